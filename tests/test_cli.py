"""The command line as a program: exit codes, one JSON object, pipes, interrupts, and forecasting without torch."""

from __future__ import annotations

import gzip
import json
import os
import signal
import subprocess
import sys
import types
from pathlib import Path

import msgspec
import pytest

from llmprof import cli
from llmprof.commands import COMMANDS, doctor
from llmprof.commands.request import number_of_tokens
from llmprof.report import torch_tb
from llmprof.report.ranking import best_forecast, rank_forecasts
from llmprof.report.torch_tb import export_torch_tb
from llmprof.schema.store import RunWriter, load_profile, save_profile, save_workload
from tests.profiles import measured, workload

FORECAST_KEYS = {
    "layout", "gpus", "global_batch", "step_time_s", "tokens_per_s", "naive_step_time_s",
    "second_baseline_step_time_s", "bound_step_time_s", "breakdown_s", "mfu", "peak_memory_bytes", "verdict",
    "oom_probability", "measured_fraction", "interpolated_fraction", "assumed_fraction", "assumptions", "cost",
    "energy_j_per_step",
}  # fmt: skip
BREAKDOWN_KEYS = {
    "compute", "recompute", "tp", "cp", "ep", "dp", "pp", "bubble", "optimizer", "host", "input", "straggler",
}  # fmt: skip
SHOW_KEYS = {
    "ranks", "step_time_us", "attributed_fraction", "root_fraction", "phases", "tokens_per_s", "mfu",
    "peak_memory_bytes", "operators", "collectives", "warnings",
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


def start(*arguments: str, code: str = "") -> subprocess.CompletedProcess[str]:
    """Run the command line, or other code with the same arguments, in a process of its own."""
    program = ["-c", code] if code else ["-m", "llmprof"]
    return subprocess.run(
        [sys.executable, *program, *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "COLUMNS": "80"},
        check=False,
    )


def objects(capsys: pytest.CaptureFixture[str]) -> list[dict[str, object]]:
    """Every JSON object on stdout; nothing else may be there."""
    text, found = capsys.readouterr().out, []
    decoder = json.JSONDecoder()
    while text.strip():
        value, end = decoder.raw_decode(text.lstrip())
        found.append(value)
        text = text.lstrip()[end:]
    return found


def test_version_and_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("llmprof ")
    for arguments in ([], ["--help"]):
        assert cli.main(arguments) == 0
        text = capsys.readouterr().out
        assert all(f"\n  {name} " in text for name in COMMANDS)


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_help(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([name, "--help"]) == 0
    assert f"usage: llmprof {name}" in capsys.readouterr().out


def test_show_prints_one_object_with_the_promised_keys(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["show", str(run), "--json"]) == 0
    (report,) = objects(capsys)
    assert set(report) >= SHOW_KEYS
    operators = report["operators"]
    assert isinstance(operators, list)
    assert set(operators[0]) >= {
        "op", "family", "module", "phase", "count", "time_us", "exclusive_us", "flops", "bytes",
    }  # fmt: skip
    assert report["step_time_us"] == {"median": 1000.0, "iqr": 0.0, "n": 12}


def test_top_and_by_and_depth(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["show", str(run), "--json", "--top", "2", "--by", "module", "--depth", "1"]) == 0
    (report,) = objects(capsys)
    assert len(report["operators"]) == 2  # type: ignore[arg-type]
    assert [g["key"] for g in report["groups"]] == ["layers", "optimizer"]  # type: ignore[attr-defined]


def test_a_partial_run_is_shown_and_says_so(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    profile = measured(ranks=1)
    manifest = msgspec.structs.replace(profile.manifest, status="partial")
    save_profile(msgspec.structs.replace(profile, manifest=manifest), run)
    assert cli.main(["show", str(run)]) == 0
    assert "the run is partial" in capsys.readouterr().out


def test_a_run_that_was_killed_is_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    whole = measured(ranks=1, steps=5)
    writer = RunWriter(tmp_path / "run", 0)
    writer.begin(whole.manifest)
    for row in whole.steps[:5]:
        writer.journal(row)
    writer.close()
    with (writer.directory / "journal.jsonl").open("ab") as journal:
        journal.write(b'{"rank":0,"step":5,"sta')
    assert cli.main(["show", str(tmp_path / "run"), "--json"]) == 0
    (report,) = objects(capsys)
    assert report["step_time_us"] == {"median": 1000.0, "iqr": 0.0, "n": 5}
    assert report["phases"] == {}
    assert "the run is partial: it ended before it was closed" in report["warnings"]  # type: ignore[operator]
    assert cli.main(["show", str(tmp_path / "run")]) == 0


def test_a_directory_of_runs_names_the_newest(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["show", str(run.parent)]) == 2
    assert f"hint: it holds runs, the newest is {run}" in capsys.readouterr().err


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


def test_export_writes_a_timeline_compressed_by_suffix(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plain, packed = tmp_path / "sub" / "t.json", tmp_path / "t.json.gz"
    assert cli.main(["export", str(run), "--chrome", str(plain)]) == 0
    assert cli.main(["export", str(run), "--chrome", str(packed)]) == 0
    assert f"wrote {packed}" in capsys.readouterr().out
    assert json.loads(gzip.decompress(packed.read_bytes())) == json.loads(plain.read_bytes())


def test_export_rewrites_raw_traces_for_torch_tb_profiler(run: Path, tmp_path: Path) -> None:
    events = [
        {"ph": "X", "cat": "cuda_runtime", "name": "cudaLaunchKernel", "ts": 1, "dur": 2},
        {"ph": "X", "cat": "user_annotation", "name": "nccl:_all_gather_base", "ts": 1, "dur": 2},
        {"ph": "X", "cat": "kernel", "name": "gemm", "ts": 1, "dur": 2},
    ]
    raw = run / "rank-00000" / "trace.json.gz"
    raw.write_bytes(gzip.compress(json.dumps({"traceEvents": events}).encode()))
    before = raw.read_bytes()
    assert cli.main(["export", str(run), "--torch-tb", str(tmp_path / "tb")]) == 0
    (file,) = (tmp_path / "tb" / "tiny").iterdir()
    assert file.name.startswith("node0_00000.")
    assert file.name.endswith(".pt.trace.json.gz")
    written = json.loads(gzip.decompress(file.read_bytes()))["traceEvents"]
    assert [(e["cat"], e["name"]) for e in written] == [
        ("Runtime", "cudaLaunchKernel"),
        ("user_annotation", "nccl:all_gather"),
        ("kernel", "gemm"),
    ]
    assert raw.read_bytes() == before
    assert cli.main(["export", str(run), "--torch-tb", str(tmp_path / "tb")]) == 2


def test_doctor(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["doctor", "--json"]) == 0
    (found,) = objects(capsys)
    assert found["versions"]["torch"]  # type: ignore[index]
    checks = {c["name"]: c for c in found["checks"]}  # type: ignore[attr-defined]
    assert checks["capture"]["ok"]
    assert "internet" in checks["PyTorch Profiler tab"]["detail"]
    assert all(c["ok"] or c["hint"] for c in checks.values())


def test_doctor_where_torch_cannot_be_imported(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(doctor, "_PROBE", "raise ImportError('libtorch.so is missing')")
    assert cli.main(["doctor"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "libtorch.so is missing" in text
    assert "forecast, show and compare still work" in text


def test_only_telling_ranks_are_exported_to_torch_tb_profiler(tmp_path: Path) -> None:
    profile = measured(ranks=4, layout="dp=4")  # rank r is r us slower
    save_profile(profile, tmp_path / "run")
    packed = gzip.compress(b'{"traceEvents": []}')
    for rank in range(4):
        (tmp_path / "run" / f"rank-{rank:05d}" / "trace.json.gz").write_bytes(packed)
    files = export_torch_tb(tmp_path / "run", profile, tmp_path / "tb")
    assert [f.name.split(".")[0] for f in files] == ["node0_00000", "node0_00003"]


def test_a_trace_too_large_for_the_tab_is_refused(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch_tb, "MAX_TRACE_BYTES", 100)
    packed = gzip.compress(json.dumps({"traceEvents": [{}] * 100}).encode())
    (run / "rank-00000" / "trace.json.gz").write_bytes(packed)
    assert cli.main(["export", str(run), "--torch-tb", str(tmp_path / "tb")]) == 2
    assert "too much for the tab" in capsys.readouterr().err
    assert not list((tmp_path / "tb").iterdir())


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


def test_output_that_is_no_terminal_has_no_escape_codes(run: Path) -> None:
    for arguments in (["show", str(run)], ["show", "nowhere"], ["compare", str(run), str(run)]):
        done = start(*arguments)
        assert "\x1b" not in done.stdout + done.stderr


def test_an_ascii_terminal_is_no_reason_to_fail(run: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "llmprof", "show", str(run)],
        capture_output=True,
        timeout=60,
        env={**os.environ, "PYTHONIOENCODING": "ascii", "COLUMNS": "80"},
        check=True,
    )
    assert b"####" in done.stdout
    done.stdout.decode("ascii")


def test_a_reader_that_leaves_is_no_error(run: Path) -> None:
    done = subprocess.run(
        ["bash", "-c", f"set -o pipefail; '{sys.executable}' -m llmprof show '{run}' --json | head -c 1"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")


def _command(name: str, execute: object) -> types.ModuleType:
    module = types.ModuleType(f"llmprof.commands.{name}")
    module.SUMMARY = "stands in"  # type: ignore[attr-defined]
    module.add_arguments = lambda parser: parser.add_argument("--json", action="store_true")  # type: ignore[attr-defined]
    module.execute = execute  # type: ignore[attr-defined]
    return module


def _raise(error: BaseException) -> object:
    def execute(args: object) -> int:
        raise error

    return execute


def test_our_own_fault(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    module = _command("doctor", _raise(KeyError("lost\nkey")))
    monkeypatch.setitem(sys.modules, "llmprof.commands.doctor", module)
    assert cli.main(["doctor"]) == 1
    text = capsys.readouterr()
    assert text.err.splitlines()[0].startswith("llmprof: internal error: KeyError:")
    assert "LLMPROF_DEBUG=1" in text.err
    assert "Traceback" not in text.err
    assert cli.main(["doctor", "--json"]) == 1
    (answer,) = objects(capsys)
    assert answer["error"]["kind"] == "internal"  # type: ignore[index]
    monkeypatch.setenv("LLMPROF_DEBUG", "1")
    assert cli.main(["doctor"]) == 1
    assert "Traceback" in capsys.readouterr().err


def test_ctrl_c(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(
        sys.modules, "llmprof.commands.doctor", _command("doctor", _raise(KeyboardInterrupt()))
    )
    assert cli.main(["doctor"]) == 128 + signal.SIGINT
    assert capsys.readouterr().err == "llmprof: interrupted\n"


def test_json_after_the_separator_belongs_to_the_script() -> None:
    assert cli._wants_json(["show", "x", "--json"])
    assert not cli._wants_json(["run", "--", "train.py", "--json"])


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
