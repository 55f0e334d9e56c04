"""Operator and collective tables become scored rows: part of a table may be fitted, the rest is priced from it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from math import exp
from typing import Any

import numpy as np

from llmprof.judge.aggregate import score_rows, score_times
from llmprof.judge.cells import Reject
from llmprof.judge.result import TableScores
from llmprof.judge.scores import ScoredRow
from llmprof.judge.splits import FEWEST_IN_STRATUM, Fit, split_rows, strata
from llmprof.judge.table import Table

NORMAL_P90 = 1.2816
SEEDS = 5
FITTED = "fitted"


@dataclass(frozen=True, kw_only=True, slots=True)
class Item:
    """A row that can be priced.

    Attributes:
        index: of the row in its table.
        stratum: rows that are split and reported together.
        size: FLOPs of a matmul, bytes of anything else.
        roofline_us: time at the peak of what limits it, for the naive forecast.
        nodes: nodes that it spans.
        work: what the pricer needs.
    """

    index: int
    row_id: str
    stratum: str
    time_us: float
    size: float
    roofline_us: float
    resolution_us: float
    nodes: int
    work: Any


Pricer = Callable[[Sequence[Item], Sequence[Item]], list[tuple[float, float]]]
"""(fitted items, items to price) -> time in microseconds and spread of its logarithm for each."""


def score_items(
    table: Table,
    read: Callable[[int, dict[str, str]], Item],
    price: Pricer,
    *,
    fit: Fit | None,
    naive_share: float,
) -> TableScores:
    """Score a table.

    Args:
        read: a row as an Item; raises Reject.
        price: prices items, given others that were measured.
        fit: what is fitted; None for none.
        naive_share: share of the peak that the naive forecast takes when nothing is fitted.
    """
    items: list[Item] = []
    reasons: dict[int, Reject] = {}
    seen: set[str] = set()
    for index, row in enumerate(table.rows):
        try:
            item = read(index, row)
            if item.row_id in seen:
                raise Reject("row_id stands in the table twice")
            seen.add(item.row_id)
            items.append(item)
        except Reject as reject:
            reasons[index] = reject
    seeds = range(SEEDS if fit and fit.kind == "random" else 1)
    rounds = [_round(items, price, fit=fit, seed=seed, naive_share=naive_share) for seed in seeds]
    first = {row.row_id: row for row in rounds[0]}
    by_index = {item.index: first[item.row_id] for item in items}
    rows = [
        by_index[i] if i in by_index else ScoredRow(row_id=row.get("row_id", ""), reason=reasons[i].reason)
        for i, row in enumerate(table.rows)
    ]
    fitted = sum(row.reason == FITTED for row in rounds[0])
    return TableScores(
        name=table.name,
        kind=table.kind,
        columns=table.columns,
        rows=[_with_columns(row, cells) for row, cells in zip(rows, table.rows, strict=True)],
        groups=_groups(rounds[0], "cold" if fit is None else f"fit {fit.kind}:{fit.amount:g}"),
        countable=sum(1 for i in range(len(table.rows)) if i not in reasons or reasons[i].defect),
        fitted=fitted,
        forecasts=sum(row.scored for found in rounds for row in found),
        defects=dict(Counter(r.reason for r in reasons.values() if r.defect)),
        extra={"seeds": len(rounds), **_mean_scores(rounds)},
    )


def _with_columns(row: ScoredRow, cells: dict[str, str]) -> ScoredRow:
    from msgspec.structs import replace

    return replace(row, columns=cells)


def _round(
    items: Sequence[Item], price: Pricer, *, fit: Fit | None, seed: int, naive_share: float
) -> list[ScoredRow]:
    """Split once, price what is not fitted."""
    fitted: list[Item] = []
    asked = list(items)
    if fit:
        split = split_rows(
            items,
            fit,
            stratum=_stratum,
            row_id=lambda i: i.row_id,
            size=lambda i: i.size,
            nodes=lambda i: i.nodes,
            seed=seed,
        )
        fitted, asked = [items[i] for i in split.fitted], [items[i] for i in split.scored]
    shares = {
        key: float(np.median([fitted[i].roofline_us / fitted[i].time_us for i in members]))
        for key, members in strata(fitted, _stratum).items()
    }
    rows = [_fitted_row(item) for item in fitted]
    for item, (time_us, spread) in zip(asked, price(fitted, asked), strict=True):
        nearest = [f for f in fitted if f.stratum == item.stratum] if len(fitted) < 500 else []
        second = min(nearest, key=lambda f: abs(np.log(f.size / item.size)), default=None)
        rows.append(
            ScoredRow(
                row_id=item.row_id,
                measured=item.time_us,
                predicted_p10=time_us * exp(-NORMAL_P90 * spread),
                predicted_p50=time_us,
                predicted_p90=time_us * exp(NORMAL_P90 * spread),
                naive=item.roofline_us / shares.get(item.stratum, naive_share),
                second=second.time_us * item.size / second.size if second else None,
                group=item.stratum,
                resolution=item.resolution_us,
            )
        )
    return rows


def _stratum(item: Item) -> Hashable:
    return item.stratum


def _fitted_row(item: Item) -> ScoredRow:
    return ScoredRow(row_id=item.row_id, measured=item.time_us, reason=FITTED, group=item.stratum)


def _groups(rows: Sequence[ScoredRow], mode: str) -> list[dict[str, Any]]:
    """Scores of each stratum; `small` where it has too few rows to say much."""
    members: dict[str, list[ScoredRow]] = {}
    for row in rows:
        members.setdefault(row.group, []).append(row)
    return [
        {"key": key, "mode": mode, "small": len(found) < FEWEST_IN_STRATUM, **score_rows(found)}
        for key, found in members.items()
        if any(row.scored for row in found)
    ]


def _mean_scores(rounds: Sequence[Sequence[ScoredRow]]) -> dict[str, Any]:
    """Time scores as means over the seeds."""
    found = [score_times([row for row in rows if row.scored]) for rows in rounds]
    return {
        key: float(np.mean([f[key] for f in found])) if all(f[key] is not None for f in found) else None
        for key in found[0]
        if key != "n"
    }
