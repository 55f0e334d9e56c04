"""Sampled uncertainty: named factors that all operators of a family share, and the interval of what they give.

Independent errors of 10^5 operators would cancel to false certainty; errors of a family, a link level, the host or a
memory category move together, so each is one log-normal factor that multiplies everything it concerns.
"""

from __future__ import annotations

from dataclasses import replace
from math import exp, sqrt
from typing import NamedTuple
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

from llmprof.extrapolate.calibration import CLASSES, Calibration, class_of

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
    """Draws of shared factors. Index 0 is nominal: 1, or for an assumed price what calibration shifts it by.

    A factor depends on its name, the seed and the calibration alone, so forecasts of two layouts share their errors.
    Factors of assumed prices ("matmul:assumed", "link:nvlink:assumed") share the error of their class beside their own.

    Args:
        draws: number of draws beside the nominal one.
        seed: of the generator.
        calibration: shifts and errors of the classes; None for the prior.
    """

    def __init__(self, *, draws: int = 200, seed: int = 0, calibration: Calibration | None = None) -> None:
        self.draws = draws
        self.calibration = calibration or Calibration.prior()
        self._seed = seed
        self._normals: dict[str, NDArray[np.float64]] = {}
        self._factors: dict[tuple[str, float], NDArray[np.float64]] = {}
        self._shared = self._class_logarithms()
        self._variances = [float(v) for v in np.diag(Calibration.prior().covariance)]

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
        """Log-normal factor of a name, shape (1 + draws,).

        Args:
            spread: standard deviation of its logarithm before calibration; a factor of a class has at least the
                class's, and what it has beyond is its own.
        """
        found = self._factors.get((name, spread))
        if found is None:
            found = self._factors[name, spread] = self._factor(name, spread)
            found.setflags(write=False)
        return found

    def _factor(self, name: str, spread: float) -> NDArray[np.float64]:
        index = class_of(name)
        if index is None:
            return np.asarray(np.exp(spread * self.normal(name)))
        own = sqrt(max(0.0, spread**2 - self._variances[index]))
        return np.asarray(np.exp(self._shared[index] + own * self.normal(name)))

    def nominal(self, name: str) -> float:
        """Nominal value of a factor."""
        index = class_of(name)
        return 1.0 if index is None else exp(float(self.calibration.shifts[index]))

    def model(self, layout: str) -> NDArray[np.float64]:
        """Factor on a whole step, shape (1 + draws,): what a forecast errs by beyond its prices, 1 at index 0.

        One part is common to all layouts (the software), the other is a layout's own.
        """
        known = self.calibration
        common = known.software_spread * self.normal("model")
        return np.asarray(np.exp(common + known.layout_spread * self.normal(f"model:{layout}")))

    def _class_logarithms(self) -> NDArray[np.float64]:
        """Shift plus error of each class, shape (4, 1 + draws); the errors have the calibration's covariance."""
        values, vectors = np.linalg.eigh(self.calibration.covariance)
        root = (vectors * np.sqrt(np.maximum(values, 0.0))) @ vectors.T
        normals = np.stack([self.normal(f"class:{name}") for name in CLASSES])
        return np.asarray(self.calibration.shifts[:, None] + root @ normals)

    def independent(self, name: str, spread: float, count: float) -> NDArray[np.float64]:
        """Factor of a sum of `count` like terms with independent errors: its spread falls with their square root."""
        return self.factor(f"independent:{name}", spread / sqrt(max(count, 1.0)))


class Probes(Factors):
    """Factors without errors at several sets of shifts, to take the sensitivities of a step in one simulation.

    Args:
        shifts: logarithms by class, shape (n, 4); the first set is nominal.
    """

    def __init__(self, shifts: NDArray[np.float64]) -> None:
        super().__init__(
            draws=len(shifts) - 1, calibration=replace(Calibration.prior(), shifts=shifts[0].copy())
        )
        self._shared = shifts.T

    def normal(self, name: str) -> NDArray[np.float64]:
        """No error, shape (n,)."""
        return np.zeros(1 + self.draws)


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
