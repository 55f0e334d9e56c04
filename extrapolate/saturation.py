"""A form for the time of one operator over its work: a floor, then memory or arithmetic at rates that small sizes miss.

time = floor + (compute^4 + memory^4)^(1/4), compute = flops / rate x product over sizes of (1 + half / size). The exponent
rounds the corner of the roofline; `half` is the size at which half of the rate is reached. memory = bytes / rate x
(1 - (1 - 1 / gain) / (1 + (bytes / cache)^2)): what fits into the device's cache moves `gain` times faster.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
CORNER = 4
"""Exponent of the roofline's corner: assumed."""
HALF_SIZE = 2.0
GAIN = 1.15
"""Median of cached over uncached rates, from the few operators with rows on either side: assumed."""
_PRIOR_SPREADS = (1.0, 0.7, 0.7, 0.25)
_HALF_SPREAD = 3.0
"""Of the logarithms of floor, rates, gain and half sizes around what the rows suggest: assumed."""
_ERROR = 0.05
"""Relative error from which a row counts less (smooth absolute error)."""
_RATES = len(_PRIOR_SPREADS)
_MOVES = 40
_TRIES = 6
_STEP = 1e-4
_SETTLED = 1e-6


@dataclass(frozen=True, kw_only=True, slots=True)
class Rows:
    """Some calls.

    Attributes:
        logs: base-2 logarithms of their sizes, shape (n, sizes).
        flops, bytes: shape (n,).
        cached: share of the traffic that the device's cache serves, shape (n,); 0 where its size is not known.
    """

    logs: Array
    flops: Array
    bytes: Array
    cached: Array


@dataclass(frozen=True, kw_only=True, slots=True)
class Saturation:
    """A fitted form: natural logarithms of floor, FLOP rate, byte rate, gain and half sizes."""

    parameters: Array
    by_flops: bool

    def seconds(self, rows: Rows) -> Array:
        """Time of each call, shape (n,)."""
        return _seconds(self.parameters, rows, self.by_flops)


def _seconds(parameters: Array, rows: Rows, by_flops: bool) -> Array:
    floor_s, flops_per_s, bytes_per_s, gain = np.exp(parameters[:_RATES])
    memory_s = rows.bytes / bytes_per_s * (1.0 - (1.0 - 1.0 / gain) * rows.cached)
    if not by_flops:
        return np.asarray(floor_s + memory_s)
    small = np.log1p(np.exp(parameters[_RATES:] - rows.logs * np.log(2.0))).sum(axis=1)
    compute_s = rows.flops / flops_per_s * np.exp(small)
    return np.asarray(floor_s + (compute_s**CORNER + memory_s**CORNER) ** (1 / CORNER))


def fit_saturation(rows: Rows, times_s: Array, *, by_flops: bool) -> Saturation:
    """The most probable form, by Levenberg and Marquardt's method.

    Args:
        times_s: measured, shape (n,).
        by_flops: whether arithmetic counts.
    """
    fit = _Fit(rows=rows, times_s=times_s, by_flops=by_flops)
    at, least = fit.guess, fit.cost(fit.guess)
    damping = 1e-2
    for _ in range(_MOVES):
        normal, downhill = fit.linearized(at)
        for _ in range(_TRIES):
            move = np.linalg.solve(normal + damping * np.diag(np.diag(normal)), downhill)
            there = at + np.clip(move, -1.0, 1.0)
            found = fit.cost(there)
            if found < least:
                break
            damping *= 4.0
        else:
            break
        settled = least - found < _SETTLED * least
        at, least, damping = there, found, damping * 0.3
        if settled:
            break
    return Saturation(parameters=at, by_flops=by_flops)


class _Fit:
    """Smooth absolute errors of the logarithm, and normal priors around what the rows suggest."""

    def __init__(self, *, rows: Rows, times_s: Array, by_flops: bool) -> None:
        self.rows, self.by_flops = rows, by_flops
        self.target = np.log(times_s)
        self.guess = _guess(rows, times_s, by_flops)
        self.spreads = np.array([*_PRIOR_SPREADS, *[_HALF_SPREAD] * (len(self.guess) - _RATES)])

    def errors(self, at: Array) -> Array:
        return np.asarray(self.target - np.log(_seconds(at, self.rows, self.by_flops)))

    def cost(self, at: Array) -> float:
        rows = 2.0 * (np.sqrt(1.0 + np.square(self.errors(at) / _ERROR)) - 1.0).sum()
        return float(rows + np.square((at - self.guess) / self.spreads).sum())

    def linearized(self, at: Array) -> tuple[Array, Array]:
        """Normal matrix and downhill direction of the reweighted least squares."""
        now = self.errors(at)
        slopes = np.stack([(now - self.errors(at + h)) / _STEP for h in _STEP * np.eye(len(at))], axis=1)
        weighted = slopes / (np.sqrt(1.0 + np.square(now / _ERROR)) * _ERROR**2)[:, None]
        normal = weighted.T @ slopes + np.diag(1.0 / self.spreads**2)
        return normal, weighted.T @ now - (at - self.guess) / self.spreads**2


def _guess(rows: Rows, times_s: Array, by_flops: bool) -> Array:
    """Logarithms of floor, rates and half sizes to start from, which are the middle of the priors, too."""
    floor_s = max(0.5 * float(times_s.min()), 1e-7)
    bytes_rate = 1.2 * float(np.quantile(rows.bytes / times_s, 0.95))
    if not by_flops:
        return np.log([floor_s, 1.0, bytes_rate, GAIN])
    flops_rate = float(np.quantile(rows.flops / times_s, 0.95))
    return np.log([floor_s, flops_rate, bytes_rate, GAIN, *[HALF_SIZE] * rows.logs.shape[1]])
