"""A layout as typed and a global batch -> the layout that is simulated, or one clear line why it cannot be."""

from __future__ import annotations

import re
from dataclasses import replace

from llmprof.errors import LayoutError, RequestError, WorkloadError
from llmprof.extrapolate.schedule import ROUNDS, SCHEDULES, Pipeline, round_size
from llmprof.schema.cluster import Cluster
from llmprof.schema.layout import Layout
from llmprof.schema.limits import MAX_COUNT
from llmprof.schema.workload import ClassTrace, Workload

MAX_REPLICATED_FLOPS = 0.05
MAX_PASSES = 65_536
"""Virtual stages x microbatches of a step: each is simulated, and this many take some ten seconds."""
MOST_ASKED = {"global_batch": MAX_COUNT, "seq": MAX_COUNT, "tokens": 1e24}
"""Sequences of a step, tokens of a sequence, tokens of a run: more would not be told apart as floats, or overflow."""


def check_asked(**values: float | None) -> None:
    """Refuse numbers that are not above 0, or beyond MOST_ASKED; None is not given.

    Raises:
        RequestError: with the name and the rule.
    """
    for name, value in values.items():
        if value is not None and not value > 0:
            raise RequestError(f"{name}={value} is not positive", hint=f"give {name} above 0")
        if value is not None and value > MOST_ASKED[name]:
            raise RequestError(f"{name} is more than the {MOST_ASKED[name]:g} that are forecast")


def check_supported(layout: Layout, cluster: Cluster) -> None:
    """Refuse what is not modelled, and more devices than the cluster has.

    Raises:
        LayoutError: with the part that is not supported, or the device arithmetic.
    """
    unsupported = (
        (layout.etp not in (0, layout.tp), f"etp={layout.etp} with tp={layout.tp}", "leave etp out"),
        (layout.offload != "none", f"offload={layout.offload}", "leave offload out"),
        (layout.recompute == "selective", "recompute=selective", "use recompute=none or full"),
        (
            layout.schedule not in SCHEDULES,
            f"schedule={layout.schedule}",
            f"use {', '.join(SCHEDULES)}",
        ),
    )
    for refused, what, hint in unsupported:
        if refused:
            raise LayoutError(f"not supported yet: {what}", hint=hint)
    if cluster.max_devices is not None and layout.gpus > cluster.max_devices:
        raise LayoutError(
            f"dp {layout.dp} x tp {layout.tp} x pp {layout.pp} x cp {layout.cp} = {layout.gpus}, but "
            f"{cluster.name} has {cluster.max_devices} devices",
            hint="lower a degree",
        )


def resolve_batch(layout: Layout, workload: Workload, global_batch: int | None) -> tuple[Layout, str]:
    """The layout with its final `accum`, and one sentence about the global batch.

    Args:
        global_batch: sequences per step; None for the captured one (strong scaling), or the layout's when there is none.

    Raises:
        LayoutError: the global batch is not dp x mb x accum.
    """
    per_pass = layout.dp * layout.mb
    if global_batch is not None:
        if global_batch == layout.global_batch:
            return layout, f"global batch {global_batch} sequences, as asked"
        if layout.accum == 1 and global_batch >= per_pass and global_batch % per_pass == 0:
            accum = global_batch // per_pass
            return replace(layout, accum=accum), (
                f"global batch {global_batch} sequences = dp {layout.dp} x mb {layout.mb} x accum {accum}"
            )
        raise LayoutError(
            f"dp {layout.dp} x mb {layout.mb} x accum {layout.accum} = {layout.global_batch} sequences, "
            f"not the global batch of {global_batch}",
            hint=f"choose dp x mb x accum = {global_batch}, or leave accum out",
        )
    if workload.source == "reference":
        return layout, (
            f"global batch {layout.global_batch} sequences = dp {layout.dp} x mb {layout.mb} x accum {layout.accum}"
        )
    captured = workload.dp * workload.batch * workload.accum
    if captured == layout.global_batch:
        return layout, f"global batch {captured} sequences, as captured (strong scaling)"
    if layout.accum == 1 and captured % per_pass == 0 and captured > per_pass:
        accum = captured // per_pass
        return replace(layout, accum=accum), (
            f"global batch {captured} sequences, as captured (strong scaling): accum {accum}"
        )
    return layout, (
        f"global batch {layout.global_batch} sequences = dp {layout.dp} x mb {layout.mb} x accum {layout.accum}, "
        f"not the captured {captured}"
    )


def check_passes(layout: Layout) -> None:
    """Refuse a step whose simulation would seem to hang, and microbatches that do not fill the schedule's rounds.

    Raises:
        LayoutError: with the number of passes and the largest `accum` that is simulated, or the size of a round.
    """
    stages = layout.pp * layout.vpp
    if stages * layout.accum > MAX_PASSES:
        of = f"pp {layout.pp} x " + (f"vpp {layout.vpp} x " if layout.vpp > 1 else "")
        raise LayoutError(
            f"{of}accum {layout.accum} = {stages * layout.accum} passes in a step, more than "
            f"the {MAX_PASSES} that are simulated",
            hint=f"set accum={max(1, MAX_PASSES // stages)} or less: raise mb or dp, or ask for a smaller global batch",
        )
    size = round_size(Pipeline(layout.pp, layout.vpp, layout.accum))
    if layout.schedule in ROUNDS and layout.accum % size:
        raise LayoutError(
            f"schedule={layout.schedule} runs rounds of {size} microbatches at pp={layout.pp}, and accum={layout.accum} "
            f"is not a multiple of it ({layout.accum} / {size} = {layout.accum / size:.2f})",
            hint=f"choose accum as a multiple of pp={layout.pp}, such as {-(-layout.accum // layout.pp) * layout.pp}",
        )


def choose_class(workload: Workload, layout: Layout, seq: int) -> ClassTrace:
    """The traced class of a layout's degrees that holds at its microbatch and sequence length.

    Raises:
        WorkloadError: no such class was traced, or it holds for another batch or sequence length only.
        LayoutError: the model's tensor-parallel plan leaves too much work replicated.
    """
    same = [c for c in workload.classes if c.tp == layout.tp and c.sp == layout.sp]
    if not same:
        names = dict.fromkeys(f"tp={c.tp}{' sp=1' if c.sp else ''}" for c in workload.classes)
        traced = ", ".join(names) or "none"
        reason = _refusal_of(f"tp={layout.tp}{',sp=1' if layout.sp else ''}", workload.tp_refusal)
        raise WorkloadError(
            f"tp={layout.tp}{' sp=1' if layout.sp else ''} was not traced for this model"
            f"{f': {reason}' if reason else ''}",
            hint=f"traced classes: {traced}",
        )
    for trace in same:
        if trace.batch in (None, layout.mb) and trace.seq in (None, seq):
            _check_replicated(trace, layout)
            return trace
    held = "; ".join(f"mb={c.batch or 'any'}, seq={c.seq or 'any'}" for c in same)
    raise WorkloadError(
        f"the trace of tp={layout.tp} does not hold at mb={layout.mb}, seq={seq}",
        hint=f"it holds at {held}",
    )


def _check_replicated(trace: ClassTrace, layout: Layout) -> None:
    if trace.replicated_flops_fraction > MAX_REPLICATED_FLOPS:
        modules = ", ".join(trace.replicated_modules) or "not named"
        raise LayoutError(
            f"{trace.replicated_flops_fraction:.0%} of the matmul work has no tensor-parallel plan at "
            f"tp={layout.tp}: {modules}",
            hint="use tp=1 for this model",
        )


def _refusal_of(name: str, refusals: str) -> str:
    """The reason given for one class in "tp=2: why; tp=4 and tp=4,sp=1: why"; text of another form whole."""
    if not refusals.startswith("tp="):
        return refusals
    for refusal in re.split(r"; (?=tp=\d)", refusals):
        names, _, reason = refusal.partition(": ")
        if name in names.split(" and "):
            return reason
    return ""
