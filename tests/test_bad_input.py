"""Wrong input: one clear line, exit code 2, no traceback; with --json one object on stdout."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from llmprof.cli import main
from llmprof.schema.store import save_profile
from tests.profiles import measured

Damage = Callable[[Path], None]


def _truncate(name: str, keep: float) -> Damage:
    def damage(run: Path) -> None:
        file = run / "rank-00000" / name
        file.write_bytes(file.read_bytes()[: int(file.stat().st_size * keep)])

    return damage


def _overwrite(name: str, data: bytes) -> Damage:
    def damage(run: Path) -> None:
        (run / name).write_bytes(data)

    return damage


def _remove(name: str) -> Damage:
    return lambda run: (run / "rank-00000" / name).unlink()


DAMAGES: dict[str, Damage] = {
    "tables cut in half": _truncate("tables.npz", 0.5),
    "tables cut at the end": _truncate("tables.npz", 0.99),
    "tables empty": _truncate("tables.npz", 0.0),
    "tables are garbage": _overwrite("rank-00000/tables.npz", bytes(range(256)) * 40),
    "tables missing": _remove("tables.npz"),
    "manifest cut in half": _truncate("manifest.json", 0.5),
    "manifest empty": _truncate("manifest.json", 0.0),
    "manifest is garbage": _overwrite("rank-00000/manifest.json", b"\xff\xfe\x00" * 100),
    "manifest is other JSON": _overwrite("rank-00000/manifest.json", b"[1, 2]"),
    "manifest is deep": _overwrite("rank-00000/manifest.json", b'{"forecast":{"a":' + b"[" * 100_000),
    "manifest is of a newer version": _overwrite("rank-00000/manifest.json", b'{"version": 99}'),
    "manifest missing": _remove("manifest.json"),
    "workload is garbage": _overwrite("workload.json", b"{"),
}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    save_profile(measured(ranks=1), tmp_path / "run")
    return tmp_path / "run"


def fails_clearly(arguments: list[str], capsys: pytest.CaptureFixture[str], *, kind: str) -> str:
    """Run twice, as text and as JSON; returns the message. Every complaint must have the same form."""
    assert main(arguments) == 2
    text = capsys.readouterr()
    assert text.out == ""
    lines = text.err.splitlines()
    assert lines[0].startswith("llmprof: ")
    assert len(lines) <= 2
    assert all(line.startswith("hint: ") for line in lines[1:])
    assert main([*arguments, "--json"]) == 2
    output = capsys.readouterr()
    assert output.err == ""
    error = json.loads(output.out)["error"]
    assert set(error) == {"kind", "message", "hint"}
    assert error["kind"] == kind
    assert lines[0] == f"llmprof: {' '.join(error['message'].split())}"
    return str(error["message"])


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES.keys())
def test_a_torn_run(damage: Damage, run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    damage(run)
    kind = "workload" if (run / "workload.json").exists() else "run"
    message = fails_clearly(["show", str(run)], capsys, kind=kind)
    assert str(run) in message


def test_tables_that_are_a_zip_of_nothing(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (run / "rank-00000" / "tables.npz").write_bytes(b"PK\x05\x06" + b"\0" * 18)
    assert "no step was seen" in fails_clearly(["show", str(run)], capsys, kind="run")


@pytest.mark.parametrize("name", ["tables.npz", "manifest.json"])
def test_flipped_bytes_are_never_our_fault(name: str, run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = run / "rank-00000" / name
    intact = file.read_bytes()
    dice = random.Random(name)
    codes = set()
    for _ in range(100):
        damaged = bytearray(intact)
        for _ in range(dice.choice([1, 1, 3, 20])):
            damaged[dice.randrange(len(damaged))] = dice.randrange(256)
        file.write_bytes(damaged)
        codes.add(main(["show", str(run)]))
        assert "internal error" not in capsys.readouterr().err
    assert codes <= {0, 2}
    assert 2 in codes


@pytest.mark.parametrize("duration_us", [0.0, -1.0, float("nan"), float("inf")])
def test_impossible_durations(duration_us: float, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    profile = measured(ranks=1)
    steps = tuple(msgspec.structs.replace(s, duration_us=duration_us) for s in profile.steps)
    save_profile(msgspec.structs.replace(profile, steps=steps), tmp_path / "run")
    fails_clearly(["show", str(tmp_path / "run")], capsys, kind="run")
    fails_clearly(["compare", str(tmp_path / "run"), str(tmp_path / "run")], capsys, kind="run")


@pytest.mark.parametrize("command", ["show", "export", "compare", "forecast"])
@pytest.mark.parametrize("what", ["missing", "empty", "file"])
def test_not_a_run(command: str, what: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / what
    if what == "empty":
        path.mkdir()
    elif what == "file":
        path.write_bytes(b"\x80\x04garbage")
    rest = {
        "export": ["--chrome", str(tmp_path / "out.json")],
        "compare": [str(path)],
        "forecast": ["--cluster", "8xH100-SXM", "--layout", "dp=1"],
    }
    message = fails_clearly([command, str(path), *rest.get(command, [])], capsys, kind="run")
    assert str(path) in message
    assert not (tmp_path / "out.json").exists()


def test_a_run_in_which_no_step_was_seen(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    empty = msgspec.structs.replace(measured(ranks=1), steps=(), phases=(), operators=(), spans=(), memory=())
    save_profile(empty, tmp_path / "run")
    assert "no step was seen" in fails_clearly(["show", str(tmp_path / "run")], capsys, kind="run")


def test_an_empty_trace(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_profile(msgspec.structs.replace(measured(ranks=1), spans=()), tmp_path / "run")
    arguments = ["export", str(tmp_path / "run"), "--chrome", str(tmp_path / "out.json")]
    assert "no timeline" in fails_clearly(arguments, capsys, kind="request")


@pytest.mark.parametrize(
    ("gpus", "layout", "message", "hint"),
    [
        (32, "dp=3,tp=4,pp=2", "dp 3 x tp 4 x pp 2 = 24, but 32 GPUs were asked", "set dp=4"),
        (64, "dp=8,tp=4", "dp 8 x tp 4 = 32, but 64 GPUs were asked", "set dp=16"),
        (8, "dp=1", "dp 1 = 1, but 8 GPUs were asked", "set dp=8"),
        (
            12,
            "dp=2,tp=8",
            "dp 2 x tp 8 = 16, but 12 GPUs were asked",
            "12 is not a multiple of 8; for example dp=2,tp=6",
        ),
    ],
)
def test_a_layout_that_does_not_multiply_out(
    gpus: int, layout: str, message: str, hint: str, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["forecast", str(run), "--cluster", "8xH100-SXM", "--gpus", str(gpus), "--layout", layout]
    assert fails_clearly(arguments, capsys, kind="layout") == message
    main(arguments)
    assert f"hint: {hint}\n" in capsys.readouterr().err


def test_the_suggested_degree_minds_the_sharding_group(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [
        "forecast",
        str(run),
        "--cluster",
        "8xH100-SXM",
        "--gpus",
        "12",
        "--layout",
        "dp=8,zero=3,shard=8",
    ]
    main(arguments)
    assert "hint: set dp=12 (and mind that shard=8 does not divide dp=12" in capsys.readouterr().err


@pytest.mark.parametrize("layout", ["dp=two", "fsdp=2", "", "dp=2,dp=4", "dp=0", "dp=2,shard=2"])
def test_a_layout_that_does_not_parse(layout: str, run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fails_clearly(
        ["forecast", str(run), "--cluster", "8xH100-SXM", "--layout", layout], capsys, kind="layout"
    )


def test_an_unknown_cluster(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["forecast", str(run), "--cluster", "8xH100-SMX", "--layout", "dp=8"]
    assert "8xH100-SMX" in fails_clearly(arguments, capsys, kind="cluster")
    main(arguments)
    assert "did you mean 8xH100-SXM?" in capsys.readouterr().err


def test_a_cluster_file_that_is_not_there(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fails_clearly(
        ["forecast", str(run), "--cluster", "no/such.json", "--layout", "dp=8"], capsys, kind="cluster"
    )


def test_a_run_without_a_workload_cannot_be_forecast(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fails_clearly(
        ["forecast", str(run), "--cluster", "8xH100-SXM", "--layout", "dp=8"], capsys, kind="workload"
    )


@pytest.mark.parametrize(
    "arguments",
    [
        ["show"],
        ["no-such-command"],
        ["show", "x", "--top", "0"],
        ["show", "x", "--top", "many"],
        ["show", "x", "--no-such-option"],
        ["forecast", "x", "--layout", "dp=1"],
        ["forecast", "x", "--cluster", "8xH100-SXM", "--layout", "dp=1", "--gpus", "-3"],
        ["forecast", "x", "--cluster", "8xH100-SXM", "--layout", "dp=1", "--tokens", "lots"],
        ["export", "x"],
    ],
    ids=" ".join,
)
def test_wrong_arguments(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    fails_clearly(arguments, capsys, kind="request")


def test_a_place_that_cannot_be_written(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("in the way")
    arguments = ["export", str(run), "--chrome", str(tmp_path / "file" / "out.json")]
    assert "cannot use" in fails_clearly(arguments, capsys, kind="file")


def test_torch_tb_needs_a_raw_trace(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["export", str(run), "--torch-tb", str(tmp_path / "tb")]
    assert "kept no raw trace" in fails_clearly(arguments, capsys, kind="request")
    assert not (tmp_path / "tb").exists()


@pytest.mark.parametrize("data", [b"", b"not gzip", b"\x1f\x8b\x08\x00torn", b"{}"])
def test_torn_raw_traces(data: bytes, run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (run / "rank-00000" / "trace.json.gz").write_bytes(data)
    fails_clearly(["export", str(run), "--torch-tb", str(tmp_path / "tb")], capsys, kind="run")
    assert not list((tmp_path / "tb").glob("*"))


@pytest.mark.parametrize("as_json", [False, True])
def test_no_traceback_in_a_real_process(as_json: bool, tmp_path: Path) -> None:
    arguments = ["show", str(tmp_path / "nowhere"), *(["--json"] if as_json else [])]
    done = subprocess.run(
        [sys.executable, "-m", "llmprof", *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "COLUMNS": "80"},
        check=False,
    )
    assert done.returncode == 2
    assert "Traceback" not in done.stderr + done.stdout
    if as_json:
        assert json.loads(done.stdout)["error"]["kind"] == "run"
    else:
        assert done.stderr.splitlines()[0] == f"llmprof: there is no run at {tmp_path / 'nowhere'}"
