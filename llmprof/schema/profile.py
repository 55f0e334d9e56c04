"""Profile: one training step as typed rows, measured or predicted. Everything that reports takes one of these.

Times are microseconds, memory is bytes, fractions are 0..1; `None` means not known, never zero.
"""

from __future__ import annotations

from typing import Any

import msgspec

from llmprof.schema.workload import Workload

FORMAT_VERSION = 1

PHASES = (
    "forward",
    "recompute",
    "backward_input",
    "backward_weight",
    "optimizer",
    "communication",
    "input",
    "host",
    "idle",
    "other",
)
"""Phases partition the wall interval of a step, per rank, exactly."""

MEMORY_CATEGORIES = (
    "parameters",
    "gradients",
    "optimizer",
    "activations",
    "buffers",
    "peak",
    "peak_reserved",
    "temporary",
    "communication",
    "framework",
)


class StepRow(msgspec.Struct, frozen=True, kw_only=True):
    """One step as the training loop saw it.

    Attributes:
        rank: global rank.
        step: index from the start of the run, 0-based.
        start_us: start on the rank's monotonic clock, relative to the start of the session.
        duration_us: wall time of the step.
        tokens: tokens that this rank consumed in the step, or None when not known.
        sequences: sequences (dim 0 of the model input summed over microbatches), or None.
        microbatches: root forwards with gradients in the step (accumulation count).
        instrumented: True inside a profiled window; such steps are not used for the step time.
        kind: "train", "warmup", "compile", "evaluation", "checkpoint" or "outlier"; only "train" is averaged.
        peak_memory_bytes: peak allocated during the step, or None.
        energy_j: energy of this rank's device during the step, or None when there is no meter.
    """

    rank: int
    step: int
    start_us: float
    duration_us: float
    tokens: int | None = None
    sequences: int | None = None
    microbatches: int = 1
    instrumented: bool = False
    kind: str = "train"
    peak_memory_bytes: int | None = None
    energy_j: float | None = None


class PhaseRow(msgspec.Struct, frozen=True, kw_only=True):
    """Exclusive time of one phase in one step; the phases of a (rank, step) sum to its duration."""

    rank: int
    step: int
    phase: str
    exclusive_us: float


class OperatorRow(msgspec.Struct, frozen=True, kw_only=True):
    """All calls of one operator with equal shapes, module and phase on one rank.

    Attributes:
        op: the operator's full name, such as "aten::mm".
        family: see `llmprof.schema.operators`.
        module: FQN of the innermost module that ran it ("" is the root), or "optimizer", "input", ...
        phase: one of PHASES.
        shapes: input shapes, in the text form of `llmprof.schema.operators.format_shapes`.
        dtype: dtype of the first tensor input.
        attributes: what changes the cost beside shapes, such as "causal"; comma-separated, sorted.
        device: device type that did the work ("cpu", "cuda").
        count: calls per step (mean over the window).
        time_us: median duration of one call (device time on CUDA, else the operator's own wall time).
        time_iqr_us, time_n: interquartile range and number of the calls behind `time_us`.
        exclusive_us: its share of the partition of the step's wall interval, per step.
        host_us: median host time of one call (dispatch), None when it is not separable.
        flops, bytes: of one call, from formulas on shapes.
        attributed: False when it ran inside a child module but could only be given to the root.
    """

    rank: int
    op: str
    family: str
    module: str
    phase: str
    shapes: str
    dtype: str
    attributes: str = ""
    device: str
    count: float
    time_us: float
    time_iqr_us: float
    time_n: int
    exclusive_us: float
    host_us: float | None = None
    flops: int
    bytes: int
    attributed: bool = True


class CollectiveRow(msgspec.Struct, frozen=True, kw_only=True):
    """All calls of one collective with equal kind, group and size on one rank.

    Attributes:
        kind: "all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "send", "recv", "barrier".
        axis: mesh axis ("dp", "tp", ...) or "" when not known.
        group_size: ranks in the group, 0 when not known.
        size_bytes: message bytes. For all_gather and reduce_scatter: the full (gathered) buffer.
        exposed_us: exclusive time per step, where nothing else ran.
        in_situ: False for rows from a back-to-back sweep.
        span: devices over which the group spreads, in rank order; 0 when not known.
    """

    rank: int
    kind: str
    axis: str
    group_size: int
    size_bytes: int
    dtype: str
    backend: str
    module: str = ""
    phase: str = "communication"
    count: float
    time_us: float
    time_iqr_us: float
    time_n: int
    exposed_us: float
    in_situ: bool = True
    span: int = 0


class SpanRow(msgspec.Struct, frozen=True, kw_only=True):
    """One interval of the representative step, for the timeline.

    `row` is an index into the operators or collectives table (by `table`), or -1.
    """

    rank: int
    stream: str
    name: str
    phase: str
    start_us: float
    duration_us: float
    table: str = ""
    row: int = -1


class MemoryRow(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes of one category on one rank; `time_us` is None for a value that holds for the whole step."""

    rank: int
    category: str
    size_bytes: int
    time_us: float | None = None


class HostRow(msgspec.Struct, frozen=True, kw_only=True):
    """A measured host quantity, such as "dispatch_us_per_operator" or "profiler_overhead_fraction"."""

    rank: int
    name: str
    value: float
    iqr: float
    n: int


class SourceRow(msgspec.Struct, frozen=True, kw_only=True):
    """What measured (or predicted) a rank's rows."""

    rank: int
    hostname: str
    device: str
    device_name: str
    device_count: int
    threads: int
    memory_bytes: int | None
    backend: str
    clock: str
    software: str


class RankClass(msgspec.Struct, frozen=True, kw_only=True):
    """Ranks that do the same are stored once: `rank` stands for `count` ranks."""

    rank: int
    count: int
    stage: int = 0


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """What the tables are about.

    Attributes:
        kind: "measured" or "predicted".
        status: "complete", or "partial" when the process ended before the run was closed.
        layout: the layout string, "" when not known.
        precision: compute dtype of the matmuls ("float32", "bfloat16", ...).
        window: indices of the profiled steps.
        model_flops_per_step: model FLOPs of one step over all ranks by the MFU convention, None when not known.
        peak_flops: dense peak of one device in `precision`, None when not known.
        attributed_fraction, root_fraction: see hooks/README.md; None when no window was recorded.
        forecast: for a predicted profile, the object of `llmprof forecast --json`.
    """

    version: int = FORMAT_VERSION
    kind: str = "measured"
    status: str = "complete"
    name: str = ""
    created: str = ""
    llmprof_version: str = ""
    world_size: int = 1
    rank_classes: tuple[RankClass, ...] = ()
    layout: str = ""
    cluster: str = ""
    precision: str = "float32"
    window: tuple[int, ...] = ()
    model_flops_per_step: float | None = None
    peak_flops: float | None = None
    attributed_fraction: float | None = None
    root_fraction: float | None = None
    warnings: tuple[str, ...] = ()
    assumptions: tuple[str, ...] = ()
    forecast: dict[str, Any] | None = None


class Profile(msgspec.Struct, frozen=True, kw_only=True):
    """One training step, measured or predicted: a manifest, tables that may be empty, and the Workload if traced."""

    manifest: Manifest
    steps: tuple[StepRow, ...] = ()
    phases: tuple[PhaseRow, ...] = ()
    operators: tuple[OperatorRow, ...] = ()
    collectives: tuple[CollectiveRow, ...] = ()
    spans: tuple[SpanRow, ...] = ()
    memory: tuple[MemoryRow, ...] = ()
    host: tuple[HostRow, ...] = ()
    sources: tuple[SourceRow, ...] = ()
    workload: Workload | None = None


TABLES: dict[str, type[msgspec.Struct]] = {
    "steps": StepRow,
    "phases": PhaseRow,
    "operators": OperatorRow,
    "collectives": CollectiveRow,
    "spans": SpanRow,
    "memory": MemoryRow,
    "host": HostRow,
    "sources": SourceRow,
}
"""Row type of each table of a Profile, in the order in which they are stored."""


def unmeasured(workload: Workload) -> Profile:
    """A workload as the subject of forecasts, without measurements."""
    return Profile(manifest=Manifest(name=workload.name, precision=workload.precision), workload=workload)
