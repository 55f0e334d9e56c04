"""The example trains the same numbers with and without capture, to the last bit."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
EXAMPLE = ROOT / "examples" / "train_llama.py"
SIZES = {"layers": 2, "hidden": 32, "heads": 4, "kv-heads": 2, "ffn": 64, "seq": 32, "batch": 4}
TINY = ["--steps=13", "--device=cpu", *(f"--{name}={size}" for name, size in SIZES.items())]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]


def train(parallel: str, directory: Path, *, capture: bool) -> list[str]:
    """Runs the example in a directory of its own; returns its lines about losses."""
    directory.mkdir()
    launcher = [sys.executable] if parallel == "none" else TORCHRUN
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "LLMPROF": "1" if capture else "0"}
    answer = subprocess.run(
        [*launcher, str(EXAMPLE), *TINY, "--parallel", parallel],
        cwd=directory,
        env=environment,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert answer.returncode == 0, answer.stdout + answer.stderr
    return [line for line in answer.stdout.splitlines() if "loss" in line]


@pytest.mark.parametrize("parallel", ["none", "ddp", "fsdp2"])
def test_losses_are_bitwise_equal_with_and_without_capture(parallel: str, tmp_path: Path) -> None:
    plain = train(parallel, tmp_path / "plain", capture=False)
    captured = train(parallel, tmp_path / "captured", capture=True)
    assert len(plain) == 14
    assert "0x1." in plain[-1]
    assert captured == plain
    assert not (tmp_path / "plain" / "runs").exists()
    assert (tmp_path / "captured" / "runs" / "llama").is_dir()


def test_the_decorator_is_the_only_line_of_llmprof() -> None:
    tree = ast.parse(EXAMPLE.read_text(encoding="utf-8"))
    uses = [node for node in ast.walk(tree) if isinstance(node, ast.Name) and node.id == "llmprof"]
    (train_function,) = (
        node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.name == "train"
    )
    assert len(uses) == 1
    assert uses[0] in list(ast.walk(train_function.decorator_list[0]))
