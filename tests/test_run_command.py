"""`llmprof run` around scripts, modules and launchers: what the script sees, its exit code, and the run that is kept."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

import llmprof
from llmprof.errors import RequestError
from llmprof.hooks.launch import parse_target

SCRIPT = """
import sys
assert "torch" not in sys.modules, "torch must not be imported before the script does it"
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(16, 8), nn.Linear(8, 16)
    def forward(self, tokens):
        return self.head(self.embed(tokens))

def main():
    torch.set_num_threads(1)
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(8):
        tokens = torch.randint(0, 16, (2, 4))
        model(tokens).mean().backward()
        optimizer.step()
    print("argv", *sys.argv[1:], "path", sys.path[0], __name__)
    if "--fail" in sys.argv:
        raise ValueError("of the script")
    if "--exit" in sys.argv:
        sys.exit(int(sys.argv[-1]))

if __name__ == "__main__":
    main()
"""

WINDOW = ["--wait", "2", "--warmup", "1", "--active", "2", "--no-workload"]
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "LLMPROF": "1"}


def llmprof_run(*words: str, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "llmprof", "run", *words]
    return subprocess.run(
        command,
        cwd=cwd,
        env={**ENVIRONMENT, **environment},
        capture_output=True,
        text=True,
        check=False,
        timeout=200,
    )


@pytest.fixture
def script(tmp_path: Path) -> Path:
    directory = tmp_path / "code"
    directory.mkdir()
    (directory / "train.py").write_text(SCRIPT)
    return directory / "train.py"


def test_a_script_sees_its_own_arguments_and_path(tmp_path: Path, script: Path) -> None:
    done = llmprof_run("-o", "out", *WINDOW, "--", str(script), "--lr", "1", "--", "x", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"argv --lr 1 -- x path {script.parent} __main__\n"
    assert "llmprof show" in done.stderr
    profile = llmprof.load_profile(tmp_path / "out")
    assert len(profile.steps) == 8 and profile.operators


def test_exit_codes_and_tracebacks_are_those_of_the_script(tmp_path: Path, script: Path) -> None:
    done = llmprof_run("-o", "out", *WINDOW, "--json", "--", str(script), "--exit", "7", cwd=tmp_path)
    assert done.returncode == 7, done.stderr
    told = json.loads(done.stdout[done.stdout.index("{") :])
    assert told["exit_code"] == 7 and told["status"] == "complete" and told["steps"] == 8
    failed = llmprof_run("-o", "out", *WINDOW, "--", str(script), "--fail", cwd=tmp_path)
    assert failed.returncode == 1
    assert failed.stderr.rstrip().splitlines()[-1] != "" and "ValueError: of the script" in failed.stderr
    assert "runpy" not in failed.stderr and "launch.py" not in failed.stderr
    assert len(llmprof.load_profile(tmp_path / "out").steps) == 8


def test_a_module_runs_as_python_minus_m_does(tmp_path: Path, script: Path) -> None:
    done = llmprof_run("-o", "out", *WINDOW, "--", "-m", "train", "--lr", "1", cwd=script.parent)
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"argv --lr 1 path {script.parent} __main__\n"
    assert len(llmprof.load_profile(script.parent / "out").steps) == 8


def test_switched_off_the_script_just_runs(tmp_path: Path, script: Path) -> None:
    done = llmprof_run("-o", "out", "--", str(script), cwd=tmp_path, LLMPROF="0")
    assert done.returncode == 0, done.stderr
    assert not (tmp_path / "out").exists()


def test_a_script_without_steps_is_told_so(tmp_path: Path) -> None:
    (tmp_path / "idle.py").write_text("import torch\nprint('idle')\n")
    done = llmprof_run("-o", "out", "--", "idle.py", cwd=tmp_path)
    assert done.returncode == 0
    assert "no step was seen" in done.stderr


def test_torchrun_outside_and_inside(tmp_path: Path, script: Path) -> None:
    """`llmprof run -- torchrun train.py` and `torchrun -m llmprof run -- train.py` capture both ranks."""
    (tmp_path / "sitecustomize.py").write_text("import os\nos.environ['THEIRS'] = 'ran'\n")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    launcher = ["torchrun", "--nproc-per-node", "2", "--master-addr", "127.0.0.1", "--master-port", port]
    checked = script.with_name("checked.py")
    checked.write_text("import os\nassert os.environ['THEIRS'] == 'ran'\n" + SCRIPT)
    outside = llmprof_run(
        "-o", "outside", *WINDOW, "--", *launcher, str(checked), cwd=tmp_path, PYTHONPATH=str(tmp_path)
    )
    assert outside.returncode == 0, outside.stderr
    command = [sys.executable, "-m", "torch.distributed.run", *launcher[1:]]
    command += ["-m", "llmprof", "run", "-o", "inside", *WINDOW, "--", str(script)]
    inside = subprocess.run(
        command, cwd=tmp_path, env=ENVIRONMENT, capture_output=True, text=True, check=False, timeout=200
    )
    assert inside.returncode == 0, inside.stderr
    for name in ("outside", "inside"):
        profile = llmprof.load_profile(tmp_path / name)
        assert profile.manifest.status == "complete"
        assert sorted({row.rank for row in profile.steps}) == [0, 1]
        assert len(profile.steps) == 16


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "nothing to run"),
        (["-m"], "needs the name"),
        (["missing.py"], "no script missing.py"),
        (["no-such-program"], "neither a script nor a program"),
        ([""], "has no name"),
        (["/"], "a directory without __main__.py"),
        (["-m", "no_such_module"], "no module no_such_module"),
        (["-m", "no_such_module.part"], "no module no_such_module"),
        (["-m", ".relative"], "no module .relative"),
    ],
)
def test_what_cannot_be_run_is_refused(words: list[str], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        parse_target(words)


def test_wrong_requests_end_with_exit_code_2(tmp_path: Path) -> None:
    done = llmprof_run("--", "missing.py", cwd=tmp_path)
    assert done.returncode == 2 and "Traceback" not in done.stderr
    done = llmprof_run("--wait", "-3", "--", sys.executable, "-c", "pass", cwd=tmp_path)
    assert done.returncode == 2 and "wait=-3" in done.stderr
