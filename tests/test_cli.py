"""The command line as a program: exit codes, one JSON object, pipes, interrupts, and forecasting without torch."""

from __future__ import annotations

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
from llmprof.schema.store import RunWriter, save_profile
from tests.profiles import measured, workload
from tests.programs import objects, start

SHOW_KEYS = {
    "ranks", "step_time_us", "attributed_fraction", "root_fraction", "phases", "tokens_per_s", "mfu",
    "peak_memory_bytes", "operators", "collectives", "warnings",
}  # fmt: skip


@pytest.fixture
def run(tmp_path: Path) -> Path:
    profile = msgspec.structs.replace(measured(ranks=1, layout="dp=1"), workload=workload())
    save_profile(profile, tmp_path / "run")
    return tmp_path / "run"


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
