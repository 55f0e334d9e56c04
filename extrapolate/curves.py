"""Curves of measured operators: what arithmetic and traffic take, a roofline fitted to the rows and corrected nearby.

time = (floor + max(flops / rate, bytes / rate)) x correction. The roofline carries the form to sizes that nobody
measured; the correction is the inverse-distance mean of what the nearest rows differ by (tiles, layouts, caches).
"""

from __future__ import annotations

from itertools import product
from math import exp, inf, log
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

MIN_SPREAD = 0.02
MAX_SPREAD = 1.2
LONE_SPREAD = 0.4
"""Spread of a curve with too few rows for residuals: assumed."""
STRANGER_SPREAD = 0.8
"""Spread of a family's curve with one operator in it, for another operator of the family: assumed."""
SPREAD_PER_OCTAVE = 0.08
"""Growth of the spread for each doubling of the work outside the measured range: assumed."""
_NEIGHBOURS = 4
_CLOSEST = 1e-6
"""Added to squared distances, so that the weight of an equal row is finite."""
_FEWEST_TO_FIT = 6
"""With fewer rows the efficiency between and beyond them is that of the nearest."""
_QUANTILES = (0.5, 0.8, 0.95, 1.0)
_FLOORS = (0.0, 0.25, 0.5, 0.75, 1.0)


class Work(NamedTuple):
    """Arithmetic and memory traffic of one call."""

    flops: int
    bytes: int


class Estimate(NamedTuple):
    """A time with the standard deviation of its logarithm and the rows behind it."""

    time_s: float
    spread: float
    rows: tuple[str, ...] = ()


class Neighbour(NamedTuple):
    """A measured row behind a price, its time, and with which weight it counts (weights may be below 0)."""

    name: str
    time_s: float
    weight: float


class Evidence(NamedTuple):
    """What a price rests on, for a person.

    Attributes:
        method: "row", "surface", "curve", "roofline" or "host".
        basis: how the rows became the price, in one line.
        neighbours: the rows, those that count most first.
        source: of assumed numbers, "" where there are none.
    """

    method: str
    basis: str
    neighbours: tuple[Neighbour, ...] = ()
    source: str = ""


class Measured(NamedTuple):
    """One measured key: its work, its time and how it is named; `operator` is its bare name."""

    work: Work
    time_s: float
    name: str
    operator: str


class Roofline(NamedTuple):
    """Floor and rates; a rate may be infinite."""

    floor_s: float
    flops_per_s: float
    bytes_per_s: float

    def at(self, flops: Array, bytes: Array) -> Array:
        """Seconds of some work, shapes (n,)."""
        return np.asarray(self.floor_s + np.maximum(flops / self.flops_per_s, bytes / self.bytes_per_s))

    def of(self, flops: float, bytes: float) -> float:
        """Seconds of the work of one call."""
        return self.floor_s + max(flops / self.flops_per_s, bytes / self.bytes_per_s)


class Curve:
    """Times of one operator or family over its work.

    Args:
        rows: at least one, with work.
        by_flops: whether arithmetic or traffic alone is the measure when there are too few rows to tell.
    """

    def __init__(self, rows: list[Measured], *, by_flops: bool) -> None:
        self.by_flops = by_flops
        self.num_operators = len({r.operator for r in rows})
        self._names = [r.name for r in rows]
        flops = np.array([max(r.work.flops, 1) for r in rows], dtype=float)
        bytes_ = np.array([max(r.work.bytes, 1) for r in rows], dtype=float)
        times = self._times_s = np.array([r.time_s for r in rows])
        self.roofline = fit_roofline(flops, bytes_, times, by_flops=by_flops)
        self._points = np.log(np.stack([flops, bytes_]))
        measure = self._points[0 if by_flops else 1]
        self._range = float(measure.min()), float(measure.max())
        self._corrections = np.log(times / self.roofline.at(flops, bytes_))
        self.residual = _residual(self._points, self._corrections, [r.operator for r in rows])

    def estimate(self, work: Work, *, stranger: bool = False) -> Estimate:
        """Time of some work; `stranger` when the operator is not in the curve."""
        flops, bytes_ = float(max(work.flops, 1)), float(max(work.bytes, 1))
        at = log(flops), log(bytes_)
        correction, nearest = _nearby(_distances(self._points, at), self._corrections)
        base_s = self.roofline.of(flops, bytes_)
        least = STRANGER_SPREAD if stranger and self.num_operators == 1 else MIN_SPREAD
        spread = max(self.residual, least) + SPREAD_PER_OCTAVE * self._octaves_outside(at)
        names = tuple(self._names[i] for i in nearest)
        return Estimate(base_s * exp(correction), min(MAX_SPREAD, spread), names)

    def evidence(self, work: Work) -> Evidence:
        """The rows behind `estimate`."""
        flops, bytes_ = float(max(work.flops, 1)), float(max(work.bytes, 1))
        distance = _distances(self._points, (log(flops), log(bytes_)))
        correction, nearest = _nearby(distance, self._corrections)
        weights = 1.0 / (distance[nearest] + _CLOSEST)
        rows = zip(nearest, weights / weights.sum(), strict=True)
        base_us = 1e6 * self.roofline.of(flops, bytes_)
        basis = f"roofline of {len(self._names)} rows, {base_us:.4g} us, times {exp(correction):.3f} by those nearest in work"
        found = (Neighbour(self._names[i], float(self._times_s[i]), float(weight)) for i, weight in rows)
        return Evidence("curve", basis, tuple(found))

    def _octaves_outside(self, at: tuple[float, float]) -> float:
        measure = at[0 if self.by_flops else 1]
        low, high = self._range
        return max(0.0, low - measure, measure - high) / log(2)


def fit_roofline(flops: Array, bytes_: Array, times: Array, *, by_flops: bool) -> Roofline:
    """The floor and rates with the least mean absolute error of the logarithm, over a small grid.

    Candidates are quantiles of the rates that were reached and fractions of the shortest time.
    """
    if len(times) < _FEWEST_TO_FIT:
        return Roofline(0.0, 1.0, inf) if by_flops else Roofline(0.0, inf, 1.0)
    bytes_rates = np.quantile(bytes_ / times, _QUANTILES)
    flops_rates = np.quantile(flops / times, _QUANTILES) if by_flops else np.array([inf])
    best, least = Roofline(0.0, inf, 1.0), inf
    for share, flops_rate, bytes_rate in product(_FLOORS, flops_rates, bytes_rates):
        candidate = Roofline(share * float(times.min()), float(flops_rate), float(bytes_rate))
        error = float(np.abs(np.log(times / candidate.at(flops, bytes_))).mean())
        if error < least - 1e-12:
            best, least = candidate, error
    return best


def _distances(points: Array, at: tuple[float, float]) -> Array:
    """Squared distances of points, shape (2, n), from one."""
    return np.asarray((points[0] - at[0]) ** 2 + (points[1] - at[1]) ** 2)


def _nearby(distance: Array, values: Array) -> tuple[float, list[int]]:
    """Inverse-square-distance mean of the nearest values, and their indices; of equally far ones the first come first."""
    nearest = _smallest(distance)
    weight = 1.0 / (distance[nearest] + _CLOSEST)
    return float((weight * values[nearest]).sum() / weight.sum()), nearest.tolist()


def _smallest(distance: Array) -> NDArray[np.intp]:
    """Indices of the _NEIGHBOURS smallest values in order, as a stable sort gives them, without sorting all of them."""
    if len(distance) <= 4 * _NEIGHBOURS:
        return np.argsort(distance, kind="stable")[:_NEIGHBOURS]
    bound = np.partition(distance, _NEIGHBOURS - 1)[_NEIGHBOURS - 1]
    (candidates,) = np.nonzero(distance <= bound)
    return candidates[np.argsort(distance[candidates], kind="stable")[:_NEIGHBOURS]]


def _residual(points: Array, corrections: Array, operators: list[str]) -> float:
    """Root mean square of leave-one-out errors, between MIN_SPREAD and MAX_SPREAD; LONE_SPREAD under 3 rows.

    In the curve of a family whole operators are left out, since it prices operators that are not in it.
    """
    if len(corrections) < 3:
        return LONE_SPREAD
    names = np.array(operators) if len(set(operators)) > 1 else None
    errors = []
    for i in range(len(operators)):
        distance = _distances(points, (float(points[0, i]), float(points[1, i])))
        distance[i if names is None else names == names[i]] = inf
        predicted, _ = _nearby(distance, corrections)
        errors.append(predicted - corrections[i])
    return float(np.clip(np.sqrt(np.mean(np.square(errors))), MIN_SPREAD, MAX_SPREAD))
