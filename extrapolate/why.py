"""An operator as a person types it -> its calls in a run or a forecast, each with its price and the rows behind it."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from dataclasses import dataclass
from math import exp
from typing import Any, NamedTuple

from llmprof.errors import RequestError
from llmprof.extrapolate.compute import OperatorPrices
from llmprof.extrapolate.forecast import Simulation
from llmprof.extrapolate.rows import layer_calls
from llmprof.schema.operators import Tensor, bytes_moved, flops, format_shapes, parse_shapes, split_name
from llmprof.schema.profile import Profile

_Q80 = 1.2816
"""80 % of normal values lie within so many standard deviations."""
_MOST_NAMES = 5
LARGEST_SIZE = 10**12
"""Beyond any tensor's."""


class Asked(NamedTuple):
    """An operator as typed: a name with or without its namespace, and shapes such as "64x128,128x32" or ""."""

    name: str
    shapes: str


@dataclass(frozen=True, kw_only=True, slots=True)
class OpCall:
    """A call to explain; `count` in a step, None for shapes that were only asked."""

    op: str
    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]
    attributes: frozenset[str]
    dtype: str
    count: float | None


def read_asked(text: str) -> Asked:
    """Read "aten::mm" or "mm 64x128,128x32".

    Raises:
        RequestError: there is no name, or the rest is no list of shapes.
    """
    name, _, rest = text.strip().partition(" ")
    shapes = "".join(rest.split())
    try:
        if not name:
            raise ValueError("no name")
        tensors = parse_shapes(shapes)
        if any(not 0 < size <= LARGEST_SIZE for tensor in tensors for size in tensor.shape):
            raise ValueError("no size of a tensor")
        return Asked(name, format_shapes(tensors))
    except ValueError as error:
        raise RequestError(
            f"--why {text[:80]!r} is not the name of an operator, or a name and its shapes",
            hint="such as aten::mm, or 'aten::mm 512x768,768x3072'",
        ) from error


def why_measured(profile: Profile, prices: OperatorPrices, asked: Asked) -> list[dict[str, Any]]:
    """Prices on the device of a run, of the operator's calls in it or of the shapes asked.

    Args:
        prices: of the run's rows on its own device.

    Raises:
        RequestError: the run has no such operator.
    """
    merged: dict[tuple[str, str, str, str], float] = {}
    ranks = len({row.rank for row in profile.operators}) or 1
    for row in profile.operators:
        key = (row.op, row.shapes, row.dtype, row.attributes)
        merged[key] = merged.get(key, 0.0) + row.count / ranks
    calls = [
        OpCall(
            op=op,
            inputs=parse_shapes(shapes, dtype),
            outputs=(),
            attributes=frozenset(filter(None, attributes.split(","))),
            dtype=dtype,
            count=count,
        )
        for (op, shapes, dtype, attributes), count in merged.items()
    ]
    return _explained(_chosen(calls, asked, "the run"), prices)


def why_forecast(simulation: Simulation, asked: Asked) -> list[dict[str, Any]]:
    """Prices that a forecast took, of one rank of every pipeline stage together, or of the shapes asked.

    Raises:
        RequestError: the forecast has no such operator.
    """
    merged: dict[tuple[object, ...], OpCall] = {}
    for names in simulation.plan.stages:
        for name, count in names:
            for op, _, times in layer_calls(simulation.plan.layers[name], simulation):
                key = (op.op, op.inputs, op.outputs, op.attributes)
                before = merged[key].count or 0.0 if key in merged else 0.0
                merged[key] = OpCall(
                    op=op.op,
                    inputs=op.inputs,
                    outputs=op.outputs,
                    attributes=op.attributes,
                    dtype=(op.inputs or op.outputs)[0].dtype if op.inputs or op.outputs else "",
                    count=before + count * op.count * times,
                )
    found = _chosen(merged.values(), asked, "the forecast")
    machine = simulation.machine
    explained = _explained(found, machine.prices.operators)
    for line in explained:
        factor = machine.prices.scale * machine.factors.nominal(f"{line['family']}:{line['kind']}")
        line["factor"] = factor
        for time in ("time_us", "p10_us", "p90_us"):
            line[time] *= factor
    return explained


def _chosen(calls: Iterable[OpCall], asked: Asked, where: str) -> list[OpCall]:
    """The calls of the operator asked; shapes that nobody called are priced in its most frequent dtype."""
    every = list(calls)
    own = [call for call in every if _is(call.op, asked.name)]
    if not own:
        raise _unknown(asked.name, {call.op for call in every}, where)
    if not asked.shapes:
        return own
    equal = [call for call in own if format_shapes(call.inputs) == asked.shapes]
    if equal:
        return equal
    usual = max(own, key=lambda call: call.count or 0.0)
    return [
        OpCall(
            op=usual.op,
            inputs=parse_shapes(asked.shapes, usual.dtype),
            outputs=(),
            attributes=usual.attributes,
            dtype=usual.dtype,
            count=None,
        )
    ]


def _is(op: str, name: str) -> bool:
    """Whether an operator has a name, with its namespace or without."""
    bare = split_name(op)[1]
    return name in (op, bare, bare.rstrip("_"))


def _unknown(name: str, known: set[str], where: str) -> RequestError:
    bare = {split_name(op)[1]: op for op in sorted(known)}
    near = difflib.get_close_matches(split_name(name)[1], bare, n=_MOST_NAMES, cutoff=0.5)
    near += [part for part in bare if name in part and part not in near]
    names = [bare[part] for part in near[:_MOST_NAMES]] or sorted(known)[:_MOST_NAMES]
    shown = ", ".join(names) or "none: nothing was recorded"
    return RequestError(
        f"{where} has no operator {name[:80]!r}",
        hint=f"{'near' if near else 'among its operators'}: {shown}",
    )


def _explained(calls: Iterable[OpCall], prices: OperatorPrices) -> list[dict[str, Any]]:
    lines = [_explain(call, prices) for call in calls]
    return sorted(lines, key=lambda line: -line["time_us"] * (line["count"] or 1.0))


def _explain(call: OpCall, prices: OperatorPrices) -> dict[str, Any]:
    asked = (call.op, call.inputs, call.outputs, call.attributes)
    price, evidence = prices.price(*asked), prices.evidence(*asked)
    time_us, width = price.time_s * 1e6, exp(_Q80 * price.spread)
    return {
        "op": call.op,
        "family": price.family,
        "shapes": format_shapes(call.inputs),
        "dtype": call.dtype,
        "attributes": ",".join(sorted(call.attributes)),
        "count": call.count,
        "time_us": time_us,
        "p10_us": time_us / width,
        "p90_us": time_us * width,
        "spread": price.spread,
        "factor": 1.0,
        "kind": price.kind,
        "method": evidence.method,
        "basis": evidence.basis,
        "source": evidence.source,
        "host_us": price.host_s * 1e6,
        "flops": flops(*asked),
        "bytes": bytes_moved(call.op, call.inputs, call.outputs),
        "neighbours": [
            {"name": row.name, "time_us": row.time_s * 1e6, "weight": row.weight}
            for row in evidence.neighbours
        ],
    }
