"""A CSV file of measurements becomes rows of text cells and the kind of table that it is, told by its columns."""

from __future__ import annotations

import csv
import gzip
import io
import zlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from llmprof.errors import TableError

KINDS: dict[str, tuple[tuple[str, ...], ...]] = {
    "runs": (
        ("row_id",), ("gpu",), ("n_gpus",), ("layers",), ("hidden",), ("heads",), ("seq_len",), ("global_batch",),
        ("step_time_s", "tokens_per_s_per_gpu"),
    ),
    "operators": (("row_id",), ("gpu",), ("op",), ("phase",), ("dtype",), ("time_us",)),
    "collectives": (("row_id",), ("gpu",), ("op",), ("n_gpus",), ("size_bytes",), ("time_us",)),
}  # fmt: skip
"""Columns that a kind needs; of a group with several, one."""
_KNOWN_TEXT = """row_id source source_ref provenance model layers hidden ffn_hidden gated_mlp heads kv_heads vocab seq_len params_B
active_params_B n_experts topk gpu gpus_per_node intra_link intra_GBps_per_gpu inter_link inter_GBps_per_gpu n_gpus
dp tp pp vpp cp ep sequence_parallel zero_stage dp_mode micro_batch global_batch grad_accum recompute
flash_attention precision schedule framework framework_version software_variant compile step_time_s
tokens_per_s_per_gpu tflops_per_gpu mfu hfu mfu_formula peak_tflops_ref peak_mem_GB mem_unit mem_kind mem_rank oom
error derived inferred qc notes op phase dtype batch m n k layout tokens head_dim seq_q seq_kv causal experts shape
kernel time_us stat tflops n_nodes link size_bytes algbw_GBps busbw_GBps in_place algo lib_version"""
KNOWN = frozenset(_KNOWN_TEXT.split())
"""Columns that mean something to the judge or to a person; others are counted and ignored."""
MAX_BYTES = 1 << 28
"""Of the text, unpacked: a hundred times the largest published table."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Table:
    """Measurements of one file.

    Attributes:
        name: the file's name without its ending.
        kind: "runs", "operators" or "collectives".
        columns: in the file's order.
        rows: cells as text by column, "" where empty.
        ignored_columns: those that are not known here.
    """

    name: str
    kind: str
    columns: tuple[str, ...]
    rows: list[dict[str, str]] = field(repr=False)
    ignored_columns: tuple[str, ...] = ()


def read_table(path: str | Path) -> Table:
    """Read a table of measurements (.csv, .csv.gz; UTF-8, with or without a byte order mark).

    Every row must have as many cells as the header, so that a torn file is not taken for one with empty cells.

    Raises:
        TableError: no such file, no table, or of no kind that is scored.
    """
    file = Path(path)
    try:
        lines = csv.reader(io.StringIO(_text(file), newline=""), strict=True)
        columns = _header(file, next((cells for cells in lines if cells), []))
        kind = table_kind(columns, where=_short(str(file)))
        rows = [_row(file, columns, cells, lines.line_num) for cells in lines if cells]
    except csv.Error as error:
        raise _unreadable(file, str(error)) from error
    return Table(
        name=file.name.removesuffix(".gz").removesuffix(".csv"),
        kind=kind,
        columns=columns,
        rows=rows,
        ignored_columns=tuple(c for c in columns if c not in KNOWN),
    )


def row_ids(rows: Sequence[Mapping[str, str]]) -> list[str]:
    """One name for each row, all different: its row_id, with its position where that is empty or stands before."""
    found: dict[str, None] = {}
    for index, row in enumerate(rows):
        name = row.get("row_id", "").strip()
        if not name or name in found:
            name = f"{name} (row {index + 1})".strip()
        # a table may hold such a name already
        while name in found:
            name += "'"
        found[name] = None
    return list(found)


def table_kind(columns: tuple[str, ...], *, where: str = "the table") -> str:
    """The kind of table by its columns.

    Raises:
        TableError: none fits; says what the nearest kind lacks.
    """
    missing = {
        kind: [" or ".join(group) for group in needed if not any(c in columns for c in group)]
        for kind, needed in KINDS.items()
    }
    for kind, absent in missing.items():
        if not absent:
            return kind
    nearest = min(missing, key=lambda kind: len(missing[kind]) / len(KINDS[kind]))
    raise TableError(
        f"{where} is no table of {', '.join(KINDS)}: as {nearest} it lacks the columns {', '.join(missing[nearest])}",
        hint="`row_id` and the columns of validation tables tell the kinds apart",
    )


def _text(file: Path) -> str:
    """The whole file, unpacked and decoded."""
    try:
        if not file.is_file():
            raise TableError(f"there is no table {_short(str(file))}", hint="give the path of a .csv file")
        with gzip.open(file) if file.suffix == ".gz" else file.open("rb") as opened:
            data = opened.read(MAX_BYTES + 1)
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise _unreadable(file, f"byte {error.start} is not UTF-8 text") from error
    except (OSError, EOFError, zlib.error, MemoryError) as error:
        raise _unreadable(file, str(error)) from error
    if len(data) > MAX_BYTES:
        raise _unreadable(file, f"it has more than {MAX_BYTES >> 20} MiB")
    if "\0" in text:
        raise _unreadable(file, "it holds zero bytes")
    return text


def _header(file: Path, cells: list[str]) -> tuple[str, ...]:
    names = tuple(cell.strip() for cell in cells)
    if not names:
        raise _unreadable(file, "it is empty")
    doubled = [name for name, count in Counter(names).items() if name and count > 1]
    if doubled:
        raise _unreadable(file, f"the column {_short(doubled[0])!r} stands in its header more than once")
    return names


def _row(file: Path, columns: tuple[str, ...], cells: list[str], line: int) -> dict[str, str]:
    if len(cells) != len(columns):
        raise _unreadable(file, f"line {line} has {len(cells)} cells, its header {len(columns)}")
    return dict(zip(columns, cells, strict=True))


def _short(text: str) -> str:
    """The end of a long path or name, which tells more than its beginning, in one line."""
    text = " ".join(text.split())
    return text if len(text) <= 160 else f"...{text[-157:]}"


def _unreadable(file: Path, why: str) -> TableError:
    return TableError(
        f"{_short(str(file))} cannot be read as a table: {' '.join(why.split())[:200]}",
        hint="a CSV file with a header",
    )
