"""Workload files that contradict themselves, requests that would never end: one line, exit code 2."""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from llmprof.cli import main
from llmprof.schema.catalogue import load_cluster
from llmprof.schema.store import save_workload
from tests.profiles import workload

Change = Callable[[Any], object]


def refusal(capsys: pytest.CaptureFixture[str], subject: Path, layout: str = "dp=8") -> str:
    assert main(["forecast", str(subject), "--cluster", "8xH100-SXM", "--layout", layout]) == 2
    printed = capsys.readouterr()
    assert printed.out == "" and len(printed.err.splitlines()) <= 2
    return printed.err


@pytest.fixture
def file(tmp_path: Path) -> Path:
    save_workload(workload(), tmp_path / "workload.json")
    return tmp_path / "workload.json"


def _each_op(**values: object) -> Change:
    return lambda w: [op.update(values) for op in w["classes"][0]["layers"]["block0"]["ops"]]


def _first_tensor(w: Any) -> Any:
    return w["classes"][0]["layers"]["block0"]["ops"][0]["inputs"][0]


CHANGES: dict[str, tuple[Change, str]] = {
    "no layers": (lambda w: w.update(layers=[]), "names the layer 'prologue', but its layers are none"),
    "no sequence": (lambda w: w.update(sequence=[]), "has no layers"),
    "an unknown layer": (lambda w: w["sequence"].append(["nope", 1]), "names the layer 'nope'"),
    "endless layers": (lambda w: w["sequence"].append(["block0", 10**9]), "count of 'block0' is 1000000000"),
    "a negative count": (lambda w: w["sequence"].append(["block0", -1]), "count of 'block0' is -1"),
    "a class without layers": (lambda w: w["classes"][0].update(layers={}), "no trace of layer 'prologue'"),
    "a class of no rank": (lambda w: w["classes"][0].update(tp=0), "tp of class tp=0 is 0"),
    "twice one layer": (lambda w: w["layers"].append(w["layers"][0]), "have one name"),
    "an unknown kind": (lambda w: w["layers"][0].update(kind="middle"), "has kind 'middle'"),
    "no batch": (lambda w: w.update(batch=0), "batch is 0"),
    "endless state": (lambda w: w.update(optimizer={"state_slots": 10**12}), "state_slots is"),
    "no calls": (_each_op(count=0), "count of 'aten::mm' is 0"),
    "endless calls": (_each_op(count=10**25), "count of 'aten::mm' is"),
    "a negative dimension": (lambda w: _first_tensor(w).__setitem__(0, [4, -1]), "a dimension of 'aten::mm'"),
    "a division by zero": (
        lambda w: _first_tensor(w).__setitem__(0, [[0, 0, 0, 1, 0, 0, 0], 64]),
        "a dimension of 'aten::mm'",
    ),
    "a parameter too many": (
        lambda w: w["classes"][0]["layers"]["block0"]["parameters"].append([1]),
        "has 2 parameters in layer 'block0', which has 1",
    ),
    "a negative parameter": (
        lambda w: w["layers"][1]["parameters"][0].update(shape=[-1]),
        "a dimension of block0.weight is -1",
    ),
}


@pytest.mark.parametrize(("change", "rule"), CHANGES.values(), ids=CHANGES.keys())
def test_a_workload_that_contradicts_itself(
    change: Change, rule: str, file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    content = copy.deepcopy(json.loads(file.read_text()))
    change(content)
    file.write_text(json.dumps(content))
    message = refusal(capsys, file)
    assert rule in message


@pytest.mark.parametrize("layout", ["accum=9999999", "pp=4,accum=20000"])
def test_a_step_of_too_many_microbatches(layout: str, file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "passes in a step, more than the 65536" in refusal(capsys, file, layout)


def test_a_named_pipe_is_no_file_of_ours(
    file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pipe = tmp_path / "pipe.json"
    os.mkfifo(pipe)
    assert main(["forecast", str(file), "--cluster", str(pipe), "--layout", "dp=1"]) == 2
    assert "not a file" in capsys.readouterr().err


def test_a_path_that_is_not_text(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", "--json", "run-\udcff"]) == 2
    assert json.loads(capsys.readouterr().out)["error"]["message"] == "there is no run at run-?"


@pytest.mark.parametrize("as_json", [False, True])
def test_a_message_does_not_repeat_all_that_was_typed(
    as_json: bool, file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["forecast", str(file), "--cluster", "8xH100-SXM", "--layout", "a" * 100_000]
    assert main([*arguments, *(["--json"] if as_json else [])]) == 2
    printed = capsys.readouterr()
    assert len(printed.out + printed.err) < 2500 and "unknown key" in printed.out + printed.err


def test_an_empty_parameter_is_no_fault(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    content = json.loads(file.read_text())
    for shape in (layer := content["classes"][0]["layers"]["block0"])["parameters"]:
        shape[0] = 0
    assert layer["parameters"]
    file.write_text(json.dumps(content))
    assert main(["forecast", str(file), "--cluster", "8xH100-SXM", "--layout", "dp=8", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["step_time_s"]["p50"] > 0


@pytest.mark.parametrize(
    "option", [["--seq", "1" + "0" * 300], ["--global-batch", "8" * 400], ["--tokens", "1e300"]]
)
def test_numbers_beyond_any_run(option: list[str], file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["forecast", str(file), "--cluster", "8xH100-SXM", "--layout", "dp=8", *option]) == 2
    printed = capsys.readouterr()
    assert printed.out == "" and "more than the" in printed.err


def test_a_name_in_a_file_cannot_command_the_terminal(
    file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cluster = json.loads(msgspec.json.encode(load_cluster("8xH100-SXM")))
    cluster["device"]["name"] = cluster["price"]["source"] = "H100\x1b[31m\x9b31m"
    (tmp_path / "cluster.json").write_text(json.dumps(cluster))
    asked = ["forecast", str(file), "--cluster", str(tmp_path / "cluster.json"), "--layout", "dp=8"]
    assert main(asked) == 0 and main([*asked, "--json"]) == 0
    printed = capsys.readouterr().out
    assert "H100" in printed and not set("\x1b\x9b") & set(printed)
