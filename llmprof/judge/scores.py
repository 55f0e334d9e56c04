"""Scores of forecasts against measurements: small functions on plain numbers, each with its formula."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from typing import NamedTuple

import msgspec
import numpy as np

MISSED_SHARE = 0.2
"""What an 80 % interval may miss."""
HARD_STATE_SHARE = 0.9
"""Runs whose bare state takes less of the capacity are hard to tell: activations decide."""
LEAST_MFU = 0.01
"""Rows below are launch-bound or broken, and have a group of their own."""


class ScoredRow(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One measurement with its forecast; times in one unit (seconds for runs, microseconds for operators).

    Attributes:
        measured: None where nothing was measured.
        naive, second: the baselines, None where there is none; `baselines`: further ones by name.
        reason: why it is not scored, "" when it is.
        group: calibration group or stratum; `choice_set` of layouts that compete, "" for none.
        mfu: of the measurement, by the product's convention.
        resolution: of the source, in the unit of the times.
        memory_measured, memory_predicted: peak bytes, comparable with each other.
        oom: measured, None where it is not known; `oom_probability` forecast.
        hard: the bare state takes less than HARD_STATE_SHARE of the capacity.
        columns: cells of the row; `breakdown` of the forecast by part.
    """

    row_id: str
    measured: float | None = None
    predicted_p10: float | None = None
    predicted_p50: float | None = None
    predicted_p90: float | None = None
    naive: float | None = None
    second: float | None = None
    baselines: dict[str, float] = {}
    reason: str = ""
    group: str = ""
    choice_set: str = ""
    mfu: float | None = None
    resolution: float = 0.0
    memory_measured: float | None = None
    memory_predicted: float | None = None
    oom: bool | None = None
    oom_probability: float | None = None
    hard: bool = False
    columns: dict[str, str] = {}
    breakdown: dict[str, float] = {}

    @property
    def scored(self) -> bool:
        """True when there is a finite time above 0 on both sides, and no reason against it."""
        times = (self.measured, self.predicted_p50)
        return not self.reason and all(time is not None and 0 < time < inf for time in times)

    @property
    def ape(self) -> float | None:
        """Absolute percentage error of the nominal forecast, as a fraction."""
        if not self.scored or self.measured is None or self.predicted_p50 is None:
            return None
        return absolute_percentage_error(self.predicted_p50, self.measured, resolution=self.resolution)


def absolute_percentage_error(predicted: float, measured: float, *, resolution: float = 0.0) -> float:
    """|predicted - measured| / measured; a difference below the source's resolution counts as half of it."""
    difference = abs(predicted - measured)
    return (resolution / 2 if difference < resolution else difference) / measured


def quantile(values: Sequence[float], share: float) -> float | None:
    """Quantile with linear interpolation between order statistics (Hyndman & Fan type 7); None of nothing."""
    return float(np.quantile(values, share)) if len(values) else None


def covers(low: float, high: float, measured: float) -> bool:
    """True when the measurement lies in the closed interval."""
    return low <= measured <= high


def interval_score(low: float, high: float, measured: float, *, missed_share: float = MISSED_SHARE) -> float:
    """Winkler's interval score in units of the measurement; smaller is better.

    (high - low) + 2 / a (low - x) if x < low, + 2 / a (x - high) if x > high, with a the share that may be missed
    (Gneiting & Raftery 2007, equation 43), all over x.
    """
    below, above = max(0.0, low - measured), max(0.0, measured - high)
    return ((high - low) + 2 / missed_share * (below + above)) / measured


def relative_width(low: float, middle: float, high: float) -> float:
    """(high - low) / middle."""
    return (high - low) / middle


def ranks(values: Sequence[float]) -> list[float]:
    """Ranks from 1; equal values share the mean of theirs."""
    array = np.asarray(values, dtype=float)
    below = (array[None, :] < array[:, None]).sum(axis=1)
    equal = (array[None, :] == array[:, None]).sum(axis=1)
    return [float(b + (e + 1) / 2) for b, e in zip(below, equal, strict=True)]


def spearman(predicted: Sequence[float], measured: Sequence[float]) -> float | None:
    """Pearson's correlation of the ranks; None below 3 pairs or where one side is constant."""
    if len(predicted) < 3:
        return None
    a, b = np.array(ranks(predicted)), np.array(ranks(measured))
    if a.std() == 0 or b.std() == 0:
        return None
    return float(np.clip(np.corrcoef(a, b)[0, 1], -1.0, 1.0))


def top1_regret(predicted: Sequence[float], measured: Sequence[float]) -> float:
    """How much slower the layout that the forecast puts first is than the best measured one, as a fraction.

    Of layouts that share the first place any may be chosen: their mean counts, so the order of rows does not.
    """
    first = min(predicted)
    chosen = [time for forecast, time in zip(predicted, measured, strict=True) if forecast == first]
    return float(np.mean(chosen)) / min(measured) - 1


class OomScore(NamedTuple):
    """Confusion of fit and out-of-memory; a rate without cases is None.

    Attributes:
        false_fit_rate: of runs that ran out of memory, the share that was forecast to fit.
        false_oom_rate: of runs that fitted, the share that was forecast to run out of memory.
        brier: mean squared difference of the probability and what happened.
    """

    n: int
    accuracy: float | None = None
    false_fit_rate: float | None = None
    false_oom_rate: float | None = None
    brier: float | None = None


def oom_confusion(probabilities: Sequence[float], happened: Sequence[bool]) -> OomScore:
    """Out of memory is forecast where its probability is at least one half."""
    pairs = list(zip(probabilities, happened, strict=True))
    if not pairs:
        return OomScore(0)
    right = [(p >= 0.5) == oom for p, oom in pairs]
    missed = [p < 0.5 for p, oom in pairs if oom]
    alarms = [p >= 0.5 for p, oom in pairs if not oom]
    return OomScore(
        n=len(pairs),
        accuracy=float(np.mean(right)),
        false_fit_rate=float(np.mean(missed)) if missed else None,
        false_oom_rate=float(np.mean(alarms)) if alarms else None,
        brier=float(np.mean([(p - oom) ** 2 for p, oom in pairs])),
    )
