"""Tables are told apart by their columns; what is no table is refused in one line."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmprof.errors import TableError
from llmprof.judge.cells import Reject, flag, note_of_derived, number, positive, required, whole
from llmprof.judge.table import read_table, table_kind

OPERATORS = "row_id,gpu,op,phase,dtype,time_us"
COLLECTIVES = "row_id,gpu,op,n_gpus,size_bytes,time_us"
RUNS = "row_id,gpu,n_gpus,layers,hidden,heads,seq_len,global_batch,step_time_s"


def write(folder: Path, text: str | bytes, name: str = "t.csv") -> Path:
    path = folder / name
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return path


@pytest.mark.parametrize(
    ("header", "kind"), [(OPERATORS, "operators"), (COLLECTIVES, "collectives"), (RUNS, "runs")]
)
def test_kinds_by_columns(header: str, kind: str) -> None:
    assert table_kind(tuple(header.split(","))) == kind


def test_cells_stay_text_and_unknown_columns_are_counted(tmp_path: Path) -> None:
    table = read_table(
        write(tmp_path, f"{OPERATORS},colour\nr1,A100,gemm,fwd,bf16,007,None\nr2,A100,gemm,fwd,,NA,\n")
    )
    assert table.name == "t"
    assert table.ignored_columns == ("colour",)
    assert [r["time_us"] for r in table.rows] == ["007", "NA"]
    assert [r["colour"] for r in table.rows] == ["None", ""]


def test_a_byte_order_mark_and_compression_are_read(tmp_path: Path) -> None:
    data = f"{OPERATORS}\nr1,A100,gemm,fwd,bf16,1\n".encode("utf-8-sig")
    assert read_table(write(tmp_path, data)).rows[0]["row_id"] == "r1"
    assert read_table(write(tmp_path, gzip.compress(data), "t.csv.gz")).rows[0]["row_id"] == "r1"


def test_what_the_nearest_kind_lacks_is_named(tmp_path: Path) -> None:
    with pytest.raises(TableError, match="phase") as caught:
        read_table(write(tmp_path, "row_id,gpu,op,dtype,time_us\n"))
    assert "as operators" in caught.value.message


def test_a_table_without_rows_has_none(tmp_path: Path) -> None:
    assert read_table(write(tmp_path, OPERATORS + "\n")).rows == []


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\n\n",
        b"\xff\xfe\x00binary\x00\x01" * 50,
        f"{OPERATORS}\nr1,A100,gemm,fwd,bf16,1,2,3\n".encode(),
        f"{OPERATORS},op\n1,2,3,4,5,6,7\n".encode(),
        f'{OPERATORS}\n"r1,A100\n'.encode(),
        b"\x1f\x8b torn",
        f"{OPERATORS}\nr1,A100,gemm\nr2,A100,gemm,fwd,bf16,1\n".encode(),
        f"{OPERATORS}\nr1,A100,gemm,fwd,bf16,1\nr2,A1".encode(),
        f"{OPERATORS}\nr1,{'x' * 200_000},gemm,fwd,bf16,1\n".encode(),
        f"{OPERATORS}\nr1,A\0,gemm,fwd,bf16,1\n".encode(),
        f"{OPERATORS}\n\xe4,A100,gemm,fwd,bf16,1\n".encode("latin-1"),
        b'{"rows": [1, 2]}',
    ],
)
def test_what_is_no_table_is_refused_in_one_line(tmp_path: Path, data: bytes) -> None:
    for name in ("t.csv", "t.csv.gz"):
        with pytest.raises(TableError) as caught:
            read_table(write(tmp_path, data, name))
        assert "\n" not in caught.value.message


def test_a_damaged_compressed_file_is_refused(tmp_path: Path) -> None:
    whole_file = gzip.compress(f"{OPERATORS}\n".encode() + b"r1,A100,gemm,fwd,bf16,1\n" * 2000)
    damaged = bytearray(whole_file)
    damaged[20] ^= 255
    for data in (whole_file[: len(whole_file) // 2], bytes(damaged)):
        with pytest.raises(TableError, match="cannot be read as a table"):
            read_table(write(tmp_path, data, "t.csv.gz"))


def test_a_ragged_row_is_named_by_its_line(tmp_path: Path) -> None:
    data = f"{OPERATORS}\n\nr1,A100,gemm,fwd,bf16,1\nr2,A100,gemm\n"
    with pytest.raises(TableError, match="line 4 has 3 cells, its header 6"):
        read_table(write(tmp_path, data))


def test_a_file_that_unpacks_to_too_much_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("llmprof.judge.table.MAX_BYTES", 1 << 20)
    with pytest.raises(TableError, match="more than 1 MiB"):
        read_table(write(tmp_path, gzip.compress(b"x" * (1 << 21)), "t.csv.gz"))


@given(data=st.binary(max_size=300), header=st.booleans(), name=st.sampled_from(("t.csv", "t.csv.gz")))
def test_any_bytes_are_a_table_or_refused(
    data: bytes, header: bool, name: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = write(tmp_path_factory.getbasetemp(), f"{OPERATORS}\n".encode() + data if header else data, name)
    try:
        table = read_table(path)
    except TableError as error:
        assert len(error.message.splitlines()) == 1
    else:
        assert all(tuple(row) == table.columns for row in table.rows)


def test_no_file_and_a_folder(tmp_path: Path) -> None:
    for path in (tmp_path / "none.csv", tmp_path, tmp_path / ("x" * 5000 + ".csv")):
        with pytest.raises(TableError) as caught:
            read_table(path)
        assert len(caught.value.message) < 400


def test_cells_become_numbers_or_a_reason() -> None:
    row = {
        "a": " 3 ",
        "b": "",
        "c": "nan",
        "d": "-1",
        "e": "many",
        "f": "2.5",
        "g": "inf",
        "h": "1e300",
        "z": "0",
        "y": "1",
        "n": "false",
    }
    assert number(row, "a") == 3.0
    assert number(row, "b") is None
    assert number(row, "missing") is None
    assert whole(row, "a") == 3
    assert (flag(row, "y"), flag(row, "n"), flag(row, "b")) == (True, False, None)
    for column, read in (
        ("c", number), ("e", number), ("g", number), ("d", positive), ("z", positive), ("f", whole), ("h", whole),
    ):  # fmt: skip
        with pytest.raises(Reject) as caught:
            read(row, column)
        assert column in caught.value.reason


@pytest.mark.parametrize("cell", ["1_000", "0x10", "1,5", "1e999", "-inf", "NaN", "5 ms"])
def test_cells_that_only_look_like_numbers_are_refused(cell: str) -> None:
    with pytest.raises(Reject, match="not a number: a"):
        number({"a": cell}, "a")


@given(cell=st.text(max_size=12))
def test_any_cell_is_a_quantity_or_a_reason(cell: str) -> None:
    for read in (number, positive, whole, required):
        try:
            value = read({"a": cell}, "a")
        except Reject as reject:
            assert reject.reason.endswith(": a")
        else:
            assert (value is None) == (not cell.strip())


def test_an_empty_cell_that_is_needed_is_a_reason() -> None:
    assert required({"a": "4"}, "a") == 4
    with pytest.raises(Reject, match="empty cell: a"):
        required({"a": " "}, "a")


def test_what_is_derived_is_told_from_columns_with_a_longer_name() -> None:
    cells = {"derived": "tokens_per_s_per_gpu and step_time_s from the log; mfu_formula z; oom"}
    assert note_of_derived(cells, "step_time_s") == "from the log"
    assert note_of_derived(cells, "oom") == ""
    assert note_of_derived(cells, "mfu") is None


def test_a_path_with_line_breaks_is_refused_in_one_line(tmp_path: Path) -> None:
    for name, data in (("no\nne.csv", None), ("a\nb.csv", "a,b\n1,2\n"), ("a\r\nc.csv", "")):
        path = tmp_path / name if data is None else write(tmp_path, data, name)
        with pytest.raises(TableError) as caught:
            read_table(path)
        assert len(caught.value.message.splitlines()) == 1
