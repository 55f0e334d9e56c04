"""A simulated step -> the operator calls whose price is no measurement, by how much they widen the forecast."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from llmprof.extrapolate.forecast import Simulation
from llmprof.extrapolate.layers import accumulated, layer_optimizer
from llmprof.extrapolate.work import LayerWork, Op
from llmprof.schema.measurements import CallKey, OpCall, Wanted


def lacking_calls(simulations: Iterable[Simulation]) -> tuple[Wanted, ...]:
    """Operators that were not measured, each once.

    The importance of a call is the largest share that it has of a simulated step, times the spread of its price: by
    that it moves the interval. Stages run beside each other, so the stage that calls it most often counts.

    Args:
        simulations: forecast steps, of one device.
    """
    best: dict[CallKey, Wanted] = {}
    for simulation in simulations:
        for wanted in _lacking(simulation):
            key = wanted.call.key
            if key not in best or best[key].importance < wanted.importance:
                best[key] = wanted
    return tuple(best.values())


def _lacking(simulation: Simulation) -> Iterator[Wanted]:
    prices, step_s = simulation.machine.prices.operators, float(simulation.step_s[0])
    calls: dict[CallKey, OpCall] = {}
    counts: dict[CallKey, float] = {}
    for names in simulation.plan.stages:
        of_stage: dict[CallKey, float] = {}
        for name, count in names:
            for call, times in _calls(simulation.plan.layers[name], simulation):
                calls.setdefault(call.key, call)
                of_stage[call.key] = of_stage.get(call.key, 0.0) + times * count
        for key, times in of_stage.items():
            counts[key] = max(times, counts.get(key, 0.0))
    for key, call in calls.items():
        if not call.inputs:  # nothing says how large it is
            continue
        price = prices.price(call.op, call.inputs, call.outputs, call.attributes)
        if price.kind != "measured" and price.time_s > 0:
            share = counts[key] * price.time_s / step_s
            yield Wanted(call=call, importance=share * price.spread, estimate_s=price.time_s)


def _calls(layer: LayerWork, simulation: Simulation) -> Iterator[tuple[OpCall, float]]:
    """(operator, times per step) of one instance of a layer, collectives left out."""
    plan = simulation.plan
    layout = plan.layout
    again = 2 if layout.recompute == "full" and layer.kind == "block" else 1
    for ops, times in (
        (layer.forward, again * layout.accum),
        (layer.backward, layout.accum),
        (layer_optimizer(layer, plan, simulation.machine), 1),
    ):
        for op in ops:
            if not op.collective:
                yield _call(op), times * op.count
    if layout.accum > 1:
        for gradient in accumulated(layer, plan):
            yield OpCall(op="aten::add_", inputs=(gradient, gradient), outputs=(gradient,)), layout.accum


def _call(op: Op) -> OpCall:
    return OpCall(op=op.op, inputs=op.inputs, outputs=op.outputs, attributes=op.attributes, phase=op.phase)
