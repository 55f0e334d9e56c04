"""A form for the time of one operator over its work: a floor, then memory or arithmetic at rates that small sizes miss.

time = floor + (compute^4 + memory^4)^(1/4), compute = flops / rate x product over sizes of (1 + half / size). The exponent
rounds the corner of the roofline; `half` is the size at which half of the rate is reached. memory = bytes / rate x
(1 - (1 - 1 / gain) / (1 + (bytes / cache)^2)): what fits into the device's cache moves `gain` times faster.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from llmprof.extrapolate.fitting import fit_times

Array = NDArray[np.float64]
CORNER = 4
"""Exponent of the roofline's corner: assumed."""
HALF_SIZE = 2.0
GAIN = 1.15
"""Median of cached over uncached rates, from the few operators with rows on either side: assumed."""
_PRIOR_SPREADS = (1.0, 0.7, 0.7, 0.25)
_HALF_SPREAD = 3.0
"""Of the logarithms of floor, rates, gain and half sizes around what the rows suggest: assumed."""
_RATES = len(_PRIOR_SPREADS)


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
    """The most probable form.

    Args:
        times_s: measured, shape (n,).
        by_flops: whether arithmetic counts.
    """
    guess = _guess(rows, times_s, by_flops)
    spreads = np.array([*_PRIOR_SPREADS, *[_HALF_SPREAD] * (len(guess) - _RATES)])
    found = fit_times(lambda at: _seconds(at, rows, by_flops), times_s, guess=guess, spreads=spreads)
    return Saturation(parameters=found, by_flops=by_flops)


def _guess(rows: Rows, times_s: Array, by_flops: bool) -> Array:
    """Logarithms of floor, rates and half sizes to start from, which are the middle of the priors, too."""
    floor_s = max(0.5 * float(times_s.min()), 1e-7)
    bytes_rate = 1.2 * float(np.quantile(rows.bytes / times_s, 0.95))
    if not by_flops:
        return np.log([floor_s, 1.0, bytes_rate, GAIN])
    flops_rate = float(np.quantile(rows.flops / times_s, 0.95))
    return np.log([floor_s, flops_rate, bytes_rate, GAIN, *[HALF_SIZE] * rows.logs.shape[1]])
