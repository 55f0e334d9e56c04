"""Measured operator rows as a lookup: exact keys, and the curves of an operator or family for everything else."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from functools import lru_cache
from math import log, sqrt

import numpy as np

from llmprof.extrapolate.curves import (
    MAX_SPREAD,
    MIN_SPREAD,
    Curve,
    Estimate,
    Evidence,
    Measured,
    Neighbour,
    Work,
)
from llmprof.extrapolate.features import call_sizes
from llmprof.extrapolate.surface import Call, Surface, Timed
from llmprof.schema.cluster import Device
from llmprof.schema.operators import MATMUL_FAMILIES, parse_shapes, split_name
from llmprof.schema.profile import OperatorRow, Profile

NORMAL_IQR = 1.349
"""Interquartile range of a normal distribution in standard deviations."""
MEDIAN_ERROR = 1.2533
"""Standard error of a median of n normal values, in standard deviations over the square root of n."""
MAX_DRIFT = 0.3
OUTLIER = 3.0
"""Rows of one key further from their median than this factor are pulled in to it."""


SHORTEST_US, LONGEST_US = 1e-6, 1e12
MOST_WORK = 10**24
"""Times and FLOPs or bytes of one call beyond which a row is no measurement and is passed over."""


class MeasuredOperators:
    """What a profile measured of operators; empty when `profile` is None. `device`: where it was measured.

    Rows with equal keys (other modules, phases, ranks) become one: their count-weighted mean, so that the
    captured step adds up to what was measured.
    """

    def __init__(self, profile: Profile | None, *, device: Device | None = None) -> None:
        self._device = device
        rows = profile.operators if profile else ()
        timed = self._rows = [r for r in rows if _can_be(r)]
        drift = step_drift(profile) if profile else MIN_SPREAD
        self._exact = _merge(timed, drift, strict=True)
        self._loose = _merge(timed, drift, strict=False)
        self._free = _free_times(timed)
        self._launch = _launch_times(timed)
        self._floor_s = min((r.time_us * 1e-6 for r in timed if _costs(r)), default=0.0)
        self._grouped = _by_curve(timed)
        self._curves: dict[tuple[str, str], Curve] = {}
        self._known: dict[tuple[str, str, Call], Estimate] = {}
        self._surfaces: dict[tuple[str, str, str], Surface | None] = {}

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

    def interpolate(self, op: str, family: str, dtype: str, call: Call) -> Estimate | None:
        """Time by rows of the same operator, else of its family; None when nothing like it was measured."""
        surface = self._surface(_bare(op), dtype, call.sizes.kind)
        if surface is not None:
            found = self._known.get((op, dtype, call)) or surface.estimate(call)
            return found._replace(time_s=max(found.time_s, self._floor_s))
        curve, stranger = self._curve_for(op, family, dtype, call.work)
        if curve is None:
            return None
        found = curve.estimate(call.work, stranger=stranger)
        return found._replace(time_s=max(found.time_s, self._floor_s))

    def rows_of(self, op: str, shapes: str, dtype: str, attributes: frozenset[str]) -> tuple[Neighbour, ...]:
        """The rows behind `exact`, with their shares of the calls."""
        text = ",".join(sorted(attributes))
        equal = [
            r for r in self._rows if (r.shapes, r.dtype, r.attributes) == (shapes, dtype, text) and _bare(r.op) == _bare(op)
        ]  # fmt: skip
        rows = [r for r in equal if r.op == op] or equal
        calls = sum(max(r.count, 1e-9) for r in rows)
        found = (
            Neighbour(
                f"{r.module or 'outside modules'}, {r.phase}, rank {r.rank}", r.time_us * 1e-6, max(r.count, 1e-9) / calls
            )
            for r in rows
        )  # fmt: skip
        return tuple(sorted(found, key=lambda row: -row.weight))

    def evidence(self, op: str, family: str, dtype: str, call: Call) -> Evidence | None:
        """What `interpolate` rests on."""
        surface = self._surface(_bare(op), dtype, call.sizes.kind)
        if surface is not None:
            return surface.evidence(call)
        curve, _ = self._curve_for(op, family, dtype, call.work)
        return curve.evidence(call.work) if curve else None

    def _curve_for(self, op: str, family: str, dtype: str, work: Work) -> tuple[Curve | None, bool]:
        """The curve of an operator, else of its family, and whether the operator is a stranger to it."""
        for name in (_bare(op), f"family:{family}"):
            curve = self._curve(name, dtype)
            if curve is not None and (work.flops if curve.by_flops else work.bytes):
                return curve, name != _bare(op)
        return None, False

    def look_up(self, asked: Iterable[tuple[str, str, Call]]) -> None:
        """Interpolate many (operator, dtype, call) in one go, for `interpolate` to find."""
        groups: dict[tuple[str, str, str], dict[tuple[str, str, Call], None]] = defaultdict(dict)
        for op, dtype, call in asked:
            groups[_bare(op), dtype, call.sizes.kind][op, dtype, call] = None
        for key, members in groups.items():
            surface = self._surface(*key)
            if surface is not None:
                found = surface.estimates([call for *_, call in members])
                self._known.update(zip(members, found, strict=True))

    def _surface(self, name: str, dtype: str, kind: str) -> Surface | None:
        """The surface of an operator, fitted when it is first asked for; None where it has too few rows."""
        key = (name, dtype, kind)
        if key not in self._surfaces:
            groups = self._grouped.get((name, dtype), {}).values()
            rows = [row for row in map(_timed, groups) if row and row.call.sizes.kind == kind]
            by_flops = all(row.call.work.flops > 0 for row in rows)
            self._surfaces[key] = (
                Surface(rows, by_flops=by_flops, device=self._device, dtype=dtype) if rows else None
            )
        return self._surfaces[key]

    def _curve(self, name: str, dtype: str) -> Curve | None:
        """The curve of an operator or family, fitted when it is first asked for."""
        key = (name, dtype)
        if key not in self._curves and key in self._grouped:
            rows = list(self._grouped[key].values())
            by_flops = all(g[0].family in MATMUL_FAMILIES and g[0].flops > 0 for g in rows)
            self._curves[key] = Curve([_measured(g) for g in rows], by_flops=by_flops)
        return self._curves.get(key)


def _can_be(row: OperatorRow) -> bool:
    """Whether a row is a measurement that a call can have."""
    works = max(row.flops, row.bytes) <= MOST_WORK and min(row.flops, row.bytes) >= 0
    return SHORTEST_US <= row.time_us <= LONGEST_US and works


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
    noise = _repeat_noise(groups.values())
    return {
        key: Estimate(_mean_s(group), _spread(group, drift, noise.get(_bare(key[0]), 0.0)))
        for key, group in groups.items()
    }


def _repeat_noise(groups: Iterable[list[OperatorRow]]) -> dict[str, float]:
    """By how much rows of one key disagree, by bare name: standard deviation of the logarithm."""
    variances: dict[str, list[float]] = defaultdict(list)
    for rows in groups:
        if len(rows) > 1:
            logs = [log(r.time_us) for r in rows]
            variances[_bare(rows[0].op)].append(float(np.var(logs, ddof=1)))
    return {name: min(MAX_SPREAD, sqrt(sum(found) / len(found))) for name, found in variances.items()}


def _mean_s(rows: list[OperatorRow]) -> float:
    """Count-weighted mean of the rows' medians, outliers pulled in to OUTLIER times their weighted median (seconds).

    A mean, so that the captured step adds up; an outlier is a call that waited for the machine.
    """
    if len(rows) == 1:
        return rows[0].time_us * 1e-6
    weights = np.array([max(r.count, 1e-9) for r in rows])
    times = np.array([r.time_us * 1e-6 for r in rows])
    order = np.argsort(times)
    middle = times[order][np.searchsorted(np.cumsum(weights[order]), weights.sum() / 2)]
    return float(np.average(np.clip(times, middle / OUTLIER, middle * OUTLIER), weights=weights))


def _spread(rows: list[OperatorRow], drift: float, noise: float) -> float:
    """Spread of a mean of medians: their standard error, their disagreement, and the drift that all share.

    A single row shows no disagreement: it gets the `noise` of other keys of its operator.
    """
    center = _mean_s(rows) * 1e6
    errors = [MEDIAN_ERROR * r.time_iqr_us / NORMAL_IQR / r.time_us / sqrt(max(r.time_n, 1)) for r in rows]
    apart = [log(r.time_us / center) for r in rows]
    variance = sum(e**2 + a**2 for e, a in zip(errors, apart, strict=True)) / len(rows) ** 2
    if len(rows) == 1:
        variance += noise**2
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


def _by_curve(rows: Iterable[OperatorRow]) -> dict[tuple[str, str], dict[str, list[OperatorRow]]]:
    """Rows of each key, by (bare name, dtype) and by ("family:NAME", dtype)."""
    groups: dict[tuple[str, str], dict[str, list[OperatorRow]]] = defaultdict(lambda: defaultdict(list))
    for row in rows:
        if _costs(row) and (row.bytes or row.flops):
            for name in (_bare(row.op), f"family:{row.family}"):
                groups[name, row.dtype][f"{_bare(row.op)} {row.shapes} {row.attributes}"].append(row)
    return groups


def _measured(rows: list[OperatorRow]) -> Measured:
    row = rows[0]
    return Measured(
        Work(row.flops, row.bytes), _mean_s(rows), f"{row.op} {row.shapes} {row.dtype}", _bare(row.op)
    )


def _timed(rows: list[OperatorRow]) -> Timed | None:
    """One measured key as a point of a surface; None where its shapes cannot be read."""
    row = rows[0]
    try:
        sizes = call_sizes(row.family, row.op, parse_shapes(row.shapes, row.dtype))
    except ValueError:
        return None
    flops = row.flops if row.family in MATMUL_FAMILIES else 0
    attributes = frozenset(filter(None, row.attributes.split(",")))
    return Timed(
        Call(sizes, attributes, Work(flops, row.bytes)), _mean_s(rows), f"{row.op} {row.shapes} {row.dtype}"
    )


def _costs(row: OperatorRow) -> bool:
    return row.family not in ("view", "allocation", "collective")


@lru_cache(maxsize=4096)
def _bare(op: str) -> str:
    return split_name(op)[1].removesuffix("_")
