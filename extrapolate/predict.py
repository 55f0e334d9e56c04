"""Measured Profile, layout, cluster -> predicted Profile: the forecast as an object and as rows."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from llmprof.extrapolate.baselines import (
    bound_step_time_s,
    captured_mfu,
    mfu,
    model_flops_per_step,
    naive_step_time_s,
    second_baseline_step_time_s,
)
from llmprof.extrapolate.calibration import Calibration
from llmprof.extrapolate.economics import economics_assumptions, step_cost, step_energy_j
from llmprof.extrapolate.forecast import Forecaster, Simulation
from llmprof.extrapolate.peaks import peak_flops
from llmprof.extrapolate.request import check_asked
from llmprof.extrapolate.rows import collective_rows, memory_rows, operator_rows, phase_rows, span_rows
from llmprof.extrapolate.uncertainty import SPEC_SHEET_FRACTION, Interval, interval, widen
from llmprof.schema.cluster import Cluster
from llmprof.schema.layout import Layout
from llmprof.schema.profile import Manifest, Profile, RankClass, SourceRow, StepRow

COMPUTE_PARTS = ("forward", "backward_input", "backward_weight")
BREAKDOWN = (
    "compute", "recompute", "tp", "cp", "ep", "dp", "pp", "bubble", "optimizer", "host", "input", "straggler",
)  # fmt: skip
"""Keys of a forecast's `breakdown_s`."""


def predict(
    profile: Profile,
    layout: Layout,
    cluster: Cluster,
    *,
    global_batch: int | None = None,
    seq: int | None = None,
    tokens: float | None = None,
    draws: int = 200,
    seed: int = 0,
    calibration: Calibration | None = None,
) -> Profile:
    """Forecast one training step of a captured workload under a layout on a cluster.

    Args:
        profile: a measured profile with its workload.
        layout: how the step is laid over devices.
        cluster: what it runs on.
        global_batch: sequences per step; None for the captured one where it divides (strong scaling).
        seq: tokens per sequence; None for the captured length.
        tokens: tokens of the whole run, to add the run's time and cost.
        draws: samples behind the intervals.
        seed: of the samples.
        calibration: what measured steps say of assumed prices, of `fit_calibration`; None for the prior.

    Returns:
        A Profile of kind "predicted": `manifest.forecast` is the object of `forecast --json`; rank is the stage.

    Raises:
        WorkloadError: there is no workload, or it was not traced for what is asked.
        LayoutError: the layout does not multiply out, does not fit the cluster's size, or is not supported.
    """
    check_asked(tokens=tokens)
    forecaster = Forecaster(profile, cluster, draws=draws, seed=seed, calibration=calibration)
    simulation = forecaster.simulate(layout, global_batch=global_batch, seq=seq, every_microbatch=True)
    forecast = forecast_object(profile, cluster, simulation, tokens=tokens)
    return _profile(profile, cluster, simulation, forecast)


def breakdown(simulation: Simulation) -> dict[str, float]:
    """Nominal seconds of the slowest stage by the keys of BREAKDOWN; they sum to the step time's p50."""
    parts = simulation.parts
    values = {key: parts.get(key, 0.0) for key in BREAKDOWN}
    values["compute"] = sum(parts.get(part, 0.0) for part in COMPUTE_PARTS)
    return values


def forecast_object(
    profile: Profile, cluster: Cluster, simulation: Simulation, *, tokens: float | None = None
) -> dict[str, Any]:
    """The object of `llmprof forecast --json`; every key is always there, null means not known."""
    plan = simulation.plan
    layout = replace(plan.layout, precision=plan.precision.target)
    parts = breakdown(simulation)
    assumed = simulation.evidence["assumed"]
    found = interval(simulation.step_s)
    nominal = sum(parts.values())
    time = widen(Interval(min(found.p10, nominal), nominal, max(found.p90, nominal)), assumed)
    per_step = layout.global_batch * (plan.seq if plan.workload.tokens_per_sequence_dim else 1)
    measured_mfu = captured_mfu(profile, cluster.device, plan.precision.target)
    naive = naive_step_time_s(plan.workload, layout, cluster, seq=plan.seq, mfu=measured_mfu)
    flops = model_flops_per_step(plan.workload, layout, plan.seq)
    peak = peak_flops(cluster.device, plan.precision.target)
    energy = step_energy_j(cluster, gpus=layout.gpus, step_time_s=time)
    memory = simulation.memory
    result: dict[str, Any] = {
        "layout": str(plan.layout),
        "cluster": cluster.name,
        "gpus": layout.gpus,
        "global_batch": layout.global_batch,
        "seq": plan.seq,
        "precision": plan.precision.target,
        "step_time_s": time._asdict(),
        "tokens_per_s": {
            "p10": per_step / time.p90,
            "p50": per_step / time.p50,
            "p90": per_step / time.p10,
        },
        "naive_step_time_s": naive,
        "second_baseline_step_time_s": second_baseline_step_time_s(
            plan.workload, layout, cluster, naive_s=naive
        ),
        "bound_step_time_s": bound_step_time_s(plan.workload, layout, cluster, seq=plan.seq),
        "breakdown_s": parts,
        "mfu": mfu(flops, time.p50, gpus=layout.gpus, peak=peak),
        "peak_memory_bytes": {"p50": memory.p50, "p90": memory.p90},
        "usable_memory_bytes": memory.usable,
        "verdict": memory.verdict,
        "oom_probability": memory.oom_probability,
        "measured_fraction": simulation.evidence["measured"],
        "interpolated_fraction": simulation.evidence["interpolated"],
        "assumed_fraction": assumed,
        "table_fraction": simulation.evidence["table"],
        "assumptions": list(_assumptions(cluster, simulation)),
        "cost": step_cost(cluster, gpus=layout.gpus, step_time_s=time.p50, tokens_per_step=per_step),
        "energy_j_per_step": energy,
        "run": _run_object(cluster, layout, time, tokens=tokens, per_step=per_step),
    }
    return result


def _assumptions(cluster: Cluster, simulation: Simulation) -> tuple[str, ...]:
    first: tuple[str, ...] = ()
    if simulation.evidence["assumed"] > SPEC_SHEET_FRACTION:
        share = simulation.evidence["assumed"]
        first = (f"spec-sheet estimate: {share:.0%} of the predicted time is assumed, not measured",)
    return (*first, *simulation.assumptions, *economics_assumptions(cluster))


def _run_object(
    cluster: Cluster, layout: Layout, time: Interval, *, tokens: float | None, per_step: int
) -> dict[str, Any] | None:
    """Steps, days and money of the whole run, failures not counted; None when its tokens are not given."""
    if tokens is None:
        return None
    steps = tokens / per_step
    cost = step_cost(cluster, gpus=layout.gpus, step_time_s=time.p50 * steps, tokens_per_step=tokens)
    return {
        "tokens": tokens,
        "steps": steps,
        "days": {key: seconds * steps / 86400 for key, seconds in time._asdict().items()},
        "cost": cost and {"currency": cost["currency"], "total": cost["per_step"]},
    }


def _profile(profile: Profile, cluster: Cluster, simulation: Simulation, forecast: dict[str, Any]) -> Profile:
    plan = simulation.plan
    layout = plan.layout
    step_us = forecast["step_time_s"]["p50"] * 1e6
    ranks_per_stage = layout.gpus // layout.pp
    manifest = Manifest(
        kind="predicted",
        name=profile.manifest.name,
        created=profile.manifest.created,
        llmprof_version=profile.manifest.llmprof_version,
        world_size=layout.gpus,
        rank_classes=tuple(RankClass(rank=s, count=ranks_per_stage, stage=s) for s in range(layout.pp)),
        layout=str(layout),
        cluster=cluster.name,
        precision=plan.precision.target,
        window=(0,),
        model_flops_per_step=model_flops_per_step(plan.workload, layout, plan.seq),
        peak_flops=peak_flops(cluster.device, plan.precision.target),
        assumptions=tuple(forecast["assumptions"]),
        warnings=plan.workload.warnings,
        forecast=forecast,
    )
    sequences = layout.mb * layout.accum
    steps = tuple(
        StepRow(
            rank=stage,
            step=0,
            start_us=0.0,
            duration_us=step_us,
            tokens=sequences * plan.seq if plan.workload.tokens_per_sequence_dim else None,
            sequences=sequences,
            microbatches=layout.accum,
            peak_memory_bytes=sum(simulation.memory.stages[stage].values()),
        )
        for stage in range(layout.pp)
    )
    return Profile(
        manifest=manifest,
        steps=steps,
        phases=phase_rows(simulation, step_us),
        operators=operator_rows(simulation, cluster.device.kind),
        collectives=collective_rows(simulation, cluster.backend),
        spans=span_rows(simulation),
        memory=memory_rows(simulation),
        sources=_sources(cluster, layout),
        workload=plan.workload,
    )


def _sources(cluster: Cluster, layout: Layout) -> tuple[SourceRow, ...]:
    return tuple(
        SourceRow(
            rank=stage,
            hostname="",
            device=cluster.device.kind,
            device_name=cluster.device.name,
            device_count=cluster.devices_per_node,
            threads=0,
            memory_bytes=cluster.device.memory_bytes,
            backend=cluster.backend,
            clock="predicted",
            software="llmprof",
        )
        for stage in range(layout.pp)
    )
