"""What a forecast takes for granted, one sentence each."""

from __future__ import annotations

from llmprof.extrapolate.experts import IMBALANCE
from llmprof.extrapolate.layers import TORCH_OPTIMIZERS, groups_optimizer
from llmprof.extrapolate.machine import INTERFERENCE, Machine
from llmprof.extrapolate.partition import Plan
from llmprof.extrapolate.precision import precision_assumption


def list_assumptions(plan: Plan, machine: Machine, *, seq_given: bool) -> tuple[str, ...]:
    """Sentences about precision, prices, sizes and the layout's rules."""
    layout, prices = plan.layout, machine.prices
    lines = [precision_assumption(plan.precision), *prices.operators.assumptions()]
    if layout.gpus > 1:
        lines.extend(prices.collectives.assumptions())
    reference = plan.workload.source == "reference"
    if not seq_given:
        lines.append(
            f"sequence length {plan.seq}, {'the default of the model' if reference else 'as captured'}"
        )
    if layout.pp > 1:
        counts = "+".join(
            str(sum(n for name, n in stage if plan.layers[name].kind == "block")) for stage in plan.stages
        )
        lines.append(
            f"blocks per stage {counts}; neighbours exchange messages as torch's {layout.schedule} does"
        )
    if abs(prices.scale - 1.0) > 0.02:
        lines.append(
            f"operator times scaled by {prices.scale:.2f}: so much the measured steps differ from the profiled window"
        )
    if _has_dtensors(plan):
        lines.append(
            f"operators on distributed tensors cost {prices.wrapper_s * 1e6:.0f} us of host time more"
        )
    if layout.ep > 1:
        lines.append(
            f"tokens go to experts on {layout.ep} ranks and back by all-to-all; the fullest rank gets {IMBALANCE:.0%} more than "
            "the mean (assumed)"
        )
    lines.extend(_data_parallel_lines(plan, machine))
    if groups_optimizer(plan, machine):
        lines.append("the optimizer runs over lists of tensors (foreach), torch's default on GPUs")
    if reference:
        lines.append(
            f"reference decoder, implementation profile {plan.workload.implementation}, not captured"
        )
        lines.extend(plan.workload.warnings)
    elif plan.workload.implementation == "eager":
        lines.append("eager operators as captured: no compiler, no fused kernels beyond the captured ones")
    return tuple(line for line in lines if line)


def _has_dtensors(plan: Plan) -> bool:
    implementation = plan.workload.implementation
    in_layers = plan.layout.tp > 1 and implementation == "eager"
    return in_layers or (plan.layout.zero == 3 and implementation in TORCH_OPTIMIZERS)


def _data_parallel_lines(plan: Plan, machine: Machine) -> list[str]:
    layout = plan.layout
    if layout.replicas == 1:
        return []
    once = "with the last microbatch only" if layout.accum > 1 else "beside the backward"
    lines = {
        0: [f"gradients are all-reduced in buckets of 1, then 25 MiB, {once}"],
        1: [f"gradients are reduce-scattered in buckets {once}; updated parameters are gathered after the optimizer"],
        2: ["gradients are reduce-scattered with every microbatch; updated parameters are gathered after the optimizer"],
        3: [
            "each block's parameters are gathered before forward and backward"
            + (", one after the other (gloo)" if machine.serial_fsdp else ", the next block's ahead")
        ],
    }[layout.zero]  # fmt: skip
    if not machine.cpu:
        lines.append(f"{INTERFERENCE:.0%} of hidden communication time is lost to interference (assumed)")
    return lines
