"""What searches found -> one answer: forecasts best first, how sure the first place is, the Pareto front, the knee."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from math import log2
from typing import Any

from llmprof.extrapolate.forecast import Forecaster, Simulation
from llmprof.extrapolate.predict import forecast_object
from llmprof.extrapolate.search import Found, least_regret, probability_best

DEFAULT_KNEE = 1.5
"""Least gain in tokens per second of a doubled number of GPUs that is worth it, unless asked otherwise."""


def answer(
    forecaster: Forecaster,
    searches: Mapping[int, Found],
    *,
    seq: int | None = None,
    tokens: float | None = None,
    knee: float = DEFAULT_KNEE,
) -> dict[str, Any]:
    """The object of `llmprof search --json`, without its time.

    Args:
        forecaster: of the searches, with draws.
        searches: by number of GPUs.
        tokens: of the whole run, to add its time and cost.
    """
    simulations = [
        forecaster.simulate(layout, global_batch=layout.global_batch, seq=seq)
        for found in searches.values()
        for _, layout in found.layouts
    ]
    simulations.sort(key=lambda s: (_per_sequence(s), s.plan.layout.gpus, str(s.plan.layout)))
    forecasts = [
        forecast_object(forecaster.profile, forecaster.cluster, simulation, tokens=tokens)
        for simulation in simulations
    ]
    sure = probability_best(simulations)
    for forecast, probability, front in zip(forecasts, sure, _on_front(forecasts), strict=True):
        forecast["probability_best"], forecast["pareto"] = probability, front
    scaling = list(_scaling(forecasts))
    refused = sum((found.refused for found in searches.values()), Counter[str]())
    return {
        "layouts": forecasts,
        "considered": sum(f.considered for f in searches.values()),
        "pruned": sum(f.pruned for f in searches.values()),
        "simulated": sum(f.simulated for f in searches.values()),
        "too_large": sum(f.too_large for f in searches.values()),
        "refused": sum(refused.values()),
        "refusals": dict(refused.most_common(20)),
        "left": sum(f.left for f in searches.values()),
        "proven": all(f.proven for f in searches.values()),
        "probability_best": sure[0] if sure else None,
        "least_regret": forecasts[least_regret(simulations)]["layout"] if simulations else None,
        "scaling": scaling,
        "knee_gpus": knee_of(scaling, knee),
        "tightest": _tightest(searches.values()),
    }


def _per_sequence(simulation: Simulation) -> float:
    return float(simulation.step_s[0]) / simulation.plan.layout.global_batch


def _on_front(forecasts: Sequence[Mapping[str, Any]]) -> list[bool]:
    """Whether no other is at least as good in time, GPU time and memory, and better in one of them."""
    points = [
        (time, time * f["gpus"], f["peak_memory_bytes"]["p50"])
        for f in forecasts
        for time in [f["step_time_s"]["p50"] / f["global_batch"]]
    ]
    return [
        not any(other != point and all(a <= b for a, b in zip(other, point, strict=True)) for other in points)
        for point in points
    ]


def _scaling(forecasts: Sequence[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    """The best of every number of GPUs, ascending."""
    best: dict[int, Mapping[str, Any]] = {}
    for forecast in forecasts:
        best.setdefault(forecast["gpus"], forecast)
    for gpus in sorted(best):
        found = best[gpus]
        rate = found["tokens_per_s"]["p50"]
        yield {
            "gpus": gpus,
            "layout": found["layout"],
            "step_time_s": found["step_time_s"]["p50"],
            "tokens_per_s": rate,
            "tokens_per_s_per_gpu": rate / gpus,
            "cost": found["cost"],
            "run": found["run"],
        }


def knee_of(scaling: Sequence[Mapping[str, Any]], least: float) -> int | None:
    """The number of GPUs beyond which a doubled number gives less than `least` times the tokens per second.

    Between numbers that are not doubles the gain is taken to the power that makes it one of a doubling. None when every
    step up is worth it, or there is only one number.
    """
    for small, large in pairwise(scaling):
        ratio = large["gpus"] / small["gpus"]
        gain = large["tokens_per_s"] / small["tokens_per_s"]
        if gain < least ** log2(ratio):
            return int(small["gpus"])
    return None


def _tightest(searches: Iterable[Found]) -> dict[str, Any] | None:
    known = [found.tightest for found in searches if found.tightest is not None]
    if not known:
        return None
    least = min(known, key=lambda t: t.peak_bytes)
    return {
        "layout": str(least.layout),
        "peak_memory_bytes": least.peak_bytes,
        "usable_memory_bytes": least.usable_bytes,
    }
