"""Two Profiles in, their difference out: step time error and which part of the step carries it."""

from __future__ import annotations

from collections.abc import Mapping
from math import fsum

import msgspec

from llmprof.report.breakdown import Breakdown, break_down, group_operators
from llmprof.schema.profile import PHASES, Profile


class Part(msgspec.Struct, frozen=True, kw_only=True):
    """One part of the step in both profiles, in microseconds.

    Attributes:
        a, b: exclusive time per step; None when that profile does not know its phases.
        error_share: |a - b| of this part over the sum of all |a - b|; None when there is no difference.
    """

    part: str
    a: float | None
    b: float | None
    error_share: float | None


class Comparison(msgspec.Struct, frozen=True, kw_only=True):
    """What `llmprof compare --json` prints.

    Attributes:
        reference: "a" or "b", whichever `step_time_ape` divides by: the measured one, b when both are alike.
        step_time_ape: |a - b| / reference of the step time.
        memory_ape: the same of the peak memory, None when a peak is not known.
        parts: by phase; the values of a sum to a's step, those of b to b's.
        families: by operator family.
    """

    a: str
    b: str
    reference: str
    step_time_us: dict[str, float]
    step_time_ape: float
    tokens_per_s: dict[str, float | None]
    peak_memory_bytes: dict[str, int | None]
    memory_ape: float | None
    parts: tuple[Part, ...]
    families: tuple[Part, ...]
    warnings: tuple[str, ...]


def compare(a: Profile, b: Profile) -> Comparison:
    """Compare two profiles, each measured or predicted.

    Raises:
        RunError: one of them has no step.
    """
    first, second = break_down(a), break_down(b)
    reference = "a" if (first.kind, second.kind) == ("measured", "predicted") else "b"
    times = {"a": first.step_time_us.median, "b": second.step_time_us.median}
    peaks = {"a": first.peak_memory_bytes, "b": second.peak_memory_bytes}
    return Comparison(
        a=_label(first),
        b=_label(second),
        reference=reference,
        step_time_us=times,
        step_time_ape=abs(times["a"] - times["b"]) / times[reference],
        tokens_per_s={"a": first.tokens_per_s, "b": second.tokens_per_s},
        peak_memory_bytes=peaks,
        memory_ape=_ape(peaks["a"], peaks["b"], peaks[reference]),
        parts=_parts(first.phases, second.phases, PHASES),
        families=_parts(_by_family(first), _by_family(second)),
        warnings=(*(f"a: {w}" for w in first.warnings), *(f"b: {w}" for w in second.warnings)),
    )


def _parts(a: Mapping[str, float], b: Mapping[str, float], order: tuple[str, ...] = ()) -> tuple[Part, ...]:
    """Parts in the given order, else the largest first; a side without any part is not known."""
    names = [*order, *(n for n in {**a, **b} if n not in order)] if a or b else []
    if not order:
        names.sort(key=lambda name: -max(a.get(name, 0.0), b.get(name, 0.0)))
    comparable = bool(a) and bool(b)
    errors = {n: abs(a.get(n, 0.0) - b.get(n, 0.0)) for n in names}
    total = fsum(errors.values())
    return tuple(
        Part(
            part=name,
            a=a.get(name, 0.0) if a else None,
            b=b.get(name, 0.0) if b else None,
            error_share=errors[name] / total if comparable and total > 0 else None,
        )
        for name in names
    )


def _by_family(breakdown: Breakdown) -> dict[str, float]:
    return {group.key: group.exclusive_us for group in group_operators(breakdown, by="family")}


def _ape(a: float | None, b: float | None, reference: float | None) -> float | None:
    return abs(a - b) / reference if a is not None and b is not None and reference else None


def _label(breakdown: Breakdown) -> str:
    ranks = f"{breakdown.ranks} rank" + ("s" if breakdown.ranks != 1 else "")
    where = breakdown.cluster or breakdown.device
    return "  ".join(filter(None, (breakdown.name or "run", breakdown.kind, ranks, where, breakdown.layout)))
