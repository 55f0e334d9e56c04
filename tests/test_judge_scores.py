"""Scores of forecasts, each against numbers worked out by hand."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmprof.judge.aggregate import mean_over_tables, score_rows
from llmprof.judge.scores import (
    ScoredRow,
    absolute_percentage_error,
    covers,
    interval_score,
    oom_confusion,
    quantile,
    ranks,
    relative_width,
    spearman,
    top1_regret,
)


def row(name: str, measured: float, p50: float, **more: object) -> ScoredRow:
    fields = {"predicted_p10": 0.8 * p50, "predicted_p50": p50, "predicted_p90": 1.2 * p50, **more}
    return ScoredRow(row_id=name, measured=measured, **fields)  # type: ignore[arg-type]


def test_absolute_percentage_error() -> None:
    assert absolute_percentage_error(9.0, 12.0) == pytest.approx(0.25)
    # a difference of 0.4 is below a clock of 1: it counts as 0.5
    assert absolute_percentage_error(9.6, 10.0, resolution=1.0) == pytest.approx(0.05)
    assert absolute_percentage_error(8.0, 10.0, resolution=1.0) == pytest.approx(0.2)


def test_quantile_interpolates_and_knows_nothing_of_nothing() -> None:
    assert quantile([4.0, 1.0, 3.0], 0.5) == 3.0
    assert quantile([0.0, 10.0], 0.9) == pytest.approx(9.0)
    assert quantile([], 0.5) is None


def test_interval_score_of_winkler() -> None:
    assert interval_score(8.0, 12.0, 10.0) == pytest.approx(0.4)  # inside: the width alone
    # 2 below the interval costs 2 / 0.2 x 2 = 20 beside the width of 4; in units of 6
    assert interval_score(8.0, 12.0, 6.0) == pytest.approx((4 + 20) / 6)
    assert interval_score(8.0, 12.0, 13.0) == pytest.approx((4 + 10) / 13)


def test_covers_its_own_ends_and_width_is_relative() -> None:
    assert covers(8.0, 12.0, 8.0)
    assert covers(8.0, 12.0, 12.0)
    assert not covers(8.0, 12.0, 12.1)
    assert relative_width(8.0, 10.0, 13.0) == pytest.approx(0.5)


def test_ranks_share_their_mean() -> None:
    assert ranks([10.0, 30.0, 10.0, 20.0]) == [1.5, 4.0, 1.5, 3.0]


def test_spearman_by_hand() -> None:
    # ranks 1 2 3 4 against 1 3 2 4: 1 - 6 (0 + 1 + 1 + 0) / (4 x 15) = 0.8
    assert spearman([1, 2, 3, 4], [10, 30, 20, 40]) == pytest.approx(0.8)
    assert spearman([1, 2, 3], [3, 2, 1]) == pytest.approx(-1.0)
    assert spearman([1, 2], [1, 2]) is None
    assert spearman([5, 5, 5], [1, 2, 3]) is None


def test_regret_of_the_first_choice() -> None:
    assert top1_regret([3.0, 1.0, 2.0], [10.0, 15.0, 12.0]) == pytest.approx(0.5)
    assert top1_regret([1.0, 2.0], [10.0, 15.0]) == 0.0
    # two share the first place: the mean of 12 and 16 against 10
    assert top1_regret([1.0, 2.0, 1.0], [12.0, 10.0, 16.0]) == pytest.approx(0.4)


def test_oom_confusion_by_hand() -> None:
    score = oom_confusion([0.9, 0.2, 0.6, 0.1], [True, True, False, False])
    assert score.accuracy == 0.5
    assert score.false_fit_rate == 0.5
    assert score.false_oom_rate == 0.5
    # (0.1^2 + 0.8^2 + 0.6^2 + 0.1^2) / 4
    assert score.brier == pytest.approx((0.01 + 0.64 + 0.36 + 0.01) / 4)
    assert oom_confusion([0.1], [False]).false_fit_rate is None
    assert oom_confusion([], []).n == 0


def test_rows_with_a_reason_are_not_scored_and_nothing_is_none() -> None:
    scores = score_rows([row("a", 10.0, 10.0, reason="no")])
    assert scores["n"] == 0
    assert scores["median_ape"] is None
    assert scores["coverage80"] is None
    assert scores["oom"] is None


@pytest.mark.parametrize("time", [0.0, -1.0, float("nan"), float("inf")])
def test_impossible_times_are_never_scored(time: float) -> None:
    rows = [row("measured", time, 10.0, naive=1.0), row("predicted", 10.0, time, naive=1.0)]
    assert [r.scored for r in rows] == [False, False]
    scores = score_rows(rows)
    assert scores["n"] == 0
    assert scores["naive_median_ape"] is None


@pytest.mark.parametrize("bad", [0.0, -1.0, float("nan"), float("inf")])
def test_impossible_baselines_and_peaks_are_never_scored(bad: float) -> None:
    scores = score_rows(
        [
            row("a", 10.0, 10.0, naive=bad, second=bad, memory_measured=bad, memory_predicted=1.0),
            row("b", 10.0, 10.0, naive=5.0, memory_measured=4.0, memory_predicted=bad),
            row("c", 10.0, 10.0, naive=5.0, memory_measured=4.0, memory_predicted=5.0),
        ]
    )
    assert (scores["n"], scores["naive_median_ape"], scores["second_median_ape"]) == (3, 0.5, None)
    assert (scores["memory_n"], scores["memory_median_ape"]) == (1, 0.25)


def test_spearman_with_ties_by_hand() -> None:
    # ranks 1.5 1.5 3 against 1 2 3: covariance 1.5, variances 1.5 and 2: 1.5 / sqrt(3)
    assert spearman([1, 1, 2], [1, 2, 3]) == pytest.approx(1.5 / 3**0.5)
    assert spearman([1, 2, 3], [7, 7, 7]) is None
    assert spearman([], []) is None


def test_one_percent_mfu_is_not_below_and_a_table_of_such_rows_leaves_none() -> None:
    assert score_rows([row("a", 10.0, 11.0, mfu=0.01)])["below_1pct_mfu"] is None
    low, usual = score_rows([row("a", 10.0, 20.0, mfu=0.001)]), score_rows([row("b", 10.0, 11.0)])
    total = mean_over_tables([low, usual])
    assert total["median_ape"] == pytest.approx(0.55)
    assert total["without_below_1pct_mfu"]["median_ape"] == pytest.approx(0.1)


def test_the_mean_of_confusions_skips_rates_without_cases() -> None:
    fits = score_rows([row("a", 1.0, 1.0, oom=False, oom_probability=0.5)])
    both = score_rows(
        [
            row("b", 1.0, 1.0, oom=False, oom_probability=0.0),
            ScoredRow(row_id="c", oom=True, oom_probability=0.0, hard=True),
        ]
    )
    oom = mean_over_tables([fits, both, score_rows([row("d", 1.0, 1.0)])])["oom"]
    assert (oom["n"], oom["accuracy"]) == (3, 0.25)
    # the first table has no run out of memory: 1 / 1 alone, not (0 + 1) / 2
    assert (oom["false_fit_rate"], oom["false_oom_rate"]) == (1.0, 0.5)
    # (0.5^2 + (0 + 1) / 2) / 2
    assert oom["brier"] == pytest.approx(0.375)
    assert (oom["hard"]["n"], oom["hard"]["false_fit_rate"], oom["hard"]["false_oom_rate"]) == (1, 1.0, None)


def test_no_rows_give_no_figures() -> None:
    for scores in (score_rows([]), mean_over_tables([]), mean_over_tables([score_rows([])])):
        assert scores["n"] == 0
        figures = {k: v for k, v in scores.items() if k not in ("n", "tables", "without_below_1pct_mfu")}
        assert set(figures.values()) == {None}
        assert not any((scores["without_below_1pct_mfu"] or {}).values())


def test_memory_and_hard_rows_by_hand() -> None:
    rows = [
        row(
            "a",
            1.0,
            1.0,
            memory_measured=10.0,
            memory_predicted=12.0,
            oom=False,
            oom_probability=0.1,
            hard=True,
        ),
        row("b", 1.0, 1.0, memory_measured=10.0, memory_predicted=9.0, oom=False, oom_probability=0.7),
        ScoredRow(row_id="c", oom=True, oom_probability=0.5, reason="no time", hard=True),
        ScoredRow(row_id="d", oom=True, oom_probability=0.4, reason="no time", hard=True),
    ]
    scores = score_rows(rows)
    assert scores["n"] == 2
    assert scores["memory_median_ape"] == pytest.approx(0.15)
    oom = scores["oom"]
    # runs out of memory: one half of them forecast to fit; a probability of one half is a forecast of out of memory
    assert (oom["n"], oom["accuracy"], oom["false_fit_rate"], oom["false_oom_rate"]) == (4, 0.5, 0.5, 0.5)
    assert oom["hard"]["n"] == 3
    assert oom["hard"]["accuracy"] == pytest.approx(2 / 3)
    assert oom["hard"]["false_oom_rate"] == 0.0


def test_a_table_by_hand() -> None:
    rows = [row("a", 10.0, 11.0, naive=5.0), row("b", 20.0, 30.0, naive=10.0), row("c", 5.0, 5.0, naive=5.0)]
    scores = score_rows(rows)
    assert scores["median_ape"] == pytest.approx(0.1)
    assert scores["naive_median_ape"] == pytest.approx(0.5)
    assert scores["second_median_ape"] is None
    # 10 lies in 8.8 to 13.2, 20 not in 24 to 36, 5 in 4 to 6
    assert scores["coverage80"] == pytest.approx(2 / 3)
    assert scores["without_below_1pct_mfu"] is None


def test_rows_below_one_percent_mfu_are_told_apart() -> None:
    scores = score_rows([row("a", 10.0, 11.0, mfu=0.4), row("b", 10.0, 100.0, mfu=0.001)])
    assert scores["n"] == 2
    assert scores["without_below_1pct_mfu"]["n"] == 1
    assert scores["without_below_1pct_mfu"]["median_ape"] == pytest.approx(0.1)
    assert scores["below_1pct_mfu"]["n"] == 1
    assert scores["below_1pct_mfu"]["median_ape"] == pytest.approx(9.0)


def test_only_sets_of_eight_layouts_compete() -> None:
    seven = [row(str(i), 10.0 + i, 10.0 + i, choice_set="x") for i in range(7)]
    assert score_rows(seven)["spearman"] is None
    eight = [*seven, row("7", 9.0, 20.0, choice_set="x")]
    scores = score_rows(eight)
    assert scores["choice_sets"] == 1
    # the forecast books row 0 (10.0), the best took 9.0
    assert scores["top1_regret"] == pytest.approx(1 / 9)


def test_the_mean_over_tables_is_unweighted() -> None:
    small, large = score_rows([row("a", 10.0, 12.0)]), score_rows([row(str(i), 10.0, 10.0) for i in range(9)])
    assert mean_over_tables([small, large])["median_ape"] == pytest.approx(0.1)
    assert mean_over_tables([small, large])["n"] == 10


TIMES = st.lists(st.tuples(st.floats(0.1, 100), st.floats(0.1, 100)), min_size=1, max_size=12)


@given(times=TIMES)
def test_scores_stay_in_their_bounds(times: list[tuple[float, float]]) -> None:
    scores = score_rows([row(str(i), a, b, choice_set="x") for i, (a, b) in enumerate(times)])
    assert 0 <= scores["median_ape"] <= scores["p90_ape"]
    assert 0 <= scores["coverage80"] <= 1
    assert scores["interval_score80"] >= 0
    assert scores["median_relative_width"] == pytest.approx(0.4)
    assert scores["spearman"] is None or -1 <= scores["spearman"] <= 1
    assert scores["top1_regret"] is None or scores["top1_regret"] >= 0


@given(times=TIMES, order=st.randoms())
def test_order_and_regret_do_not_depend_on_the_order_of_rows(
    times: list[tuple[float, float]], order: Random
) -> None:
    rows = [row(str(i), a, round(b), choice_set="x") for i, (a, b) in enumerate(times) if round(b)] * 2
    mixed = order.sample(rows, len(rows))
    for name in ("spearman", "top1_regret", "choice_sets"):
        assert score_rows(mixed)[name] == pytest.approx(score_rows(rows)[name])


@given(
    times=TIMES,
    unit=st.floats(0.01, 100),
)
def test_scores_do_not_depend_on_the_unit_or_the_order(times: list[tuple[float, float]], unit: float) -> None:
    base = score_rows([row(str(i), a, b) for i, (a, b) in enumerate(times)])
    other = score_rows([row(str(i), unit * a, unit * b) for i, (a, b) in enumerate(times)][::-1])
    for name in ("median_ape", "p90_ape", "interval_score80", "median_relative_width"):
        assert other[name] == pytest.approx(base[name], rel=1e-6)
