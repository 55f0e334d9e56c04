"""Cells of a table row, as text, become numbers and flags; an empty cell is None, never 0."""

from __future__ import annotations

import re
from collections.abc import Mapping
from math import isfinite

Row = Mapping[str, str]
"""Cells of one row by column; "" is empty."""
LARGEST_WHOLE = 1 << 53
"""Whole numbers up to here are exact as floats; none in a table of measurements is larger."""
_FLAGS = {"1": True, "true": True, "yes": True, "0": False, "false": False, "no": False}


class Reject(Exception):
    """Why a row is left out.

    Attributes:
        reason: one short line, the same for all rows that are left out for the same reason.
        defect: the row could be measured but not forecast: something that we lack.
    """

    def __init__(self, reason: str, *, defect: bool = False) -> None:
        super().__init__(reason)
        self.reason = reason
        self.defect = defect


def text(row: Row, column: str) -> str:
    """A cell without surrounding space; "" when the column is missing."""
    return row.get(column, "").strip()


def number(row: Row, column: str) -> float | None:
    """A cell as a number, None when it is empty.

    Raises:
        Reject: the cell holds something else, or no finite number.
    """
    cell = text(row, column)
    if not cell:
        return None
    try:
        # Python alone reads 1_000 as a number
        value = float("nan" if "_" in cell else cell)
    except ValueError:
        value = float("nan")
    if not isfinite(value):
        raise Reject(f"not a number: {column}")
    return value


def positive(row: Row, column: str) -> float | None:
    """As `number`, for quantities that cannot be 0 or less.

    Raises:
        Reject: as `number`, or it is not above 0.
    """
    value = number(row, column)
    if value is not None and value <= 0:
        raise Reject(f"not above 0: {column}")
    return value


def whole(row: Row, column: str) -> int | None:
    """A cell as a whole number above 0, None when it is empty.

    Raises:
        Reject: the cell holds something else.
    """
    value = positive(row, column)
    if value is not None and value != int(value):
        raise Reject(f"not a whole number: {column}")
    if value is not None and value > LARGEST_WHOLE:
        raise Reject(f"too large: {column}")
    return None if value is None else int(value)


def required(row: Row, column: str) -> int:
    """As `whole`, for cells without which there is no forecast.

    Raises:
        Reject: as `whole`, or the cell is empty.
    """
    value = whole(row, column)
    if value is None:
        raise Reject(f"empty cell: {column}")
    return value


def flag(row: Row, column: str) -> bool | None:
    """A cell as a yes or no, None when it is empty or says neither."""
    return _FLAGS.get(text(row, column).lower())


def note_of_derived(row: Row, column: str) -> str | None:
    """What `derived` says about a column: None when it is not listed, "" when it is listed without an explanation."""
    for entry in text(row, "derived").split(";"):
        found = re.match(rf"\s*(?:.* and )?{re.escape(column)}\b(?:\s+and\s+\S+)?(.*)", entry)
        if found:
            return found.group(1).strip()
    return None
