"""The store: round trips, torn and foreign files, killed runs, and runs of earlier versions."""

from __future__ import annotations

import io
import os
import pickle
import random
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmprof.errors import RunError, WorkloadError
from llmprof.schema.columns import MAX_TABLE_BYTES, columns_to_rows, read_npz, rows_to_columns
from llmprof.schema.profile import (
    FORMAT_VERSION,
    TABLES,
    Manifest,
    MemoryRow,
    OperatorRow,
    Profile,
    RankClass,
    StepRow,
)
from llmprof.schema.store import RunWriter, load_profile, load_workload, save_profile, save_workload
from llmprof.schema.workload import LayerSpec, ParameterSpec, Workload

FIXTURE = Path(__file__).parent / "data" / "profile_v1"

texts = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\x00"), max_size=12)
numbers = {
    int: st.integers(-(2**63), 2**63 - 1),
    float: st.floats(allow_nan=False),
    bool: st.booleans(),
    str: texts,
}


def rows_of(row_type: type[msgspec.Struct], rank: int) -> st.SearchStrategy[tuple[msgspec.Struct, ...]]:
    """Rows of a table with any values of the declared types, all of one rank."""
    columns: dict[str, st.SearchStrategy[Any]] = {}
    for field in msgspec.structs.fields(row_type):
        kinds = getattr(field.type, "__args__", (field.type,))
        values = [st.none() if kind is type(None) else numbers[kind] for kind in kinds]
        columns[field.name] = st.just(rank) if field.name == "rank" else st.one_of(*values)
    return st.lists(st.builds(row_type, **columns), max_size=3).map(tuple)


@st.composite
def profiles(draw: st.DrawFn) -> Profile:
    """A complete profile of one to three rank classes with any rows."""
    ranks = range(draw(st.integers(1, 3)))
    classes = tuple(RankClass(rank=r, count=draw(st.integers(1, 4))) for r in ranks)
    manifest = Manifest(
        name=draw(texts),
        world_size=sum(c.count for c in classes),
        rank_classes=classes,
        warnings=tuple(draw(st.lists(texts, max_size=2, unique=True))),
        attributed_fraction=draw(st.one_of(st.none(), st.floats(0, 1))),
    )
    tables: dict[str, Any] = {
        name: tuple(row for r in ranks for row in draw(rows_of(row_type, r)))
        for name, row_type in TABLES.items()
    }
    return Profile(manifest=manifest, **tables)


@pytest.mark.parametrize("table", TABLES)
def test_columns_give_back_any_rows(table: str) -> None:
    @settings(max_examples=25, deadline=None)
    @given(rows_of(TABLES[table], 0))
    def check(rows: tuple[msgspec.Struct, ...]) -> None:
        assert columns_to_rows(table, rows_to_columns(table, rows)) == rows

    check()


@settings(max_examples=10, deadline=None)
@given(profiles())
def test_what_is_saved_is_loaded(profile: Profile) -> None:
    with tempfile.TemporaryDirectory() as folder:
        save_profile(profile, folder)
        assert load_profile(folder) == profile


def small(**changes: Any) -> Profile:
    steps = tuple(StepRow(rank=0, step=i, start_us=float(i), duration_us=1.0) for i in range(3))
    manifest = Manifest(world_size=1, rank_classes=(RankClass(rank=0, count=1),))
    values: dict[str, Any] = {"manifest": manifest, "steps": steps} | changes
    return Profile(**values)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    save_profile(small(), tmp_path / "run")
    return tmp_path / "run"


def test_files_are_readable_by_others_and_leave_nothing_behind(run: Path) -> None:
    names = sorted(p.relative_to(run).as_posix() for p in run.rglob("*") if p.is_file())
    assert names == ["rank-00000/manifest.json", "rank-00000/tables.npz"]
    assert all((run / name).stat().st_mode & 0o044 == 0o044 for name in names)


@pytest.mark.parametrize("name", ["manifest.json", "tables.npz"])
@pytest.mark.parametrize(
    "content", [b"", b"\x00", b"{", b"PK\x03\x04", b"not ours at all" * 50, b"[1, 2]", b"null"]
)
def test_foreign_content_is_refused(run: Path, name: str, content: bytes) -> None:
    (run / "rank-00000" / name).write_bytes(content)
    with pytest.raises(RunError) as caught:
        load_profile(run)
    assert name in caught.value.message
    assert caught.value.exit_code == 2


@pytest.mark.parametrize("name", ["manifest.json", "tables.npz"])
def test_torn_files_are_refused_at_any_length(run: Path, name: str) -> None:
    file = run / "rank-00000" / name
    data = file.read_bytes().rstrip()
    for length in range(0, len(data), max(1, len(data) // 40)):
        file.write_bytes(data[:length])
        with pytest.raises(RunError):
            load_profile(run)


@pytest.mark.parametrize("name", ["manifest.json", "tables.npz"])
def test_damaged_bytes_load_or_are_refused_in_one_line(run: Path, name: str) -> None:
    file = run / "rank-00000" / name
    data, generator, refused = file.read_bytes(), random.Random(0), 0
    for _ in range(150):
        damaged = bytearray(data)
        for _ in range(generator.choice([1, 2, 30])):
            damaged[generator.randrange(len(damaged))] = generator.randrange(256)
        file.write_bytes(damaged)
        try:
            load_profile(run)
        except RunError as error:
            refused += 1
            assert "\n" not in str(error) and len(str(error)) < 500 and str(error).isprintable()
    assert refused > 50


def archive(**arrays: Any) -> bytes:
    buffer = io.BytesIO()
    np.savez(buffer, **arrays)
    return buffer.getvalue()


class Bomb:
    """Unpickling it would leave a file behind."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.touch, (self.path,))


def test_pickled_arrays_are_refused_and_never_run(run: Path, tmp_path: Path) -> None:
    trace = tmp_path / "ran"
    pickle.loads(pickle.dumps(Bomb(trace)))
    assert trace.exists(), "the bomb works"
    trace.unlink()
    objects = np.array([Bomb(trace)], dtype=object)
    (run / "rank-00000" / "tables.npz").write_bytes(archive(**{"steps.kind": objects}))
    with pytest.raises(RunError):
        load_profile(run)
    assert not trace.exists()


def test_an_archive_that_would_fill_the_memory_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    assert MAX_TABLE_BYTES < 10e9
    monkeypatch.setattr("llmprof.schema.columns.MAX_TABLE_BYTES", 1_000_000)
    buffer = io.BytesIO()
    columns: dict[str, Any] = {"steps.step": np.zeros(1_000_000)}
    np.savez_compressed(buffer, **columns)
    assert buffer.tell() < 100_000
    buffer.seek(0)
    with pytest.raises(RunError, match="of memory, more than"):
        read_npz(buffer, name="bomb")


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"steps.step": np.arange(2)}, "different lengths"),
        ({"steps.step": np.array([1.5, 2.5, 3.5])}, "expected columns"),
        ({"steps.step": np.array(["a", "b", "c"])}, "expected columns"),
        ({"steps.step": np.zeros((3, 1), dtype=int)}, "2 dimensions"),
        ({"steps.step": None}, "expected columns"),
    ],
)
def test_columns_that_do_not_fit_are_refused(changes: dict[str, Any], expected: str) -> None:
    columns = rows_to_columns("steps", small().steps) | changes
    kept = {name: column for name, column in columns.items() if column is not None}
    with pytest.raises(RunError, match=expected):
        columns_to_rows("steps", kept)


def test_unknown_columns_and_tables_are_ignored(run: Path) -> None:
    file = run / "rank-00000" / "tables.npz"
    with np.load(file) as arrays:
        columns = {name: arrays[name] for name in arrays.files}
    extra = {"steps.colour": np.array(["a", "b", "c"]), "planets.name": np.array(["mars"])}
    file.write_bytes(archive(**columns, **extra))
    assert load_profile(run) == small()


def test_a_missing_optional_column_takes_its_default(run: Path) -> None:
    file = run / "rank-00000" / "tables.npz"
    with np.load(file) as arrays:
        columns = {name: arrays[name] for name in arrays.files if not name.startswith("steps.energy_j")}
    file.write_bytes(archive(**columns))
    assert load_profile(run) == small()


def test_an_unknown_key_of_the_manifest_is_ignored_and_a_newer_version_refused(run: Path) -> None:
    file = run / "rank-00000" / "manifest.json"
    manifest = msgspec.json.decode(file.read_bytes())
    file.write_bytes(msgspec.json.encode(manifest | {"colour": "blue"}))
    assert load_profile(run) == small()
    file.write_bytes(msgspec.json.encode(manifest | {"version": FORMAT_VERSION + 1}))
    with pytest.raises(RunError, match=f"version {FORMAT_VERSION + 1}") as caught:
        load_profile(run)
    assert "update" in caught.value.hint


def test_missing_and_empty_directories_are_refused(tmp_path: Path, run: Path) -> None:
    with pytest.raises(RunError, match="no run at"):
        load_profile(tmp_path / "nowhere")
    with pytest.raises(RunError, match="is a file"):
        load_profile(run / "rank-00000" / "tables.npz")
    (tmp_path / "empty").mkdir()
    with pytest.raises(RunError, match="holds no run"):
        load_profile(tmp_path / "empty")
    (run / "rank-00000" / "manifest.json").unlink()
    with pytest.raises(RunError, match="missing"):
        load_profile(run)


def test_a_complete_run_without_tables_is_refused(run: Path) -> None:
    (run / "rank-00000" / "tables.npz").unlink()
    with pytest.raises(RunError, match=r"tables\.npz is missing"):
        load_profile(run)


def test_a_missing_rank_makes_a_run_partial(tmp_path: Path) -> None:
    classes = (RankClass(rank=0, count=1), RankClass(rank=1, count=1))
    save_profile(small(manifest=Manifest(world_size=2, rank_classes=classes)), tmp_path / "run")
    assert load_profile(tmp_path / "run").manifest.status == "complete"
    for file in (tmp_path / "run" / "rank-00001").iterdir():
        file.unlink()
    (tmp_path / "run" / "rank-00001").rmdir()
    assert load_profile(tmp_path / "run").manifest.status == "partial"


def test_the_journal_of_an_unfinished_run_is_read_up_to_a_torn_line(tmp_path: Path) -> None:
    writer = RunWriter(tmp_path / "run", 0)
    writer.begin(small().manifest)
    for row in small().steps:
        writer.journal(row)
    profile = load_profile(tmp_path / "run")
    assert profile.manifest.status == "partial"
    assert profile.steps == small().steps
    with (tmp_path / "run" / "rank-00000" / "journal.jsonl").open("ab") as journal:
        journal.write(b'{"rank":0,"step":3,"start_')
    assert load_profile(tmp_path / "run").steps == small().steps
    writer.close()


def test_a_finished_run_replaces_its_journal(tmp_path: Path) -> None:
    writer = RunWriter(tmp_path / "run", 0)
    writer.begin(small().manifest)
    writer.journal(small().steps[0])
    writer.write_rank(small())
    assert not (tmp_path / "run" / "rank-00000" / "journal.jsonl").exists()
    assert load_profile(tmp_path / "run") == small()


def test_a_new_run_in_an_old_directory_forgets_the_old_one(run: Path) -> None:
    writer = RunWriter(run, 0)
    writer.begin(small().manifest)
    writer.journal(small().steps[1])
    writer.close()
    assert load_profile(run).steps == small().steps[1:2]


KILLED = """
import sys, time
from llmprof.schema.profile import Manifest, RankClass, StepRow
from llmprof.schema.store import RunWriter
writer = RunWriter(sys.argv[1], 0)
writer.begin(Manifest(world_size=1, rank_classes=(RankClass(rank=0, count=1),)))
step = 0
while True:
    writer.journal(StepRow(rank=0, step=step, start_us=0.0, duration_us=1.0))
    step += 1
    if step == 50:
        print("ready", flush=True)
"""


@pytest.mark.skipif(os.name == "nt", reason="needs SIGKILL")
def test_a_killed_process_leaves_a_readable_run(tmp_path: Path) -> None:
    child = subprocess.Popen(
        [sys.executable, "-c", KILLED, str(tmp_path / "run")], stdout=subprocess.PIPE, text=True
    )
    assert child.stdout is not None
    with child.stdout:
        assert child.stdout.readline() == "ready\n"
        child.send_signal(signal.SIGKILL)
        assert child.wait() == -signal.SIGKILL
    profile = load_profile(tmp_path / "run")
    assert profile.manifest.status == "partial"
    assert len(profile.steps) >= 50
    assert [row.step for row in profile.steps] == list(range(len(profile.steps)))


def test_a_failed_write_leaves_the_old_file(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_space(_: int) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(os, "fsync", no_space)
    with pytest.raises(OSError, match="no space"):
        save_profile(small(steps=()), run)
    monkeypatch.undo()
    assert load_profile(run) == small()
    assert not [p for p in run.rglob(".*") if p.is_file()], "no temporary file is left"


def workload() -> Workload:
    weight = ParameterSpec(name="w", shape=(2, 3), dtype="float32")
    return Workload(name="tiny", layers=(LayerSpec(name="block0", kind="block", parameters=(weight,)),))


def test_a_workload_goes_with_its_run(tmp_path: Path) -> None:
    save_profile(small(workload=workload()), tmp_path / "run")
    assert load_profile(tmp_path / "run").workload == workload()
    save_workload(workload(), tmp_path / "alone.json")
    assert load_workload(tmp_path / "alone.json") == workload()


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"layers": 3}', b"[" * 5000])
def test_a_torn_workload_is_refused(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "workload.json"
    file.write_bytes(content)
    with pytest.raises(WorkloadError, match="torn or is not a workload"):
        load_workload(file)


def test_a_missing_and_a_newer_workload_are_refused(tmp_path: Path) -> None:
    with pytest.raises(WorkloadError, match="no workload at"):
        load_workload(tmp_path / "none.json")
    (tmp_path / "new.json").write_bytes(b'{"version": 99}')
    with pytest.raises(WorkloadError, match="version 99"):
        load_workload(tmp_path / "new.json")


def test_a_run_of_version_1_stays_readable() -> None:
    """The committed files were written by the first release's format; they must load with these values for ever."""
    profile = load_profile(FIXTURE)
    assert profile.manifest.version == 1
    assert profile.manifest.status == "complete"
    assert (profile.manifest.world_size, profile.manifest.layout) == (2, "dp=2")
    assert [(c.rank, c.count) for c in profile.manifest.rank_classes] == [(0, 1), (1, 1)]
    assert {name: len(getattr(profile, name)) for name in TABLES} == {
        "steps": 4, "phases": 4, "operators": 2, "collectives": 2, "spans": 2, "memory": 4, "host": 2, "sources": 2,
    }  # fmt: skip
    assert profile.steps[0] == StepRow(
        rank=0,
        step=5,
        start_us=1000.5,
        duration_us=2500.25,
        tokens=256,
        sequences=2,
        peak_memory_bytes=123456789,
    )
    assert profile.operators[0] == OperatorRow(
        rank=0, op="aten::mm", family="matmul", module="layers.0.mlp", phase="forward", shapes="64x128,128x256",
        dtype="float32", attributes="causal", device="cpu", count=4.0, time_us=30.5, time_iqr_us=1.25, time_n=12,
        exclusive_us=122.0, host_us=None, flops=4194304, bytes=229376, attributed=True,
    )  # fmt: skip
    assert profile.memory[1] == MemoryRow(rank=0, category="peak", size_bytes=2**40, time_us=7.5)
    assert profile.workload is not None
    assert profile.workload.layer("block0").parameters[0].shape == (128, 256)
