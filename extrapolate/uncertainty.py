"""Sampled uncertainty: named factors that all operators of a family share, and the interval of what they give.

Independent errors of 10^5 operators would cancel to false certainty; errors of a family, a link level, the host or a
memory category move together, so each is one log-normal factor that multiplies everything it concerns.
"""

from __future__ import annotations

from math import sqrt
from typing import NamedTuple
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

SPEC_SHEET_FRACTION = 0.5
"""Share of assumed time above which a forecast is a spec-sheet estimate."""
SPEC_SHEET_FACTOR = 1.5
"""Least width of the interval of a spec-sheet estimate, each way."""


class Interval(NamedTuple):
    """10 %, nominal and 90 % value."""

    p10: float
    p50: float
    p90: float


class Factors:
    """Draws of shared factors; index 0 is the nominal 1.0, the median of each factor is 1.

    A factor depends on its name and the seed alone, so forecasts of two layouts share their errors.

    Args:
        draws: number of draws beside the nominal one.
        seed: of the generator.
    """

    def __init__(self, *, draws: int = 200, seed: int = 0) -> None:
        self.draws = draws
        self._seed = seed
        self._normals: dict[str, NDArray[np.float64]] = {}

    def normal(self, name: str) -> NDArray[np.float64]:
        """Standard normal draws of a name, shape (1 + draws,), 0 at index 0."""
        found = self._normals.get(name)
        if found is None:
            generator = np.random.default_rng([self._seed, crc32(name.encode())])
            found = np.concatenate([[0.0], generator.standard_normal(self.draws)])
            found.setflags(write=False)
            self._normals[name] = found
        return found

    def factor(self, name: str, spread: float) -> NDArray[np.float64]:
        """Log-normal factor of a name, shape (1 + draws,); `spread` is the standard deviation of its logarithm."""
        return np.asarray(np.exp(spread * self.normal(name)))

    def independent(self, name: str, spread: float, count: float) -> NDArray[np.float64]:
        """Factor of a sum of `count` like terms with independent errors: its spread falls with their square root."""
        return self.factor(f"independent:{name}", spread / sqrt(max(count, 1.0)))


def interval(values: NDArray[np.float64]) -> Interval:
    """Interval of draws: p50 is the nominal value (index 0), so that its breakdown adds up.

    Args:
        values: shape (1 + draws,).
    """
    nominal = float(values[0])
    if len(values) == 1:
        return Interval(nominal, nominal, nominal)
    low, high = np.quantile(values[1:], [0.1, 0.9])
    return Interval(min(float(low), nominal), nominal, max(float(high), nominal))


def widen(found: Interval, assumed_fraction: float) -> Interval:
    """The interval, at least x1.5 either way when more than half of the time is assumed."""
    if assumed_fraction <= SPEC_SHEET_FRACTION:
        return found
    return Interval(
        min(found.p10, found.p50 / SPEC_SHEET_FACTOR),
        found.p50,
        max(found.p90, found.p50 * SPEC_SHEET_FACTOR),
    )
