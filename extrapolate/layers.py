"""Costs of one layer on one rank: forward, backward, recomputation, gradient accumulation, optimizer."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from llmprof.extrapolate.cost import Cost
from llmprof.extrapolate.machine import Machine, Round, Segment, Stretch
from llmprof.extrapolate.optimizer import fallback_ops, optimizer_ops
from llmprof.extrapolate.partition import Plan
from llmprof.extrapolate.schedule import SPLIT_BACKWARD
from llmprof.extrapolate.work import LayerWork, Op, Shards
from llmprof.schema.layout import Layout
from llmprof.schema.operators import Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerSegments:
    """One layer for one microbatch (optimizer: for one step); `accumulate` is None in a step of one microbatch.

    `input` and `weight` are the halves of `backward`, None where the schedule does not run them apart.
    """

    forward: Segment
    recompute: Segment
    backward: Segment
    input: Segment | None
    weight: Segment | None
    accumulate: Segment | None
    optimizer: Segment


class LayerKey(NamedTuple):
    """What layers of two plans have in common when it is equal."""

    tp: int
    sp: bool
    cp: int
    cp_kind: str
    ep: int
    mb: int
    seq: int
    precision: str

    @classmethod
    def of(cls, layout: Layout, *, seq: int, precision: str) -> LayerKey:
        """The key of a layout at a sequence length (tokens) and compute dtype."""
        return cls(layout.tp, layout.sp, layout.cp, layout.cp_kind, layout.ep, layout.mb, seq, precision)

    @property
    def state(self) -> tuple[int, bool, int, str]:
        """What their parameters have in common."""
        return self.tp, self.sp, self.ep, self.precision


@dataclass(slots=True)
class LayerPricer:
    """Segments of layers; what layouts share is priced and sampled once."""

    _known: dict[tuple[Hashable, ...], Segment] = field(default_factory=dict)
    _stretches: dict[tuple[Hashable, ...], Stretch] = field(default_factory=dict)

    def segments(self, plan: Plan, machine: Machine, *, key: LayerKey) -> dict[str, LayerSegments]:
        """Segments of every layer of a plan, by layer name.

        Args:
            key: equal for plans whose layers are equal.
        """
        return {name: self._layer(layer, plan, machine, key=key) for name, layer in plan.layers.items()}

    def _layer(self, layer: LayerWork, plan: Plan, machine: Machine, *, key: LayerKey) -> LayerSegments:
        layout, name = plan.layout, layer.name
        group = tuple(machine.prices.group[axis] for axis in ("tp", "cp", "ep"))
        shards = Shards.of(layout)
        sharded = (layout.zero, shards, layout.pp == 1)
        forward = self.once((key, name, group, "forward"), lambda: _forward(layer, machine))
        apart = layout.schedule in SPLIT_BACKWARD
        return LayerSegments(
            forward=forward,
            recompute=self.once((key, name, group, "recompute"), lambda: _again(forward)),
            backward=self.once((key, name, group, "backward"), lambda: _backward(layer, machine)),
            input=self.once((key, name, group, "input"), lambda: _input_gradients(layer, machine))
            if apart
            else None,
            weight=self.once((key, name, group, "weight"), lambda: _weight_gradients(layer, machine))
            if apart
            else None,
            accumulate=self.once(
                (key.state, name, "accumulate", sharded),
                lambda: machine.segment({"backward_weight": _accumulation(layer, plan, machine)}),
            )
            if layout.accum > 1
            else None,
            optimizer=self.once(
                (key.state, name, "optimizer", layout.zero == 3, shards),
                lambda: machine.segment({"optimizer": _optimizer(layer, plan, machine)}),
            ),
        )

    def once(self, key: tuple[Hashable, ...], make: Callable[[], Segment]) -> Segment:
        """The segment of a key, made when it is asked for first."""
        if key not in self._known:
            self._known[key] = make()
        return self._known[key]

    def stretch(self, *steps: tuple[Segment, str, str]) -> Stretch:
        """Segments in a row, with their label and phase; the same ones are put together once."""
        key = tuple((id(segment), label) for segment, label, _ in steps)
        if key not in self._stretches:
            self._stretches[key] = Stretch.of(*steps)
        return self._stretches[key]


def _forward(layer: LayerWork, machine: Machine) -> Segment:
    return _segment(layer.forward, machine, {"forward": layer.forward})


def _segment(ops: Sequence[Op], machine: Machine, compute: Mapping[str, Sequence[Op]]) -> Segment:
    """Operators and collectives as one piece of work.

    Args:
        ops: whose collectives it has.
        compute: of these, by part, the operators that it has.
    """
    prices = machine.prices
    costs = {part: prices.compute(op for op in own if not op.round) for part, own in compute.items()}
    costs |= prices.communication(op for op in ops if not op.round)
    rounds = [
        Round(part, axis, prices.compute(together), cost)
        for part, own in compute.items()
        for together in _rounds(own)
        for axis, cost in prices.communication(together).items()
    ]
    return machine.segment(costs, rounds)


def _rounds(ops: Sequence[Op]) -> list[list[Op]]:
    """Operators and collectives that run beside each other, round by round."""
    found: dict[int, list[Op]] = {}
    for op in ops:
        if op.round:
            found.setdefault(op.round, []).append(op)
    return list(found.values())


def _again(forward: Segment) -> Segment:
    """A forward once more, owned by recomputation."""
    parts = {"recompute" if part == "forward" else part: s for part, s in forward.parts.items()}
    return replace(forward, parts=parts)


def _backward(layer: LayerWork, machine: Machine) -> Segment:
    return _segment(layer.backward, machine, {phase: _of(layer.backward, phase) for phase in BACKWARD_PHASES})


def _input_gradients(layer: LayerWork, machine: Machine) -> Segment:
    """The half of a backward that the stage before waits for, with the communication inside the layer."""
    return _segment(layer.backward, machine, {"backward_input": _of(layer.backward, "backward_input")})


def _weight_gradients(layer: LayerWork, machine: Machine) -> Segment:
    return machine.segment(
        {"backward_weight": machine.prices.compute(_of(layer.backward, "backward_weight"))}
    )


TORCH_OPTIMIZERS = ("eager", "compile")
"""Implementations whose optimizer sees sharded parameters as distributed tensors; the others keep flat buffers."""
BACKWARD_PHASES = ("backward_input", "backward_weight")


def _of(ops: Sequence[Op], phase: str) -> list[Op]:
    return [op for op in ops if op.phase == phase]


def _accumulation(layer: LayerWork, plan: Plan, machine: Machine) -> Cost:
    """Adding a microbatch's gradients to what is there."""
    cost = Cost()
    for gradient in accumulated(layer, plan):
        cost.add(machine.prices.operator("aten::add_", (gradient, gradient), (gradient,)))
    return cost


def accumulated(layer: LayerWork, plan: Plan) -> Iterator[Tensor]:
    """Gradients to which each microbatch adds, on the shard when gradients are sharded each time."""
    layout = plan.layout
    sharded = layout.zero == 2 or (layout.zero == 3 and layout.pp == 1)
    shards = Shards.of(layout) if sharded else Shards(1, 1)
    for parameter in layer.own_parameters:
        if parameter.trainable:
            dtype = plan.precision.gradients or parameter.dtype
            yield Tensor((-(-parameter.numel // shards.by(parameter)),), dtype)


def groups_optimizer(plan: Plan, machine: Machine) -> bool:
    """True when single-tensor optimizer operators captured on a CPU run as lists on the target."""
    return not machine.cpu and plan.workload.optimizer.launch == "single"


def _optimizer(layer: LayerWork, plan: Plan, machine: Machine) -> Cost:
    shards = Shards.of(plan.layout)
    cost = machine.prices.compute(layer_optimizer(layer, plan, machine))
    if plan.precision.mixed and plan.layout.zero < 3:
        numel = sum(-(-p.numel // shards.by(p)) for p in layer.own_parameters)
        working = plan.precision.activation
        cost = cost.plus(machine.prices.copy("aten::_to_copy", numel, source="float32", target=working))
    return cost


def layer_optimizer(layer: LayerWork, plan: Plan, machine: Machine) -> tuple[Op, ...]:
    """A layer's optimizer operators on the shard of one rank, in lists where the target runs them so."""
    shards, grouped = Shards.of(plan.layout), groups_optimizer(plan, machine)
    ops = optimizer_ops(layer, stage_optimizer(layer, plan), shards=shards, grouped=grouped)
    if plan.layout.zero == 3 and plan.workload.implementation in TORCH_OPTIMIZERS:
        return tuple(replace(op, wrapped=bool(op.inputs)) for op in ops)
    return ops


def stage_optimizer(layer: LayerWork, plan: Plan) -> tuple[Op, ...]:
    """A layer's optimizer operators, as traced; one fused update where none was traced for the whole model."""
    if any(other.optimizer for other in plan.layers.values()):
        return layer.optimizer
    return fallback_ops(layer, plan.workload.optimizer.state_slots)
