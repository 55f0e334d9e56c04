"""Profile, layout, cluster -> one simulated step: stage clocks, memory, and the shares of evidence behind them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import log
from statistics import NormalDist

import numpy as np

from llmprof.errors import RequestError, WorkloadError
from llmprof.extrapolate.calibrate import window_scale, wrapper_us
from llmprof.extrapolate.collective import CollectivePrices
from llmprof.extrapolate.compute import OperatorPrices, is_same_device
from llmprof.extrapolate.cost import Prices
from llmprof.extrapolate.groups import axis_groups, boundary_span
from llmprof.extrapolate.layers import groups_optimizer, layer_segments
from llmprof.extrapolate.machine import INTERFERENCE, Machine, Segment
from llmprof.extrapolate.memory import Capacity, MemoryForecast, forecast_memory, measured_framework
from llmprof.extrapolate.partition import Plan, partition
from llmprof.extrapolate.precision import choose_precision, precision_assumption
from llmprof.extrapolate.request import check_supported, resolve_batch
from llmprof.extrapolate.schedule import (
    SCHEDULES,
    Instruction,
    gathers_needed,
    in_flight,
)
from llmprof.extrapolate.simulate import Array, Call, Calls, Parts, Pipeline, Span, StageClock, add_into
from llmprof.extrapolate.stage import Stage
from llmprof.extrapolate.uncertainty import Factors
from llmprof.schema.cluster import Cluster
from llmprof.schema.layout import Layout
from llmprof.schema.profile import Profile
from llmprof.schema.workload import Workload

ASSUMED_JITTER = 0.005
"""Relative standard deviation of one rank's step where none was measured: assumed."""
MAX_JITTER = 0.05
JITTER_SPREAD = 0.4


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """What is asked beside the layout and the cluster (see `predict`)."""

    global_batch: int | None = None
    seq: int | None = None
    tokens: float | None = None
    draws: int = 200
    seed: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class StageResult:
    """One stage of the simulated step.

    Attributes:
        end_s: when it is done with its part, input and straggling of others not counted.
        parts: owners of its nominal time up to `end_s`.
        evidence: nominal seconds of its work by kind of evidence.
        calls: its collectives in one step.
    """

    end_s: Array
    parts: Parts
    evidence: Parts
    calls: Calls
    spans: tuple[Span, ...]

    @property
    def busy_s(self) -> float:
        """Nominal seconds in which it does not wait for other stages."""
        return float(self.end_s[0]) - self.parts.get("bubble", 0.0) - self.parts.get("pp", 0.0)


@dataclass(frozen=True, kw_only=True, slots=True)
class Simulation:
    """A simulated step.

    Attributes:
        step_s: time of the step in every draw, shape (1 + draws,).
        parts: owners of the nominal step on the slowest stage (the one that waits least for others); they sum to
            it, and waiting for others to end is part of the bubble.
        evidence: shares of measured, interpolated and assumed work on the slowest stage, summing to 1.
    """

    plan: Plan
    machine: Machine
    step_s: Array
    parts: Parts
    evidence: Parts
    stages: tuple[StageResult, ...]
    slowest: int
    memory: MemoryForecast
    assumptions: tuple[str, ...]


def simulate_step(profile: Profile, layout: Layout, cluster: Cluster, request: Request) -> Simulation:
    """Partition, price, schedule and simulate one step.

    Raises:
        WorkloadError, LayoutError: see `predict`.
    """
    workload = profile.workload
    if workload is None:
        raise WorkloadError("the run has no workload", hint="capture it again with tracing on")
    seq = _check_request(request, workload)
    check_supported(layout, cluster)
    layout, batch_line = resolve_batch(layout, workload, request.global_batch)
    rule = choose_precision(
        captured=workload.precision, asked=layout.precision, device_kind=cluster.device.kind
    )
    plan = partition(workload, layout, seq=seq, precision=rule)
    same = is_same_device(profile, cluster.device)
    machine = _machine(profile, layout, cluster, request, same_device=same)
    programs = [list(SCHEDULES[layout.schedule](s, layout.pp, layout.accum)) for s in range(layout.pp)]
    stages = _run_stages(plan, machine, cluster, programs)
    end = np.maximum.reduce([s.end_s for s in stages])
    slowest = max(range(len(stages)), key=lambda s: stages[s].busy_s)
    extra, extra_parts = _beyond_stages(profile, plan, machine, float(end[0]), same_device=same)
    parts = {**stages[slowest].parts, **extra_parts}
    add_into(parts, {"bubble": float(end[0] - stages[slowest].end_s[0])})
    capacity = Capacity(cluster=cluster, framework_bytes=measured_framework(profile) if same else None)
    return Simulation(
        plan=plan,
        machine=machine,
        step_s=end + extra,
        parts=parts,
        evidence=_shares(stages[slowest], extra_parts),
        stages=stages,
        slowest=slowest,
        memory=forecast_memory(
            plan, capacity, factors=machine.factors, in_flight=[in_flight(p) for p in programs]
        ),
        assumptions=(batch_line, *_assumptions(plan, machine, seq_given=request.seq is not None)),
    )


def _check_request(request: Request, workload: Workload) -> int:
    seq = workload.seq if request.seq is None else request.seq
    for name, value in (("seq", seq), ("global_batch", request.global_batch), ("tokens", request.tokens)):
        if value is not None and value <= 0:
            raise RequestError(f"{name}={value:g} is not positive", hint=f"give {name} above 0")
    return seq


def _machine(
    profile: Profile, layout: Layout, cluster: Cluster, request: Request, *, same_device: bool
) -> Machine:
    operators = OperatorPrices(profile, cluster.device, same_device=same_device)
    prices = Prices(
        operators=operators,
        collectives=CollectivePrices(profile, cluster, same_device=same_device),
        group=axis_groups(layout, cluster),
        scale=window_scale(profile, operators),
        wrapper_s=wrapper_us(profile, same_device=same_device)[0] * 1e-6,
    )
    return Machine(
        prices=prices,
        factors=Factors(draws=request.draws, seed=request.seed),
        cpu=cluster.device.kind == "cpu",
        serial_fsdp=cluster.backend == "gloo",
    )


def _run_stages(
    plan: Plan, machine: Machine, cluster: Cluster, programs: Sequence[Sequence[Instruction]]
) -> tuple[StageResult, ...]:
    """Run all stages against each other."""
    segments = layer_segments(plan, machine)
    stages = [
        Stage(
            index=i, plan=plan, machine=machine, segments=segments, gathers=gathers_needed(list(programs[i]))
        )
        for i in range(len(programs))
    ]
    messages = [_message(plan, machine, cluster, i) for i in range(len(programs) - 1)]
    pipeline = Pipeline(programs=programs, stages=stages, transfer_s=[m.device_s for m in messages])
    clocks = pipeline.run(np.zeros(1 + machine.factors.draws))
    for boundary, message in enumerate(messages):
        for stage in (boundary, boundary + 1):
            for _ in range(2 * plan.layout.accum):
                add_into(clocks[stage].evidence, message.evidence)
                add_into(clocks[stage].calls, message.calls)
    return tuple(_end(stage, clock) for stage, clock in zip(stages, clocks, strict=True))


def _message(plan: Plan, machine: Machine, cluster: Cluster, boundary: int) -> Segment:
    """The activation (or its gradient) handed over a stage boundary."""
    last = plan.layers[plan.stages[boundary][-1][0]]
    span = boundary_span(plan.layout, cluster, boundary)
    return machine.segment({"pp": machine.prices.call(Call("send", "pp", 2, span, last.boundary_bytes))})


def _end(stage: Stage, clock: StageClock) -> StageResult:
    """Close a stage: what the tail of its communication exposes, then its end of step."""
    parts, evidence, calls = dict(clock.parts), dict(clock.evidence), dict(clock.calls)
    start = np.maximum(clock.now_s, clock.tail_end_s)
    add_into(parts, {clock.tail_part: float(start[0] - clock.now_s[0])})
    end = stage.end_of_step()
    add_into(parts, end.parts)
    add_into(evidence, end.evidence)
    add_into(calls, end.calls)
    offset = float(start[0])
    spans = [replace(s, start_s=s.start_s + offset) for s in end.spans]
    return StageResult(
        end_s=start + end.duration_s,
        parts=parts,
        evidence=evidence,
        calls=calls,
        spans=(*clock.spans, *spans),
    )


def _beyond_stages(
    profile: Profile, plan: Plan, machine: Machine, nominal_s: float, *, same_device: bool
) -> tuple[Array, Parts]:
    """Time beyond the stages: waiting for input, and for the slowest of all ranks."""
    wait = _input_s(profile, plan) if same_device else 0.0
    jitter = _jitter(profile) if same_device else ASSUMED_JITTER
    late = nominal_s * jitter * expected_maximum(plan.layout.gpus)
    factors = machine.factors
    extra: Array = wait * factors.factor("input", 0.2) + late * factors.factor("straggler", JITTER_SPREAD)
    return extra, {"input": wait, "straggler": late}


def expected_maximum(count: int) -> float:
    """Expected largest of `count` standard normal numbers (Blom's approximation); 0 for one."""
    if count <= 1:
        return 0.0
    return NormalDist().inv_cdf((count - 0.375) / (count + 0.25))


def _input_s(profile: Profile, plan: Plan) -> float:
    """Measured stall for input in one step, scaled by the sequences that one rank reads."""
    rows = [r for r in profile.phases if r.phase == "input"]
    steps = {(r.rank, r.step) for r in rows}
    if not steps:
        return 0.0
    mean_us = sum(r.exclusive_us for r in rows) / len(steps)
    captured = plan.workload.batch * plan.workload.accum
    return mean_us * 1e-6 * plan.layout.mb * plan.layout.accum / max(captured, 1)


def _jitter(profile: Profile) -> float:
    """Relative spread of the measured steps, robust (from the interquartile range of the logarithms), at most 5 %."""
    times = [r.duration_us for r in profile.steps if r.kind == "train" and not r.instrumented and r.rank == 0]
    if len(times) < 4:
        return ASSUMED_JITTER
    low, high = np.quantile([log(t) for t in times if t > 0], [0.25, 0.75])
    return float(min(MAX_JITTER, (high - low) / 1.349))


def _shares(stage: StageResult, extra: Parts) -> Parts:
    evidence = dict(stage.evidence)
    add_into(evidence, {"assumed": extra["straggler"], "measured": extra["input"]})
    total = sum(evidence.values()) or 1.0
    shares = {kind: evidence.get(kind, 0.0) / total for kind in ("measured", "interpolated")}
    return {**shares, "assumed": max(0.0, 1.0 - sum(shares.values()))}


def _assumptions(plan: Plan, machine: Machine, *, seq_given: bool) -> tuple[str, ...]:
    layout, prices = plan.layout, machine.prices
    lines = [precision_assumption(plan.precision), *prices.operators.assumptions()]
    if layout.gpus > 1:
        lines.extend(prices.collectives.assumptions())
    if not seq_given:
        lines.append(f"sequence length {plan.seq}, as captured")
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
    if layout.tp > 1 or layout.zero == 3:
        lines.append(
            f"operators on distributed tensors cost {prices.wrapper_s * 1e6:.0f} us of host time more"
        )
    lines.extend(_data_parallel_lines(plan, machine))
    if groups_optimizer(plan, machine):
        lines.append("the optimizer runs over lists of tensors (foreach), torch's default on GPUs")
    if plan.workload.implementation == "eager":
        lines.append("eager operators as captured: no compiler, no fused kernels beyond the captured ones")
    return tuple(line for line in lines if line)


def _data_parallel_lines(plan: Plan, machine: Machine) -> list[str]:
    layout = plan.layout
    if layout.dp == 1:
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
