"""Profile, cluster, then any number of layouts -> simulated steps: stage clocks, memory, shares of evidence."""

from __future__ import annotations

from collections.abc import Iterator
from copy import copy
from dataclasses import dataclass, replace
from math import log
from statistics import NormalDist

import numpy as np

from llmprof.errors import WorkloadError
from llmprof.extrapolate.assumptions import list_assumptions
from llmprof.extrapolate.calibration import CLASSES, Calibration
from llmprof.extrapolate.collective import CollectivePrices
from llmprof.extrapolate.compute import OperatorPrices, is_same_device
from llmprof.extrapolate.cost import Prices
from llmprof.extrapolate.groups import axis_groups, boundary_span
from llmprof.extrapolate.layers import LayerKey, LayerPricer
from llmprof.extrapolate.ledger import Call, FlatLedger, Ledger, Parts, add_into
from llmprof.extrapolate.machine import Machine, Segment
from llmprof.extrapolate.memory import Capacity, MemoryForecast, forecast_memory, measured_framework
from llmprof.extrapolate.partition import Plan, evaluate_layers, partition
from llmprof.extrapolate.precision import HALF, choose_precision
from llmprof.extrapolate.request import check_asked, check_passes, check_supported, resolve_batch
from llmprof.extrapolate.schedule import Pipeline
from llmprof.extrapolate.simulate import Array, Pass, Span
from llmprof.extrapolate.stage import Stage, equal_stages
from llmprof.extrapolate.steady import StageClock, Times, Timetable, most_in_flight, run_step
from llmprof.extrapolate.table import TABLE_KINDS
from llmprof.extrapolate.uncertainty import Factors, Probes
from llmprof.extrapolate.window import window_scale, wrapper_us
from llmprof.extrapolate.work import LayerWork
from llmprof.schema.cluster import Cluster
from llmprof.schema.layout import Layout
from llmprof.schema.profile import Profile

ASSUMED_JITTER = 0.005
"""Relative standard deviation of one rank's step where none was measured: assumed."""
MAX_JITTER = 0.05
JITTER_SPREAD = 0.4
INPUT_SPREAD = 0.2
COMMUNICATION_PARTS = ("tp", "cp", "ep", "dp", "pp")


@dataclass(frozen=True, kw_only=True, slots=True)
class StageResult:
    """One stage of the simulated step.

    Attributes:
        end_s: when it is done with its part, input and straggling of others not counted.
        waiting_s: nominal seconds of that in which it waits for other stages or sums gradients with them.
        ledger: its work; the owners sum to the nominal time up to `end_s`.
        clock: its passes and waits.
        ending: what followed the last backward.
    """

    end_s: Array
    waiting_s: float
    ledger: Ledger
    clock: StageClock
    ending: Pass

    def spans(self) -> Iterator[Span]:
        """What ran in the nominal step."""
        yield from self.clock.spans
        start = float(self.end_s[0] - self.ending.duration_s[0])
        for span in self.ending.spans:
            yield replace(span, start_s=start + span.start_s)

    @property
    def busy_s(self) -> float:
        """Nominal seconds in which it does not wait for other stages."""
        return float(self.end_s[0]) - self.waiting_s


@dataclass(frozen=True, kw_only=True, slots=True)
class Simulation:
    """A simulated step.

    Attributes:
        step_s: time of the step in every draw, shape (1 + draws,).
        parts: owners of the nominal step on the slowest stage (the one that waits least for others); they sum to
            it, and waiting for others to end is part of the bubble.
        evidence: shares of measured, interpolated and assumed work on the slowest stage, summing to 1; "table" is the part
            of the interpolated one that published tables price.
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


class Forecaster:
    """Simulates layouts of one captured run on one cluster; what layouts share is evaluated and priced once.

    Args:
        profile: a measured profile with its workload.
        cluster: what it runs on.
        draws, seed: samples behind the intervals.
        calibration: what measured steps say of assumed prices; None for the prior.

    Raises:
        WorkloadError: the profile has no workload.
    """

    def __init__(
        self,
        profile: Profile,
        cluster: Cluster,
        *,
        draws: int = 200,
        seed: int = 0,
        calibration: Calibration | None = None,
    ) -> None:
        if profile.workload is None:
            raise WorkloadError("the run has no workload", hint="capture it again with tracing on")
        if not profile.workload.sequence:
            raise WorkloadError("the workload has no layers", hint="capture the run again")
        self.profile, self.cluster = profile, cluster
        self._workload = profile.workload
        self._same = is_same_device(profile, cluster.device)
        self._seed, self._factors = seed, Factors(draws=draws, seed=seed, calibration=calibration)
        self._operators = OperatorPrices(profile, cluster.device, same_device=self._same)
        self._collectives = CollectivePrices(profile, cluster, same_device=self._same)
        self._scale = window_scale(profile, self._operators)
        self._layers: dict[LayerKey, dict[str, LayerWork]] = {}
        self._pricer = LayerPricer()

    def recalibrated(self, calibration: Calibration) -> Forecaster:
        """The same forecaster with another calibration; plans and nominal prices are shared."""
        return self._with(Factors(draws=self._factors.draws, seed=self._seed, calibration=calibration))

    def with_draws(self, draws: int) -> Forecaster:
        """The same forecaster with another number of draws; 0 is the nominal step alone, and the quickest."""
        return self._with(Factors(draws=draws, seed=self._seed, calibration=self._factors.calibration))

    def memory(
        self, layout: Layout, *, global_batch: int | None = None, seq: int | None = None
    ) -> MemoryForecast:
        """Peak memory of a layout, without its time; arguments and errors are those of `simulate`."""
        plan, _, _ = self._asked(layout, global_batch, seq)
        return self._memory(plan)

    def probing(self, shifts: Array) -> Forecaster:
        """The same forecaster, with nominal steps at several sets of calibration shifts, shape (n, 4), for draws."""
        return self._with(Probes(shifts))

    def _with(self, factors: Factors) -> Forecaster:
        other = copy(self)
        other._factors, other._pricer = factors, LayerPricer()
        return other

    def simulate(
        self,
        layout: Layout,
        *,
        global_batch: int | None = None,
        seq: int | None = None,
        every_microbatch: bool = False,
    ) -> Simulation:
        """Partition, price, schedule and simulate one step.

        Args:
            layout: how it is laid over devices.
            global_batch: sequences per step; None for the captured one where it divides.
            seq: tokens per sequence; None for the captured length.
            every_microbatch: simulate all of them and keep spans of the whole step; else there are none.

        Raises:
            WorkloadError, LayoutError: see `llmprof.extrapolate.predict.predict`.
        """
        plan, key, batch_line = self._asked(layout, global_batch, seq)
        machine = self._machine(plan.layout)
        stages = _run_stages(
            plan, machine, self._pricer, cluster=self.cluster, key=key, every=every_microbatch
        )
        end: Array = np.maximum.reduce([s.end_s for s in stages])
        slowest = max(range(len(stages)), key=lambda s: stages[s].busy_s)
        extra, extra_parts = self._beyond_stages(plan, end)
        ledger = stages[slowest].ledger.flat()
        parts = {**ledger.parts(), **extra_parts}
        add_into(parts, {"bubble": float(end[0] - stages[slowest].end_s[0])})
        return Simulation(
            plan=plan,
            machine=machine,
            step_s=(end + extra) * self._factors.model(str(plan.layout)),
            parts=parts,
            evidence=_shares(ledger, extra_parts, self._factors.calibration),
            stages=stages,
            slowest=slowest,
            memory=self._memory(plan),
            assumptions=(
                batch_line,
                *filter(None, [self._factors.calibration.sentence()]),
                *list_assumptions(plan, machine, seq_given=seq is not None),
            ),
        )

    def _asked(self, layout: Layout, global_batch: int | None, seq: int | None) -> tuple[Plan, LayerKey, str]:
        """The plan of a request once it is checked, and one sentence about its global batch."""
        check_asked(global_batch=global_batch, seq=seq)
        check_supported(layout, self.cluster)
        layout, batch_line = resolve_batch(layout, self._workload, global_batch)
        check_passes(layout)
        return *self._plan(layout, self._workload.seq if seq is None else seq), batch_line

    def _plan(self, layout: Layout, seq: int) -> tuple[Plan, LayerKey]:
        captured, kind = self._workload.precision, self.cluster.device.kind
        masters = self._workload.source == "reference"
        rule = choose_precision(
            captured=captured,
            asked=layout.precision,
            device_kind=kind,
            masters=masters,
            narrow=self._workload.optimizer.gradient_dtype in HALF,
        )
        key = LayerKey.of(layout, seq=seq, precision=rule.target)
        if key not in self._layers:
            self._layers[key] = evaluate_layers(self._workload, layout, seq=seq, precision=rule)
        plan = partition(self._workload, layout, seq=seq, precision=rule, layers=self._layers[key])
        return plan, key

    def _machine(self, layout: Layout) -> Machine:
        prices = Prices(
            operators=self._operators,
            collectives=self._collectives,
            group=axis_groups(layout, self.cluster),
            scale=self._scale,
            wrapper_s=wrapper_us(self.profile, same_device=self._same)[0] * 1e-6,
        )
        return Machine(
            prices=prices,
            factors=self._factors,
            cpu=self.cluster.device.kind == "cpu",
            serial_fsdp=self.cluster.backend == "gloo",
        )

    def _beyond_stages(self, plan: Plan, end_s: Array) -> tuple[Array, Parts]:
        """Time beyond the stages: waiting for input, and for the slowest of all ranks."""
        wait = _input_s(self.profile, plan) if self._same else 0.0
        jitter = _jitter(self.profile) if self._same else ASSUMED_JITTER
        late = end_s * jitter * expected_maximum(plan.layout.gpus)
        waited = wait * self._factors.factor("input", INPUT_SPREAD)
        extra: Array = waited + late * self._factors.factor("straggler", JITTER_SPREAD)
        return extra, {"input": wait, "straggler": float(late[0])}

    def _memory(self, plan: Plan) -> MemoryForecast:
        framework = measured_framework(self.profile) if self._same else None
        return forecast_memory(
            plan,
            Capacity(cluster=self.cluster, framework_bytes=framework),
            factors=self._factors,
            in_flight=most_in_flight(_timetable(plan.layout)),
        )


def _run_stages(
    plan: Plan, machine: Machine, pricer: LayerPricer, *, cluster: Cluster, key: LayerKey, every: bool
) -> tuple[StageResult, ...]:
    """Run all stages against each other."""
    layout = plan.layout
    segments = pricer.segments(plan, machine, key=key)
    stages = equal_stages(plan, machine, pricer, segments, record=every)
    messages = [_message(plan, machine, cluster, i) for i in range(len(plan.virtual) - 1)]
    times = Times(
        stages=stages,
        transfer_s=[m.device_s for m in messages],
        start_s=np.zeros(1 + machine.factors.draws),
    )
    clocks = run_step(_timetable(layout), times, every=every)
    results = [_end(stage, clock) for stage, clock in zip(stages, clocks, strict=True)]
    for boundary, message in enumerate(messages):
        for virtual in (boundary, boundary + 1):
            results[virtual % layout.pp].ledger.beside.append((message, 2.0 * layout.accum))
    return tuple(results)


def _timetable(layout: Layout) -> Timetable:
    return Timetable(layout.schedule, Pipeline(layout.pp, layout.vpp, layout.accum))


def _message(plan: Plan, machine: Machine, cluster: Cluster, boundary: int) -> Segment:
    """The activation (or its gradient) handed over a boundary of virtual stages."""
    last = plan.layers[plan.virtual[boundary][-1][0]]
    span = boundary_span(plan.layout, cluster, boundary)
    return machine.segment({"pp": machine.prices.call(Call("send", "pp", 2, span, last.boundary_bytes))})


def _end(stage: Stage, clock: StageClock) -> StageResult:
    """Close a stage: what the tail of its communication exposes, then its end of step."""
    ledger = clock.ledger()
    start = np.maximum(clock.now_s, clock.tail_end_s)
    ledger.give(clock.tail_part, float(start[0] - clock.now_s[0]))
    end = stage.end_of_step()
    ledger.add(end.ledger)
    return StageResult(
        end_s=start + end.duration_s,
        waiting_s=sum(clock.waits.values()) + end.ledger.parts().get("pp", 0.0),
        ledger=ledger,
        clock=clock,
        ending=end,
    )


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


def _shares(ledger: FlatLedger, extra: Parts, calibration: Calibration) -> Parts:
    """Shares by kind of evidence; assumed prices are interpolated as far as calibration explains what they err by."""
    evidence, parts = ledger.evidence(), ledger.parts()
    add_into(evidence, {"assumed": extra["straggler"], "measured": extra["input"]})
    total = sum(evidence.values()) or 1.0
    shares = {kind: evidence.get(kind, 0.0) / total for kind in ("measured", "interpolated")}
    assumed = {name: evidence.get(f"assumed:{name}", 0.0) for name in CLASSES}
    # what hides behind other work does not move the step
    moving = {
        **assumed,
        "link": min(assumed["link"], sum(parts.get(part, 0.0) for part in COMMUNICATION_PARTS)),
        "host": parts.get("host", 0.0),
    }
    explained = calibration.explained(np.array([moving[name] for name in CLASSES]))
    tables = sum(seconds for kind, seconds in evidence.items() if kind.startswith(TABLE_KINDS)) / total
    shares["interpolated"] += explained * sum(assumed.values()) / total + tables
    return {**shares, "assumed": max(0.0, 1.0 - sum(shares.values())), "table": tables}
