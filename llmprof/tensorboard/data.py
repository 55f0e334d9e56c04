"""Turns a Profile and its forecasts into the one JSON report that the tab draws, at most 4 MB, and back."""

from __future__ import annotations

import json
import math
import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from llmprof.errors import RequestError, RunError
from llmprof.report.breakdown import Breakdown, Group, break_down, group_operators
from llmprof.report.steps import rank_weights
from llmprof.schema.layout import Layout
from llmprof.schema.profile import Profile, SourceRow, StepRow

REPORT_VERSION = 1
MAX_REPORT_BYTES = 4_000_000
"""TensorBoard serves 4 MB in 0.1 s and fails at 300 MB; a report that would be larger is thinned out."""

Report = dict[str, Any]

_MAX_STEPS = 1000
_MAX_ROWS = 300
_MAX_FORECASTS = 500
_MAX_RANKS = 64
_MAX_TEXT = 4000
_MAX_ITEMS = 5000
_MAX_DEPTH = 12
_LAYER_NUMBER = re.compile(r"(?<=\.)\d+(?=\.|$)|^\d+(?=\.|$)")


def build_report(profile: Profile, forecasts: Sequence[Profile] = ()) -> Report:
    """The report of one run.

    Args:
        profile: measured, or predicted (then it is shown as a forecast and nothing as measured).
        forecasts: predicted Profiles made from it.

    Returns:
        `run` (what it is about), `show` (the numbers of `llmprof show --json`, or None when nothing was measured),
        `problem` (why a run that should have been measured was not),
        `steps` (slowest rank of each), `ranks` (phases of each), `forecasts` (the objects of
        `llmprof forecast --json` with their `cluster`) and `scaling` (those that differ in replicas only).
    """
    measured = profile.manifest.kind != "predicted"
    predicted = [*([] if measured else [profile]), *forecasts]
    objects = [forecast_object(p) for p in predicted if p.manifest.forecast is not None]
    breakdown, problem = _break_down(profile) if measured else (None, None)
    report = {
        "version": REPORT_VERSION,
        "run": _run_facts(profile),
        "show": _show(breakdown) if breakdown else None,
        "problem": problem,
        "steps": _steps(profile.steps) if measured else [],
        "ranks": _phases_by_rank(profile, breakdown.step_time_us.median) if breakdown else [],
        "forecasts": objects,
        "scaling": scaling_series(objects),
    }
    cleaned = clean(report)
    assert isinstance(cleaned, dict)
    return cleaned


def _break_down(profile: Profile) -> tuple[Breakdown | None, Report | None]:
    """The numbers, or why there are none: a workload file, a run that was killed before its first step."""
    try:
        return break_down(profile), None
    except RunError as error:
        return None, {"message": error.message, "hint": error.hint}


def _show(breakdown: Breakdown) -> Report:
    """The numbers of `show`, with operators also added up by name, family and module."""
    numbers: Report = msgspec.to_builtins(breakdown)
    modules = group_operators(breakdown, by="module")
    groups = {
        "by_operator": group_operators(breakdown, by="op"),
        "by_family": group_operators(breakdown, by="family"),
        "by_module": modules,
        "by_layer": fold_layers(modules),
    }
    tables = {name: msgspec.to_builtins(rows[:_MAX_ROWS]) for name, rows in groups.items()}
    return {**numbers, **tables, "operators": numbers["operators"][:_MAX_ROWS]}


def fold_layers(modules: Iterable[Group]) -> list[Group]:
    """Modules of repeated layers added up: "layers.0.mlp" and "layers.1.mlp" become "layers.*.mlp"."""
    members: dict[str, list[Group]] = defaultdict(list)
    for module in modules:
        members[_LAYER_NUMBER.sub("*", module.key)].append(module)
    folded = [
        Group(
            key=key,
            phases=tuple(dict.fromkeys(phase for module in same for phase in module.phases)),
            count=math.fsum(module.count for module in same),
            exclusive_us=math.fsum(module.exclusive_us for module in same),
            share=math.fsum(module.share for module in same),
            flops=math.fsum(module.flops for module in same),
            bytes=math.fsum(module.bytes for module in same),
        )
        for key, same in members.items()
    ]
    return sorted(folded, key=lambda group: -group.exclusive_us)


def forecast_object(profile: Profile) -> Report:
    """The forecast of a predicted Profile, with the cluster it is for."""
    forecast = dict(profile.manifest.forecast or {})
    forecast.setdefault("cluster", profile.manifest.cluster)
    forecast.setdefault("precision", profile.manifest.precision)
    return forecast


def add_forecasts(report: Report, earlier: Iterable[Report]) -> Report:
    """A report that also keeps earlier forecasts of the same run; one made again replaces its earlier self."""
    forecasts = list(report["forecasts"])
    known = {_identity(forecast) for forecast in forecasts}
    for forecast in earlier:
        if isinstance(forecast, dict) and _identity(forecast) not in known:
            known.add(_identity(forecast))
            forecasts.append(forecast)
    kept = forecasts[:_MAX_FORECASTS]
    return {**report, "forecasts": kept, "scaling": scaling_series(kept)}


def _identity(forecast: Report) -> tuple[str, ...]:
    return tuple(str(forecast.get(key)) for key in ("layout", "cluster", "global_batch", "seq", "precision"))


def scaling_series(forecasts: Iterable[Report]) -> list[Report]:
    """Forecasts that differ in data parallelism only, as curves over the number of GPUs.

    Returns:
        One object for each family of layouts with two or more sizes: `cluster`, `family` (the layout without its
        data-parallel degree) and `points`, indices into `forecasts` in the order of their GPUs. Of several
        layouts of one size the fastest is taken.
    """
    families: dict[tuple[str, str], dict[int, int]] = defaultdict(dict)
    objects = list(forecasts)
    for index, forecast in enumerate(objects):
        family, gpus, rate = _family(forecast.get("layout")), forecast.get("gpus"), _tokens_per_s(forecast)
        if family is None or not isinstance(gpus, int) or rate is None:
            continue
        sizes = families[(str(forecast.get("cluster") or ""), family)]
        best = _tokens_per_s(objects[sizes[gpus]]) if gpus in sizes else None
        if best is None or rate > best:
            sizes[gpus] = index
    return [
        {"cluster": cluster, "family": family, "points": [sizes[gpus] for gpus in sorted(sizes)]}
        for (cluster, family), sizes in families.items()
        if len(sizes) > 1
    ]


def _family(layout: object) -> str | None:
    """The layout without what changes with the number of replicas; None when it is no layout."""
    try:
        parsed = Layout.parse(str(layout))
        words = str(Layout.parse(_without(str(parsed), ("dp", "shard", "accum", "ep")))).split(",")
    except RequestError:
        return None
    kept = [w for w in words if not w.startswith("dp=")]
    return ", ".join([*kept, *([f"ep={parsed.ep}"] if parsed.ep > 1 else [])]) or "data parallel only"


def _without(layout: str, keys: Sequence[str]) -> str:
    return ",".join(["dp=1", *(w for w in layout.split(",") if w.partition("=")[0] not in keys)])


def _tokens_per_s(forecast: Report) -> float | None:
    rate = forecast.get("tokens_per_s")
    value = rate.get("p50") if isinstance(rate, dict) else None
    return float(value) if isinstance(value, int | float) else None


def _run_facts(profile: Profile) -> Report:
    manifest = profile.manifest
    workload = profile.workload
    return {
        "name": manifest.name,
        "kind": manifest.kind,
        "status": manifest.status,
        "created": manifest.created,
        "llmprof_version": manifest.llmprof_version,
        "world_size": manifest.world_size,
        "layout": manifest.layout,
        "cluster": manifest.cluster,
        "precision": manifest.precision,
        "window": list(manifest.window),
        "assumptions": list(manifest.assumptions),
        "model": workload.name if workload else "",
        "batch": workload.batch if workload else None,
        "seq": workload.seq if workload else None,
        "devices": _devices(profile.sources),
        "software": next((s.software for s in profile.sources), ""),
    }


def _devices(sources: Sequence[SourceRow]) -> list[Report]:
    counts: dict[tuple[str, str, str], int] = defaultdict(int)
    memory: dict[tuple[str, str, str], int | None] = {}
    for source in sources:
        key = (source.device_name or source.device, source.device, source.backend)
        counts[key] += 1
        memory[key] = source.memory_bytes
    return [
        {
            "name": name,
            "device": device,
            "backend": backend,
            "ranks": n,
            "memory_bytes": memory[name, device, backend],
        }
        for (name, device, backend), n in counts.items()
    ]


def _steps(rows: Sequence[StepRow]) -> list[Report]:
    """The slowest rank of each step; evenly thinned out when there are many."""
    slowest: dict[int, StepRow] = {}
    for row in rows:
        if row.step not in slowest or row.duration_us > slowest[row.step].duration_us:
            slowest[row.step] = row
    ordered = [slowest[step] for step in sorted(slowest)]
    stride = max(1, math.ceil(len(ordered) / _MAX_STEPS))
    return [
        {
            "step": row.step,
            "duration_us": row.duration_us,
            "rank": row.rank,
            "tokens": row.tokens,
            "kind": row.kind,
            "instrumented": row.instrumented,
            "peak_memory_bytes": row.peak_memory_bytes,
        }
        for row in ordered[::stride]
    ]


def _phases_by_rank(profile: Profile, step_us: float) -> list[Report]:
    """Exclusive time of each phase on each rank per step, scaled so that the ranks' mean is the step time."""
    sums: dict[int, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    steps: dict[int, set[int]] = defaultdict(set)
    for row in profile.phases:
        sums[row.rank][row.phase] += row.exclusive_us
        steps[row.rank].add(row.step)
    weights = rank_weights(profile)
    window_us = math.fsum(
        weights.get(rank, 0.0) * sum(phases.values()) / len(steps[rank]) for rank, phases in sums.items()
    )
    scale = step_us / window_us if window_us > 0 else 1.0
    return [
        {"rank": rank, "phases": {name: us * scale / len(steps[rank]) for name, us in sums[rank].items()}}
        for rank in sorted(sums)[:_MAX_RANKS]
    ]


def encode_report(report: Report) -> bytes:
    """The report as JSON of at most 4 MB: long tables lose their smallest rows, and `thinned` says so.

    Raises:
        RequestError: it is still too large.
    """
    data = _dump(report)
    limit = _MAX_ROWS
    while len(data) > MAX_REPORT_BYTES and limit >= 10:
        report = _thin(report, limit)
        data = _dump(report)
        limit //= 2
    if len(data) > MAX_REPORT_BYTES:
        raise RequestError(
            f"the report has {len(data) / 1e6:.1f} MB, TensorBoard takes at most {MAX_REPORT_BYTES / 1e6:.0f} MB",
            hint="write fewer forecasts into one run",
        )
    return data


def decode_report(data: bytes) -> Report:
    """A report as the tab may trust its shape: an object, with finite numbers, short texts and bounded lists.

    Raises:
        RunError: it is no JSON object, or it is of a newer version.
    """
    if len(data) > 2 * MAX_REPORT_BYTES:
        raise RunError(
            f"the report has {len(data) / 1e6:.0f} MB, more than {2 * MAX_REPORT_BYTES / 1e6:.0f} MB"
        )
    try:
        report = clean(json.loads(data))
    except (ValueError, RecursionError) as error:
        raise RunError(f"the stored report is torn or is not ours: {error}", hint="write it again") from error
    if not isinstance(report, dict):
        raise RunError("the stored report is not a JSON object", hint="write it again")
    version = report.get("version")
    if not isinstance(version, int):
        raise RunError("the stored report has no version: it is not ours", hint="write it again")
    if version > REPORT_VERSION:
        raise RunError(
            f"the report has format version {version}, this llmprof reads up to {REPORT_VERSION}",
            hint="update llmprof",
        )
    return report


def clean(value: object, depth: int = 0) -> object:
    """A value that any JSON reader takes: no NaN or infinity, nothing of unbounded length or depth."""
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int):
        return value if abs(value) < 2**63 else None
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, str):
        return value if len(value) <= _MAX_TEXT else value[: _MAX_TEXT - 1] + "…"
    if depth >= _MAX_DEPTH:
        return None
    if isinstance(value, dict):
        return {str(k)[:_MAX_TEXT]: clean(v, depth + 1) for k, v in list(value.items())[:_MAX_ITEMS]}
    if isinstance(value, list | tuple):
        return [clean(v, depth + 1) for v in value[:_MAX_ITEMS]]
    return str(value)[:_MAX_TEXT]


def _dump(report: Report) -> bytes:
    return json.dumps(report, allow_nan=False, separators=(",", ":")).encode()


def _thin(report: Report, limit: int) -> Report:
    """A copy with at most `limit` rows in each table; forecasts keep their order, steps their spread."""
    show = dict(report.get("show") or {})
    for table in ("operators", "by_operator", "by_module", "by_layer", "collectives", "warnings"):
        if isinstance(show.get(table), list):
            show[table] = show[table][:limit]
    steps = report.get("steps") or []
    forecasts = (report.get("forecasts") or [])[: min(_MAX_FORECASTS, limit)]
    return {
        **report,
        "thinned": limit,
        "show": show or None,
        "steps": steps[:: max(1, math.ceil(len(steps) / limit))],
        "forecasts": forecasts,
        "scaling": scaling_series(forecasts),
    }
