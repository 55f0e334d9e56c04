"""What measured rows differ by from a form, carried to rows nearby: a Gaussian process over their features.

Rasmussen and Williams, Gaussian Processes for Machine Learning, 2006: exponential covariances (4.18 with gamma = 1; smoother ones
carry trends of the rows beyond them), one length for each feature, chosen by the probability of each row given all
others (5.10 to 5.12).
"""

from __future__ import annotations

from itertools import product
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
LENGTHS = (1.0, 2.0, 4.0, 8.0, 16.0)
"""Distances, in units of the features, over which rows resemble each other."""
NOISE = (1e-3, 1e-2, 1e-1)
"""Share of a row's variance that no other row has."""
_FACTORS = (0.25, 0.5, 2.0, 4.0)
_EXACT = 1e-12
"""Variance of values that a form meets exactly."""
_SAMPLE = 160
"""Rows by which the covariance is chosen."""
MOST_ROWS = 1500
_AT_ONCE = 2048
_NEAREST = 12
"""Rows that tell how uncertain a value is."""


class _Choice(NamedTuple):
    """A covariance: lengths by feature, and noise."""

    lengths: tuple[float, ...]
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
        points: features, shape (n, features); no feature is the same everywhere.
        values: shape (n,), around 0.
    """

    def __init__(self, points: Array, values: Array) -> None:
        order = self._order = np.random.default_rng(0).permutation(len(values))[:MOST_ROWS]
        self._points, self._mean = points[order], float(np.median(values))
        centered = values[order] - self._mean
        sample = slice(0, _SAMPLE)
        self._choice = _choose(self._points[sample], centered[sample])
        covariance = _covariance(self._points, self._points, self._choice)
        errors, shares, self._weights = _left_out(covariance, centered, self._choice.noise)
        self._among = covariance + self._choice.noise * np.eye(len(centered))
        self._variance = float(np.mean(errors**2 / shares))

    def at(self, points: Array) -> Array:
        """Most probable values, shape (m,), at points of shape (m, features)."""
        return np.asarray(_covariance(points, self._points, self._choice) @ self._weights + self._mean)

    def look(self, points: Array) -> Look:
        """Values at points of shape (m, features), with what is known of them."""
        looks = [self._look(points[at : at + _AT_ONCE]) for at in range(0, len(points), _AT_ONCE)]
        return Look(*map(np.concatenate, zip(*looks, strict=True)))

    def _look(self, points: Array) -> Look:
        near = _covariance(points, self._points, self._choice)
        values = near @ self._weights + self._mean
        count = min(_NEAREST, near.shape[1])
        nearest = np.argpartition(-near, count - 1, axis=1)[:, :count]
        close = np.take_along_axis(near, nearest, axis=1)
        order = np.argsort(-close, axis=1, kind="stable")
        nearest, close = np.take_along_axis(nearest, order, axis=1), np.take_along_axis(close, order, axis=1)
        among = self._among[nearest[:, :, None], nearest[:, None, :]]
        explained = (close * np.linalg.solve(among, close[:, :, None])[:, :, 0]).sum(axis=1)
        variance = self._variance * np.maximum(1.0 + self._choice.noise - explained, 0.0)
        return Look(values, np.sqrt(variance), self._order[nearest])


def _choose(points: Array, values: Array) -> _Choice:
    """The covariance under which the rows are most probable, each given the others: a grid, then feature by feature."""
    squares = np.square(points[:, None, :] - points[None, :, :])
    features = points.shape[1]

    def surprise(choice: _Choice) -> float:
        distance = np.sqrt(squares @ (1.0 / np.square(choice.lengths)))
        errors, shares, _ = _left_out(np.exp(-distance), values, choice.noise)
        return float(np.mean(np.log(shares * (np.mean(errors**2 / shares) + _EXACT))))

    grid = [_Choice((length,) * features, noise) for length, noise in product(LENGTHS, NOISE)]
    least, best = min((surprise(choice), i) for i, choice in enumerate(grid))
    chosen = grid[best]
    for feature in range(features):
        for factor in _FACTORS:
            lengths = list(chosen.lengths)
            lengths[feature] *= factor
            other = chosen._replace(lengths=tuple(lengths))
            found = surprise(other)
            if found < least:
                least, chosen = found, other
    return chosen


def _covariance(some: Array, others: Array, choice: _Choice) -> Array:
    """Shape (m, n) of points of shapes (m, features) and (n, features)."""
    a, b = some / choice.lengths, others / choice.lengths
    squares = np.square(a).sum(axis=1)[:, None] + np.square(b).sum(axis=1) - 2.0 * a @ b.T
    return np.asarray(np.exp(-np.sqrt(np.maximum(squares, 0.0))))


def _left_out(covariance: Array, values: Array, noise: float) -> tuple[Array, Array, Array]:
    """Errors of each value from all others, their variances (up to a common factor), and the weights of the rows."""
    matrix = covariance.copy()
    matrix[np.diag_indices_from(matrix)] += noise
    inverse = np.linalg.inv(matrix)
    weights = inverse @ values
    diagonal = np.diag(inverse)
    return weights / diagonal, 1.0 / diagonal, weights
