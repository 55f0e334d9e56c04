"""Scores by device and family: figures by hand, simple rules beside them, and what is too small."""

from __future__ import annotations

import pytest

from llmprof.judge.operators import score_operators
from llmprof.judge.priced import Item, fit_line
from llmprof.judge.scores import ScoredRow
from llmprof.judge.splits import Fit
from llmprof.judge.strata import FEWEST, mean_over_strata, score_strata
from llmprof.judge.table import Table
from tests.made_up import GEMM


def row(error: float) -> ScoredRow:
    """Measured 100, forecast as much higher as said, within half of it; the rules are 10 % and 50 % too high."""
    price = 100.0 * (1 + error)
    return ScoredRow(
        row_id="r", measured=100.0, predicted_p10=price / 2, predicted_p50=price, predicted_p90=price * 2,
        naive=110.0, second=150.0, baselines={"linear": 110.0, "roofline": 50.0},
    )  # fmt: skip


def test_strata_are_scored_by_hand() -> None:
    rows = [row(error) for error in (0.02, 0.04, 0.06)] * 10
    (found,) = score_strata(["card matmul"] * 30, [rows, rows])
    assert (found["key"], found["n"]) == ("card matmul", 30)
    assert found["median_ape"] == pytest.approx(0.04)
    assert found["coverage80"] == 1.0
    assert found["naive_median_ape"] == pytest.approx(0.10)
    assert found["linear_median_ape"] == pytest.approx(0.10)
    assert found["roofline_median_ape"] == pytest.approx(0.50)
    assert found["second_median_ape"] == pytest.approx(0.50)
    assert found["beats"]
    # a band that just holds 80 % of errors of 2 to 6 % is far narrower than a factor of two either way
    assert found["band_score80"] < 0.2 < found["interval_score80"]


def test_a_rule_that_is_better_is_not_beaten() -> None:
    (found,) = score_strata(["card matmul"] * 30, [[row(0.2)] * 30])
    assert not found["beats"]
    mean = mean_over_strata([found, {**found, "median_ape": 0.4, "beats": True}])
    assert mean is not None
    assert (mean["n"], mean["beats"]) == (2, 1)
    assert mean["median_ape"] == pytest.approx(0.3)


def test_small_strata_and_rows_without_a_kind_are_left_out() -> None:
    rows = [row(0.1)] * (FEWEST - 1) + [row(0.1)] * 40
    kinds = ["card softmax"] * (FEWEST - 1) + [""] * 40
    assert score_strata(kinds, [rows]) == []
    assert mean_over_strata([]) is None


def item(size: float, time_us: float) -> Item:
    return Item(
        index=0, row_id="", stratum="", time_us=time_us, size=size, roofline_us=1.0, resolution_us=0.0, work=None
    )  # fmt: skip


def test_a_line_is_found_again_and_never_goes_below_zero() -> None:
    assert fit_line([item(s, 5 + 2 * s) for s in (1, 10, 100)]) == pytest.approx((5, 2))
    assert fit_line([item(s, s**2) for s in (1, 2, 4)])[0] == 0.0
    assert fit_line([item(s, 1 / s) for s in (1, 2, 4)])[1] == 0.0
    assert fit_line([item(10, 30)])[0] + 10 * fit_line([item(10, 30)])[1] == pytest.approx(30)


def test_an_operator_table_has_strata() -> None:
    rows = [
        GEMM | {"row_id": f"r{m}", "m": str(m), "n": "4096", "k": "4096", "time_us": repr(5 + m / 4)}
        for m in range(256, 256 * 61, 256)
    ]
    table = Table(name="made_up", kind="operators", columns=tuple(rows[0]), rows=rows)
    scored = score_operators(table, fit=Fit("random", 0.4), seeds=2)
    (found,) = scored.extra["strata"]
    assert found["key"].endswith(" matmul")
    assert found["n"] == 36
    # the made-up times are a line
    assert found["linear_median_ape"] < 1e-6
    assert not found["beats"]
