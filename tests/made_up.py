"""Tables of made-up runs whose measured times come from our own forecast, so that every score is known beforehand."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Mapping
from pathlib import Path

import pytest

from llmprof.judge.cells import Reject
from llmprof.judge.outcomes import Bench
from llmprof.judge.runs import Case, read_case

ROWS_FILE = Path(__file__).parent / "data" / "made_up_runs.csv"
PUBLISHED = Path(__file__).resolve().parents[2] / "shared" / "validation"
Row = dict[str, str]

needs_published = pytest.mark.skipif(not PUBLISHED.is_dir(), reason="no tables in ../shared/validation")


def made_up_rows() -> list[Row]:
    """Rows without a time: 10 layouts on 8 GPUs, 3 on 16."""
    with ROWS_FILE.open(encoding="utf-8", newline="") as file:
        return [dict(row) for row in csv.DictReader(file)]


def row(**cells: object) -> Row:
    """The first row, timed, with other cells."""
    first = made_up_rows()[0] | {"step_time_s": "1.0"}
    return first | {key: str(value) for key, value in cells.items()}


def case(**cells: object) -> Case:
    """As `row`, read."""
    found = read_case(row(**cells))
    assert isinstance(found, Case), found.reason
    return found


def reason(**cells: object) -> str:
    """Why such a row is left out."""
    found = read_case(row(**cells))
    assert isinstance(found, Reject), "the row is a case"
    return found.reason


def timed(rows: Iterable[Row], factor: float) -> list[Row]:
    """The rows, measured at `factor` times our cold forecast."""
    rows = list(rows)
    cases = [c for c in (read_case(r | {"step_time_s": "1"}) for r in rows) if isinstance(c, Case)]
    bench = Bench(cases)
    outcomes = [bench.forecast(c) for c in cases]
    times = [o.time_s.p50 for o in outcomes if o.time_s]
    assert len(times) == len(rows), [o.problem for o in outcomes]
    return [r | {"step_time_s": repr(t * factor)} for r, t in zip(rows, times, strict=True)]


def write(rows: Iterable[Mapping[str, str]], path: Path) -> Path:
    """A CSV file of the rows."""
    rows = list(rows)
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, list(dict.fromkeys(key for r in rows for key in r)))
        writer.writeheader()
        writer.writerows(rows)
    return path


GEMM = {
    "op": "gemm",
    "phase": "fwd",
    "dtype": "bf16",
    "gpu": "A100-SXM4-80GB",
    "qc": "ok",
    "m": "512",
    "n": "64",
    "k": "32",
}
"""A row of an operator table: one product."""
