"""Files of measured operators: grow line by line, survive a torn end, refuse what is not theirs."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from llmprof.errors import TableError
from llmprof.schema.measurements import (
    IN_RUN,
    MeasurementWriter,
    OpCall,
    Wanted,
    read_measurements,
    same_machine,
    still_wanted,
    with_measurements,
    with_own_measurements,
)
from llmprof.schema.operators import Tensor
from llmprof.schema.profile import Manifest, Profile
from tests.profiles import collective, operator, source


def _written(path: Path, *times_us: float) -> Path:
    writer = MeasurementWriter(path, source())
    for i, time_us in enumerate(times_us):
        writer.operator(operator(shapes=f"{2 + i}x4,4x8", time_us=time_us, count=0.0))
    writer.close()
    return path


def test_what_was_written_is_read(tmp_path: Path) -> None:
    path = _written(tmp_path / "t.jsonl", 10.0, 20.0)
    writer = MeasurementWriter(path, source())
    writer.collective(collective())
    writer.close()
    found = read_measurements(path)
    assert found.source == source()
    assert [row.time_us for row in found.operators] == [10.0, 20.0]
    assert found.collectives == (collective(),)


def test_the_last_of_equal_rows_counts(tmp_path: Path) -> None:
    path = _written(tmp_path / "t.jsonl", 10.0)
    _written(path, 12.0)
    assert [row.time_us for row in read_measurements(path).operators] == [12.0]


def test_a_torn_last_line_is_no_line_and_writing_goes_on_behind_the_last_whole_one(tmp_path: Path) -> None:
    path = _written(tmp_path / "t.jsonl", 10.0, 20.0)
    data = path.read_bytes()
    for cut in range(len(data.splitlines(keepends=True)[0]) + 1, len(data)):
        path.write_bytes(data[:cut])
        kept = read_measurements(path).operators
        assert len(kept) == data[:cut].count(b"\n") - 1
    path.write_bytes(data[:-5])
    writer = MeasurementWriter(path, source())
    assert [row.time_us for row in writer.known.operators] == [10.0]
    writer.operator(operator(shapes="9x4,4x8", time_us=30.0, count=0.0))
    writer.close()
    assert [row.time_us for row in read_measurements(path).operators] == [10.0, 30.0]


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"{}\n",
        b"not json\n",
        b'{"llmprof_measurements": 99, "source": 1}\n',
        b"[" * 100_000 + b"\n",
        b"\x00\xff\n",
    ],
)
def test_foreign_files_are_refused_in_one_line(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "t.jsonl"
    path.write_bytes(data)
    with pytest.raises(TableError) as error:
        read_measurements(path)
    assert "\n" not in error.value.message
    assert error.value.hint


@pytest.mark.parametrize(
    "changes",
    [
        {"time_us": 0.0},
        {"time_us": -1.0},
        {"time_us": float("inf")},
        {"time_iqr_us": float("nan")},
        {"count": -2.0},
        {"flops": -5},
        {"shapes": "2x-3"},
        {"shapes": "what"},
    ],
)
def test_rows_that_cannot_have_been_measured_are_named(tmp_path: Path, changes: dict[str, object]) -> None:
    writer = MeasurementWriter(tmp_path / "t.jsonl", source())
    try:
        writer.operator(msgspec.structs.replace(operator(), **changes))
    finally:
        writer.close()
    with pytest.raises(TableError, match="line 2"):
        read_measurements(tmp_path / "t.jsonl")


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TableError, match="no table of measurements"):
        read_measurements(tmp_path / "none.jsonl")


def test_a_file_of_another_machine_is_not_continued(tmp_path: Path) -> None:
    path = _written(tmp_path / "t.jsonl", 10.0)
    with pytest.raises(TableError, match=r"AMD EPYC 7R13 \(1 thread\).*other \(1 thread\)"):
        MeasurementWriter(path, msgspec.structs.replace(source(), device_name="other"))


def test_threads_tell_machines_apart_only_on_a_cpu() -> None:
    four = msgspec.structs.replace(source(), threads=4)
    assert not same_machine(source(), four)
    gpu = msgspec.structs.replace(source(), device="cuda")
    assert same_machine(gpu, msgspec.structs.replace(gpu, threads=4))


def test_measurements_join_a_profile_of_the_same_machine_and_replace_another(tmp_path: Path) -> None:
    found = read_measurements(_written(tmp_path / "t.jsonl", 10.0))
    own = Profile(manifest=Manifest(), operators=(operator(),), sources=(source(),))
    assert len(with_measurements(own, found).operators) == 2
    other = msgspec.structs.replace(own, sources=(msgspec.structs.replace(source(), device_name="other"),))
    priced = with_measurements(other, found)
    assert priced.operators == found.operators
    assert priced.sources == (source(),)


def test_measurements_of_another_machine_inside_a_run_are_named_and_not_used(tmp_path: Path) -> None:
    _written(tmp_path / IN_RUN, 10.0)
    other = msgspec.structs.replace(source(), device_name="other")
    profile = Profile(manifest=Manifest(), sources=(other,))
    read = with_own_measurements(profile, tmp_path)
    assert not read.operators
    assert "was measured on AMD EPYC 7R13 (1 thread)" in read.manifest.warnings[0]
    assert with_own_measurements(profile, tmp_path / "empty") == profile


def test_wanted_calls_are_taken_once_by_importance_without_the_known(tmp_path: Path) -> None:
    def call(m: int) -> OpCall:
        return OpCall(op="aten::mm", inputs=(Tensor((m, 4), "float32"), Tensor((4, 8), "float32")))

    known = read_measurements(_written(tmp_path / "t.jsonl", 10.0))  # of 2x4,4x8
    assert known.operators[0].dtype == "float32"
    wanted = [
        Wanted(call=call(m), importance=weight) for m, weight in ((2, 9.0), (3, 1.0), (5, 2.0), (3, 4.0))
    ]
    assert [w.call.inputs[0].shape[0] for w in still_wanted(wanted, known)] == [3, 5]
