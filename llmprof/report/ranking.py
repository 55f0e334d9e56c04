"""Forecast objects in, their order out: which layout to book."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

Forecast = Mapping[str, Any]
"""The object of `llmprof forecast --json`."""


def seconds_per_sequence(forecast: Forecast) -> float:
    """Step time p50 over the global batch: what makes forecasts of different batches comparable."""
    return float(forecast["step_time_s"]["p50"]) / max(1, int(forecast["global_batch"]))


def rank_forecasts(forecasts: Sequence[Forecast]) -> list[Forecast]:
    """Those that fit first, the fastest per sequence first."""
    return sorted(forecasts, key=lambda f: (f["verdict"] == "oom", seconds_per_sequence(f)))


def best_forecast(forecasts: Sequence[Forecast]) -> Forecast | None:
    """The fastest that fits, None when none does."""
    first = rank_forecasts(forecasts)[0]
    return None if first["verdict"] == "oom" else first


def intervals_overlap(a: Forecast, b: Forecast) -> bool:
    """True when the p90 of the faster one reaches the p10 of the other, per sequence."""
    high = a["step_time_s"]["p90"] / max(1, a["global_batch"])
    low = b["step_time_s"]["p10"] / max(1, b["global_batch"])
    return bool(high >= low)
