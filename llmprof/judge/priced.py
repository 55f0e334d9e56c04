"""Operator and collective tables become scored rows: part of a table may be fitted, the rest is priced from it."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from math import exp, log
from typing import Any

import msgspec
import numpy as np

from llmprof.judge.aggregate import score_rows, score_times
from llmprof.judge.cells import Reject, Row, positive
from llmprof.judge.result import TableScores
from llmprof.judge.scores import ScoredRow
from llmprof.judge.splits import FEWEST_IN_STRATUM, Fit, Split, split_rows, strata
from llmprof.judge.strata import score_strata
from llmprof.judge.table import Table, row_ids

NORMAL_P90 = 1.2816
"""90 % quantile of a normal distribution in standard deviations."""
SEEDS = 5
FITTED = "fitted"
SHORTEST_US, LONGEST_US = 1e-3, 1e11
"""A nanosecond and a day: no call on a device takes less or more."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Item:
    """A row that can be priced.

    Attributes:
        index: of the row in its table.
        stratum: rows that are split and reported together.
        size: FLOPs of a matmul, bytes of anything else.
        roofline_us: time at the peak of what limits it, for the naive forecast; 0 for a view.
        nodes: nodes that it spans.
        kind: device and operator family, "" where rows are not told apart by these.
        work: what the pricer needs.
    """

    index: int
    row_id: str
    stratum: str
    time_us: float
    size: float
    roofline_us: float
    resolution_us: float
    nodes: int = 1
    kind: str = ""
    work: Any


def read_time_us(row: Row) -> float:
    """The measured time of a row in microseconds.

    Raises:
        Reject: there is none, or no call on a device can take it.
    """
    time_us = positive(row, "time_us")
    if time_us is None:
        raise Reject("no time")
    if not SHORTEST_US <= time_us <= LONGEST_US:
        raise Reject("below a nanosecond or above a day: time_us")
    return time_us


Pricer = Callable[[Sequence[Item], Sequence[Item]], list[tuple[float, float]]]
"""(fitted items, items to price) -> time in microseconds and spread of its logarithm for each."""


def median_share(fitted: Sequence[Item]) -> float:
    """Median share of the roofline that some items reach."""
    return float(np.median([item.roofline_us / item.time_us for item in fitted]))


@dataclass(frozen=True, kw_only=True, slots=True)
class Scoring:
    """How the rows of one kind of table are scored.

    Attributes:
        read: a row as an Item; raises Reject.
        price: prices items, given others that were measured.
        naive_share: share of the roofline that the naive forecast takes when nothing is fitted.
        fitted_share: the same from the fitted items of a stratum.
        seeds: random splits that are averaged.
    """

    read: Callable[[int, dict[str, str]], Item]
    price: Pricer
    naive_share: float
    fitted_share: Callable[[Sequence[Item]], float] = median_share
    seeds: int = SEEDS


def score_items(table: Table, scoring: Scoring, *, fit: Fit | None) -> TableScores:
    """Score a table; rows and fitted rows are those of the first split, time scores are means over all splits.

    `small_strata` has the scores of strata with fewer than FEWEST_IN_STRATUM rows, `without_small_strata` the rest.
    """
    items, reasons = _read_all(table, scoring)
    seeds = range(scoring.seeds if fit and fit.kind == "random" else 1)
    rounds = [_round(items, scoring, fit=fit, seed=seed) for seed in seeds]
    sizes = Counter(item.stratum for item in items)
    small = {key for key, count in sizes.items() if count < FEWEST_IN_STRATUM}
    first = {item.index: row for item, row in zip(items, rounds[0], strict=True)}
    mode = f"fit {fit}" if fit else "cold"
    return TableScores(
        name=table.name,
        kind=table.kind,
        columns=table.columns,
        rows=[_row(first.get(i), cells, reasons.get(i)) for i, cells in enumerate(table.rows)],
        groups=_groups(rounds, mode, small),
        countable=sum(1 for i in range(len(table.rows)) if i not in reasons or reasons[i].defect),
        fitted=sum(row.reason == FITTED for row in rounds[0]),
        forecasts=sum(row.scored for found in rounds for row in found),
        defects=dict(Counter(r.reason for r in reasons.values() if r.defect)),
        extra={
            "seeds": len(rounds),
            **_mean_scores(rounds),
            "small_strata": _part(rounds, small),
            "without_small_strata": _part(rounds, sizes.keys() - small) if small else None,
            "strata": score_strata([item.kind for item in items], rounds),
        },
    )


def _read_all(table: Table, scoring: Scoring) -> tuple[list[Item], dict[int, Reject]]:
    """Items in the order of the table, and why the other rows are none."""
    items: list[Item] = []
    reasons: dict[int, Reject] = {}
    for index, (name, row) in enumerate(zip(row_ids(table.rows), table.rows, strict=True)):
        try:
            items.append(replace(scoring.read(index, row), row_id=name))
        except Reject as reject:
            reasons[index] = reject
    return items, reasons


def _row(scored: ScoredRow | None, cells: dict[str, str], reject: Reject | None) -> ScoredRow:
    if scored is None:
        assert reject is not None, "a row is an item or has a reason"
        return ScoredRow(row_id=cells.get("row_id", ""), reason=reject.reason, columns=cells)
    return msgspec.structs.replace(scored, columns=cells)


def _round(items: Sequence[Item], scoring: Scoring, *, fit: Fit | None, seed: int) -> list[ScoredRow]:
    """Split once, price what is not fitted; rows in the order of the items."""
    split = _split(items, fit, seed)
    fitted, asked = [items[i] for i in split.fitted], [items[i] for i in split.scored]
    groups = {key: [fitted[i] for i in members] for key, members in strata(fitted, _stratum).items()}
    shares = {key: scoring.fitted_share(members) for key, members in groups.items()}
    nearest = {key: _Nearest(members) for key, members in groups.items()}
    lines = {key: fit_line(members) for key, members in groups.items()}
    rows: dict[int, ScoredRow] = {item.index: _fitted_row(item) for item in fitted}
    for item, (time_us, spread) in zip(asked, scoring.price(fitted, asked), strict=True):
        share = shares.get(item.stratum, scoring.naive_share)
        naive_us = item.roofline_us / share if share else None
        second_us = nearest[item.stratum].scaled_us(item) if item.stratum in nearest else None
        row = _scored_row(item, (time_us, spread), naive_us=naive_us, second_us=second_us)
        simple = {"roofline": item.roofline_us}
        if item.stratum in lines:
            floor_us, per_size_us = lines[item.stratum]
            simple["linear"] = floor_us + per_size_us * item.size
        rows[item.index] = msgspec.structs.replace(row, baselines=simple)
    return [rows[item.index] for item in items]


def _split(items: Sequence[Item], fit: Fit | None, seed: int) -> Split:
    if fit is None:
        return Split((), tuple(range(len(items))))
    return split_rows(
        items,
        fit,
        stratum=_stratum,
        row_id=lambda i: i.row_id,
        size=lambda i: i.size,
        nodes=lambda i: i.nodes,
        seed=seed,
    )


def fit_line(fitted: Sequence[Item]) -> tuple[float, float]:
    """Floor and slope (microseconds, of a FLOP or byte) of the line with the least squared relative errors, neither below 0."""
    times = np.array([item.time_us for item in fitted])
    columns = np.stack([1.0 / times, np.array([item.size for item in fitted]) / times], axis=1)
    scale = np.sqrt(np.square(columns).sum(axis=0))
    floor, slope = np.linalg.lstsq(columns / scale, np.ones(len(times)), rcond=None)[0] / scale
    if floor >= 0 and slope >= 0:
        return float(floor), float(slope)
    alone = columns.sum(axis=0) / np.square(columns).sum(axis=0)
    return (0.0, float(alone[1])) if floor < 0 else (float(alone[0]), 0.0)


class _Nearest:
    """The second baseline: the fitted item of a stratum that is nearest in size, scaled by its size."""

    def __init__(self, fitted: Sequence[Item]) -> None:
        self._items = sorted(fitted, key=lambda item: (item.size, item.row_id))
        self._sizes = [item.size for item in self._items]

    def scaled_us(self, item: Item) -> float:
        place = bisect_left(self._sizes, item.size)
        around = self._items[max(place - 1, 0) : place + 1]
        best = min(around, key=lambda other: abs(log(other.size / item.size)))
        return best.time_us * item.size / best.size


def _stratum(item: Item) -> Hashable:
    return item.stratum


def _fitted_row(item: Item) -> ScoredRow:
    return ScoredRow(row_id=item.row_id, measured=item.time_us, reason=FITTED, group=item.stratum)


def _scored_row(
    item: Item, price: tuple[float, float], *, naive_us: float | None, second_us: float | None
) -> ScoredRow:
    """The interval is that of a log-normal time."""
    time_us, spread = price
    return ScoredRow(
        row_id=item.row_id,
        measured=item.time_us,
        predicted_p10=time_us * exp(-NORMAL_P90 * spread),
        predicted_p50=time_us,
        predicted_p90=time_us * exp(NORMAL_P90 * spread),
        naive=naive_us or None,
        second=second_us,
        group=item.stratum,
        resolution=item.resolution_us,
    )


def _groups(rounds: Sequence[Sequence[ScoredRow]], mode: str, small: Collection[str]) -> list[dict[str, Any]]:
    """Scores of each stratum; `small` where it has too few rows to say much."""
    members: list[dict[str, list[ScoredRow]]] = []
    for rows in rounds:
        members.append({})
        for row in rows:
            members[-1].setdefault(row.group, []).append(row)
    return [
        {
            "key": key,
            "mode": mode,
            "small": key in small,
            **score_rows(found),
            **_mean_scores([of_round[key] for of_round in members]),
        }
        for key, found in members[0].items()
        if any(row.scored for row in found)
    ]


def _part(rounds: Sequence[Sequence[ScoredRow]], keys: Collection[str]) -> dict[str, Any] | None:
    """Time scores of some strata, None when none of their rows is scored."""
    found = [[row for row in rows if row.group in keys] for rows in rounds]
    count = sum(row.scored for row in found[0])
    return {"n": count, **_mean_scores(found)} if count else None


def _mean_scores(rounds: Sequence[Iterable[ScoredRow]]) -> dict[str, Any]:
    """Time scores as means over the splits; None where one of them has none."""
    found = [score_times([row for row in rows if row.scored]) for rows in rounds]
    return {
        key: float(np.mean([f[key] for f in found])) if all(f[key] is not None for f in found) else None
        for key in found[0]
        if key != "n"
    }
