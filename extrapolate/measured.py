"""Measured operator rows as a lookup: exact keys, and interpolation between neighbours in efficiency space."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from math import exp, log, sqrt
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from llmprof.schema.operators import MATMUL_FAMILIES, split_name
from llmprof.schema.profile import OperatorRow, Profile

NORMAL_IQR = 1.349
"""Interquartile range of a normal distribution in standard deviations."""
MEDIAN_ERROR = 1.2533
"""Standard error of a median of n normal values, in standard deviations over the square root of n."""
MIN_SPREAD = 0.02
MAX_DRIFT = 0.3
OUTLIER = 3.0
"""Rows of one key further from their median than this factor are pulled in to it."""
LONE_SPREAD = 0.4
"""Spread of a curve with too few rows for residuals: assumed."""
STRANGER_SPREAD = 0.8
"""Spread of a family's curve with one operator in it, for another operator of the family: assumed."""
SPREAD_PER_OCTAVE = 0.08
"""Growth of the spread for each doubling of the work outside the measured range: assumed."""
MAX_SPREAD = 1.2
_NEIGHBOURS = 4


class Work(NamedTuple):
    """Arithmetic and memory traffic of one call."""

    flops: int
    bytes: int


class Estimate(NamedTuple):
    """A time with the standard deviation of its logarithm and the rows behind it."""

    time_s: float
    spread: float
    rows: tuple[str, ...] = ()


class _Curve(NamedTuple):
    """Rows of one operator or family: log coordinates (n, 2) of flops and bytes, log of work per second (n,)."""

    points: NDArray[np.float64]
    log_rate: NDArray[np.float64]
    names: tuple[str, ...]
    by_flops: bool
    residual: float
    num_operators: int


class MeasuredOperators:
    """What a profile measured of operators; empty when `profile` is None.

    Rows with equal keys (other modules, phases, ranks) become one: their count-weighted mean, so that the
    captured step adds up to what was measured.
    """

    def __init__(self, profile: Profile | None) -> None:
        rows = profile.operators if profile else ()
        timed = [r for r in rows if r.time_us > 0]
        drift = step_drift(profile) if profile else MIN_SPREAD
        self._exact = _merge(timed, drift, strict=True)
        self._loose = _merge(timed, drift, strict=False)
        self._free = _free_times(timed)
        self._launch = _launch_times(timed)
        self._floor_s = min((r.time_us * 1e-6 for r in timed if _costs(r)), default=0.0)
        self._curves = _curves(timed)

    def exact(self, op: str, shapes: str, dtype: str, attributes: frozenset[str]) -> Estimate | None:
        """The measured time of this operator with these shapes, or None; `add_` stands in for `add`."""
        text = ",".join(sorted(attributes))
        return self._exact.get((op, shapes, dtype, text)) or self._loose.get((_bare(op), shapes, dtype, text))

    def free_time_s(self, op: str) -> float:
        """Own host time of a view or allocation: its mean, else the mean of all of them, else 0."""
        return self._free.get(_bare(op), self._free.get("", 0.0))

    def launch_s(self, op: str) -> float | None:
        """Measured host time to launch this operator, else the mean over all, else None."""
        return self._launch.get(_bare(op), self._launch.get(""))

    def interpolate(self, op: str, family: str, dtype: str, work: Work) -> Estimate | None:
        """Time from neighbours of the same operator, else of the same family; None when there are none.

        Efficiency (work per second) is interpolated over the logarithms of flops and bytes with inverse-distance
        weights of the nearest rows; outside the measured range it stays flat.
        """
        for key in ((_bare(op), dtype), (f"family:{family}", dtype)):
            curve = self._curves.get(key)
            if curve is not None and (work.flops if curve.by_flops else work.bytes):
                stranger = key[0] != _bare(op) and curve.num_operators == 1
                return self._from_curve(curve, work, least_spread=STRANGER_SPREAD if stranger else MIN_SPREAD)
        return None

    def _from_curve(self, curve: _Curve, work: Work, *, least_spread: float) -> Estimate:
        at = np.array([log(max(work.flops, 1)), log(max(work.bytes, 1))])
        log_rate, nearest = _weighted(curve.points, curve.log_rate, at)
        amount = work.flops if curve.by_flops else work.bytes
        time_s = max(amount / exp(log_rate), self._floor_s)
        column = curve.points[:, 0 if curve.by_flops else 1]
        outside = max(0.0, float(column.min()) - log(amount), log(amount) - float(column.max())) / log(2)
        spread = min(MAX_SPREAD, max(curve.residual, least_spread) + SPREAD_PER_OCTAVE * outside)
        return Estimate(time_s, spread, tuple(curve.names[i] for i in nearest))


def _weighted(
    points: NDArray[np.float64], values: NDArray[np.float64], at: NDArray[np.float64]
) -> tuple[float, list[int]]:
    """Inverse-square-distance mean of the nearest values, and their indices."""
    distance = ((points - at) ** 2).sum(axis=1)
    nearest = np.argsort(distance, kind="stable")[:_NEIGHBOURS]
    weight = 1.0 / (distance[nearest] + 1e-6)
    return float((weight * values[nearest]).sum() / weight.sum()), nearest.tolist()


def step_drift(profile: Profile) -> float:
    """Standard deviation of the logarithm of step times: how far a whole run may be off, between 2 % and 30 %."""
    times = [
        r.duration_us for r in profile.steps if r.kind == "train" and not r.instrumented and r.duration_us > 0
    ]
    if len(times) < 4:
        return MIN_SPREAD
    low, middle, high = np.quantile(times, [0.25, 0.5, 0.75])
    return float(np.clip((high - low) / NORMAL_IQR / middle, MIN_SPREAD, MAX_DRIFT))


def _merge(
    rows: Iterable[OperatorRow], drift: float, *, strict: bool
) -> dict[tuple[str, str, str, str], Estimate]:
    groups: dict[tuple[str, str, str, str], list[OperatorRow]] = defaultdict(list)
    for row in rows:
        name = row.op if strict else _bare(row.op)
        groups[name, row.shapes, row.dtype, row.attributes].append(row)
    return {key: Estimate(_mean_s(group), _spread(group, drift)) for key, group in groups.items()}


def _mean_s(rows: list[OperatorRow]) -> float:
    """Count-weighted mean of the rows' medians, outliers pulled in to OUTLIER times their weighted median (seconds).

    A mean, so that the captured step adds up; an outlier is a call that waited for the machine.
    """
    weights = np.array([max(r.count, 1e-9) for r in rows])
    times = np.array([r.time_us * 1e-6 for r in rows])
    order = np.argsort(times)
    middle = times[order][np.searchsorted(np.cumsum(weights[order]), weights.sum() / 2)]
    return float(np.average(np.clip(times, middle / OUTLIER, middle * OUTLIER), weights=weights))


def _spread(rows: list[OperatorRow], drift: float) -> float:
    """Spread of a mean of medians: their standard error, their disagreement, and the drift that all share."""
    center = _mean_s(rows) * 1e6
    errors = [MEDIAN_ERROR * r.time_iqr_us / NORMAL_IQR / r.time_us / sqrt(max(r.time_n, 1)) for r in rows]
    apart = [log(r.time_us / center) for r in rows]
    variance = sum(e**2 + a**2 for e, a in zip(errors, apart, strict=True)) / len(rows) ** 2
    return min(MAX_SPREAD, sqrt(variance + drift**2))


def _free_times(rows: Iterable[OperatorRow]) -> dict[str, float]:
    """Mean time of each view or allocation by bare name, and of all of them under ""."""
    groups: dict[str, list[OperatorRow]] = defaultdict(list)
    for row in rows:
        if not _costs(row):
            groups[_bare(row.op)].append(row)
            groups[""].append(row)
    return {name: _mean_s(group) for name, group in groups.items()}


def _launch_times(rows: Iterable[OperatorRow]) -> dict[str, float]:
    """Count-weighted mean host time by bare name, and of all operators under "" (seconds)."""
    totals: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
    for row in rows:
        if row.host_us is not None and row.count > 0:
            for name in (_bare(row.op), ""):
                totals[name][0] += row.count * row.host_us * 1e-6
                totals[name][1] += row.count
    return {name: seconds / count for name, (seconds, count) in totals.items()}


def _curves(rows: Iterable[OperatorRow]) -> dict[tuple[str, str], _Curve]:
    groups: dict[tuple[str, str], dict[str, list[OperatorRow]]] = defaultdict(lambda: defaultdict(list))
    for row in rows:
        if _costs(row) and (row.bytes or row.flops):
            for name in (_bare(row.op), f"family:{row.family}"):
                groups[name, row.dtype][f"{_bare(row.op)} {row.shapes} {row.attributes}"].append(row)
    return {key: _curve(list(group.values())) for key, group in groups.items()}


def _curve(groups: list[list[OperatorRow]]) -> _Curve:
    by_flops = all(g[0].family in MATMUL_FAMILIES and g[0].flops > 0 for g in groups)
    points, rates, names, labels = [], [], [], []
    for group in groups:
        row, time_s = group[0], _mean_s(group)
        work = row.flops if by_flops else row.bytes
        if work > 0:
            points.append((log(max(row.flops, 1)), log(max(row.bytes, 1))))
            rates.append(log(work / time_s))
            names.append(f"{row.op} {row.shapes} {row.dtype}")
            labels.append(_bare(row.op))
    coordinates, log_rate = np.array(points).reshape(-1, 2), np.array(rates)
    residual = _residual(coordinates, log_rate, labels)
    return _Curve(coordinates, log_rate, tuple(names), by_flops, residual, len(set(labels)))


def _residual(points: NDArray[np.float64], log_rate: NDArray[np.float64], labels: list[str]) -> float:
    """Root mean square of leave-one-out errors, between MIN_SPREAD and MAX_SPREAD; LONE_SPREAD under 3 rows.

    In the curve of a family whole operators are left out, since it prices operators that are not in it.
    """
    if len(log_rate) < 3:
        return LONE_SPREAD
    left_out = np.array(labels) if len(set(labels)) > 1 else np.arange(len(labels)).astype(str)
    errors = []
    for i in range(len(labels)):
        rest = left_out != left_out[i]
        predicted, _ = _weighted(points[rest], log_rate[rest], points[i])
        errors.append(predicted - log_rate[i])
    return float(np.clip(np.sqrt(np.mean(np.square(errors))), MIN_SPREAD, MAX_SPREAD))


def _costs(row: OperatorRow) -> bool:
    return row.family not in ("view", "allocation", "collective")


def _bare(op: str) -> str:
    return split_name(op)[1].removesuffix("_")
