"""`forecast --calibrate-with FILE`: a table of measured runs corrects a forecast; one that cannot is refused in a line."""

from __future__ import annotations

import csv
import json
from math import log
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llmprof.cli import main
from llmprof.errors import RequestError
from llmprof.judge.calibrated import calibration_from
from llmprof.judge.cells import Row
from llmprof.judge.outcomes import Bench
from llmprof.judge.runs import Case, read_case
from llmprof.schema.devices import find_device

TRUTH = np.array([0.25, 0.0, 0.1, 0.0])
MODEL = "llama:layers=8,hidden=8192,ffn=22016,heads=64,kv_heads=64,vocab=32000,seq=2048"
SIZES = {
    "layers": "8", "hidden": "8192", "ffn_hidden": "22016", "heads": "64", "kv_heads": "64", "vocab": "32000",
    "gated_mlp": "1", "seq_len": "2048",
}  # fmt: skip


def row(number: int, **cells: str) -> dict[str, str]:
    """A run on 8 H100 with 2 sequences a GPU."""
    base = {
        "row_id": f"made:{number:04}", "source": "made", "gpu": "H100-SXM5-80GB", "gpus_per_node": "8", "n_gpus": "8",
        "dp": "8", "tp": "1", "pp": "1", "cp": "1", "ep": "1", "zero_stage": "0", "micro_batch": "2",
        "global_batch": "16", "recompute": "none", "flash_attention": "2", "precision": "bf16",
        "sequence_parallel": "0", "framework": "PyTorch", "compile": "0", "step_time_s": "", "derived": "", "qc": "ok",
        "oom": "0", "notes": "",
    }  # fmt: skip
    return {**SIZES, **base, **cells}


def timed(rows: list[dict[str, str]]) -> list[dict[str, str]]:
    """Rows with the steps of a world whose factors are at TRUTH."""
    found = []
    for cells in rows:
        case = read_case({**cells, "step_time_s": "1"})
        assert isinstance(case, Case), case
        seconds = float(Bench([case]).readings_s(case, TRUTH[None])[0, 0])
        found.append({**cells, "step_time_s": f"{seconds:.6f}"})
    return found


def write(path: Path, rows: list[Row]) -> Path:
    """A table of runs."""
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, fieldnames=list(row(0)))
        writer.writeheader()
        writer.writerows(rows)
    return path


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four runs of one world, and others that do not count."""
    layouts: list[dict[str, str]] = [
        {},
        {"zero_stage": "3"},
        {"dp": "4", "tp": "2", "global_batch": "8"},
        {"micro_batch": "4", "global_batch": "32"},
    ]
    rows: list[Row] = [*timed([row(i, **cells) for i, cells in enumerate(layouts)])]
    rows += [row(7, gpu="A100-SXM4-80GB", step_time_s="9.0"), row(8), row(9, step_time_s="9.0", qc="odd")]
    return write(tmp_path_factory.mktemp("tables") / "ours.csv", rows)


def forecast(capsys: pytest.CaptureFixture[str], *options: str) -> dict[str, Any]:
    """The object of `forecast --json` for one layout on 8 H100."""
    layout = "dp=4,zero=3,tp=2,mb=4"
    asked = ["forecast", "--model", MODEL, "--cluster", "8xH100-SXM", "--layout", layout, "--json"]
    code = main([*asked, *options])
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert code == (2 if "error" in found else 0)
    return found


def test_a_table_of_the_device_s_runs_corrects_the_forecast(
    table: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cold = forecast(capsys)
    warm = forecast(capsys, "--calibrate-with", str(table))
    lines = [line for line in warm["assumptions"] if line.startswith("calibrated on ")]
    assert len(lines) == 1
    assert "4 rows of ours.csv" in lines[0]
    # compute is slower by up to a quarter of the logarithm, and is most of the step
    moved = log(warm["step_time_s"]["p50"] / cold["step_time_s"]["p50"])
    assert 0.1 < moved < 0.25
    width = [log(f["step_time_s"]["p90"] / f["step_time_s"]["p10"]) for f in (cold, warm)]
    assert width[1] < width[0]
    assert warm["interpolated_fraction"] > cold["interpolated_fraction"] == cold["table_fraction"]
    assert sum(warm["breakdown_s"].values()) == pytest.approx(warm["step_time_s"]["p50"], rel=1e-9)


def test_the_order_of_the_file_s_rows_does_not_matter(table: Path, tmp_path: Path) -> None:
    with table.open(encoding="utf-8") as file:
        rows: list[Row] = list(csv.DictReader(file))
    other = write(tmp_path / "ours.csv", rows[::-1])
    device = find_device("H100-SXM5-80GB")
    one, two = calibration_from(table, device), calibration_from(other, device)
    assert np.array_equal(one.shifts, two.shifts)
    assert one.rows == two.rows == 4
    # every row is compute for most of its step
    assert one.shifts[0] == pytest.approx(TRUTH[0], abs=0.1)


def test_runs_of_another_device_alone_are_refused_with_counts(
    table: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = ["forecast", "--model", MODEL, "--cluster", "8xB200", "--layout", "dp=8,mb=2", "--json"]
    assert main([*asked, "--calibrate-with", str(table)]) == 2
    error = json.loads(capsys.readouterr().out)["error"]
    assert error["message"].startswith("no row of ours.csv can calibrate a forecast for B200")
    assert "ran on H100-SXM5-80GB (4)" in error["message"]
    assert "other reasons (" in error["message"]
    assert "step_time_s" in error["hint"]


@pytest.mark.parametrize("text", ["", "a,b\n1,2\n", "row_id,gpu\n"])
def test_what_is_no_table_of_runs_is_one_line(
    text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "bad.csv"
    path.write_text(text, encoding="utf-8")
    found = forecast(capsys, "--calibrate-with", str(path))
    assert "\n" not in found["error"]["message"]


def test_a_table_of_another_kind_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "ops.csv"
    path.write_text(
        "row_id,gpu,op,phase,dtype,m,n,k,time_us\nx:1,H100,gemm,fwd,bf16,1,1,1,5\n", encoding="utf-8"
    )
    with pytest.raises(RequestError, match=r"ops\.csv is a table of operators"):
        calibration_from(path, find_device("H100-SXM5-80GB"))


def test_a_table_without_rows_says_so(tmp_path: Path) -> None:
    path = write(tmp_path / "none.csv", [])
    with pytest.raises(RequestError, match="it has no rows"):
        calibration_from(path, find_device("H100-SXM5-80GB"))
