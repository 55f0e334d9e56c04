"""Calibration: measured steps into shifts of at most four shared factors, drawn towards the prior where rows are silent.

A forecast's assumed prices err by class: matmuls, memory-bound operators, links and host time. The logarithm of a
factor is shift of its class + error of its class + own error; calibration moves the shifts and shrinks the class errors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import lru_cache
from math import exp, hypot, sqrt
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from llmprof.errors import RequestError
from llmprof.schema.operators import MATMUL_FAMILIES
from llmprof.schema.priors import load_priors

Array = NDArray[np.float64]

CLASSES = ("matmul", "memory", "link", "host")
"""What one scalar each calibrates; the order of shifts and covariance."""
CALIBRATED = ("assumed", "table", "transferred")
"""Kinds of prices that calibration is about: what the run measured on the device needs none."""
HUBER = 1.345
"""Residual, in units of the model error, beyond which a row counts as an outlier (95 % efficient on normal errors)."""
MAX_MOVES = 4
_PROBE = 0.05
"""Shift by which sensitivities are taken: wide enough to look past the kinks of hidden and exposed work."""
_SETTLED = 0.01
_HALVINGS = 4
_REWEIGHTINGS = 50
_PRIOR_ROWS = 8.0
"""How many rows the assumed model error counts for when rows say what it is: assumed."""
_WILD = 3.0
"""Residual, in units of the model error, at which one row ceases to widen all intervals."""


@lru_cache(maxsize=4096)
def class_of(name: str) -> int | None:
    """Index in CLASSES of a shared factor such as "matmul:assumed"; None when calibration leaves it alone."""
    stem, _, kind = name.rpartition(":")
    if kind not in CALIBRATED:
        return None
    if stem.startswith("link:"):
        return CLASSES.index("link")
    if stem == "host":
        return CLASSES.index("host")
    if stem == "imbalance":
        return None  # of the data, not of a price
    return CLASSES.index("matmul" if stem in MATMUL_FAMILIES else "memory")


@lru_cache(maxsize=4096)
def evidence_of(name: str) -> str:
    """Under what the time of a factor counts as evidence: its kind, calibrated prices also by class ("assumed:link")."""
    index, kind = class_of(name), name.rpartition(":")[2]
    return kind if index is None else f"{kind}:{CLASSES[index]}"


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Calibration:
    """What is known of the four classes' factors.

    Attributes:
        shifts: logarithms of the factors on time in the order of CLASSES, shape (4,).
        covariance: of their errors, shape (4, 4).
        layout_spread: error of a step's logarithm beyond the factors, another for each layout; it does not average out
            over operators.
        software_spread: the same, common to all layouts of a run; calibration takes it away.
        rows: measured steps behind it; 0 for the prior.
        residual: root mean square of log(measured / calibrated nominal) over the rows.
        source: name of the file the rows come from, for the list of assumptions.
    """

    shifts: Array
    covariance: Array
    layout_spread: float
    software_spread: float = 0.0
    rows: int = 0
    residual: float = 0.0
    source: str = ""

    @classmethod
    def prior(cls) -> Calibration:
        """Before any measured step: no shift, the spreads of `llmprof.schema.priors`."""
        prior = load_priors().calibration
        spreads = [prior.matmul_spread, prior.memory_spread, prior.link_spread, prior.host_spread]
        return cls(
            shifts=_frozen(np.zeros(len(CLASSES))),
            covariance=_frozen(np.diag(np.square(spreads))),
            layout_spread=prior.layout_spread,
            software_spread=prior.software_spread,
        )

    @property
    def model_spread(self) -> float:
        """Standard deviation of the logarithm of a step beyond the shared factors."""
        return hypot(self.layout_spread, self.software_spread)

    def explained(self, shares: Array) -> float:
        """Share of the prior variance of a step's logarithm that the rows have taken away, 0..1.

        Args:
            shares: of the step's time by class, in any unit, shape (4,).
        """
        before = float(shares @ Calibration.prior().covariance @ shares)
        if self.rows == 0 or before <= 0:
            return 0.0
        return min(1.0, max(0.0, 1.0 - float(shares @ self.covariance @ shares) / before))

    def sentence(self) -> str:
        """For a list of assumptions; "" for the prior."""
        if self.rows == 0:
            return ""
        rows = "1 row" if self.rows == 1 else f"{self.rows} rows"
        source = f" of {self.source}" if self.source else ""
        times = ", ".join(f"{name} x{exp(s):.2f}" for name, s in zip(CLASSES, self.shifts, strict=True))
        return f"calibrated on {rows}{source}; times: {times}; steps remain {self.residual:.0%} off (rms)"


@dataclass(frozen=True, kw_only=True, slots=True)
class Observation:
    """A measured step and how to forecast it.

    Attributes:
        name: of the row; rows are taken in the order of their names.
        step_s: measured seconds.
        nominal_s: nominal forecasts, shape (n,) seconds, at n sets of shifts, shape (n, 4); see `Forecaster.probing`.
        spread: standard deviation of log(nominal) by what is not known of the row, beside the model error.
    """

    name: str
    step_s: float
    nominal_s: Callable[[Array], Array]
    spread: float = 0.0


def fit_calibration(
    observations: Iterable[Observation], *, prior: Calibration | None = None, source: str = ""
) -> Calibration:
    """Most probable shifts given measured steps (Gauss-Newton), and what remains uncertain.

    log(measured) = log(nominal(shifts)) + error, the error with the prior's layout spread, the row's own and Huber's
    tails, the shifts normal around the prior. A move that makes the posterior less likely is halved. Each move asks every row once, for
    the nominal step and its four sensitivities together; two or three moves are enough.

    Args:
        observations: measured steps; one that cannot be forecast at the prior should be left out beforehand.
        prior: what is believed before; None for `Calibration.prior()`.
        source: name of the file the rows come from.

    Raises:
        RequestError: a measured step or its forecast is not a positive number.
    """
    known = prior or Calibration.prior()
    rows = sorted(observations, key=lambda o: (o.name, o.step_s))
    if not rows:
        return known
    fit = _Fit(rows, known)
    now = fit.look(known.shifts)
    for _ in range(MAX_MOVES):
        before, now = now, fit.descend(now, fit.solve(now))
        if float(np.abs(now.shifts - before.shifts).max()) < _SETTLED:
            break
    gain = fit.gain(now.jacobian, fit.weights(now.residuals))
    covariance = known.covariance - gain @ now.jacobian @ known.covariance
    return Calibration(
        shifts=_frozen(now.shifts),
        covariance=_frozen((covariance + covariance.T) / 2),
        rows=known.rows + len(rows),
        residual=sqrt(float(np.mean(np.square(now.residuals)))),
        layout_spread=fit.layout_spread(now.residuals, fitted=float(np.trace(now.jacobian @ gain))),
        source=source or known.source,
    )


class _Look(NamedTuple):
    """The rows at some shifts: log(measured / nominal), shape (k,), and d log(nominal) / d shift, shape (k, 4)."""

    shifts: Array
    residuals: Array
    jacobian: Array


class _Fit:
    """Posterior of the shifts around a linearization.

    Legend: k rows, 4 classes; J (k, 4) sensitivities of log nominal, C (4, 4) the prior's covariance, R (k, k) noise.
    """

    def __init__(self, rows: list[Observation], prior: Calibration) -> None:
        self.rows, self.prior = rows, prior
        steps = [_log_seconds(np.array([o.step_s]), f"measured step of {o.name}") for o in rows]
        self.measured = np.concatenate(steps)
        self.noise = np.array([hypot(prior.layout_spread, o.spread) for o in rows])

    def look(self, shifts: Array) -> _Look:
        """Forecast all rows at some shifts and beside them (forward differences)."""
        probes = shifts + np.concatenate([np.zeros((1, len(CLASSES))), _PROBE * np.eye(len(CLASSES))])
        logs = np.stack([_log_seconds(o.nominal_s(probes), f"forecast of {o.name}") for o in self.rows])
        return _Look(shifts, self.measured - logs[:, 0], (logs[:, 1:] - logs[:, :1]) / _PROBE)

    def weights(self, residuals: Array) -> Array:
        """Huber's weights, shape (k,): 1 for what the model error explains, less for a wild row."""
        scaled = np.abs(residuals) / self.noise
        return np.asarray(np.minimum(1.0, HUBER / np.maximum(scaled, HUBER)))

    def gain(self, jacobian: Array, weights: Array) -> Array:
        """Kalman's gain C J' (J C J' + R)^-1, shape (4, k); it needs no inverse of C, so a class may be certain."""
        spread = jacobian @ self.prior.covariance
        noise = np.diag(self.noise**2 / weights)
        return np.asarray(np.linalg.solve(spread @ jacobian.T + noise, spread).T)

    def solve(self, now: _Look) -> Array:
        """Shifts at the maximum of the linearized posterior, shape (4,), by reweighting until it settles."""
        innovations = now.residuals + now.jacobian @ (now.shifts - self.prior.shifts)
        moved = np.zeros(len(CLASSES))
        for _ in range(_REWEIGHTINGS):
            weights = self.weights(innovations - now.jacobian @ moved)
            aim = self.gain(now.jacobian, weights) @ innovations
            settled = float(np.abs(aim - moved).max()) < 1e-6
            moved = aim
            if settled:
                break
        return np.asarray(self.prior.shifts + moved)

    def descend(self, now: _Look, aim: Array) -> _Look:
        """Go to the aim, or as far towards it as the cost falls."""
        for _ in range(_HALVINGS):
            found = self.look(aim)
            if self.cost(found) <= self.cost(now):
                return found
            aim = (now.shifts + aim) / 2
        return now

    def cost(self, at: _Look) -> float:
        """Minus the logarithm of the posterior, without its constant."""
        scaled = np.abs(at.residuals) / self.noise
        rows = np.where(scaled <= HUBER, scaled**2 / 2, HUBER * (scaled - HUBER / 2))
        moved = at.shifts - self.prior.shifts
        return float(rows.sum() + moved @ np.linalg.pinv(self.prior.covariance) @ moved / 2)

    def layout_spread(self, residuals: Array, *, fitted: float) -> float:
        """Model error by the rows, pooled with the prior's; `fitted` is how many of the rows the shifts used up."""
        prior = self.prior.layout_spread
        own = np.abs(residuals) * prior / self.noise
        clipped = np.minimum(own, _WILD * prior)
        pooled = _PRIOR_ROWS * prior**2 + float(np.square(clipped).sum())
        return sqrt(pooled / (_PRIOR_ROWS + len(residuals) - fitted))


def _log_seconds(seconds: Array, what: str) -> Array:
    if not bool(np.all(np.isfinite(seconds) & (seconds > 0))):
        raise RequestError(f"{what} is {seconds[0]} s: it must be a positive number")
    return np.asarray(np.log(seconds))


def _frozen(values: Array) -> Array:
    copy = np.array(values, dtype=float)
    copy.setflags(write=False)
    return copy
