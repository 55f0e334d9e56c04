"""Tables of published operator measurements that ship with the package: from a device's name to rows that price it.

`benchmarks/device_tables.py` writes them; a table is read when it is first asked for.
"""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

import msgspec

_DIRECTORY = Path(__file__).parent / "catalogue" / "tables"


class TableSource(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where rows come from: repository and commit, licence, and the published rows among which these were chosen."""

    repository: str
    licence: str
    published: int


class LeftOut(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Errors |price / measured - 1| of rows that did not price themselves.

    Attributes:
        rows: how many.
        how: which rows: "published rows that the table leaves out", or "each fifth of the table's rows from the others".
    """

    rows: int
    median: float
    p90: float
    how: str


class TablePart(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Rows of one operator in one dtype.

    Attributes:
        op: operator that stands for its kind, such as "aten::mm" for any product.
        attributes: as of `OperatorRow`.
        shapes: of the inputs, as `llmprof.schema.operators.format_shapes` writes them.
        time_us: of one call; as long as `shapes`.
    """

    op: str
    dtype: str
    attributes: str = ""
    source: TableSource
    left_out: LeftOut
    shapes: tuple[str, ...]
    time_us: tuple[float, ...]

    def __post_init__(self) -> None:
        if len(self.shapes) != len(self.time_us):
            raise ValueError(f"{self.op}: {len(self.shapes)} shapes, but {len(self.time_us)} times")


class DeviceTable(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Operators of one device."""

    device: str
    note: str
    parts: tuple[TablePart, ...]


def table_names() -> tuple[str, ...]:
    """Devices that have a table of their own."""
    return tuple(sorted(file.stem for file in _DIRECTORY.glob("*.json")))


@lru_cache(maxsize=16)
def load_device_table(name: str) -> DeviceTable | None:
    """The table of a device of the catalogue, None where there is none."""
    if name not in table_names():
        return None
    return msgspec.json.decode((_DIRECTORY / f"{name}.json").read_bytes(), type=DeviceTable)
