"""Typed rows to NumPy columns and back: what a table looks like inside an `.npz`, without pickle."""

from __future__ import annotations

import types
import typing
import zipfile
import zlib
from collections.abc import Mapping, Sequence
from typing import IO, Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from llmprof.errors import RunError
from llmprof.schema.profile import TABLES

Columns = dict[str, NDArray[Any]]
MAX_TABLE_BYTES = 2_000_000_000
"""Uncompressed size above which a tables file is refused (a hostile archive could fill the memory)."""
_MAX_ERROR_CHARACTERS = 120

_NUMPY_DTYPE: dict[type, str] = {int: "int64", float: "float64", bool: "bool", str: "U"}


def rows_to_columns(table: str, rows: Sequence[msgspec.Struct]) -> Columns:
    """Columns of one table, each named "table.column"; an optional column gets a mask "table.column?".

    Text keeps every character but zeros at its end, which NumPy's fixed-width strings drop.
    """
    columns: Columns = {}
    for field in msgspec.structs.fields(TABLES[table]):
        base, optional = _base_type(field.type)
        values = [getattr(row, field.name) for row in rows]
        name = f"{table}.{field.name}"
        if optional:
            columns[f"{name}?"] = np.array([v is not None for v in values], dtype=bool)
            values = [base() if v is None else v for v in values]
        columns[name] = np.array(values, dtype=_NUMPY_DTYPE[base])
    return columns


def columns_to_rows(table: str, columns: Mapping[str, NDArray[Any]]) -> tuple[msgspec.Struct, ...]:
    """Rows of one table. Unknown columns are ignored; a missing column takes the field's default.

    Raises:
        RunError: columns of different lengths, of a wrong type, or a required one is missing.
    """
    row_type = TABLES[table]
    fields = msgspec.structs.fields(row_type)
    present = [f for f in fields if f.encode_name and f"{table}.{f.name}" in columns]
    if not present:
        return ()
    lengths = {f.name: len(columns[f"{table}.{f.name}"]) for f in present}
    if len(set(lengths.values())) > 1:
        raise RunError(
            f"table {table} has columns of different lengths: {lengths}", hint="the file is damaged"
        )
    lists = {f.name: _column_values(table, f, columns) for f in present}
    names = list(lists)
    try:
        return tuple(
            msgspec.convert(dict(zip(names, row, strict=True)), row_type)
            for row in zip(*lists.values(), strict=True)
        )
    except (msgspec.ValidationError, TypeError) as error:
        raise RunError(f"table {table} does not have the expected columns: {error}") from error


def _column_values(
    table: str, field: msgspec.structs.FieldInfo, columns: Mapping[str, NDArray[Any]]
) -> list[Any]:
    name = f"{table}.{field.name}"
    column = columns[name]
    if column.ndim != 1:
        raise RunError(f"column {name} has {column.ndim} dimensions instead of 1", hint="the file is damaged")
    values: list[Any] = column.tolist()
    _, optional = _base_type(field.type)
    mask = columns.get(f"{name}?")
    if optional and mask is not None and len(mask) == len(values):
        values = [v if known else None for v, known in zip(values, mask.tolist(), strict=True)]
    return values


def _base_type(annotation: Any) -> tuple[type, bool]:
    """(int, True) for `int | None`, (int, False) for `int`."""
    if typing.get_origin(annotation) in (types.UnionType, typing.Union):
        (base,) = [a for a in typing.get_args(annotation) if a is not type(None)]
        return base, True
    return annotation, False


def read_npz(file: IO[bytes], *, name: str) -> Columns:
    """Arrays of an `.npz`, never executing anything.

    Raises:
        RunError: not a zip file, torn, pickled objects inside, or larger than MAX_TABLE_BYTES.
    """
    try:
        with zipfile.ZipFile(file) as archive:
            size = sum(info.file_size for info in archive.infolist())
        if size > MAX_TABLE_BYTES:
            raise RunError(
                f"{name} would take {size / 1e9:.1f} GB of memory, more than {MAX_TABLE_BYTES / 1e9:.0f} GB"
            )
        file.seek(0)
        with np.load(file, allow_pickle=False) as arrays:
            return {key: arrays[key] for key in arrays.files}
    except (
        zipfile.BadZipFile,
        ValueError,
        OSError,
        EOFError,
        KeyError,
        RuntimeError,
        MemoryError,
        zlib.error,
    ) as error:
        if isinstance(error, RunError):
            raise
        raise RunError(
            f"{name} is torn or is not one of our files: {_one_line(error)}", hint="capture the run again"
        ) from error


def _one_line(error: BaseException) -> str:
    """The start of an error's text without what a terminal cannot show: libraries quote the damaged bytes."""
    text = "".join(c for c in str(error) if c.isprintable())
    return text if len(text) <= _MAX_ERROR_CHARACTERS else f"{text[:_MAX_ERROR_CHARACTERS]}..."
