"""Parameters of a form for times, from measured times: smooth absolute errors of the logarithm, normal priors."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
ERROR = 0.05
"""Relative error from which a row counts less."""
_MOVES = 40
_TRIES = 6
_STEP = 1e-4
_SETTLED = 1e-6


def fit_times(seconds: Callable[[Array], Array], times_s: Array, *, guess: Array, spreads: Array) -> Array:
    """The most probable parameters, by Levenberg and Marquardt's method.

    Args:
        seconds: parameters, shape (p,), -> times, shape (n,).
        times_s: measured, shape (n,).
        guess, spreads: middles and standard deviations of the priors; the search begins at the middles.
    """
    fit = _Fit(seconds, times_s, guess, spreads)
    at, least = guess, fit.cost(guess)
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
    return at


class _Fit:
    def __init__(
        self, seconds: Callable[[Array], Array], times_s: Array, guess: Array, spreads: Array
    ) -> None:
        self._seconds, self._target = seconds, np.log(times_s)
        self._guess, self._spreads = guess, spreads

    def errors(self, at: Array) -> Array:
        return np.asarray(self._target - np.log(self._seconds(at)))

    def cost(self, at: Array) -> float:
        rows = 2.0 * (np.sqrt(1.0 + np.square(self.errors(at) / ERROR)) - 1.0).sum()
        return float(rows + np.square((at - self._guess) / self._spreads).sum())

    def linearized(self, at: Array) -> tuple[Array, Array]:
        """Normal matrix and downhill direction of the reweighted least squares."""
        now = self.errors(at)
        slopes = np.stack([(now - self.errors(at + h)) / _STEP for h in _STEP * np.eye(len(at))], axis=1)
        weighted = slopes / (np.sqrt(1.0 + np.square(now / ERROR)) * ERROR**2)[:, None]
        normal = weighted.T @ slopes + np.diag(1.0 / self._spreads**2)
        return normal, weighted.T @ now - (at - self._guess) / self._spreads**2
