"""`llmprof forecast` as a program: promised keys, several layouts, saved forecasts, and life without torch."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest

from llmprof import cli
from llmprof.commands.request import number_of_tokens
from llmprof.report.ranking import best_forecast, rank_forecasts
from llmprof.schema.store import load_profile, save_profile, save_workload
from tests.profiles import measured, workload
from tests.programs import objects, start

FORECAST_KEYS = {
    "layout", "gpus", "global_batch", "step_time_s", "tokens_per_s", "naive_step_time_s",
    "second_baseline_step_time_s", "bound_step_time_s", "breakdown_s", "mfu", "peak_memory_bytes", "verdict",
    "oom_probability", "measured_fraction", "interpolated_fraction", "assumed_fraction", "assumptions", "cost",
    "energy_j_per_step",
}  # fmt: skip
BREAKDOWN_KEYS = {
    "compute", "recompute", "tp", "cp", "ep", "dp", "pp", "bubble", "optimizer", "host", "input", "straggler",
}  # fmt: skip
ON_H100 = ["--cluster", "8xH100-SXM"]

WITHOUT_TORCH = """
import sys
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("torch", "pandas"):
            raise ImportError(f"{name} is refused")
sys.meta_path.insert(0, Refuse())
from llmprof.cli import main
code = main(sys.argv[1:])
assert "torch" not in sys.modules and "pandas" not in sys.modules
sys.exit(code)
"""


@pytest.fixture
def run(tmp_path: Path) -> Path:
    profile = msgspec.structs.replace(measured(ranks=1, layout="dp=1"), workload=workload())
    save_profile(profile, tmp_path / "run")
    return tmp_path / "run"


def test_forecast_prints_one_object_with_the_promised_keys(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["forecast", str(run), *ON_H100, "--gpus", "4", "--layout", "dp=4", "--json"]) == 0
    (forecast,) = objects(capsys)
    assert set(forecast) >= FORECAST_KEYS
    parts, step = forecast["breakdown_s"], forecast["step_time_s"]
    assert isinstance(parts, dict)
    assert isinstance(step, dict)
    assert set(parts) == BREAKDOWN_KEYS
    assert sum(parts.values()) == pytest.approx(step["p50"], rel=1e-9)
    assert step["p10"] <= step["p50"] <= step["p90"]
    assert (forecast["gpus"], forecast["verdict"]) == (4, "fits")


def test_several_layouts_are_compared(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["forecast", str(run), *ON_H100, "--layout", "dp=2", "--layout", "dp=2,pp=2"]
    assert cli.main([*arguments, "--json"]) == 0
    (answer,) = objects(capsys)
    forecasts = answer["forecasts"]
    assert isinstance(forecasts, list)
    assert [f["gpus"] for f in forecasts] == [2, 4]
    assert answer["best"] == best_forecast(forecasts)["layout"]  # type: ignore[index]
    assert cli.main(arguments) == 0
    text = capsys.readouterr().out
    assert f"Book this one: {answer['best']}" in text
    assert max(len(line) for line in text.splitlines()) <= 80


def test_forecast_text_says_what_it_rests_on(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["forecast", str(run), *ON_H100, "--layout", "dp=4", "--tokens", "1B"]) == 0
    text = capsys.readouterr().out
    first = next(line for line in text.splitlines() if line.strip())
    assert first.startswith("spec-sheet estimate")
    for word in ("Step time", "MFU", "fits", "naive", "bound", "assumed", "4 x H100", "1.00 G tokens"):
        assert word in text
    assert max(len(line) for line in text.splitlines()) <= 80


def test_nothing_that_fits_is_no_answer_but_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save_workload(workload(hidden=65536), tmp_path / "large.json")
    arguments = ["forecast", str(tmp_path / "large.json"), *ON_H100, "--layout", "dp=2", "--layout", "dp=8"]
    assert cli.main(arguments) == 3
    assert "None of these fits into memory" in capsys.readouterr().out
    assert cli.main([*arguments, "--json"]) == 3
    (answer,) = objects(capsys)
    assert answer["best"] is None
    assert cli.main([*arguments, "--layout", "dp=64,zero=3", "--json"]) == 0
    assert objects(capsys)[0]["best"] == "dp=64,zero=3"


def test_a_workload_file_can_be_forecast(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_workload(workload(), tmp_path / "model.json")
    assert cli.main(["forecast", str(tmp_path / "model.json"), *ON_H100, "--layout", "dp=4", "--json"]) == 0
    (forecast,) = objects(capsys)
    assert forecast["measured_fraction"] == 0


def test_a_saved_forecast_is_a_run_like_any_other(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    saved = tmp_path / "predicted"
    assert cli.main(["forecast", str(run), *ON_H100, "--layout", "dp=4", "--save", str(saved), "--json"]) == 0
    (forecast,) = objects(capsys)
    profile = load_profile(saved)
    assert profile.manifest.kind == "predicted"
    assert profile.manifest.forecast == forecast
    assert cli.main(["show", str(saved), "--json"]) == 0
    (report,) = objects(capsys)
    phases, step = report["phases"], report["step_time_us"]
    assert isinstance(phases, dict)
    assert isinstance(step, dict)
    assert step["median"] == pytest.approx(1e6 * forecast["step_time_s"]["p50"])  # type: ignore[index]
    assert sum(phases.values()) == pytest.approx(step["median"])
    assert report["mfu"] == forecast["mfu"]
    assert cli.main(["compare", str(saved), str(run), "--json"]) == 0
    (comparison,) = objects(capsys)
    assert comparison["step_time_ape"] == pytest.approx(abs(step["median"] - 1000.0) / 1000.0)
    assert cli.main(["export", str(saved), "--chrome", str(tmp_path / "t.json"), "--json"]) == 0
    assert json.loads((tmp_path / "t.json").read_bytes())["traceEvents"]


def test_several_saved_forecasts_lie_side_by_side(run: Path, tmp_path: Path) -> None:
    layouts = ["--layout", "dp=2", "--layout", "dp=2,pp=2"]
    assert (
        cli.main(["forecast", str(run), *ON_H100, *layouts, "--save", str(tmp_path / "many"), "--json"]) == 0
    )
    assert sorted(p.name for p in (tmp_path / "many").iterdir()) == ["dp=2", "dp=2,pp=2"]


@pytest.mark.parametrize(
    "arguments", [["show", "RUN"], ["show", "RUN", "--json"], ["compare", "RUN", "RUN"]], ids=" ".join
)
def test_commands_work_where_torch_and_pandas_cannot_be_imported(arguments: list[str], run: Path) -> None:
    done = start(*(str(run) if a == "RUN" else a for a in arguments), code=WITHOUT_TORCH)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("as_json", [True, False])
def test_forecast_works_where_torch_and_pandas_cannot_be_imported(
    as_json: bool, run: Path, tmp_path: Path
) -> None:
    options = ["--layout", "dp=4", "--save", str(tmp_path / "saved"), "--tb", str(tmp_path / "tb")]
    done = start(
        "forecast", str(run), *ON_H100, *options, *(["--json"] if as_json else []), code=WITHOUT_TORCH
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert list((tmp_path / "tb").rglob("events.out.tfevents.*"))
    if as_json:
        assert json.loads(done.stdout)["gpus"] == 4


@pytest.mark.parametrize(
    ("text", "tokens"), [("300B", 3e11), ("1.5e12", 1.5e12), ("2T", 2e12), ("10k", 1e4), ("7", 7.0)]
)
def test_numbers_of_tokens(text: str, tokens: float) -> None:
    assert number_of_tokens(text) == pytest.approx(tokens)


def _forecast(layout: str, step_s: float, *, batch: int = 8, verdict: str = "fits") -> dict[str, object]:
    spread = {"p10": 0.9 * step_s, "p50": step_s, "p90": 1.1 * step_s}
    return {"layout": layout, "step_time_s": spread, "global_batch": batch, "verdict": verdict}


def test_the_best_is_the_fastest_per_sequence_that_fits() -> None:
    forecasts = [
        _forecast("slow", 2.0),
        _forecast("too large", 0.5, verdict="oom"),
        _forecast("large batch", 3.0, batch=16),
        _forecast("fast", 1.8, verdict="tight"),
    ]
    assert [f["layout"] for f in rank_forecasts(forecasts)] == ["large batch", "fast", "slow", "too large"]
    assert best_forecast(forecasts) is forecasts[2]
    assert best_forecast(forecasts[1:2]) is None
