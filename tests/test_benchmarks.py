"""The benchmark's arithmetic on numbers worked out by hand, and its layouts on real ranks."""

from __future__ import annotations

import subprocess
import sys
import time
from typing import Any

import pytest

from benchmarks.cases import CASES, LAYOUTS, Case, layout_string
from benchmarks.quiet import ForeignLoad
from benchmarks.ranks import RankGroup
from benchmarks.scores import Single, make_row, summarize
from examples.train_llama import ModelConfig
from llmprof.judge.scores import spearman
from llmprof.schema.layout import Layout

TINY = Case(
    name="tiny",
    model=ModelConfig(layers=2, hidden=32, heads=4, kv_heads=2, ffn=64, seq=16),
    batch=8,
)


def forecast(layout: str, p50: float) -> dict[str, Any]:
    """The keys of a forecast that a row reads: naive is 2 s, the second baseline 1.5 s."""
    return {
        "layout": layout,
        "step_time_s": {"p10": p50 * 0.9, "p50": p50, "p90": p50 * 1.1},
        "naive_step_time_s": 2.0,
        "second_baseline_step_time_s": 1.5,
        "bound_step_time_s": 0.5,
    }


def test_scores_of_two_rows_worked_out_by_hand() -> None:
    single = Single(measured_s=2.0, forecast_s=2.2)
    rows = [
        make_row(("a", "single"), [2.0, 2.0, 2.0], forecast=forecast("dp=1", 2.2), single=single),
        make_row(("a", "ddp"), [0.9, 1.0, 1.1], forecast=forecast("dp=2", 1.1), single=single),
        make_row(("a", "tp"), [1.0, 1.0, 1.6], forecast=forecast("tp=2", 1.3), single=single),
    ]
    ddp, tp = rows[1:]
    assert ddp.ape == pytest.approx(0.1)
    assert ddp.naive_ape == pytest.approx(1.0)
    assert ddp.second_ape == pytest.approx(0.5)
    assert ddp.ratio_error == pytest.approx(0.0)  # both 10 % too slow: the ratio is right
    assert tp.ratio_error == pytest.approx(1.3 / 1.1 - 1)
    assert ddp.covered
    assert not tp.covered
    scores = summarize(rows, {"a": 1.0})
    assert scores["n"] == 2
    assert scores["median_ape"] == pytest.approx((0.1 + 0.3) / 2)
    assert scores["coverage80"] == 0.5
    assert scores["naive_median_ape"] == pytest.approx(1.0)
    assert len(scores["rows"]) == 3


def test_rank_correlation_of_equal_opposite_and_half_swapped_orders() -> None:
    assert spearman([1, 2, 3], [10, 20, 30]) == pytest.approx(1.0)
    assert spearman([1, 2, 3], [3, 2, 1]) == pytest.approx(-1.0)
    assert spearman([1, 2, 3], [2, 1, 3]) == pytest.approx(0.5)


def test_layouts_that_are_equally_fast_have_no_order_to_get_right() -> None:
    single = Single(measured_s=2.0, forecast_s=2.0)
    rows = [
        make_row(("a", "ddp"), [1.00], forecast=forecast("dp=2", 1.1), single=single),
        make_row(("a", "tp"), [1.04], forecast=forecast("tp=2", 1.0), single=single),
        make_row(("a", "1f1b"), [1.20], forecast=forecast("pp=2", 1.05), single=single),
    ]
    scores = summarize(rows, {})
    assert (scores["pairs"], scores["pairs_correct"]) == (
        2,
        1,
    )  # ddp and tp before 1f1b; ddp is forecast after it


def test_foreign_load_counts_other_processes_and_not_ours() -> None:
    command = [sys.executable, "-c", "import time\nend = time.time() + 1\nwhile time.time() < end: pass"]
    theirs, ours = subprocess.Popen(command), subprocess.Popen(command)
    stranger, family = ForeignLoad([ours.pid]), ForeignLoad([ours.pid, theirs.pid])
    time.sleep(0.8)
    seen, unseen = stranger.share(), family.share()
    assert theirs.wait() == ours.wait() == 0
    assert seen > unseen


def test_choosing_the_slower_layout_is_a_regret() -> None:
    single = Single(measured_s=2.0, forecast_s=2.0)
    rows = [
        make_row(("a", "ddp"), [1.0], forecast=forecast("dp=2", 1.3), single=single),
        make_row(("a", "tp"), [1.2], forecast=forecast("tp=2", 1.1), single=single),
    ]
    scores = summarize(rows, {})
    assert not scores["order_correct"]
    assert scores["orders"][0]["top1_regret"] == pytest.approx(0.2)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
@pytest.mark.parametrize("name", ["single", *LAYOUTS])
def test_every_layout_has_the_same_global_batch(case: Case, name: str) -> None:
    layout = Layout.parse(layout_string(name, case))
    assert layout.global_batch == case.batch
    assert layout.gpus == (1 if name == "single" else 2)


@pytest.fixture(scope="module")
def one_rank_losses() -> list[float]:
    """Losses of the first steps of the tiny case on one rank."""
    group = RankGroup("single", TINY)
    group.close()
    return group.warmup_losses


@pytest.mark.parametrize("name", LAYOUTS)
def test_two_real_ranks_train_the_same_model_as_one(name: str, one_rank_losses: list[float]) -> None:
    group = RankGroup(name, TINY)
    try:
        group.run(2)
        group.run(1)
    finally:
        exits = group.close()
    # The second loss is equal only if gradients and the optimizer's step are: the first one alone would not tell.
    first, second = one_rank_losses
    assert first - second > 1e-3
    assert group.warmup_losses == pytest.approx(one_rank_losses, abs=1e-5)
    assert len(group.durations_s) == 3
    assert all(0 < seconds < 60 for seconds in group.durations_s)
    assert exits == [0, 0]
