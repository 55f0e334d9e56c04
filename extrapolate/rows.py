"""A simulated step -> the rows of a predicted Profile. The rank of a row is its pipeline stage."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from llmprof.extrapolate.compute import OpPrice
from llmprof.extrapolate.forecast import COMMUNICATION_PARTS, Simulation, StageResult
from llmprof.extrapolate.groups import COMMON, EXPERTS
from llmprof.extrapolate.layers import groups_optimizer, stage_optimizer
from llmprof.extrapolate.ledger import Call
from llmprof.extrapolate.machine import Machine
from llmprof.extrapolate.optimizer import optimizer_ops
from llmprof.extrapolate.partition import Plan
from llmprof.extrapolate.work import LayerWork, Op, Shards
from llmprof.schema.operators import bytes_moved, format_shapes
from llmprof.schema.profile import PHASES, CollectiveRow, MemoryRow, OperatorRow, PhaseRow, SpanRow

MAX_SPANS = 4000
"""Spans of one stage beyond which only the schedule's instructions are kept."""
_AXES = {name: "dp" for name in (*COMMON, *EXPERTS)}
NORMAL_IQR = 1.349


def operator_rows(simulation: Simulation, device: str) -> tuple[OperatorRow, ...]:
    """Operators of one rank of every stage, equal calls added up."""
    rows: list[OperatorRow] = []
    for stage, names in enumerate(simulation.plan.stages):
        merged: dict[tuple[object, ...], tuple[Op, str, str, float]] = {}
        for name, count in names:
            layer = simulation.plan.layers[name]
            for op, phase, calls in layer_calls(layer, simulation):
                module = ".".join(filter(None, (layer.module, op.module)))
                key = (op.op, module, phase, op.inputs, op.attributes)
                before = merged[key][3] if key in merged else 0.0
                merged[key] = (op, phase, module, before + calls * count * op.count)
        rows.extend(_operator_row(stage, entry, simulation.machine, device) for entry in merged.values())
    return tuple(rows)


def layer_calls(layer: LayerWork, simulation: Simulation) -> Iterator[tuple[Op, str, int]]:
    """(operator, phase, times per step) of one instance of a layer, collectives left out."""
    plan = simulation.plan
    layout = plan.layout
    groups: list[tuple[Iterable[Op], str, int]] = [
        (layer.forward, "forward", layout.accum),
        (layer.backward, "", layout.accum),
        (_optimizer(layer, plan, simulation), "optimizer", 1),
    ]
    if layout.recompute == "full" and layer.kind == "block":
        groups.append((layer.forward, "recompute", layout.accum))
    for ops, phase, times in groups:
        for op in ops:
            if not op.collective:
                yield op, phase or op.phase, times


def _optimizer(layer: LayerWork, plan: Plan, simulation: Simulation) -> tuple[Op, ...]:
    grouped = groups_optimizer(plan, simulation.machine)
    return optimizer_ops(layer, stage_optimizer(layer, plan), shards=Shards.of(plan.layout), grouped=grouped)


def _operator_row(
    stage: int, entry: tuple[Op, str, str, float], machine: Machine, device: str
) -> OperatorRow:
    op, phase, module, count = entry
    prices = machine.prices
    price = prices.operators.price(op.op, op.inputs, op.outputs, op.attributes)
    time_us = price.time_s * 1e6 * machine.factors.nominal(f"{price.family}:{price.kind}")
    launches = machine.factors.nominal(f"host:{prices.operators.host_kind()}")
    return OperatorRow(
        rank=stage,
        op=op.op,
        family=op.family,
        module="optimizer" if phase == "optimizer" else module,
        phase=phase,
        shapes=format_shapes(op.inputs),
        dtype=op.inputs[0].dtype if op.inputs else "",
        attributes=",".join(sorted(op.attributes)),
        device=device,
        count=count,
        time_us=time_us,
        time_iqr_us=time_us * price.spread * NORMAL_IQR,
        time_n=1,
        exclusive_us=time_us * count,
        host_us=price.host_s * 1e6 * launches,
        flops=op.flops,
        bytes=bytes_moved(op.op, op.inputs, op.outputs),
    )


def collective_rows(simulation: Simulation, backend: str) -> tuple[CollectiveRow, ...]:
    """Collectives of one rank of every stage; the exposed time of an axis is shared among them by duration."""
    return tuple(
        row
        for stage, result in enumerate(simulation.stages)
        for row in _collective_rows(stage, result, simulation, backend)
    )


def _collective_rows(
    stage: int, result: StageResult, simulation: Simulation, backend: str
) -> Iterator[CollectiveRow]:
    ledger = result.ledger.flat()
    calls, parts = ledger.calls(), ledger.parts()
    priced = {call: _call_price(call, simulation.machine) for call in calls}
    total: dict[str, float] = {}
    for call, count in calls.items():
        axis = _AXES.get(call.axis, call.axis)
        total[axis] = total.get(axis, 0.0) + priced[call].time_s * count
    for call, count in calls.items():
        axis = _AXES.get(call.axis, call.axis)
        seconds, spread = priced[call].time_s, priced[call].spread
        exposed = min(parts.get(axis, 0.0), total[axis])
        yield CollectiveRow(
            rank=stage,
            kind=call.kind,
            axis=axis,
            group_size=call.group_size,
            size_bytes=call.size_bytes,
            dtype="",
            backend=backend,
            count=count,
            time_us=seconds * 1e6,
            time_iqr_us=seconds * 1e6 * spread * NORMAL_IQR,
            time_n=1,
            exposed_us=exposed * 1e6 * (seconds * count / total[axis] if total[axis] else 0.0),
        )


def _call_price(call: Call, machine: Machine) -> OpPrice:
    price = machine.prices.collectives.price(call.kind, call.size_bytes, call.group_size, call.span)
    return price._replace(time_s=price.time_s * machine.factors.nominal(f"{price.family}:{price.kind}"))


def phase_rows(simulation: Simulation, step_us: float) -> tuple[PhaseRow, ...]:
    """Phases of every stage; they sum to the step, waiting of any kind is idle."""
    rows: list[PhaseRow] = []
    for stage, result in enumerate(simulation.stages):
        parts = result.ledger.parts()
        seconds = {phase: parts.get(phase, 0.0) for phase in PHASES}
        seconds["communication"] = sum(parts.get(axis, 0.0) for axis in COMMUNICATION_PARTS)
        seconds["input"] = simulation.parts.get("input", 0.0)
        seconds["idle"] = 0.0
        values = {phase: value * 1e6 for phase, value in seconds.items()}
        values["idle"] = max(0.0, step_us - sum(values.values()))
        rows.extend(
            PhaseRow(rank=stage, step=0, phase=phase, exclusive_us=value) for phase, value in values.items()
        )
    return tuple(rows)


def span_rows(simulation: Simulation) -> tuple[SpanRow, ...]:
    """The nominal step of every stage as intervals, after the wait for input."""
    offset = simulation.parts.get("input", 0.0)
    rows: list[SpanRow] = []
    for stage, result in enumerate(simulation.stages):
        spans = tuple(result.spans())
        if len(spans) > MAX_SPANS:
            spans = tuple(s for s in spans if s.stream in ("schedule", "pp"))
        rows.extend(
            SpanRow(
                rank=stage,
                stream=span.stream,
                name=span.name,
                phase=span.phase,
                start_us=(offset + span.start_s) * 1e6,
                duration_us=span.duration_s * 1e6,
            )
            for span in spans
        )
    return tuple(rows)


def memory_rows(simulation: Simulation) -> tuple[MemoryRow, ...]:
    """Bytes by category of every stage: "peak" is what tensors take, "peak_reserved" all of it."""
    rows: list[MemoryRow] = []
    for stage, categories in enumerate(simulation.memory.stages):
        reserved = sum(categories.values())
        sizes = {k: v for k, v in categories.items() if k != "slack"}
        sizes["peak"] = reserved - categories["slack"] - categories["framework"]
        sizes["peak_reserved"] = reserved
        rows.extend(
            MemoryRow(rank=stage, category=category, size_bytes=size) for category, size in sizes.items()
        )
    return tuple(rows)
