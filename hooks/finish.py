"""Turns what a capture has learned into a Profile, and the live model into a Workload."""

from __future__ import annotations

import datetime
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from llmprof import __version__
from llmprof.hooks import captured
from llmprof.hooks.rootinputs import RootInputs
from llmprof.hooks.steplog import settle_kinds
from llmprof.hooks.window import RecordedWindow
from llmprof.schema.devices import known_device
from llmprof.schema.layout import Layout
from llmprof.schema.local import fastest_matmul_flops_per_s
from llmprof.schema.profile import HostRow, Manifest, MemoryRow, Profile, RankClass, StepRow

if TYPE_CHECKING:
    from llmprof.hooks.capture import Capture, RunState
    from llmprof.hooks.recorder import Recording
    from llmprof.hooks.scalars import LiveScalars
    from llmprof.schema.cluster import Device

ENOUGH_STEPS = 10
"""Uninstrumented steps below which the step time is called uncertain."""

_NO_PUBLISHED_PEAK = (
    "MFU is relative to the fastest matmul of this run ({:.3g} GFLOP/s): no peak of this CPU is published"
)

NO_STEP = (
    "no step was seen in this process: decorate the function that runs the training loop, or mark the steps with "
    "session.step()"
)


def make_profile(capture: Capture, *, status: str) -> Profile:
    """Everything known so far as one rank's Profile."""
    state = capture.state
    window = _representative(capture.windows.recorded)
    source = captured.source_row(
        rank=state.rank, device=state.device, clock=capture.clock.name, backend=state.backend
    )
    steps = settle_kinds(_with_recorded_durations(capture.rows, capture.windows.recorded))
    base = make_manifest(state, status=status)
    recording = window.recording if window is not None else None
    device = known_device(source.device_name)
    flops = captured.model_flops_per_step(recording.operators) if recording is not None else None
    peak = _peak_flops(device, recording, state)
    manifest = msgspec.structs.replace(
        base,
        layout=_layout_text(state.layout, capture.taps.roots.inputs, steps),
        window=window.steps if window is not None else (),
        model_flops_per_step=flops * state.world_size if flops is not None else None,
        peak_flops=peak,
        attributed_fraction=recording.attributed_fraction if recording is not None else None,
        root_fraction=recording.root_fraction if recording is not None else None,
        assumptions=(_NO_PUBLISHED_PEAK.format(peak / 1e9),) if peak and device is None else (),
        warnings=tuple(
            dict.fromkeys([*_warnings(capture, steps), *(recording.warnings if recording else ())])
        ),
    )
    return Profile(
        manifest=manifest,
        steps=tuple(steps),
        phases=recording.phases if recording is not None else (),
        operators=recording.operators if recording is not None else (),
        collectives=recording.collectives if recording is not None else (),
        spans=recording.spans if recording is not None else (),
        memory=(*state.memory, *_peak_rows(state, steps), *_activation_rows(state, recording)),
        host=(*(recording.host if recording is not None else ()), *state.host_rows()),
        sources=(source,),
    )


def make_manifest(state: RunState, *, status: str) -> Manifest:
    """The manifest before anything is known about the model."""
    return Manifest(
        status=status,
        name=state.options.name or state.options.directory.name,
        created=datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        llmprof_version=__version__,
        world_size=state.world_size,
        rank_classes=(RankClass(rank=state.rank, count=1),),
        precision=state.precision,
    )


def clear_stale(directory: Path, *, world_size: int) -> None:
    """Remove what an earlier, larger run left here: ranks that no longer exist, and its workload."""
    (directory / "workload.json").unlink(missing_ok=True)
    for old in directory.glob("rank-*"):
        number = old.name.removeprefix("rank-")
        if number.isdigit() and int(number) >= world_size:
            shutil.rmtree(old, ignore_errors=True)


def host_row(rank: int, name: str, values: Sequence[float]) -> HostRow:
    """Median and interquartile range of a host quantity."""
    low, median, high = np.percentile(np.asarray(values, dtype=float), (25, 50, 75))
    return HostRow(rank=rank, name=name, value=float(median), iqr=float(high - low), n=len(values))


def static_rows(capture: Capture) -> tuple[MemoryRow, ...]:
    """Parameters, gradients, optimizer state and buffers of this rank, while the model is alive."""
    from llmprof.hooks.memory import static_memory

    main = capture.taps.roots.main
    if main is None:
        return ()
    return static_memory(main, capture.taps.main_optimizer(), rank=capture.state.rank)


def write_mfu(profile: Profile, scalars: LiveScalars | None) -> None:
    """One MFU value at the last step, where the device's peak is known."""
    flops, peak = profile.manifest.model_flops_per_step, profile.manifest.peak_flops
    times = [row.duration_us for row in profile.steps if row.kind == "train" and not row.instrumented]
    if scalars is None or flops is None or peak is None or not times:
        return
    mfu = flops / profile.manifest.world_size / (float(np.median(times)) * 1e-6) / peak
    scalars.write(profile.steps[-1].step, {"mfu": mfu})


def _representative(windows: Sequence[RecordedWindow]) -> RecordedWindow | None:
    """The window of median length, so that one disturbed window does not become the answer."""
    if not windows:
        return None
    ordered = sorted(windows, key=lambda w: sum(p.exclusive_us for p in w.recording.phases))
    return ordered[(len(ordered) - 1) // 2]


def _with_recorded_durations(rows: Sequence[StepRow], windows: Sequence[RecordedWindow]) -> list[StepRow]:
    """Steps of a window take the duration that their phases partition, so that both agree exactly; ends stay."""
    durations: dict[int, float] = {}
    for window in windows:
        for phase in window.recording.phases:
            durations[phase.step] = durations.get(phase.step, 0.0) + phase.exclusive_us
    settled = []
    for row in rows:
        duration_us = durations.get(row.step, row.duration_us)
        start_us = row.start_us + row.duration_us - duration_us
        settled.append(msgspec.structs.replace(row, start_us=start_us, duration_us=duration_us))
    return settled


def _layout_text(layout: Layout | None, inputs: RootInputs, steps: Sequence[StepRow]) -> str:
    if layout is None:
        return ""
    counts = [row.microbatches for row in steps if row.kind == "train"]
    fields = {name: getattr(layout, name) for name in Layout.__dataclass_fields__}
    fields["mb"] = inputs.batch or 1
    fields["accum"] = int(np.median(counts)) if counts else 1
    return str(Layout(**fields))


def _peak_rows(state: RunState, steps: Sequence[StepRow]) -> tuple[MemoryRow, ...]:
    peaks = [row.peak_memory_bytes for row in steps if row.peak_memory_bytes is not None]
    rows = [MemoryRow(rank=state.rank, category="peak", size_bytes=max(peaks))] if peaks else []
    if state.device == "cpu":
        rows.append(MemoryRow(rank=state.rank, category="framework", size_bytes=state.framework_bytes))
    return tuple(rows)


def _peak_flops(device: Device | None, recording: Recording | None, state: RunState) -> float | None:
    """The published peak of the device; for a CPU the fastest measured matmul; None for an unlisted GPU."""
    if device is not None:
        return device.peak_flops.get(state.precision)
    if state.device != "cpu" or recording is None:
        return None
    return fastest_matmul_flops_per_s(recording.operators, state.precision)


def _activation_rows(state: RunState, recording: Recording | None) -> tuple[MemoryRow, ...]:
    """Activations kept for the backward pass of one microbatch, from the trace of the captured layout.

    None where activations are recomputed: the trace keeps them all.
    """
    workload, layout = state.workload, state.layout
    if workload is None or recording is None or any(row.phase == "recompute" for row in recording.operators):
        return ()
    trace = (
        workload.find_class(layout.tp, sp=layout.sp)
        if layout is not None
        else workload.find_class(1, sp=False)
    )
    if trace is None:
        return ()
    size = workload.saved_bytes(trace, batch=workload.batch, seq=workload.seq)
    return (MemoryRow(rank=state.rank, category="activations", size_bytes=size),)


def _warnings(capture: Capture, steps: Sequence[StepRow]) -> list[str]:
    found = [
        *capture.state.warnings,
        *capture.detector.warnings,
        *capture.windows.warnings,
        *capture.guard.warnings,
    ]
    if not steps:
        return [NO_STEP, *found]
    timed = sum(row.kind == "train" and not row.instrumented for row in steps)
    if timed < ENOUGH_STEPS:
        found.append(
            f"only {timed} plain steps were timed, {ENOUGH_STEPS} or more are better: train a few steps more"
        )
    first = capture.windows.first_planned
    if not capture.windows.recorded and first is not None and len(steps) <= first:
        found.append(
            f"the run ended after {len(steps)} steps, before the profiled window at step {first}: train longer, or "
            "set wait and warmup lower"
        )
    return found
