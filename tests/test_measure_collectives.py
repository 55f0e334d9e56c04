"""Collectives are timed between real ranks, over groups that say how far they spread."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from llmprof import cli
from llmprof.hooks.measure_collectives import KINDS, SIZES_BYTES, Group, usual_groups, usual_items
from llmprof.schema.measurements import read_measurements

ROOT = Path(__file__).resolve().parent.parent


def test_groups_are_neighbours_and_one_rank_of_each_node() -> None:
    assert usual_groups(2, 2) == (Group((0, 1), 2),)
    assert usual_groups(6, 6) == (Group((0, 1), 2), Group((0, 1, 2, 3), 4), Group(tuple(range(6)), 6))
    eight = usual_groups(8, 4)
    assert eight[-1] == Group((0, 4), 8)
    assert [g.span for g in eight[:-1]] == [2, 4, 8]
    assert usual_groups(2, 1) == (Group((0, 1), 2),)


def test_any_beginning_of_the_items_covers_the_range_of_sizes() -> None:
    items = usual_items(usual_groups(2, 2))
    assert len(items) == len(set(items)) == len(KINDS) * len(SIZES_BYTES)
    first_third = {i.size_bytes for i in items[: len(items) // 3 + len(KINDS)]}
    assert min(first_third) == min(SIZES_BYTES)
    assert max(first_third) == max(SIZES_BYTES)


@pytest.mark.parametrize(
    ("arguments", "ranks", "said"),
    [
        (["-o", "TABLE"], "", "two ranks or more, and there are 1"),
        (["-o", "TABLE"], "1", "two ranks or more, and there are 1"),
        (["-o", "TABLE"], "many", "two ranks or more"),
        ([], "2", "in a run or in a table"),
        (["RUN", "-o", "TABLE"], "2", "in a run or in a table"),
        (["-o", "TABLE", "--sweep", "all"], "2", "different things"),
    ],
)
def test_requests_that_cannot_be_met_are_refused(
    arguments: list[str],
    ranks: str,
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("WORLD_SIZE", ranks)
    assert cli.main(["measure", "--collectives", *arguments]) == 2
    printed = capsys.readouterr().err
    assert said in printed


def test_two_ranks_measure_all_kinds(tmp_path: Path) -> None:
    table = tmp_path / "links.jsonl"
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m"]
    measure = ["llmprof", "measure", "--collectives", "-o", str(table), "--budget", "8s", "--json"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*launch, *measure], capture_output=True, text=True, env=environment, timeout=240, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    printed = json.loads(done.stdout)
    assert printed["ranks"] == 2
    rows = read_measurements(table).collectives
    assert len(rows) == len(printed["collectives"]) > 0
    assert {row.kind for row in rows} == {*KINDS, "recv"}
    assert {row.backend for row in rows} == {"gloo"}
    assert all((row.group_size, row.span, row.count, row.in_situ) == (2, 2, 0.0, True) for row in rows)
    assert all(row.time_us > 0 and row.time_n >= 5 for row in rows)


def test_a_file_that_is_not_ours_ends_all_ranks(tmp_path: Path) -> None:
    table = tmp_path / "links.jsonl"
    table.write_text("something else\n")
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m"]
    measure = ["llmprof", "measure", "--collectives", "-o", str(table), "--budget", "5s"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*launch, *measure], capture_output=True, text=True, env=environment, timeout=240, check=False
    )
    assert done.returncode != 0
    assert "is no table of measurements" in done.stderr
    assert table.read_text() == "something else\n"
