"""Scored tables become the one object that `llmprof validate --json` prints and the text report shows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from math import log
from typing import Any

from llmprof.errors import RequestError
from llmprof.judge.aggregate import mean_over_tables, score_rows, score_times
from llmprof.judge.scores import ScoredRow, quantile
from llmprof.judge.strata import mean_over_strata

_ROW_COLUMNS = ("model", "gpu", "n_gpus", "layout", "op", "phase", "dtype", "shape", "size_bytes")
"""Cells that tell a person which row it is."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TableScores:
    """A table after scoring.

    Attributes:
        name, kind, columns: of the table.
        rows: in the table's order.
        groups: objects with `key`, `mode` and scores.
        countable: rows that should be scored: measured, and nothing wrong with them.
        fitted: of those, the ones used to fit.
        forecasts: forecasts made.
        defects: reasons to leave out rows that are our own fault, with counts.
        extra: more keys of the table's object.
    """

    name: str
    kind: str
    columns: tuple[str, ...]
    rows: list[ScoredRow]
    groups: list[dict[str, Any]]
    countable: int
    fitted: int = 0
    forecasts: int = 0
    defects: dict[str, int] = field(default_factory=dict)
    extra: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class Asked:
    """What the result should hold.

    Attributes:
        mode: in words: "cold", "calibrated 4", ...
        worst: rows with the largest errors that are listed with their breakdown.
        by: column by whose values errors are listed, "" for none.
    """

    mode: str
    worst: int = 0
    by: str = ""


def result_object(
    tables: Sequence[TableScores],
    asked: Asked,
    *,
    seconds: float,
    refused: dict[str, str],
    warnings: Sequence[str],
) -> dict[str, Any]:
    """The object of `llmprof validate --json`.

    Args:
        seconds: from reading the tables to here.
        refused: files that are no tables, with the reason.
        warnings: wishes that were ignored.

    Raises:
        RequestError: no table has the column asked by.
    """
    scores = [_table_object(table) for table in tables]
    counted = sum(t.countable - t.fitted for t in tables)
    forecasts = sum(t.forecasts for t in tables)
    rows = [row for table in tables for row in table.rows]
    return {
        "mode": asked.mode,
        "summary": scores[0] if len(scores) == 1 else mean_over_tables(scores),
        "tables": scores,
        "strata": _strata(tables),
        "groups": [group for table in tables for group in table.groups],
        "rows": [_row_object(row, table.name) for table in tables for row in table.rows],
        "skipped": _reasons(rows),
        "defects": _summed(table.defects for table in tables),
        "scored_fraction": sum(s["n"] for s in scores) / counted if counted else None,
        "worst": _worst(tables, asked.worst),
        "by": _by(tables, asked.by) if asked.by else None,
        "refused": refused,
        "warnings": list(warnings),
        "forecasts": forecasts,
        "seconds": seconds,
        "forecasts_per_s": forecasts / seconds if seconds > 0 else None,
    }


def _strata(tables: Sequence[TableScores]) -> dict[str, Any] | None:
    """Operators by table, device and family, with the unweighted mean; None where no table has such strata."""
    rows = [{"table": table.name, **row} for table in tables for row in table.extra.get("strata", ())]
    return {"mean": mean_over_strata(rows), "rows": rows} if rows else None


def _table_object(table: TableScores) -> dict[str, Any]:
    scores = score_rows(table.rows)
    counted = table.countable - table.fitted
    return {
        "table": table.name,
        "kind": table.kind,
        "rows": len(table.rows),
        "countable": table.countable,
        "fitted": table.fitted,
        "scored_fraction": scores["n"] / counted if counted else None,
        **scores,
        "skipped": _reasons(table.rows),
        "defects": table.defects,
        "forecasts": table.forecasts,
        **table.extra,
    }


def _reasons(rows: Iterable[ScoredRow]) -> dict[str, int]:
    """Rows that are not scored, by reason, the most frequent first."""
    counts = Counter(row.reason or "no forecast" for row in rows if not row.scored)
    return dict(counts.most_common())


def _summed(counts: Iterable[dict[str, int]]) -> dict[str, int]:
    total: Counter[str] = Counter()
    for each in counts:
        total.update(each)
    return dict(total.most_common())


def _row_object(row: ScoredRow, table: str) -> dict[str, Any]:
    return {
        "row_id": row.row_id,
        "table": table,
        "predicted": None
        if row.predicted_p50 is None
        else {"p10": row.predicted_p10, "p50": row.predicted_p50, "p90": row.predicted_p90},
        "measured": row.measured,
        "naive": row.naive,
        "second": row.second,
        "scored": row.scored,
        "reason": row.reason,
        "group": row.group,
    }


def _error(row: ScoredRow) -> float:
    """|log(predicted / measured)|: too high and too low by the same factor are equally wrong."""
    assert row.predicted_p50 is not None and row.measured is not None, "the row is scored"
    return abs(log(row.predicted_p50 / row.measured))


def _worst(tables: Sequence[TableScores], count: int) -> list[dict[str, Any]]:
    """The rows that are farthest off by their factor, with their breakdown."""
    scored = [(row, table.name) for table in tables for row in table.rows if row.scored]
    scored.sort(key=lambda pair: (-_error(pair[0]), pair[0].row_id))
    return [
        {
            **_row_object(row, name),
            "ape": row.ape,
            "ratio": (row.predicted_p50 or 0.0) / (row.measured or 1.0),
            "columns": {key: row.columns[key] for key in _ROW_COLUMNS if row.columns.get(key)},
            "breakdown": {key: value for key, value in row.breakdown.items() if value},
        }
        for row, name in scored[:count]
    ]


def _by(tables: Sequence[TableScores], column: str) -> dict[str, Any]:
    """Errors by the value of a column, in numeric order where values are numbers."""
    known = dict.fromkeys(c for table in tables for c in table.columns)
    if column not in known:
        raise RequestError(f"no table has the column {column!r}", hint=f"the columns are {', '.join(known)}")
    found: dict[str, list[ScoredRow]] = {}
    for table in tables:
        for row in table.rows:
            if row.scored:
                found.setdefault(row.columns.get(column, ""), []).append(row)
    return {
        "column": column,
        "values": [
            {"value": value, **score_times(found[value]), "median_ratio": _ratio(found[value])}
            for value in sorted(found, key=_numeric)
        ],
    }


def _ratio(rows: Iterable[ScoredRow]) -> float | None:
    """Median of predicted over measured: which way the errors go."""
    return quantile([(row.predicted_p50 or 0.0) / (row.measured or 1.0) for row in rows], 0.5)


def _numeric(text: str) -> tuple[int, float, str]:
    try:
        return 0, float(text), ""
    except ValueError:
        return 1, 0.0, text
