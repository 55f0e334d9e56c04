"""A form for the time of one operator over its work: a floor, then memory or arithmetic at rates that small sizes miss.

time = floor + (tensors - 1) x step + (compute^4 + memory^4)^(1/4), compute = flops / rate x product over sizes of
(1 + half / size) x waste^share. The exponent rounds the corner of the roofline; `half` is the size at which half of the rate
is reached; `waste` is what the tiles of a kernel leave idle. memory = bytes / rate x (1 - (1 - 1 / gain) x cached): what fits
into the device's cache moves `gain` times faster.
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
FLOOR_S = 4e-6
"""Shortest time that a call of any size takes, unless rows are shorter: assumed."""
STEP_S = 1e-6
"""Time that each further tensor of a list takes: assumed."""
FLOPS_SHARE, BYTES_SHARE = 0.6, 0.75
"""What operators usually reach of a device's rates: assumed."""
_PRIOR_SPREADS = (1.0, 0.7, 0.7, 0.25, 2.0, 0.7)
_HALF_SPREAD = 3.0
"""Of the logarithms of floor, rates, gain, step, the logit of the waste's share, and half sizes around what is expected:
assumed."""
_RATES = len(_PRIOR_SPREADS)


@dataclass(frozen=True, kw_only=True, slots=True)
class Rows:
    """Some calls.

    Attributes:
        logs: base-2 logarithms of their sizes, shape (n, sizes).
        flops, bytes: shape (n,).
        cached: share of the traffic that the device's cache serves, shape (n,); 0 where its size is not known.
        waste: natural logarithm of what tiles leave idle, shape (n,); 0 where that is not known.
        tensors: members of the list that a call works on, shape (n,); 1 for anything else.
    """

    logs: Array
    flops: Array
    bytes: Array
    cached: Array
    waste: Array
    tensors: Array


@dataclass(frozen=True, kw_only=True, slots=True)
class Rates:
    """What a device can do: FLOPs and bytes in a second."""

    flops_per_s: float
    bytes_per_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Saturation:
    """A fitted form: natural logarithms of floor, FLOP rate, byte rate, gain and half sizes."""

    parameters: Array
    by_flops: bool

    def seconds(self, rows: Rows) -> Array:
        """Time of each call, shape (n,)."""
        return _seconds(self.parameters, rows, self.by_flops)


def _seconds(parameters: Array, rows: Rows, by_flops: bool) -> Array:
    floor_s, flops_per_s, bytes_per_s, gain, step_s = np.exp(parameters[: _RATES - 1])
    floor = floor_s + step_s * (rows.tensors - 1.0)
    memory_s = rows.bytes / bytes_per_s * (1.0 - (1.0 - 1.0 / gain) * rows.cached)
    if not by_flops:
        return np.asarray(floor + memory_s)
    small = np.log1p(np.exp(parameters[_RATES:] - rows.logs * np.log(2.0))).sum(axis=1)
    share = 1.0 / (1.0 + np.exp(-parameters[_RATES - 1]))
    compute_s = rows.flops / flops_per_s * np.exp(small + share * rows.waste)
    return np.asarray(floor + (compute_s**CORNER + memory_s**CORNER) ** (1 / CORNER))


def fit_saturation(rows: Rows, times_s: Array, *, by_flops: bool, rates: Rates | None = None) -> Saturation:
    """The most probable form.

    Args:
        times_s: measured, shape (n,).
        by_flops: whether arithmetic counts.
        rates: of the device; None where they are not known: what the rows reach stands in.
    """
    guess = _guess(rows, times_s, by_flops=by_flops, rates=rates)
    spreads = np.array([*_PRIOR_SPREADS, *[_HALF_SPREAD] * (len(guess) - _RATES)])
    found = fit_times(lambda at: _seconds(at, rows, by_flops), times_s, guess=guess, spreads=spreads)
    return Saturation(parameters=found, by_flops=by_flops)


def _guess(rows: Rows, times_s: Array, *, by_flops: bool, rates: Rates | None) -> Array:
    """Logarithms of floor, rates and half sizes to start from, which are the middle of the priors, too.

    Rows of small calls reach little of a device's rates: they say nothing against them.
    """
    floor_s = min(max(0.5 * float(times_s.min()), 1e-7), FLOOR_S)
    bytes_rate = 1.2 * float(np.quantile(rows.bytes / times_s, 0.95))
    flops_rate = float(np.quantile(rows.flops / times_s, 0.95)) if by_flops else 1.0
    if rates:
        bytes_rate = max(bytes_rate, BYTES_SHARE * rates.bytes_per_s)
        flops_rate = max(flops_rate, FLOPS_SHARE * rates.flops_per_s) if by_flops else 1.0
    halves = [HALF_SIZE] * rows.logs.shape[1] if by_flops else []
    return np.append(np.log([floor_s, flops_rate, bytes_rate, GAIN, STEP_S]), [0.0, *np.log(halves)])
