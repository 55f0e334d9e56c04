"""A Profile in, the numbers of `llmprof show` out: step time, phases, operators, collectives. Draws nothing.

Operators and phases are measured in a profiled window, which is slower than a step without a profiler. Their
exclusive times are scaled to the uninstrumented step, so that they sum to it. Over ranks, the mean is reported;
the step time itself is that of the slowest rank.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Sequence
from math import fsum

import msgspec

from llmprof.report.steps import (
    Spread,
    choose_steps,
    mfu,
    only_rank,
    rank_weights,
    slowest_per_step,
    state_warnings,
    tokens_per_s,
)
from llmprof.schema.profile import PHASES, CollectiveRow, OperatorRow, Profile


class OperatorLine(msgspec.Struct, frozen=True, kw_only=True):
    """Calls of one operator with equal shapes, module and phase, mean over ranks.

    Attributes:
        count: calls per step.
        time_us: duration of one call.
        exclusive_us: share of the step, scaled to the uninstrumented step.
        flops, bytes: of one call.
    """

    op: str
    family: str
    module: str
    phase: str
    shapes: str
    dtype: str
    count: float
    time_us: float
    exclusive_us: float
    flops: int
    bytes: int


class CollectiveLine(msgspec.Struct, frozen=True, kw_only=True):
    """Calls of one collective with equal group and size, mean over ranks; `exposed_us` is per step, scaled."""

    kind: str
    axis: str
    group_size: int
    size_bytes: int
    count: float
    time_us: float
    exposed_us: float


class Group(msgspec.Struct, frozen=True, kw_only=True):
    """Operators added up over a key; all values are per step.

    Attributes:
        key: name of the operator, module or family.
        phases: phases in which it ran, the longest first.
        share: of the step's time.
    """

    key: str
    phases: tuple[str, ...]
    count: float
    exclusive_us: float
    share: float
    flops: float
    bytes: float


class Breakdown(msgspec.Struct, frozen=True, kw_only=True):
    """All numbers of one Profile; the keys are those of `llmprof show --json`.

    Attributes:
        phases: exclusive time per step by phase; sums to `step_time_us.median`; empty when no window was recorded.
        tokens_per_s: over all ranks.
        peak_memory_bytes: of the rank with the most.
        memory_bytes: by category, of the rank with the most.
    """

    name: str
    kind: str
    status: str
    ranks: int
    device: str
    layout: str
    cluster: str
    precision: str
    step_time_us: Spread
    attributed_fraction: float | None
    root_fraction: float | None
    phases: dict[str, float]
    tokens_per_s: float | None
    mfu: float | None
    peak_memory_bytes: int | None
    memory_bytes: dict[str, int]
    operators: tuple[OperatorLine, ...]
    collectives: tuple[CollectiveLine, ...]
    warnings: tuple[str, ...]


def break_down(profile: Profile, *, rank: int | None = None) -> Breakdown:
    """Compute every number that `show` reports.

    Args:
        profile: measured or predicted.
        rank: look at this rank only; all ranks when None.

    Raises:
        RunError: the profile has no step.
        RequestError: the profile does not have the rank.
    """
    if rank is not None:
        profile = only_rank(profile, rank)
    manifest = profile.manifest
    chosen, warnings = choose_steps(profile)
    step_time = slowest_per_step(chosen)
    weights = rank_weights(profile)
    scale, phases = _phases(profile, step_time.median, weights)
    if not phases:
        warnings.append("no profiled window was recorded: phases and operators are not known")
    return Breakdown(
        name=manifest.name,
        kind=manifest.kind,
        status=manifest.status,
        ranks=manifest.world_size,
        device=device_text(profile),
        layout=manifest.layout,
        cluster=manifest.cluster,
        precision=manifest.precision,
        step_time_us=step_time,
        attributed_fraction=manifest.attributed_fraction,
        root_fraction=manifest.root_fraction,
        phases=phases,
        tokens_per_s=tokens_per_s(profile, chosen, step_us=step_time.median),
        mfu=mfu(profile, step_us=step_time.median),
        peak_memory_bytes=_peak_memory_bytes(profile),
        memory_bytes=_memory_bytes(profile),
        operators=_operators(profile.operators, weights, scale),
        collectives=_collectives(profile.collectives, weights, scale),
        warnings=tuple(dict.fromkeys([*state_warnings(profile, step_time), *warnings, *manifest.warnings])),
    )


def group_operators(breakdown: Breakdown, *, by: str, depth: int | None = None) -> list[Group]:
    """Operators added up by "op", "module", "layer" or "family", the longest first.

    "layer" adds repeated layers up: "layers.0.mlp" and "layers.1.mlp" become "layers.*.mlp".

    Args:
        breakdown: from `break_down`.
        by: what to group by.
        depth: for modules and layers, how many levels of the name to keep; None keeps all.
    """
    key = _KEYS[by]
    members: dict[str, list[OperatorLine]] = defaultdict(list)
    for line in breakdown.operators:
        name = key(line)
        members[".".join(name.split(".")[:depth]) if depth and by in ("module", "layer") else name].append(
            line
        )
    step_us = breakdown.step_time_us.median
    groups = [_group(name, lines, step_us) for name, lines in members.items()]
    return sorted(groups, key=lambda g: -g.exclusive_us)


ROOT = "(root)"
_LAYER_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")
_KEYS: dict[str, Callable[[OperatorLine], str]] = {
    "op": lambda line: line.op,
    "module": lambda line: line.module or ROOT,
    "layer": lambda line: _LAYER_NUMBER.sub("*", line.module) or ROOT,
    "family": lambda line: line.family,
}
GROUP_KEYS = tuple(_KEYS)


def _group(name: str, lines: Sequence[OperatorLine], step_us: float) -> Group:
    by_phase: dict[str, float] = defaultdict(float)
    for line in lines:
        by_phase[line.phase] += line.exclusive_us
    exclusive_us = fsum(line.exclusive_us for line in lines)
    return Group(
        key=name,
        phases=tuple(sorted(by_phase, key=lambda phase: -by_phase[phase])),
        count=fsum(line.count for line in lines),
        exclusive_us=exclusive_us,
        share=exclusive_us / step_us if step_us else 0.0,
        flops=fsum(line.count * line.flops for line in lines),
        bytes=fsum(line.count * line.bytes for line in lines),
    )


def _phases(profile: Profile, step_us: float, weights: dict[int, float]) -> tuple[float, dict[str, float]]:
    """Factor from the profiled window to the uninstrumented step, and the phases that sum to that step."""
    num_steps: dict[int, set[int]] = defaultdict(set)
    totals: dict[str, float] = dict.fromkeys(PHASES, 0.0)
    for row in profile.phases:
        num_steps[row.rank].add(row.step)
    for row in profile.phases:
        weight = weights.get(row.rank, 0.0) / len(num_steps[row.rank])
        totals[row.phase] = totals.get(row.phase, 0.0) + weight * row.exclusive_us
    window_us = fsum(totals.values())
    if window_us <= 0:
        return 1.0, {}
    # ranks without phases carry no weight in either sum, so the ratio of the two holds for them too
    covered = fsum(weights.get(rank, 0.0) for rank in num_steps)
    scale = step_us / window_us
    phases = {phase: value * scale for phase, value in totals.items()}
    largest = max(phases, key=lambda phase: phases[phase])
    phases[largest] += step_us - sum(phases.values())
    return scale * covered, phases


def _operators(
    rows: Sequence[OperatorRow], weights: dict[int, float], scale: float
) -> tuple[OperatorLine, ...]:
    total = fsum(weights.get(rank, 0.0) for rank in {row.rank for row in rows}) or 1.0
    members: dict[tuple[str, ...], list[OperatorRow]] = defaultdict(list)
    for row in rows:
        key = (row.op, row.family, row.module, row.phase, row.shapes, row.dtype, row.attributes, row.device)
        members[key].append(row)
    lines = []
    for same in members.values():
        shares = [weights.get(row.rank, 0.0) / total for row in same]
        count = fsum(w * row.count for w, row in zip(shares, same, strict=True))
        time_us = fsum(w * row.count * row.time_us for w, row in zip(shares, same, strict=True))
        exclusive_us = fsum(w * row.exclusive_us for w, row in zip(shares, same, strict=True))
        lines.append(
            OperatorLine(
                op=same[0].op,
                family=same[0].family,
                module=same[0].module,
                phase=same[0].phase,
                shapes=same[0].shapes,
                dtype=same[0].dtype,
                count=count,
                time_us=time_us / count if count else 0.0,
                exclusive_us=exclusive_us * scale,
                flops=same[0].flops,
                bytes=same[0].bytes,
            )
        )
    return tuple(sorted(lines, key=lambda line: -line.exclusive_us))


def _collectives(
    rows: Sequence[CollectiveRow], weights: dict[int, float], scale: float
) -> tuple[CollectiveLine, ...]:
    rows = [row for row in rows if row.in_situ]
    total = fsum(weights.get(rank, 0.0) for rank in {row.rank for row in rows}) or 1.0
    members: dict[tuple[str, str, int, int], list[CollectiveRow]] = defaultdict(list)
    for row in rows:
        members[row.kind, row.axis, row.group_size, row.size_bytes].append(row)
    lines = []
    for (kind, axis, group_size, size_bytes), same in members.items():
        shares = [weights.get(row.rank, 0.0) / total for row in same]
        count = fsum(w * row.count for w, row in zip(shares, same, strict=True))
        time_us = fsum(w * row.count * row.time_us for w, row in zip(shares, same, strict=True))
        lines.append(
            CollectiveLine(
                kind=kind,
                axis=axis,
                group_size=group_size,
                size_bytes=size_bytes,
                count=count,
                time_us=time_us / count if count else 0.0,
                exposed_us=fsum(w * row.exposed_us for w, row in zip(shares, same, strict=True)) * scale,
            )
        )
    return tuple(sorted(lines, key=lambda line: -line.exposed_us))


def _memory_bytes(profile: Profile) -> dict[str, int]:
    largest: dict[str, int] = {}
    for row in profile.memory:
        largest[row.category] = max(largest.get(row.category, 0), row.size_bytes)
    return largest


def _peak_memory_bytes(profile: Profile) -> int | None:
    """Peak outside the profiled window when that is known: recording shapes keeps tensors alive inside it."""
    outside = [
        row.peak_memory_bytes
        for row in profile.steps
        if row.peak_memory_bytes is not None and not row.instrumented
    ]
    if outside:
        return max(outside)
    return max((row.size_bytes for row in profile.memory if row.category == "peak"), default=None)


def device_text(profile: Profile) -> str:
    """What the ranks ran on, such as "NVIDIA H100 80GB HBM3"; several kinds are joined by " + "."""
    names = dict.fromkeys(row.device_name or row.device for row in profile.sources)
    return " + ".join(names)
