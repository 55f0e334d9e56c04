"""Scored operator rows become scores by device and family, so that a large table hides no small one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import exp, log
from typing import Any

import msgspec
import numpy as np

from llmprof.judge.aggregate import score_times
from llmprof.judge.scores import ScoredRow, absolute_percentage_error, quantile

FEWEST = 30
"""Strata with fewer scored rows say too little and are left out."""
BASELINES = {
    "naive_median_ape": "constant efficiency",
    "second_median_ape": "nearest row",
    "linear_median_ape": "linear in work",
    "roofline_median_ape": "spec roofline",
}
"""Scores of simple rules that the product's own has to beat, and what they are."""
SCORES = ("median_ape", "p90_ape", "coverage80", "interval_score80", "band_score80", *BASELINES)
_NORMAL_P90 = 1.2816


def score_strata(kinds: Sequence[str], rounds: Sequence[Sequence[ScoredRow]]) -> list[dict[str, Any]]:
    """Scores of each device and family with at least FEWEST scored rows, means over the splits.

    Args:
        kinds: device and family of each row, "" where it has none.
        rounds: of each split, the rows in the order of `kinds`.

    Returns:
        For each stratum `key`, `n` of the first split, SCORES and `beats`: whether its median error is below that of
        each baseline.
    """
    found = []
    for key in dict.fromkeys(filter(None, kinds)):
        parts = [
            [row for kind, row in zip(kinds, rows, strict=True) if kind == key and row.scored]
            for rows in rounds
        ]
        if min(map(len, parts)) < FEWEST:
            continue
        scores = _means([_scores(part) for part in parts])
        beats = all(scores[name] is None or scores["median_ape"] < scores[name] for name in BASELINES)
        found.append({"key": key, "n": len(parts[0]), **scores, "beats": beats})
    return found


def mean_over_strata(strata: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    """Unweighted means over strata, how many there are and how many beat each baseline; None without any."""
    if not strata:
        return None
    return {**_means(strata), "n": len(strata), "beats": sum(stratum["beats"] for stratum in strata)}


def _scores(rows: Sequence[ScoredRow]) -> dict[str, float | None]:
    times = score_times(rows)
    return {
        **{name: times[name] for name in SCORES if name in times},
        "band_score80": _band_score(rows),
        "linear_median_ape": _median_ape(rows, "linear"),
        "roofline_median_ape": _median_ape(rows, "roofline"),
    }


def _median_ape(rows: Sequence[ScoredRow], baseline: str) -> float | None:
    errors = [
        absolute_percentage_error(row.baselines[baseline], row.measured, resolution=row.resolution)
        for row in rows
        if row.measured is not None and row.baselines.get(baseline, 0.0) > 0
    ]
    return quantile(errors, 0.5)


def _band_score(rows: Sequence[ScoredRow]) -> float | None:
    """Winkler score of the same prices in a band of one width, chosen with hindsight to hold 80 % of the rows."""
    pairs = [(row.predicted_p50 or 0.0, row.measured or 0.0) for row in rows]
    spread = float(np.quantile([abs(log(price / time)) for price, time in pairs], 0.8)) / _NORMAL_P90
    width = exp(_NORMAL_P90 * spread)
    banded = [
        msgspec.structs.replace(row, predicted_p10=price / width, predicted_p90=price * width)
        for row, (price, _) in zip(rows, pairs, strict=True)
    ]
    score: float | None = score_times(banded)["interval_score80"]
    return score


def _means(found: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Mean of each score over those that have it."""
    means: dict[str, Any] = {}
    for name in SCORES:
        values = [scores[name] for scores in found if scores[name] is not None]
        means[name] = float(np.mean(values)) if values else None
    return means
