"""Cost and energy: from a step time on a cluster to money per step and per token, and joules per step."""

from __future__ import annotations

from typing import Any

from llmprof.extrapolate.uncertainty import Interval
from llmprof.schema.cluster import Cluster

_SECONDS_PER_HOUR = 3600.0


def step_cost(
    cluster: Cluster, *, gpus: int, step_time_s: float, tokens_per_step: float
) -> dict[str, Any] | None:
    """Money for one step and for 10^9 tokens at the cluster's price, or None when it has none.

    Returns:
        currency, per_step, per_1e9_tokens, and the date and source of the price.
    """
    price = cluster.price
    if price is None:
        return None
    per_step = price.per_device_hour * gpus * step_time_s / _SECONDS_PER_HOUR
    return {
        "currency": price.currency,
        "per_step": per_step,
        "per_1e9_tokens": per_step / tokens_per_step * 1e9 if tokens_per_step > 0 else None,
        "date": price.date,
        "source": price.source,
    }


def step_energy_j(cluster: Cluster, *, gpus: int, step_time_s: Interval) -> dict[str, float] | None:
    """Energy of one step of all devices (joules), or None when the power is not known.

    Upper estimate: every device draws its board limit for the whole step (assumed); hosts and network not counted.
    """
    power = cluster.device.power_w
    if power is None:
        return None
    return {
        "p10": power * gpus * step_time_s.p10,
        "p50": power * gpus * step_time_s.p50,
        "p90": power * gpus * step_time_s.p90,
    }


def economics_assumptions(cluster: Cluster) -> tuple[str, ...]:
    """What cost and energy take for granted, one sentence each."""
    lines = []
    if cluster.price is not None:
        price = cluster.price
        lines.append(
            f"price {price.per_device_hour:g} {price.currency} per device and hour of {price.date} ({price.source})"
        )
    if cluster.device.power_w is not None:
        lines.append(f"energy assumes {cluster.device.power_w:g} W for each device over the whole step")
    return tuple(lines)
