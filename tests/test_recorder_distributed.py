"""Two gloo ranks in DDP, FSDP2, TP and FSDP2 x TP: collectives, local shapes, memory and phases, by hand."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.record_distributed import FFN, HIDDEN, STEPS, TOKENS

ROOT = Path(__file__).parents[1]
PARAMETERS = 2 * 2 * HIDDEN * FFN
BLOCK_BYTES = 2 * HIDDEN * FFN * 4


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    """What each rank of each layout recorded."""
    return {
        layout: run(layout, tmp_path_factory.mktemp(layout)) for layout in ("ddp", "fsdp2", "tp", "fsdp2_tp")
    }


def run(layout: str, directory: Path) -> list[dict[str, Any]]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command += ["-m", "tests.record_distributed", layout, str(directory)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads((directory / f"{rank}.json").read_text()) for rank in range(2)]


def collectives(found: dict[str, Any]) -> Counter[tuple[str, str, int, int]]:
    """Calls per step by (kind, axis, ranks, bytes)."""
    counted = Counter[tuple[str, str, int, int]]()
    for row in found["collectives"]:
        assert row["backend"] == "gloo" and row["dtype"] == "float32" and row["phase"] == "communication"
        assert row["time_us"] > 0
        counted[row["kind"], row["axis"], row["group_size"], row["size_bytes"]] += row["count"]
    return counted


def matmuls(found: dict[str, Any]) -> Counter[tuple[str, str, str]]:
    """Calls per step by (module, phase, shapes)."""
    counted = Counter[tuple[str, str, str]]()
    for row in found["operators"]:
        if row["op"] == "aten::mm":
            counted[row["module"], row["phase"], row["shapes"]] += row["count"]
    return counted


def expected_matmuls(ffn: int) -> Counter[tuple[str, str, str]]:
    t, h, f = TOKENS, HIDDEN, ffn
    expected = Counter[tuple[str, str, str]]()
    for block in "01":
        expected[f"{block}.up", "forward", f"{t}x{h},{h}x{f}"] = 1
        expected[f"{block}.down", "forward", f"{t}x{f},{f}x{h}"] = 1
        expected[f"{block}.up", "backward_weight", f"{f}x{t},{t}x{h}"] = 1
        expected[f"{block}.down", "backward_weight", f"{h}x{t},{t}x{f}"] = 1
        expected[f"{block}.down", "backward_input", f"{t}x{h},{h}x{f}"] = 1
    expected["1.up", "backward_input", f"{t}x{f},{f}x{h}"] = 1  # block 0's input needs no gradient
    return expected


@pytest.mark.parametrize("layout", ["ddp", "fsdp2", "tp", "fsdp2_tp"])
def test_phases_add_up_and_operators_are_attributed(
    recorded: dict[str, list[dict[str, Any]]], layout: str
) -> None:
    for found in recorded[layout]:
        assert found["warnings"] == []
        assert found["attributed_fraction"] >= 0.97
        assert len(found["steps"]) == STEPS
        for number, duration_us in found["steps"]:
            total = sum(row["exclusive_us"] for row in found["phases"] if row["step"] == number)
            assert total == pytest.approx(duration_us, rel=1e-6)
        phase = sum(row["exclusive_us"] for row in found["phases"] if row["phase"] == "communication") / STEPS
        assert sum(row["exposed_us"] for row in found["collectives"]) == pytest.approx(
            phase, rel=1e-6, abs=1e-6
        )
        streams = {span["stream"] for span in found["spans"]}
        assert streams == {"main", "gloo"}


def test_ddp_reduces_the_gradients_once(recorded: dict[str, list[dict[str, Any]]]) -> None:
    for found in recorded["ddp"]:
        assert collectives(found) == {("all_reduce", "dp", 2, 4 * PARAMETERS): 1}
        assert matmuls(found) == expected_matmuls(FFN)
        assert found["memory"]["parameters"] == found["memory"]["gradients"] == 4 * PARAMETERS


def test_fsdp2_gathers_twice_and_scatters_once_per_block(recorded: dict[str, list[dict[str, Any]]]) -> None:
    for found in recorded["fsdp2"]:
        expected = {("all_gather", "dp", 2, BLOCK_BYTES): 2 * 2, ("reduce_scatter", "dp", 2, BLOCK_BYTES): 2}
        assert collectives(found) == expected
        assert {row["module"] for row in found["collectives"]} == {"0", "1"}
        assert matmuls(found) == expected_matmuls(FFN)
        memory = found["memory"]
        assert memory["parameters"] == memory["gradients"] == 4 * PARAMETERS // 2
        assert memory["optimizer"] == 2 * 4 * PARAMETERS // 2 + 4 * 4
        assert {row["module"] for row in found["operators"] if row["op"] == "fsdp::chunk_cat"} == {"0", "1"}


@pytest.mark.parametrize("layout", ["tp", "fsdp2_tp"])
def test_tensor_parallel_blocks_have_local_shapes(
    recorded: dict[str, list[dict[str, Any]]], layout: str
) -> None:
    for found in recorded[layout]:
        assert matmuls(found) == expected_matmuls(FFN // 2)
        # forward: each block's output; backward: the gradient of each block's input, but not of the data
        reduced = {key: n for key, n in collectives(found).items() if key[1] == "tp"}
        assert reduced == {("all_reduce", "tp", 2, TOKENS * HIDDEN * 4): 3}
        assert found["memory"]["parameters"] == 4 * PARAMETERS // 2
        host = {row["name"]: row for row in found["host"]}
        assert host["dtensor_dispatch_us_per_op"]["n"] >= 10 * STEPS
        assert host["dtensor_dispatch_us_per_op"]["value"] > 0


def test_ranks_agree_and_training_goes_on(recorded: dict[str, list[dict[str, Any]]]) -> None:
    losses = [found["losses"] for layout in recorded.values() for found in layout]
    for values in losses:
        assert values == pytest.approx(losses[0], rel=1e-4)
        assert values == sorted(values, reverse=True)
