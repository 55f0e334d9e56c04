"""Turns forecasts and measurements of layouts into errors, order and coverage, and those into a table."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations
from typing import Any, NamedTuple

import msgspec
import numpy as np
from rich.table import Table

from llmprof.judge.scores import absolute_percentage_error, covers, spearman, top1_regret

RESOLUTION = 0.05
"""Layouts whose measured steps differ by less are taken as equally fast: medians here repeat to about 3 %."""


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One layout of one case; times are seconds of one training step.

    Attributes:
        measured_iqr_s: interquartile range of the measured steps, `measured_n` of them.
        ratio_error: relative error of (this layout / one rank): drift of the machine common to both cancels.
    """

    case: str
    layout: str
    layout_string: str
    measured_s: float
    measured_iqr_s: float
    measured_n: int
    p10_s: float
    p50_s: float
    p90_s: float
    naive_s: float
    second_s: float
    bound_s: float
    ape: float
    naive_ape: float
    second_ape: float
    ratio_error: float
    covered: bool


class Single(NamedTuple):
    """A step on one rank, in seconds: what the ratios of layouts refer to."""

    measured_s: float
    forecast_s: float


def make_row(
    name: tuple[str, str], durations_s: Sequence[float], *, forecast: dict[str, Any], single: Single
) -> Row:
    """A row from the measured steps and the forecast.

    Args:
        name: of the case and of the layout.
        durations_s: measured steps in seconds.
        forecast: the object that `llmprof forecast --json` prints for the layout.
        single: the one-rank step of the case.
    """
    case, layout = name
    low, measured, high = (float(q) for q in np.percentile(durations_s, (25, 50, 75)))
    interval = forecast["step_time_s"]
    naive, second = forecast["naive_step_time_s"], forecast["second_baseline_step_time_s"]
    return Row(
        case=case,
        layout=layout,
        layout_string=forecast["layout"],
        measured_s=measured,
        measured_iqr_s=high - low,
        measured_n=len(durations_s),
        p10_s=interval["p10"],
        p50_s=interval["p50"],
        p90_s=interval["p90"],
        naive_s=naive,
        second_s=second,
        bound_s=forecast["bound_step_time_s"],
        ape=absolute_percentage_error(interval["p50"], measured),
        naive_ape=absolute_percentage_error(naive, measured),
        second_ape=absolute_percentage_error(second, measured),
        ratio_error=absolute_percentage_error(
            interval["p50"] / single.forecast_s, measured / single.measured_s
        ),
        covered=covers(interval["p10"], interval["p90"], measured),
    )


def summarize(rows: Sequence[Row], machine: dict[str, Any]) -> dict[str, Any]:
    """The scores of all rows that are not the one-rank run itself, and the rows.

    Args:
        rows: every row, also those of layout "single".
        machine: per case, what the machine did meanwhile: "drift" is the one-rank step measured beside the layouts
            over the one-rank step of the capture.
    """
    scored = [row for row in rows if row.layout != "single"]
    orders = [
        _order([row for row in scored if row.case == case]) for case in dict.fromkeys(r.case for r in scored)
    ]
    return {
        "n": len(scored),
        "median_ape": float(np.median([row.ape for row in scored])),
        "mean_ape": float(np.mean([row.ape for row in scored])),
        "naive_median_ape": float(np.median([row.naive_ape for row in scored])),
        "second_median_ape": float(np.median([row.second_ape for row in scored])),
        "median_ratio_error": float(np.median([row.ratio_error for row in scored])),
        "coverage80": float(np.mean([row.covered for row in scored])),
        "order_correct": all(order["pairs_correct"] == order["pairs"] for order in orders),
        "pairs": sum(order["pairs"] for order in orders),
        "pairs_correct": sum(order["pairs_correct"] for order in orders),
        "orders": orders,
        "machine": machine,
        "rows": [msgspec.to_builtins(row) for row in rows],
    }


def _order(rows: Sequence[Row]) -> dict[str, Any]:
    """How well the layouts of one case are ordered; pairs closer than RESOLUTION have no order to get right."""
    forecast, measured = [row.p50_s for row in rows], [row.measured_s for row in rows]
    pairs = [sorted(pair, key=lambda row: row.measured_s) for pair in combinations(rows, 2)]
    clear = [(a, b) for a, b in pairs if b.measured_s > a.measured_s * (1 + RESOLUTION)]
    return {
        "case": rows[0].case,
        "pairs": len(clear),
        "pairs_correct": sum(a.p50_s < b.p50_s for a, b in clear),
        "spearman": spearman(forecast, measured),
        "top1_correct": int(np.argmin(forecast)) == int(np.argmin(measured)),
        "top1_regret": top1_regret(forecast, measured),
    }


def table(rows: Sequence[Row]) -> Table:
    """The rows for a person, times in milliseconds."""
    result = Table(title="Two gloo ranks on this machine: one-rank capture, forecast against measurement")
    for heading in ("case", "layout"):
        result.add_column(heading, no_wrap=True)
    for heading in ("measured ms", "p10", "p50", "p90", "error", "ratio", "naive", "second", "in 80 %"):
        result.add_column(heading, justify="right")
    for row in rows:
        result.add_row(
            row.case if row.layout == "single" else "",
            row.layout,
            f"{row.measured_s * 1e3:.1f}",
            *(f"{value * 1e3:.1f}" for value in (row.p10_s, row.p50_s, row.p90_s)),
            f"{row.p50_s / row.measured_s - 1:+.1%}",
            f"{row.ratio_error:.1%}",
            f"{row.naive_ape:.1%}",
            f"{row.second_ape:.1%}",
            "yes" if row.covered else "no",
            end_section=row.layout == "1f1b",
        )
    return result
