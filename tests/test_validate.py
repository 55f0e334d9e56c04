"""`llmprof validate` on tables whose scores are known beforehand, and on the published ones."""

from __future__ import annotations

import json
from collections.abc import Callable
from math import exp
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llmprof.cli import main
from llmprof.extrapolate.calibration import CLASSES, Calibration
from llmprof.judge.forecasts import Group, forecast_groups
from llmprof.judge.outcomes import Bench, pooled, weighted_quantile
from tests.made_up import PUBLISHED, case, made_up_rows, needs_published, row, timed, write

Run = Callable[..., dict[str, Any]]
SUMMARY_KEYS = {
    "n", "median_ape", "p90_ape", "coverage80", "interval_score80", "median_relative_width", "naive_median_ape",
    "second_median_ape", "spearman", "top1_regret", "memory_median_ape", "oom",
}  # fmt: skip


@pytest.fixture
def validate(capsys: pytest.CaptureFixture[str]) -> Run:
    """The command's JSON object."""

    def run(*arguments: object, code: int = 0) -> dict[str, Any]:
        found = main(["validate", *map(str, arguments), "--json", "--jobs", "1"])
        said = capsys.readouterr().out
        assert found == code, said
        return dict(json.loads(said))

    return run


@pytest.fixture(scope="module")
def slower(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All made-up rows, measured 10 % above our forecast."""
    return write(timed(made_up_rows(), 1.1), tmp_path_factory.mktemp("tables") / "slower.csv")


def test_errors_are_those_of_the_forecast(validate: Run, slower: Path) -> None:
    result = validate(slower)
    summary = result["summary"]
    assert summary["n"] == 13
    assert summary["median_ape"] == pytest.approx(1 - 1 / 1.1)
    assert summary["p90_ape"] == pytest.approx(1 - 1 / 1.1)
    assert summary["coverage80"] == 1.0
    assert summary["spearman"] == pytest.approx(1.0)
    assert summary["top1_regret"] == 0.0
    assert result["scored_fraction"] == 1.0
    assert result["skipped"] == {}


def test_the_object_has_its_keys(validate: Run, slower: Path) -> None:
    result = validate(slower, "--worst", 2)
    assert {"summary", "groups", "rows", "skipped", "scored_fraction", "tables"} <= result.keys()
    assert SUMMARY_KEYS <= result["summary"].keys()
    assert SUMMARY_KEYS | {"key", "mode"} <= result["groups"][0].keys()
    first = result["rows"][0]
    assert first["row_id"] == "made_up:00"
    assert first["predicted"].keys() == {"p10", "p50", "p90"}
    assert first["predicted"]["p10"] <= first["predicted"]["p50"] <= first["predicted"]["p90"]
    assert (first["scored"], first["reason"]) == (True, "")
    assert first["measured"] == pytest.approx(1.1 * first["predicted"]["p50"])
    assert result["forecasts"] >= 13 and result["forecasts_per_s"] > 0
    worst = result["worst"]
    assert len(worst) == 2
    assert sum(worst[0]["breakdown"].values()) == pytest.approx(worst[0]["predicted"]["p50"], rel=1e-6)


def test_rows_without_a_usable_time_are_counted_and_never_scored(validate: Run, tmp_path: Path) -> None:
    rows = timed(made_up_rows()[:6], 1.0)
    for found, cell in zip(rows, ("nan", "-1", "0", "", "inf"), strict=False):
        found["step_time_s"] = cell
    result = validate(write(rows, tmp_path / "odd.csv"))
    assert result["summary"]["n"] == 1
    assert sum(r["scored"] for r in result["rows"]) == 1
    assert result["skipped"] == {
        "not a number: step_time_s": 2,
        "not above 0: step_time_s": 2,
        "no time": 1,
    }
    assert result["scored_fraction"] == 1.0, "rows without a time are not missed"


def test_what_is_not_modelled_lowers_the_scored_fraction(validate: Run, tmp_path: Path) -> None:
    rows = timed(made_up_rows()[:4], 1.0)
    rows[0] |= {"precision": "nvfp4"}
    rows[1] |= {"layers": ""}
    result = validate(write(rows, tmp_path / "lacking.csv"))
    assert result["scored_fraction"] == 0.5
    assert result["defects"] == {"not supported yet: precision nvfp4": 1}


def test_a_table_without_usable_rows_is_no_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], validate: Run
) -> None:
    path = write([row(step_time_s="")], tmp_path / "empty.csv")
    assert main(["validate", str(path)]) == 0
    assert "no row can be scored" in capsys.readouterr().out
    result = validate(path)
    assert (result["summary"]["n"], result["scored_fraction"]) == (0, None)
    assert result["summary"]["median_ape"] is None


def test_calibration_finds_a_known_efficiency(validate: Run, tmp_path: Path) -> None:
    """Every matmul takes 1.5 times what we assume: a few rows tell, and the rest is forecast right."""
    truth = Calibration.prior()
    shifts = np.zeros(len(CLASSES))
    shifts[CLASSES.index("matmul")] = np.log(1.5)
    rows = made_up_rows()
    cases = [
        case(**r, step_time_s="1") for r in ({k: v for k, v in r.items() if k != "step_time_s"} for r in rows)
    ]
    bench = Bench(cases)
    moved = Calibration(
        shifts=shifts,
        covariance=truth.covariance,
        layout_spread=truth.layout_spread,
        software_spread=truth.software_spread,
    )
    outcomes = [bench.forecast(c, moved) for c in cases]
    for found, outcome in zip(rows, outcomes, strict=True):
        assert outcome.time_s is not None
        found["step_time_s"] = repr(outcome.time_s.p50)
    path = write(rows, tmp_path / "known.csv")
    cold, calibrated = validate(path), validate(path, "--calibrated", 4)
    assert cold["summary"]["median_ape"] > 0.1
    assert calibrated["summary"]["median_ape"] < 0.25 * cold["summary"]["median_ape"]
    assert calibrated["summary"]["n"] == 9
    assert calibrated["skipped"] == {"calibrates its group": 4}
    assert calibrated["scored_fraction"] == 1.0
    (group,) = calibrated["groups"]
    assert group["mode"] == "calibrated 4"
    assert 1.2 < group["calibration"]["matmul"] < 1.7


def test_only_the_smallest_runs_calibrate(validate: Run, slower: Path) -> None:
    result = validate(slower, "--calibrated", 20)
    fitted = [r["row_id"] for r in result["rows"] if r["reason"] == "calibrates its group"]
    assert fitted == [f"made_up:{i:02d}" for i in range(10)], "those on 8 GPUs, none on 16"


def test_the_naive_baseline_takes_the_utilization_of_the_calibrating_rows(
    validate: Run, tmp_path: Path
) -> None:
    rows = timed(made_up_rows()[:6], 3.0)
    path = write(rows, tmp_path / "slow.csv")
    cold, calibrated = validate(path), validate(path, "--calibrated", 3)
    assert calibrated["summary"]["naive_median_ape"] < cold["summary"]["naive_median_ape"]


def test_a_group_of_one_row_stays_cold(validate: Run, tmp_path: Path) -> None:
    path = write(timed(made_up_rows()[:1], 1.1), tmp_path / "one.csv")
    result = validate(path, "--calibrated", 4)
    assert [g["mode"] for g in result["groups"]] == ["cold"]
    assert result["summary"]["n"] == 1


def test_fit_and_out_of_memory_are_told_apart(validate: Run, tmp_path: Path) -> None:
    """One row of each kind: right fit, false out-of-memory, right out-of-memory, false fit."""
    huge = {"layers": 80, "hidden": 8192, "heads": 64, "kv_heads": 64, "ffn_hidden": 28672, "params_B": ""}
    one = {"dp": 1, "n_gpus": 1, "global_batch": 1}
    rows = [
        row(row_id="fits"),
        row(row_id="false oom", **huge, **one),
        row(row_id="oom", **huge, **one, step_time_s="", oom=1),
        row(row_id="false fit", step_time_s="", oom=1),
    ]
    oom = validate(write(rows, tmp_path / "memory.csv"))["summary"]["oom"]
    assert (oom["n"], oom["accuracy"], oom["false_fit_rate"], oom["false_oom_rate"]) == (4, 0.5, 0.5, 0.5)
    assert oom["hard"]["n"] == 2, "the bare state of the huge model does not fit"


def test_memory_is_compared_with_what_was_measured(validate: Run, tmp_path: Path) -> None:
    measured = row(peak_mem_GB=10, mem_kind="max reserved")
    result = validate(write([measured], tmp_path / "memory.csv"))
    (outcome,) = forecast_groups([Group(key="", calibrating=(), scored=(case(),))], jobs=1)[0].outcomes
    expected = abs(outcome.memory_bytes / 10e9 - 1)
    assert result["summary"]["memory_median_ape"] == pytest.approx(expected)


def test_errors_by_the_values_of_a_column(validate: Run, slower: Path) -> None:
    by = validate(slower, "--by", "tp")["by"]
    assert by["column"] == "tp"
    assert [v["value"] for v in by["values"]] == ["1", "2", "4", "8"]
    assert sum(v["n"] for v in by["values"]) == 13
    assert by["values"][0]["median_ratio"] == pytest.approx(1 / 1.1)


def test_an_unknown_column_is_refused_with_those_there_are(validate: Run, slower: Path) -> None:
    error = validate(slower, "--by", "colour", code=2)["error"]
    assert error["message"] == "no table has the column 'colour'"
    assert "micro_batch" in error["hint"]


def test_wishes_that_are_ignored_are_said(validate: Run, slower: Path) -> None:
    (warning,) = validate(slower, "--fit", "random:0.3")["warnings"]
    assert warning.startswith("--fit is for operators and collectives")


@pytest.mark.parametrize("value", ["0", "-2", "x"])
def test_a_bad_number_of_rows_is_refused(validate: Run, slower: Path, value: str) -> None:
    assert validate(slower, f"--calibrated={value}", code=2)["error"]["kind"] == "request"


def test_a_missing_file_and_a_file_that_is_no_table(validate: Run, slower: Path, tmp_path: Path) -> None:
    assert validate(slower, tmp_path / "none.csv", code=2)["error"]["kind"] == "table"
    other = tmp_path / "other.csv"
    other.write_text("a,b\n1,2\n", encoding="utf-8")
    assert validate(other, code=2)["error"]["kind"] == "table"
    assert list(validate(slower, other)["refused"]) == ["other.csv"]


def test_doubled_and_empty_row_ids_are_different_rows(validate: Run, tmp_path: Path) -> None:
    rows = timed(made_up_rows()[:3], 1.0)
    rows[1]["row_id"] = rows[0]["row_id"]
    rows[2]["row_id"] = ""
    result = validate(write(rows, tmp_path / "doubled.csv"))
    assert len({r["row_id"] for r in result["rows"]}) == 3
    assert result["summary"]["n"] == 3


def test_processes_do_not_change_the_result(slower: Path) -> None:
    cases = tuple(case(**{**r, "step_time_s": "1"}) for r in made_up_rows())
    many = Group(key="a", calibrating=cases[:2], scored=cases * 1)
    alone = forecast_groups([many], jobs=1)[0]
    split = forecast_groups([many] * 6, jobs=2)[5]
    assert [o.time_s for o in alone.outcomes] == [o.time_s for o in split.outcomes]
    assert alone.mfu == split.mfu


def test_readings_are_pooled_by_their_weights() -> None:
    a, b = np.full(201, 1.0), np.full(201, 3.0)
    found = pooled([a, b], np.array([0.8, 0.2]), [0.0, 0.0])
    assert (found.p10, found.p50, found.p90) == (1.0, 1.0, 3.0)
    assert weighted_quantile(np.array([3.0, 1.0, 2.0]), np.array([0.2, 0.5, 0.3]), 0.5) == 1.0
    assert weighted_quantile(np.array([3.0, 1.0, 2.0]), np.array([0.2, 0.5, 0.3]), 0.9) == 3.0


def test_unknown_cells_widen_the_interval() -> None:
    known, unknown = case(recompute="full"), case(recompute="")
    bench = Bench([known, unknown])
    sure, unsure = bench.forecast(known).time_s, bench.forecast(unknown).time_s
    assert sure is not None and unsure is not None
    assert unsure.p90 / unsure.p10 > sure.p90 / sure.p10


def test_without_the_optimizer_a_step_is_shorter() -> None:
    whole = case(precision="fp32")
    part = case(precision="fp32", notes="no optimizer step in the label")
    bench = Bench([whole, part])
    long, short = bench.forecast(whole), bench.forecast(part)
    assert long.time_s is not None and short.time_s is not None
    expected = long.time_s.p50 - long.breakdown_s["optimizer"]
    assert short.time_s.p50 == pytest.approx(expected)
    assert sum(short.breakdown_s.values()) == pytest.approx(short.time_s.p50)


def test_baselines_follow_the_utilization(slower: Path) -> None:
    found = Bench([case(pp=2, dp=4)]).forecast(case(pp=2, dp=4))
    naive, second = found.baselines(0.2)
    assert naive == pytest.approx(2 * found.naive_s)
    reduced = found.second_s - found.naive_s * found.bubble
    assert second == pytest.approx(naive * found.bubble + reduced)


def test_the_text_fits_into_80_columns(capsys: pytest.CaptureFixture[str], slower: Path) -> None:
    assert main(["validate", str(slower), "--by", "tp", "--worst", "2", "--jobs", "1"]) == 0
    text = capsys.readouterr().out
    assert max(len(line) for line in text.splitlines()) <= 80
    for word in ("median", "naive", "second", "Farthest off", "By tp", "forecasts in"):
        assert word in text


@needs_published
@pytest.mark.parametrize(
    ("table", "least"),
    [("megatron_tables", 0.95), ("simumax_b200", 0.95), ("kempnerforge", 0.95), ("neusight_labels", 0.95)],
)
def test_published_tables_are_scored(validate: Run, table: str, least: float) -> None:
    result = validate(PUBLISHED / "e2e" / f"{table}.csv")
    assert result["scored_fraction"] >= least
    assert result["summary"]["n"] > 10
    assert 0 < result["summary"]["median_ape"] < exp(1)
