"""Step rows in, the step time and what follows from it out: which steps count, throughput, MFU."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence

import msgspec
import numpy as np

from llmprof.errors import LayoutError, RequestError, RunError
from llmprof.schema.layout import Layout
from llmprof.schema.profile import TABLES, Profile, StepRow

NOISY_IQR_FRACTION = 0.10


class Spread(msgspec.Struct, frozen=True, kw_only=True):
    """A measured time: median and interquartile range over n steps (iqr is None for a single one)."""

    median: float
    iqr: float | None
    n: int


def only_rank(profile: Profile, rank: int) -> Profile:
    """The rows of one rank.

    Raises:
        RequestError: the profile has no rows of that rank.
    """
    present = sorted({s.rank for s in profile.steps} | {c.rank for c in profile.manifest.rank_classes})
    if rank not in present:
        raise RequestError(
            f"rank {rank} is not in the run", hint=f"it has {', '.join(map(str, present)) or 'no ranks'}"
        )
    manifest = msgspec.structs.replace(
        profile.manifest, rank_classes=tuple(c for c in profile.manifest.rank_classes if c.rank == rank)
    )
    rows = {name: tuple(r for r in getattr(profile, name) if r.rank == rank) for name in TABLES}
    return msgspec.structs.replace(profile, manifest=manifest, **rows)


def choose_steps(profile: Profile) -> tuple[list[StepRow], list[str]]:
    """Rows of the steps that the step time is taken from, and warnings about the choice.

    Uninstrumented training steps if there are any, else instrumented ones, else whatever was seen.

    Raises:
        RunError: there is no step at all.
    """
    if not profile.steps:
        raise RunError(
            "no step was seen: the run ended before its first training step was complete",
            hint="train for more steps, or call session.step() where a step ends",
        )
    unusual = {row.step for row in profile.steps if row.kind != "train"}
    usual = [row for row in profile.steps if row.step not in unusual]
    in_window = {row.step for row in usual if row.instrumented}
    plain = [row for row in usual if row.step not in in_window]
    if plain:
        return plain, []
    if usual:
        return usual, ["every training step was profiled: the step time includes the profiler's overhead"]
    kinds = ", ".join(sorted({row.kind for row in profile.steps}))
    return list(profile.steps), [f"no ordinary training step was seen, only {kinds}: the step time is theirs"]


def slowest_per_step(rows: Iterable[StepRow]) -> Spread:
    """Median and IQR over steps of the slowest rank's duration.

    Raises:
        RunError: a duration is not a positive number.
    """
    slowest: dict[int, float] = defaultdict(float)
    for row in rows:
        slowest[row.step] = max(slowest[row.step], row.duration_us)
    values = np.array(list(slowest.values()))
    if not np.all(np.isfinite(values) & (values > 0)):
        raise RunError("a step has no positive duration: the run is damaged", hint="capture the run again")
    low, median, high = np.percentile(values, [25, 50, 75])
    return Spread(median=float(median), iqr=float(high - low) if len(values) > 1 else None, n=len(values))


def rank_weights(profile: Profile) -> dict[int, float]:
    """Share of all known ranks that each stored rank stands for; the shares sum to 1."""
    counts = {c.rank: c.count for c in profile.manifest.rank_classes if c.count > 0}
    if not counts:
        counts = {row.rank: 1 for row in profile.steps}
    total = sum(counts.values())
    return {rank: count / total for rank, count in counts.items()}


def state_warnings(profile: Profile, spread: Spread) -> list[str]:
    """What a reader must know about the run before its numbers: partial, ranks missing, noisy."""
    manifest = profile.manifest
    warnings = []
    if manifest.status != "complete":
        known = sum(c.count for c in manifest.rank_classes)
        missing = (
            f", {known} of {manifest.world_size} ranks were found" if known < manifest.world_size else ""
        )
        warnings.append(f"the run is partial: it ended before it was closed{missing}")
    if spread.iqr is not None and spread.median > 0 and spread.iqr > NOISY_IQR_FRACTION * spread.median:
        warnings.append(
            f"step times vary: the IQR is {spread.iqr / spread.median:.0%} of the median over {spread.n} steps"
        )
    return warnings


def tokens_per_s(profile: Profile, rows: Sequence[StepRow], *, step_us: float) -> float | None:
    """Tokens per second over all ranks, None when the tokens of a step are not known.

    Ranks that hold the same data (tensor-parallel, pipeline stages) count once, when the layout is known;
    otherwise every rank is taken to have its own.
    """
    forecast = profile.manifest.forecast
    if forecast is not None:
        return _forecast_p50(forecast.get("tokens_per_s"))
    tokens = [row.tokens for row in rows if row.tokens is not None]
    if not tokens:
        return None
    return float(np.mean(tokens)) * _num_data_shards(profile) / (step_us / 1e6)


def mfu(profile: Profile, *, step_us: float) -> float | None:
    """Model FLOPs over what the devices could have done in a step; None when either is not known."""
    manifest = profile.manifest
    if manifest.forecast is not None:
        value = manifest.forecast.get("mfu")
        return float(value) if isinstance(value, int | float) else None
    if not manifest.model_flops_per_step or not manifest.peak_flops or manifest.world_size < 1:
        return None
    return manifest.model_flops_per_step / (manifest.peak_flops * manifest.world_size * step_us / 1e6)


def _forecast_p50(spread: object) -> float | None:
    value = spread.get("p50") if isinstance(spread, dict) else None
    return float(value) if isinstance(value, int | float) else None


def _num_data_shards(profile: Profile) -> int:
    try:
        layout = Layout.parse(profile.manifest.layout)
    except LayoutError:
        return profile.manifest.world_size
    return layout.dp * layout.cp
