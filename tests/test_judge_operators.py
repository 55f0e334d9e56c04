"""Operator tables: rows become the calls they timed, and what is fitted prices the rest."""

from __future__ import annotations

from math import log
from pathlib import Path

import pytest

from llmprof.judge.operators import score_operators
from llmprof.judge.splits import Fit
from llmprof.judge.table import Table, read_table
from llmprof.schema.priors import load_priors
from tests.made_up import GEMM, PUBLISHED, needs_published


def table(kind: str, rows: list[dict[str, str]]) -> Table:
    return Table(name="made_up", kind=kind, columns=tuple(rows[0]), rows=rows)


def gemms() -> list[dict[str, str]]:
    """Products that run at exactly 100 TFLOP/s."""
    sizes = [512 * i for i in range(1, 41)]
    return [
        GEMM
        | {
            "row_id": f"r{m}",
            "m": str(m),
            "n": "4096",
            "k": "4096",
            "time_us": repr(2 * m * 4096 * 4096 / 1e8),
        }
        for m in sizes
    ]


def test_fitted_rows_price_the_others() -> None:
    cold = score_operators(table("operators", gemms()))
    fitted = score_operators(table("operators", gemms()), fit=Fit("random", 0.5))
    assert cold.fitted == 0
    assert fitted.fitted == 20
    assert sum(r.scored for r in fitted.rows) == 20
    assert fitted.extra["median_ape"] < 0.01 < cold.extra["median_ape"]
    smaller = score_operators(table("operators", gemms()), fit=Fit("smaller", 0.5))
    assert {r.row_id for r in smaller.rows if r.scored} == {f"r{512 * i}" for i in range(21, 41)}


def test_times_that_are_none_are_never_scored() -> None:
    rows = [row | {"time_us": time} for row, time in zip(gemms(), ("nan", "-1", "0", "", "x"), strict=False)]
    scored = score_operators(
        table(
            "operators",
            [*rows, gemms()[0], gemms()[0], gemms()[9] | {"gpu": "what"}, gemms()[8] | {"time_us": "1e-300"}],
        )
    )
    # a doubled row_id is a row of its own, as in tables of runs
    assert [r.row_id for r in scored.rows if r.scored] == ["r512", "r512 (row 6)", "r512 (row 7)"][1:]
    assert {r.reason for r in scored.rows} >= {
        "no time",
        "not a number: time_us",
        "below a nanosecond or above a day: time_us",
    }
    assert any(r.reason == "unknown device: what" for r in scored.rows)


def test_a_capture_sees_inputs_alone_so_fitted_rows_price_other_outputs() -> None:
    """A gated activation writes half of what it reads: its measured curve must not count the outputs twice."""
    base = {"op": "activation", "phase": "fwd", "dtype": "fp16", "gpu": "A100-SXM4-80GB", "qc": "ok"}
    rows = [
        base | {"row_id": f"a{n}", "shape": f"{n}x4096 gated (silu*mul)", "time_us": repr(n * 4096 * 6 / 1e6)}
        for n in range(1000, 9000, 200)
    ]
    fitted = score_operators(table("operators", rows), fit=Fit("random", 0.5))
    assert fitted.extra["median_ape"] < 0.01


def backward(m: int, time_us: float) -> dict[str, str]:
    return GEMM | {
        "row_id": f"b{m}",
        "phase": "bwd",
        "m": str(m),
        "n": "4096",
        "k": "4096",
        "time_us": repr(time_us),
    }


def test_both_gradients_are_fitted_and_priced_as_a_sum() -> None:
    rows = [backward(m, 4 * m * 4096 * 4096 / 1e8) for m in range(512, 20480, 512)]
    fitted = score_operators(table("operators", rows), fit=Fit("random", 0.5))
    assert fitted.fitted > 0
    assert fitted.extra["median_ape"] < 0.02


def test_parts_that_were_not_measured_alone_are_as_uncertain_as_their_assumed_price() -> None:
    """One row of both gradients is fitted; a row of the same sizes is known as well as matmuls are assumed."""
    rows = [backward(512, 400.0), backward(512, 400.0) | {"row_id": "again"}]
    (asked,) = (
        r for r in score_operators(table("operators", rows), fit=Fit("smaller", 0.5)).rows if r.scored
    )
    assert asked.predicted_p50 == pytest.approx(400.0)
    assert asked.predicted_p90 is not None
    spread = log(asked.predicted_p90 / 400.0) / 1.2816
    assert spread == pytest.approx(load_priors().family("matmul").spread, rel=0.05)


def test_a_chain_is_fitted_as_one_operator_and_leaves_its_parts_alone() -> None:
    """A rope ten times slower than its parts would be must not make sums of other rows ten times slower."""
    base = {"phase": "fwd", "dtype": "fp16", "gpu": "A100-SXM4-80GB", "qc": "ok"}
    chains = [
        base
        | {
            "op": "rope", "row_id": f"rope{b}", "time_us": repr(100.0 * b),
            "shape": f"mp=1; b={b}; h=16; l=1024; dim=2048; head_dim 128",
        }
        for b in range(1, 41)
    ]  # fmt: skip
    sums = [
        base | {"op": "add", "row_id": f"add{n}", "shape": f"{n}x4096", "time_us": repr(n * 4096 * 6 / 1.5e6)}
        for n in range(1024, 41 * 1024, 1024)
    ]
    fitted = score_operators(table("operators", chains + sums), fit=Fit("random", 0.5))
    assert len(fitted.groups) == 2
    assert all(group["median_ape"] < 0.02 for group in fitted.groups)


def test_an_eager_row_takes_its_launches_where_they_are_longer() -> None:
    row = {
        "row_id": "x", "op": "gelu", "phase": "fwd", "dtype": "fp32", "gpu": "A100-SXM4-80GB", "qc": "ok",
        "shape": "[[2, 8]]->(2, 8)", "time_us": "20",
    }  # fmt: skip
    (kernel,) = score_operators(table("operators", [row])).rows
    (eager,) = score_operators(table("operators", [row | {"framework": "PyTorch 2.1 eager"}])).rows
    priors = load_priors()
    assert kernel.predicted_p50 == pytest.approx(priors.floor_us, rel=0.01)
    assert eager.predicted_p50 == pytest.approx(priors.launch_us)


def test_baselines_and_intervals_by_hand() -> None:
    rows = gemms()
    cold = score_operators(table("operators", rows)).rows[0]
    roofline_us = 2 * 512 * 4096 * 4096 / 312e12 * 1e6
    assert cold.naive == pytest.approx(roofline_us / 0.4)
    assert cold.second is None
    assert cold.predicted_p90 and cold.predicted_p50 and cold.predicted_p10
    assert cold.predicted_p90 * cold.predicted_p10 == pytest.approx(cold.predicted_p50**2)
    fitted = score_operators(table("operators", rows), fit=Fit("smaller", 0.5)).rows[-1]
    assert fitted.naive == pytest.approx(fitted.measured)
    assert fitted.second == pytest.approx(fitted.measured)  # time grows with work in this table


def test_random_splits_are_averaged_and_small_strata_stand_apart() -> None:
    few = [row | {"row_id": f"few{i}", "kernel": "rare"} for i, row in enumerate(gemms()[:3])]
    scored = score_operators(table("operators", gemms() + few), fit=Fit("random", 0.5))
    assert scored.extra["seeds"] == 5
    assert scored.forecasts == 5 * sum(r.scored for r in scored.rows)
    assert [g["small"] for g in scored.groups] == [False, True]
    assert scored.extra["small_strata"]["n"] + scored.extra["without_small_strata"]["n"] == sum(
        r.scored for r in scored.rows
    )
    assert score_operators(table("operators", gemms()), fit=Fit("smaller", 0.5)).extra["small_strata"] is None


@needs_published
@pytest.mark.parametrize("path", sorted((PUBLISHED / "ops").glob("*.csv")), ids=lambda p: p.stem)
def test_published_operators_are_read(path: Path) -> None:
    """What is not scored has a reason of the source, or no price."""
    scored = score_operators(read_table(path))
    assert set(scored.defects) <= {
        "not an operator that is priced: kfac_inversion_block",
        "holds collectives on links that are not stated: moe_layer",
    }
    assert sum(r.scored for r in scored.rows) == scored.countable - sum(scored.defects.values())
