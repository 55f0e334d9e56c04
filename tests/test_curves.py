"""Curves of measured operators find the same neighbours as a full sort, ties included."""

from __future__ import annotations

import numpy as np
import pytest

from llmprof.extrapolate.curves import _NEIGHBOURS, Curve, Measured, Work, _smallest


@pytest.mark.parametrize("seed", range(20))
def test_nearest_are_those_of_a_stable_sort(seed: int) -> None:
    rng = np.random.default_rng(seed)
    distance = rng.integers(0, 12, size=int(rng.integers(1, 400))).astype(float)
    wanted = np.argsort(distance, kind="stable")[:_NEIGHBOURS]
    assert _smallest(distance).tolist() == wanted.tolist()


def test_rows_left_out_are_never_neighbours() -> None:
    distance = np.full(100, np.inf)
    distance[[7, 3]] = 1.0
    assert set(_smallest(distance)[:2].tolist()) == {3, 7}


def test_residual_of_rows_that_follow_a_roofline_is_the_least() -> None:
    rows = [Measured(Work(0, 1000 * n), 1e-6 * n, f"r{n}", "copy") for n in range(1, 60)]
    assert Curve(rows, by_flops=False).residual == pytest.approx(0.02)
