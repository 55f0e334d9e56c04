"""Scored rows become the figures of a group, of a table, and the unweighted mean over tables."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from math import inf
from typing import Any, TypeGuard

import numpy as np

from llmprof.judge.scores import (
    LEAST_MFU,
    ScoredRow,
    absolute_percentage_error,
    covers,
    interval_score,
    oom_confusion,
    quantile,
    relative_width,
    spearman,
    top1_regret,
)

FEWEST_IN_CHOICE_SET = 8
TIME_SCORES = (
    "median_ape", "p90_ape", "coverage80", "interval_score80", "median_relative_width", "naive_median_ape",
    "second_median_ape",
)  # fmt: skip
AVERAGED = (*TIME_SCORES, "spearman", "top1_regret", "memory_median_ape")
"""Scores whose unweighted mean over tables makes the total."""


def score_rows(rows: Sequence[ScoredRow]) -> dict[str, Any]:
    """All scores of some rows; what does not apply is None.

    Returns:
        `n` and TIME_SCORES, `spearman` and `top1_regret` as means over `choice_sets`, `memory_median_ape`, `oom`, and
        where rows are below 1 % MFU the same time scores of them (`below_1pct_mfu`) and of the others
        (`without_below_1pct_mfu`).
    """
    scored = [row for row in rows if row.scored]
    result = {**score_times(scored), **score_choices(scored), **score_memory(rows)}
    usual = [row for row in scored if row.mfu is None or row.mfu >= LEAST_MFU]
    below = [row for row in scored if row.mfu is not None and row.mfu < LEAST_MFU]
    result["below_1pct_mfu"] = score_times(below) if below else None
    result["without_below_1pct_mfu"] = score_times(usual) if below else None
    return result


def score_times(scored: Sequence[ScoredRow]) -> dict[str, Any]:
    """Errors and intervals of rows that are scored."""
    triples = [
        (row.predicted_p10, row.predicted_p50, row.predicted_p90, row.measured)
        for row in scored
        if row.predicted_p10 is not None and row.predicted_p90 is not None
    ]
    full = [(a, b, c, x) for a, b, c, x in triples if b is not None and x is not None]
    errors = [row.ape for row in scored if row.ape is not None]
    return {
        "n": len(scored),
        "median_ape": quantile(errors, 0.5),
        "p90_ape": quantile(errors, 0.9),
        "coverage80": _mean([covers(a, c, x) for a, _, c, x in full]),
        "interval_score80": _mean([interval_score(a, c, x) for a, _, c, x in full]),
        "median_relative_width": quantile([relative_width(a, b, c) for a, b, c, _ in full], 0.5),
        "naive_median_ape": _median_of(scored, "naive"),
        "second_median_ape": _median_of(scored, "second"),
    }


def score_choices(scored: Iterable[ScoredRow]) -> dict[str, Any]:
    """Order and regret over sets of layouts that compete, each with at least FEWEST_IN_CHOICE_SET rows."""
    sets: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for row in scored:
        if row.choice_set and row.predicted_p50 is not None and row.measured is not None:
            sets[row.choice_set].append((row.predicted_p50, row.measured))
    large = [list(zip(*pairs, strict=True)) for pairs in sets.values() if len(pairs) >= FEWEST_IN_CHOICE_SET]
    orders = [spearman(predicted, measured) for predicted, measured in large]
    return {
        "choice_sets": len(large) or None,
        "spearman": _mean([o for o in orders if o is not None]),
        "top1_regret": _mean([top1_regret(predicted, measured) for predicted, measured in large]),
    }


def score_memory(rows: Iterable[ScoredRow]) -> dict[str, Any]:
    """Error of the peak, and fit against out of memory, also on the hard rows alone."""
    sizes, known = [], []
    for row in rows:
        if _possible(row.memory_measured) and _possible(row.memory_predicted):
            sizes.append(absolute_percentage_error(row.memory_predicted, row.memory_measured))
        if row.oom is not None and row.oom_probability is not None:
            known.append((row.oom_probability, row.oom, row.hard))
    hard = [(p, oom) for p, oom, is_hard in known if is_hard]
    confusion = None
    if known:
        confusion = oom_confusion([p for p, *_ in known], [oom for _, oom, _ in known])._asdict()
        confusion["hard"] = oom_confusion([p for p, _ in hard], [oom for _, oom in hard])._asdict()
    return {"memory_median_ape": quantile(sizes, 0.5), "memory_n": len(sizes) or None, "oom": confusion}


def mean_over_tables(tables: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Unweighted mean of each score over the tables that have it; `n` is the sum."""
    means: dict[str, Any] = {"n": sum(t["n"] for t in tables), "tables": len(tables)}
    for name in AVERAGED:
        means[name] = _mean([t[name] for t in tables if t.get(name) is not None])
    lesser = [t["without_below_1pct_mfu"] or t for t in tables]
    means["without_below_1pct_mfu"] = {
        name: _mean([t[name] for t in lesser if t.get(name) is not None]) for name in TIME_SCORES
    }
    confusions = [t["oom"] for t in tables if t.get("oom")]
    means["oom"] = _mean_confusion(confusions) if confusions else None
    return means


def _mean_confusion(confusions: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    def mean(found: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        names = ("accuracy", "false_fit_rate", "false_oom_rate", "brier")
        return {
            "n": sum(c["n"] for c in found),
            **{name: _mean([c[name] for c in found if c[name] is not None]) for name in names},
        }

    return {**mean(confusions), "hard": mean([c["hard"] for c in confusions])}


def _median_of(scored: Iterable[ScoredRow], baseline: str) -> float | None:
    errors = [
        absolute_percentage_error(getattr(row, baseline), row.measured, resolution=row.resolution)
        for row in scored
        if _possible(getattr(row, baseline)) and row.measured is not None
    ]
    return quantile(errors, 0.5)


def _possible(quantity: float | None) -> TypeGuard[float]:
    """Known, finite and above 0: anything else is never scored."""
    return quantity is not None and 0 < quantity < inf


def _mean(values: Sequence[float]) -> float | None:
    return float(np.mean(values)) if len(values) else None
