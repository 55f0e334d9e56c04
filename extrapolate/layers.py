"""Costs of one layer on one rank: forward, backward, recomputation, gradient accumulation, optimizer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from llmprof.extrapolate.cost import Cost
from llmprof.extrapolate.machine import Machine, Segment
from llmprof.extrapolate.optimizer import fallback_ops, optimizer_ops
from llmprof.extrapolate.partition import LayerWork, Op, Plan
from llmprof.schema.operators import Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerSegments:
    """One layer for one microbatch (optimizer: for one step)."""

    forward: Segment
    backward: Segment
    recompute: Segment
    accumulate: Segment
    optimizer: Segment


def layer_segments(plan: Plan, machine: Machine) -> dict[str, LayerSegments]:
    """Segments of every layer of a plan, by layer name; equal blocks are priced once."""
    traced = any(layer.optimizer for layer in plan.layers.values())
    return {name: _segments(layer, plan, machine, traced=traced) for name, layer in plan.layers.items()}


def _segments(layer: LayerWork, plan: Plan, machine: Machine, *, traced: bool) -> LayerSegments:
    prices = machine.prices
    tp_forward = prices.communication(layer.forward)
    compute_forward = prices.compute(layer.forward)
    by_phase = {phase: prices.compute(_of(layer.backward, phase)) for phase in BACKWARD_PHASES}
    backward = by_phase | {"tp": prices.communication(layer.backward)}
    return LayerSegments(
        forward=machine.segment({"forward": compute_forward, "tp": tp_forward}),
        backward=machine.segment(backward),
        recompute=machine.segment({"recompute": compute_forward, "tp": tp_forward}),
        accumulate=machine.segment({"backward_weight": _accumulation(layer, plan, machine)}),
        optimizer=machine.segment({"optimizer": _optimizer(layer, plan, machine, traced=traced)}),
    )


BACKWARD_PHASES = ("backward_input", "backward_weight")


def _of(ops: Sequence[Op], phase: str) -> list[Op]:
    return [op for op in ops if op.phase == phase]


def _accumulation(layer: LayerWork, plan: Plan, machine: Machine) -> Cost:
    """Adding a microbatch's gradients to what is there, on the shard when gradients are sharded each time."""
    layout = plan.layout
    sharded = layout.zero == 2 or (layout.zero == 3 and layout.pp == 1)
    shard = layout.dp_shard if sharded else 1
    cost = Cost()
    for parameter in layer.own_parameters:
        if parameter.trainable:
            gradient = Tensor((-(-parameter.numel // shard),), parameter.dtype)
            cost.add(machine.prices.operator("aten::add_", (gradient, gradient), (gradient,)))
    return cost


def groups_optimizer(plan: Plan, machine: Machine) -> bool:
    """True when single-tensor optimizer operators captured on a CPU run as lists on the target."""
    return not machine.cpu and plan.workload.optimizer.launch == "single"


def _optimizer(layer: LayerWork, plan: Plan, machine: Machine, *, traced: bool) -> Cost:
    shard = plan.layout.dp_shard
    whole = layer.optimizer if traced else fallback_ops(layer, plan.workload.optimizer.state_slots)
    grouped = traced and groups_optimizer(plan, machine)
    ops = optimizer_ops(whole, shard=shard, grouped=grouped)
    if plan.layout.zero == 3:
        ops = tuple(replace(op, wrapped=bool(op.inputs)) for op in ops)
    cost = machine.prices.compute(ops)
    if plan.precision.mixed and plan.layout.zero < 3:
        numel = sum(-(-p.numel // shard) for p in layer.own_parameters)
        working = plan.precision.activation
        cost = cost.plus(machine.prices.copy("aten::_to_copy", numel, source="float32", target=working))
    return cost
