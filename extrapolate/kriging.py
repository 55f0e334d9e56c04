"""What measured rows differ by from a form, carried to rows nearby: a Gaussian process over their features.

Rasmussen and Williams, Gaussian Processes for Machine Learning, 2006. The covariance is a smooth part, for trends (4.9), and a
rough one, for kernels that a library switches between (4.18 with gamma = 1), on one distance with a length for each
feature. Lengths and variances are those of the highest marginal likelihood (5.9), with wide priors.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
MOST_ROWS = 1500
_SAMPLE = 160
"""Rows by which the covariance is chosen: the cost grows with their third power."""
_FEWEST_TO_CHOOSE = 8
"""With fewer rows the covariance is the middle of its prior, and no value is better than the rows predict each other."""
_MOVES = 30
_LENGTH, _LENGTH_SPREAD = 1.0, 1.2
"""Prior of the logarithm of a length, in standard deviations of its feature: assumed."""
_VARIANCES, _VARIANCE_SPREAD = (0.03, 0.01, 3e-4), 2.0
"""Prior of the smooth part, the rough part and the noise of a row: assumed."""
_STEEP = 2.0
"""By how much faster the rough part falls with distance."""
_LEAST_UNIT = 0.05
"""Features that vary by less than this are not stretched further."""
_AT_ONCE = 2048
_NEAREST = 12
"""Rows that tell how uncertain a value is."""
_SMALL_SAMPLE = 10.0
_Q80 = 1.2816


class _Choice(NamedTuple):
    """A covariance: a length for each feature, shape (features,), and the variances of its parts and of the noise."""

    lengths: Array
    smooth: float
    rough: float
    noise: float


class Look(NamedTuple):
    """Values at m points.

    Attributes:
        values: most probable ones, shape (m,).
        spreads: their standard deviations, given the rows nearest to each, shape (m,).
        nearest: indices of the rows that resemble each most, in the order in which the rows were given.
    """

    values: Array
    spreads: Array
    nearest: NDArray[np.intp]


class Kriging:
    """Values at points, from values at others.

    Args:
        points: features, shape (n, features).
        values: shape (n,), around 0.
    """

    def __init__(self, points: Array, values: Array) -> None:
        order = self._order = np.random.default_rng(0).permutation(len(values))[:MOST_ROWS]
        self._unit, self._mean = np.maximum(points.std(axis=0), _LEAST_UNIT), float(np.median(values))
        self._points, centered = points[order] / self._unit, values[order] - self._mean
        self._choice = _choose(self._points[:_SAMPLE], centered[:_SAMPLE])
        among = _covariance(self._points, self._points, self._choice)
        among[np.diag_indices_from(among)] += self._choice.noise
        inverse = np.linalg.inv(among)
        self._among, self._weights = among, inverse @ centered
        errors = self._weights / np.diag(inverse)
        self._scale = _scale(errors * np.sqrt(np.diag(inverse)))
        few = len(values) < _FEWEST_TO_CHOOSE
        self._least = float(np.sqrt(np.mean(errors**2))) if few else 0.0

    def weights(self, point: Array) -> tuple[NDArray[np.intp], Array]:
        """Rows by how much they resemble a point of shape (features,), and the weights of their values in its value."""
        near = _covariance(point[None] / self._unit, self._points, self._choice)[0]
        nearest = np.argsort(-near, kind="stable")
        return self._order[nearest], np.linalg.solve(self._among, near)[nearest]

    def look(self, points: Array) -> Look:
        """Values at points of shape (m, features), with what is known of them."""
        looks = [self._look(points[at : at + _AT_ONCE]) for at in range(0, len(points), _AT_ONCE)]
        return Look(*map(np.concatenate, zip(*looks, strict=True)))

    def _look(self, points: Array) -> Look:
        near = _covariance(points / self._unit, self._points, self._choice)
        values = near @ self._weights + self._mean
        count = min(_NEAREST, near.shape[1])
        nearest = np.argpartition(-near, count - 1, axis=1)[:, :count]
        close = np.take_along_axis(near, nearest, axis=1)
        order = np.argsort(-close, axis=1, kind="stable")
        nearest, close = np.take_along_axis(nearest, order, axis=1), np.take_along_axis(close, order, axis=1)
        among = self._among[nearest[:, :, None], nearest[:, None, :]]
        explained = (close * np.linalg.solve(among, close[:, :, None])[:, :, 0]).sum(axis=1)
        choice = self._choice
        unknown = np.maximum(choice.smooth + choice.rough + choice.noise - explained, choice.noise)
        spreads = np.maximum(self._scale * np.sqrt(unknown), self._least)
        return Look(values, spreads, self._order[nearest])


def _scale(errors: Array) -> float:
    """Factor on expected errors with which 80 % of the left-out ones lie inside 80 % intervals.

    Args:
        errors: of each row, given all others, in expected standard deviations, shape (n,).
    """
    found = max(float(np.quantile(np.abs(errors), 0.8)) / _Q80, 0.1)
    # few rows can show that errors are larger than expected, but not that they are smaller
    certainty = len(errors) / (len(errors) + (1.0 if found > 1 else _SMALL_SAMPLE))
    return float(found**certainty)


def _choose(points: Array, values: Array) -> _Choice:
    """The most probable covariance: resilient steps along the slope of its logarithm."""
    features = points.shape[1]
    start = np.concatenate([np.full(features, _LENGTH), np.log(_VARIANCES)])
    if len(values) < _FEWEST_TO_CHOOSE:
        return _choice(start)
    at, step, last = start, np.full(len(start), 0.2), np.zeros(len(start))
    best, least = start, np.inf
    for _ in range(_MOVES):
        found, slope = _surprise(points, values, at)
        if found < least:
            best, least = at, found
        same = np.sign(slope * last)
        step = np.clip(step * np.where(same > 0, 1.3, np.where(same < 0, 0.5, 1.0)), 1e-3, 0.8)
        at, last = np.clip(at - np.sign(slope) * step, -12.0, 6.0), slope
    return _choice(best)


def _choice(logs: Array) -> _Choice:
    smooth, rough, noise = (float(v) for v in np.exp(logs[-3:]))
    return _Choice(np.exp(logs[:-3]), smooth, rough, noise)


def _surprise(points: Array, values: Array, logs: Array) -> tuple[float, Array]:
    """Negative logarithm of the probability, and its slope along the logarithms of lengths and variances."""
    choice = _choice(logs)
    scaled = points / choice.lengths
    squares = _squares(scaled, scaled)
    distance = np.sqrt(squares)
    smooth, rough = choice.smooth * np.exp(-0.5 * squares), choice.rough * np.exp(-_STEEP * distance)
    matrix = smooth + rough + choice.noise * np.eye(len(values))
    inverse = np.linalg.inv(matrix)
    weights = inverse @ values
    outer = 0.5 * (inverse - np.outer(weights, weights))
    pull = outer * (smooth + rough * _STEEP / distance)
    np.fill_diagonal(pull, 0.0)
    slope = np.empty(len(logs))
    # the sum over pairs of pull x squared difference of each feature, without the differences
    slope[:-3] = 2.0 * (pull.sum(axis=1) @ scaled**2 - (scaled * (pull @ scaled)).sum(axis=0))
    slope[-3:] = (outer * smooth).sum(), (outer * rough).sum(), np.trace(outer) * choice.noise
    middle = np.concatenate([np.full(len(logs) - 3, _LENGTH), np.log(_VARIANCES)])
    spread = np.concatenate([np.full(len(logs) - 3, _LENGTH_SPREAD), np.full(3, _VARIANCE_SPREAD)])
    off = (logs - middle) / spread
    found = 0.5 * (values @ weights + np.linalg.slogdet(matrix)[1] + off @ off)
    return float(found), slope + off / spread


def _covariance(some: Array, others: Array, choice: _Choice) -> Array:
    """Shape (m, n) of points of shapes (m, features) and (n, features), without noise."""
    squares = _squares(some / choice.lengths, others / choice.lengths)
    return np.asarray(
        choice.smooth * np.exp(-0.5 * squares) + choice.rough * np.exp(-_STEEP * np.sqrt(squares))
    )


def _squares(a: Array, b: Array) -> Array:
    """Squared distances, shape (m, n); never quite 0, so that their roots have a slope."""
    found = np.square(a).sum(axis=1)[:, None] + np.square(b).sum(axis=1) - 2.0 * a @ b.T
    return np.asarray(np.maximum(found, 0.0) + 1e-12)
