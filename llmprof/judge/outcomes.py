"""A Case becomes its forecast: the readings of the row are forecast one by one and their draws pooled."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from math import isfinite, sqrt

import msgspec
import numpy as np
from numpy.typing import NDArray

from llmprof.errors import RequestError
from llmprof.extrapolate.baselines import bubble_factor, naive_step_time_s, second_baseline_step_time_s
from llmprof.extrapolate.calibration import CLASSES, Calibration, Observation, fit_calibration
from llmprof.extrapolate.forecast import Forecaster, Simulation
from llmprof.extrapolate.implementation import apply_implementation
from llmprof.extrapolate.predict import breakdown
from llmprof.extrapolate.uncertainty import Interval, widen
from llmprof.judge.runs import Alternative, Case, MeasuredMemory
from llmprof.schema.priors import load_priors
from llmprof.schema.profile import Profile, unmeasured
from llmprof.schema.reference import reference_workload

Array = NDArray[np.float64]
STATE = ("parameters", "gradients", "optimizer")
"""Categories of memory that a layout fixes: the bare state."""
LEAST_BELIEF = 0.05
"""What is left of the weight of a reading that we forecast not to fit: our memory forecast may be wrong. Assumed."""
OUTSIDE_TENSORS = ("slack", "framework")
"""Categories that a count of allocated tensors does not see."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """The forecast of one case.

    Attributes:
        time_s: of a step.
        naive_s, second_s: the baselines at the prior MFU; `bubble` is the second's factor for the pipeline.
        breakdown_s: nominal seconds by the keys of a forecast's breakdown, of the likeliest reading.
        memory_bytes: nominal peak of the device; `like_measured_bytes` of what was measured (stage, tensors alone).
        usable_bytes, capacity_bytes: of the device.
        state_bytes: parameters, gradients and optimizer state of the largest stage.
        oom_probability: of running out of memory; `verdict` as a forecast has it.
        layout, cluster: of the likeliest reading, among `readings`.
        problem: why there is no forecast, "" when there is one.
    """

    row_id: str
    time_s: Interval | None = None
    naive_s: float = 0.0
    second_s: float = 0.0
    bubble: float = 1.0
    breakdown_s: dict[str, float]
    memory_bytes: float = 0.0
    like_measured_bytes: float | None = None
    usable_bytes: int = 0
    capacity_bytes: int = 0
    state_bytes: float = 0.0
    oom_probability: float = 0.0
    verdict: str = ""
    layout: str = ""
    cluster: str = ""
    readings: int = 0
    problem: str = ""

    @property
    def is_number(self) -> bool:
        """Whether its interval, memory and probability are numbers that they can be."""
        times = self.time_s or ()
        return (
            all(isfinite(t) and t > 0 for t in times)
            and isfinite(self.memory_bytes)
            and 0.0 <= self.oom_probability <= 1.0
        )

    def baselines(self, mfu: float) -> tuple[float, float]:
        """Naive and second baseline (seconds) at another MFU than the prior's."""
        naive = self.naive_s * load_priors().mfu / mfu
        return naive, self.second_s + (naive - self.naive_s) * self.bubble


class Bench:
    """Forecasts cases one after the other; what they share is made once."""

    def __init__(self, cases: Iterable[Case]) -> None:
        self._degrees: dict[tuple[object, ...], dict[tuple[int, bool], None]] = {}
        for case in cases:
            found = self._degrees.setdefault(_workload_key(case), {})
            found.update(dict.fromkeys((a.layout.tp, a.layout.sp) for a in case.alternatives))
        self._profiles: dict[tuple[object, ...], Profile] = {}
        self._forecasters: dict[tuple[object, ...], Forecaster] = {}

    def forecast(self, case: Case, calibration: Calibration | None = None) -> Outcome:
        """The forecast of a case; a refused one says why."""
        try:
            found = self._forecast(case, calibration)
        except RequestError as error:
            return Outcome(row_id=case.row_id, breakdown_s={}, problem=error.message)
        if not found.is_number:
            return Outcome(
                row_id=case.row_id, breakdown_s={}, problem="the forecast is no finite time and memory"
            )
        return found

    def calibrate(self, cases: Iterable[Case], *, source: str = "") -> Calibration | None:
        """What measured cases say of the prices; None when none of them has a time and can be forecast.

        Args:
            source: name of the file that they come from.
        """
        found = [self._observation(case) for case in cases]
        observations = [o for o in found if o is not None]
        return fit_calibration(observations, source=source) if observations else None

    def readings_s(self, case: Case, shifts: Array) -> Array:
        """Nominal steps of every reading of a row at sets of calibration shifts.

        Args:
            shifts: shape (n, 4), as for `Forecaster.probing`.

        Returns:
            Seconds, shape (readings, n).
        """
        found = []
        for reading in case.alternatives:
            forecaster = self._forecaster(case, reading, None).probing(shifts)
            simulation = forecaster.simulate(reading.layout, global_batch=case.global_batch, seq=case.seq)
            found.append(_step_s(case, simulation))
        return np.stack(found)

    def _observation(self, case: Case) -> Observation | None:
        """A measured case for the fit; one of several readings is forecast by the one whose step is nominal."""
        if case.step_time_s is None:
            return None
        weights = _weights(case)
        try:
            logs = np.log(self.readings_s(case, np.zeros((1, len(CLASSES))))[:, 0])
        except RequestError:
            return None
        spread = sqrt(float(weights @ np.square(logs - weights @ logs)))

        def nominal_s(shifts: Array) -> Array:
            steps = self.readings_s(case, shifts)
            middle = weighted_quantile(steps[:, 0], weights, 0.5)
            return np.asarray(steps[int(np.flatnonzero(steps[:, 0] == middle)[0])])

        return Observation(name=case.row_id, step_s=case.step_time_s, nominal_s=nominal_s, spread=spread)

    def _forecast(self, case: Case, calibration: Calibration | None) -> Outcome:
        simulations = [self._simulate(case, a, calibration) for a in case.alternatives]
        first, likeliest = simulations[0], case.alternatives[0]
        workload, layout = first.plan.workload, first.plan.layout
        cluster = likeliest.cluster
        memory = first.memory
        weights = _weights(case)
        probabilities = np.array([s.memory.oom_probability for s in simulations])
        oom = float(weights @ probabilities)
        ran = case.step_time_s is not None
        naive_s = naive_step_time_s(workload, layout, cluster, seq=case.seq)
        return Outcome(
            row_id=case.row_id,
            time_s=pooled(
                [_step_s(case, s) for s in simulations],
                _given_that_it_ran(weights, probabilities) if ran else weights,
                [s.evidence["assumed"] for s in simulations],
            ),
            naive_s=naive_s,
            second_s=second_baseline_step_time_s(workload, layout, cluster, naive_s=naive_s),
            bubble=bubble_factor(layout),
            breakdown_s={k: v for k, v in breakdown(first).items() if case.optimizer or k != "optimizer"},
            memory_bytes=memory.p50,
            like_measured_bytes=_like(memory.stages, case.memory) if case.memory else None,
            usable_bytes=memory.usable,
            capacity_bytes=cluster.device.memory_bytes,
            state_bytes=max(sum(stage[key] for key in STATE) for stage in memory.stages),
            oom_probability=oom,
            verdict="oom" if oom >= 0.5 else replace(memory, oom_probability=min(oom, 0.49)).verdict,
            layout=str(layout),
            cluster=cluster.name,
            readings=len(simulations),
        )

    def _simulate(self, case: Case, alternative: Alternative, calibration: Calibration | None) -> Simulation:
        forecaster = self._forecaster(case, alternative, calibration)
        return forecaster.simulate(alternative.layout, global_batch=case.global_batch, seq=case.seq)

    def _forecaster(
        self, case: Case, alternative: Alternative, calibration: Calibration | None
    ) -> Forecaster:
        cluster = alternative.cluster
        key = (*_workload_key(case), cluster.name, cluster.devices_per_node, cluster.links)
        base = self._forecasters.get(key)
        if base is None:
            base = self._forecasters[key] = Forecaster(self._profile(case), cluster)
        if calibration is None:
            return base
        own_key = (*key, id(calibration))
        if own_key not in self._forecasters:
            self._forecasters[own_key] = base.recalibrated(calibration)
        return self._forecasters[own_key]

    def _profile(self, case: Case) -> Profile:
        key = _workload_key(case)
        if key not in self._profiles:
            workload = reference_workload(case.shape, degrees=self._degrees[key], precision=_traced(case))
            workload = apply_implementation(workload, case.implementation, attention=case.attention)
            optimizer = msgspec.structs.replace(workload.optimizer, gradient_dtype=case.gradients)
            workload = msgspec.structs.replace(workload, optimizer=optimizer)
            self._profiles[key] = unmeasured(workload)
        return self._profiles[key]


def pooled(steps: Sequence[Array], weights: Array, assumed: Sequence[float]) -> Interval:
    """One interval of several readings: weighted median of the nominals, quantiles of all draws together.

    Args:
        steps: seconds of each reading, shape (1 + draws,), index 0 nominal.
        weights: of the readings, summing to 1.
        assumed: share of assumed time of each.
    """
    nominal = weighted_quantile(np.array([s[0] for s in steps]), weights, 0.5)
    draws = np.concatenate([s[1:] for s in steps])
    each = np.repeat(weights, [len(s) - 1 for s in steps])
    low, high = (weighted_quantile(draws, each, q) for q in (0.1, 0.9))
    return widen(Interval(min(low, nominal), nominal, max(high, nominal)), float(weights @ assumed))


def weighted_quantile(values: Array, weights: Array, share: float) -> float:
    """The smallest value below or at which lies this share of the weight."""
    order = np.argsort(values, kind="stable")
    reached = np.cumsum(weights[order])
    index = int(np.searchsorted(reached, share * reached[-1] * (1 - 1e-12)))
    return float(values[order][min(index, len(values) - 1)])


def _weights(case: Case) -> Array:
    return np.array([a.weight for a in case.alternatives])


def _given_that_it_ran(weights: Array, oom_probabilities: Array) -> Array:
    """Weights of readings of a row with a time: one that would not have fitted into memory is hardly what was run.

    Only readings of empty cells are weighed by that; whether the row fits is forecast without it.
    """
    found = weights * np.maximum(1.0 - oom_probabilities, LEAST_BELIEF)
    return np.asarray(found / found.sum())


def _step_s(case: Case, simulation: Simulation) -> Array:
    """Draws of the step; without the optimizer where only forward and backward were timed."""
    if case.optimizer:
        return simulation.step_s
    share = simulation.parts.get("optimizer", 0.0) / float(simulation.step_s[0])
    return simulation.step_s * (1.0 - share)


def _like(stages: Sequence[dict[str, int]], measured: MeasuredMemory) -> float:
    """Nominal bytes of what was measured."""
    left_out = OUTSIDE_TENSORS if measured.allocated else ()
    sizes = [float(sum(v for k, v in stage.items() if k not in left_out)) for stage in stages]
    return max(sizes) if measured.stage is None else sizes[measured.stage]


def _traced(case: Case) -> str:
    """The precision that the reference decoder is made in."""
    if case.precision in ("float32", "tfloat32"):
        return "float32"
    return "float16" if case.precision == "float16" else "bfloat16"


def _workload_key(case: Case) -> tuple[object, ...]:
    return (case.shape, case.implementation, case.gradients, case.attention, _traced(case))
