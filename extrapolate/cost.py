"""Sums of prices: nominal seconds by shared factor and kind of evidence, turned into arrays over draws."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from llmprof.extrapolate.collective import CollectivePrices
from llmprof.extrapolate.compute import OperatorPrices, OpPrice
from llmprof.extrapolate.experts import IMBALANCE, IMBALANCE_SPREAD
from llmprof.extrapolate.ledger import Call, Calls, add_into
from llmprof.extrapolate.simulate import Array
from llmprof.extrapolate.uncertainty import Factors
from llmprof.extrapolate.work import Op
from llmprof.schema.operators import Tensor


@dataclass(slots=True)
class Cost:
    """A sum of prices.

    Attributes:
        seconds: nominal seconds by (factor, kind of evidence).
        weighted: the same times its spread.
        host_s: host time to launch it all.
        calls: the collectives among it.
    """

    seconds: dict[tuple[str, str], float] = field(default_factory=dict)
    weighted: dict[tuple[str, str], float] = field(default_factory=dict)
    host_s: float = 0.0
    calls: Calls = field(default_factory=dict)

    def add(self, price: OpPrice, count: float = 1.0) -> None:
        """Add `count` calls of a price."""
        self.host_s += price.host_s * count
        if price.time_s > 0:
            key = (price.family, price.kind)
            self.seconds[key] = self.seconds.get(key, 0.0) + price.time_s * count
            self.weighted[key] = self.weighted.get(key, 0.0) + price.time_s * price.spread * count

    def plus(self, other: Cost) -> Cost:
        """The sum of both."""
        total = Cost(dict(self.seconds), dict(self.weighted), self.host_s, dict(self.calls))
        total.include(other)
        return total

    def include(self, other: Cost) -> None:
        """Add another sum to this one."""
        add_into(self.seconds, other.seconds)
        add_into(self.weighted, other.weighted)
        add_into(self.calls, other.calls)
        self.host_s += other.host_s

    @property
    def nominal_s(self) -> float:
        """Nominal seconds without host time."""
        return sum(self.seconds.values())

    def sample(self, factors: Factors) -> Array:
        """Seconds in every draw, shape (1 + draws,): what shares a factor errs together."""
        total = np.zeros(1 + factors.draws)
        for (name, kind), seconds in self.seconds.items():
            total += seconds * factors.factor(f"{name}:{kind}", self.weighted[name, kind] / seconds)
        return total


@dataclass(frozen=True, kw_only=True, slots=True)
class Prices:
    """What operators and collectives cost on the target.

    Attributes:
        group: (group size, span in devices) of each mesh axis that communicates.
        scale: factor on operator and host times: steps as the training loop saw them over what the rows add up to.
        wrapper_s: host time that an operator on a distributed tensor (DTensor) costs beyond its local operators.
    """

    operators: OperatorPrices
    collectives: CollectivePrices
    group: dict[str, tuple[int, int]]
    scale: float = 1.0
    wrapper_s: float = 0.0

    def compute(self, ops: Iterable[Op]) -> Cost:
        """Operators of a list, collectives left out, whether they run in line or not."""
        cost = Cost()
        for op in ops:
            if not op.collective:
                price = self.operator(op.op, op.inputs, op.outputs, op.attributes)
                cost.add(price, op.count)
                if op.routed:
                    cost.add(_imbalance(price.time_s), op.count)
                if op.wrapped:
                    cost.host_s += op.count * self.wrapper_s
        return cost

    def operator(
        self,
        op: str,
        inputs: Sequence[Tensor],
        outputs: Sequence[Tensor],
        attributes: frozenset[str] = frozenset(),
    ) -> OpPrice:
        """One call of an operator, scaled."""
        price = self.operators.price(op, inputs, outputs, attributes)
        if self.scale == 1.0:
            return price
        return price._replace(time_s=price.time_s * self.scale, host_s=price.host_s * self.scale)

    def communication(self, ops: Iterable[Op]) -> dict[str, Cost]:
        """Collectives of a list by mesh axis, whether they run in line or not."""
        costs: dict[str, Cost] = {}
        for op in ops:
            if op.collective:
                axis = op.axis or "tp"
                cost = self.collective(op.collective, op.message_bytes, axis, op.count)
                if op.routed:
                    cost.add(_imbalance(cost.nominal_s))
                costs.setdefault(axis, Cost()).include(cost)
        return costs

    def collective(self, kind: str, size_bytes: int, axis: str, count: int = 1) -> Cost:
        """`count` collectives over a mesh axis; nothing over a group of one."""
        size, span = self.group[axis]
        cost = Cost()
        if size > 1 and size_bytes > 0:
            cost = self.call(Call(kind, axis, size, span, size_bytes), count)
        return cost

    def call(self, call: Call, count: int = 1) -> Cost:
        """`count` equal collectives, with the host time of their launches."""
        price = self.collectives.price(call.kind, call.size_bytes, call.group_size, call.span)
        cost = Cost(calls={call: float(count)})
        cost.add(price._replace(host_s=self.operators.host_us() * 1e-6 * self.scale), count)
        return cost

    def copy(self, op: str, numel: int, *, source: str, target: str, calls: int = 1) -> Cost:
        """`calls` copies that together move `numel` elements from one dtype to another."""
        cost = Cost()
        if numel > 0:
            shape = (max(1, numel // calls),)
            cost.add(self.operator(op, (Tensor(shape, source),), (Tensor(shape, target),)), calls)
        return cost


def _imbalance(time_s: float) -> OpPrice:
    """What the rank with the most routed tokens needs beyond the mean."""
    return OpPrice(IMBALANCE * time_s, IMBALANCE_SPREAD, "assumed", "imbalance")
