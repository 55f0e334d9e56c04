"""One capture from first to last step: step events in, a run directory out."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import TypeVar

import torch

from llmprof.hooks import captured, finish, ranks, tracing
from llmprof.hooks.clock import Mark, StepClock
from llmprof.hooks.guard import Guard
from llmprof.hooks.options import CaptureOptions
from llmprof.hooks.scalars import LiveScalars
from llmprof.hooks.steplog import FinishedStep, StepLog
from llmprof.hooks.steps import StepDetector, StepFacts
from llmprof.hooks.taps import Taps
from llmprof.hooks.window import Schedule, StepRecorder, Windows
from llmprof.schema.layout import Layout
from llmprof.schema.profile import HostRow, MemoryRow, Profile, StepRow
from llmprof.schema.store import RunWriter
from llmprof.schema.workload import Workload

logger = logging.getLogger("llmprof")
T = TypeVar("T")

RAW_TRACE = "trace.json.gz"
"""Name of the Chrome trace that `trace=True` keeps in a rank's directory."""

MARKING_REGIONS = ("evaluation", "checkpoint")
"""Names of regions that make their step one of that kind."""


@dataclass
class RunState:
    """What a capture has learned so far; `llmprof.hooks.finish` turns it into a Profile."""

    options: CaptureOptions
    rank: int = 0
    world_size: int = 1
    backend: str = ""
    device: str = "cpu"
    precision: str = "float32"
    layout: Layout | None = None
    memory: tuple[MemoryRow, ...] = ()
    workload: Workload | None = None
    framework_bytes: int = 0
    input_wait_us: list[float] = field(default_factory=list)
    regions_us: dict[str, list[float]] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)

    def host_rows(self) -> tuple[HostRow, ...]:
        """Input wait per step and the regions that the user named."""
        series = {"input_wait_us": self.input_wait_us}
        series.update({f"region.{name}_us": values for name, values in self.regions_us.items()})
        return tuple(finish.host_row(self.rank, name, values) for name, values in series.items() if values)


class Capture:
    """Drives detection, timing and windows; writes the run. All hooks come through here.

    Args:
        options: what was asked.
        implicit: started without the user's code naming us, so a process without steps writes nothing.
    """

    def __init__(self, options: CaptureOptions, *, implicit: bool = False) -> None:
        self.state = RunState(options=options)
        self.guard = Guard(self._disable)
        self.clock = StepClock()
        self.detector = StepDetector(self.guard.wrap(self._boundary))
        self.taps = Taps(self.detector, self.guard)
        self.taps.roots.inputs.set_dims(options.batch_dim, options.seq_dim)
        schedule = Schedule(
            wait=options.wait, warmup=options.warmup, active=options.active, repeat=options.repeat
        )
        self.windows = Windows(schedule, self._make_recorder, export=self._export if options.trace else None)
        self.step_kind = ""
        self._implicit = implicit
        self._process = os.getpid()
        self._step = 0
        self._begin: Mark = self.clock.mark()
        self.traced: tracing.Traced | None = None
        self._knows_inputs = False
        self._compiled = 0
        self._reserved = 0
        self._log: StepLog | None = None
        self._writer: RunWriter | None = None
        self._scalars: LiveScalars | None = None
        self._closed = False

    @property
    def rows(self) -> list[StepRow]:
        """Steps so far."""
        return self._log.rows if self._log is not None else []

    @property
    def in_this_process(self) -> bool:
        """False in a child that was forked during the capture."""
        return os.getpid() == self._process

    @property
    def is_live(self) -> bool:
        """True until `close`, in the process that opened it."""
        return not self._closed and self.in_this_process

    def mark_step(self, tokens: int | None) -> None:
        """The user's own end of a step."""
        self.guard.wrap(self.detector.step)(tokens=tokens)

    @contextmanager
    def region(self, name: str) -> Iterator[None]:
        """Time a part of the step; inside a window it is a scope of the profile."""
        if name in MARKING_REGIONS:
            self.step_kind = name
        start = time.perf_counter()
        try:
            with torch.profiler.record_function(name) if self.windows.is_open else nullcontext():
                yield
        finally:
            self.state.regions_us.setdefault(name, []).append((time.perf_counter() - start) * 1e6)

    def watch_data(self, iterable: Iterable[T]) -> Iterator[T]:
        """The same items; each request may be a boundary, and the wait for it is input time."""
        before, after = self.guard.wrap(self.taps.before_batch), self.guard.wrap(self.taps.after_batch)
        iterator = iter(iterable)
        while True:
            before()
            start = time.perf_counter()
            try:
                item = next(iterator)
            except StopIteration:
                return
            finally:
                after(time.perf_counter() - start)
            yield item

    def open(self) -> None:
        """Install the step hooks."""
        self.state.framework_bytes = captured.peak_memory_bytes("cpu")
        self.taps.install()
        self._compiled, self._reserved = captured.compile_count(), self._reserved_bytes()
        self._begin = self.clock.mark()

    def close(self, *, trace_workload: bool) -> None:
        """Take all hooks out and write the run; idempotent, raises nothing.

        Args:
            trace_workload: False when the loop ended with an exception.
        """
        if self._closed or not self.in_this_process:
            return
        self._closed = True
        for part in (self._end_last_step, self.taps.remove, self.windows.abandon):
            self._never_raise(part)
        if self.rows or not self._implicit:
            self._never_raise(lambda: self._write_run(trace_workload=trace_workload))
        for file in (self._scalars, self._writer):
            if file is not None:
                self._never_raise(file.close)
        self.traced = None

    def _never_raise(self, part: Callable[[], None]) -> None:
        try:
            part()
        except Exception as error:  # noqa: BLE001 (it would end the user's training)
            self.guard.caught(error, where="close")

    def _disable(self) -> None:
        self.taps.remove()
        self.windows.abandon()

    # At a boundary

    def _boundary(self, facts: StepFacts) -> None:
        """A step ended: time it, move the window, write what may be written, begin the next."""
        end = self.clock.mark()
        following = self._step + 1
        in_window = self.windows.is_open
        self.windows.mark(following)
        self._add(facts, end)
        self._step = following
        self._learn()
        self._move_window()
        if not self.windows.is_open and self._log is not None:
            self._log.flush()
        self._begin = end if in_window and self.windows.is_open else self.clock.mark()

    def _add(self, facts: StepFacts, end: Mark) -> None:
        if self._log is None:
            self._start_run()
        assert self._log is not None
        before_window = not self.windows.recorded and not self.windows.is_open
        self._log.add(
            FinishedStep(
                step=self._step,
                start=self._begin,
                end=end,
                facts=facts,
                kind=self._kind(facts),
                instrumented=self.windows.is_open,
                peak_memory_bytes=captured.peak_memory_bytes(self.clock.device) if before_window else None,
            )
        )
        self.state.input_wait_us.append(self.taps.input_wait_s * 1e6)
        self.taps.input_wait_s = 0.0

    def _kind(self, facts: StepFacts) -> str:
        compiled, reserved = captured.compile_count(), self._reserved_bytes()
        is_compile, grows = compiled != self._compiled, reserved != self._reserved
        self._compiled, self._reserved = compiled, reserved
        named, self.step_kind = self.step_kind, ""
        if is_compile:
            return "compile"
        if facts.evaluated:
            return "evaluation"
        if named:
            return named
        if self._step < max(1, self.state.options.wait) or grows:
            return "warmup"
        return "train" if facts.complete else "outlier"

    def _reserved_bytes(self) -> int:
        return torch.cuda.memory_reserved() if self.clock.device == "cuda" else 0

    def _start_run(self) -> None:
        """At the first boundary the process group exists: rank, directory, journal, scalars."""
        state = self.state
        state.rank, state.world_size = ranks.current_rank(), ranks.current_world_size()
        state.backend = ranks.current_backend()
        directory = state.options.directory
        if state.rank == 0:
            finish.clear_stale(directory, world_size=state.world_size)
        self._writer = RunWriter(directory, state.rank)
        self._writer.begin(finish.make_manifest(state, status="partial"))
        self._log = StepLog(state.rank, self._sink)
        if state.rank == 0:
            self._scalars = LiveScalars(directory)

    def _sink(self, row: StepRow) -> None:
        if self._writer is not None:
            self._writer.journal(row)
        if self._scalars is not None:
            dp = self.state.layout.dp if self.state.layout is not None else self.state.world_size
            tokens_per_s = row.tokens * dp / row.duration_us * 1e6 if row.tokens and row.duration_us else None
            values = {
                "step_time_ms": row.duration_us / 1e3,
                "tokens_per_s": tokens_per_s,
                "memory_bytes": row.peak_memory_bytes,
            }
            self._scalars.write(row.step, values)

    def _learn(self) -> None:
        """Watch more of the model, and note what it is once it is known."""
        self.taps.at_boundary()
        roots, state = self.taps.roots, self.state
        main = roots.main
        if main is None or not roots.settled:
            return
        if state.layout is None:
            parameter = next(main.parameters(), None)
            state.device = "cuda" if parameter is not None and parameter.device.type == "cuda" else "cpu"
            self.clock.device = state.device
            state.precision = captured.compute_precision(main, None)
            state.layout = captured.captured_layout(roots.owner or main, world_size=state.world_size)
        if roots.inputs.args is not None and not self._knows_inputs:
            self._knows_inputs = True
            state.precision = captured.compute_precision(main, roots.inputs.autocast)
            if state.options.workload and state.rank == 0:
                self.traced = tracing.Traced.of(main, self.taps.main_optimizer())

    def _move_window(self) -> None:
        if self.windows.closes_at(self._step):
            self._close_window()
        self.windows.prepare(self._step)
        if self.windows.opens_at(self._step):
            self.clock.synchronize()
            if self._log is not None:
                self._log.flush()
            self.windows.open(self._step, entering=self.taps.roots.entering)

    def _close_window(self) -> None:
        self.clock.synchronize()
        self.windows.close(self._step)
        if self._log is not None:
            self._log.flush()
        self.state.memory = finish.static_rows(self)
        self._write_tables(status="partial")

    def _make_recorder(self) -> StepRecorder:
        from llmprof.hooks.modules import ModuleNames
        from llmprof.hooks.recorder import Recorder

        names = ModuleNames()
        for root in self.taps.roots.named:
            names.add(root)
        return Recorder(names, rank=self.state.rank, device=self.state.device)

    def _export(self, profiler: torch.profiler.profile) -> None:
        if self._writer is not None:
            profiler.export_chrome_trace(str(self._writer.directory / RAW_TRACE))

    # At the end

    def _end_last_step(self) -> None:
        """A step whose optimizer ran ends there; what was only begun is dropped."""
        if self.guard.disabled or not self.detector.pending:
            if self.windows.is_open:
                self._close_window()
            return
        end = Mark(host_us=self.clock.since_start_us(self.taps.optimizer_time))
        self.windows.mark(self._step + 1)
        if self.clock.device == "cuda":
            end = self.clock.mark()
        self._add(replace(self.detector.facts(), complete=False), end)
        self._step += 1
        if self.windows.is_open:
            self._close_window()

    def _write_run(self, *, trace_workload: bool) -> None:
        if self._log is None:
            self._start_run()
        self.clock.synchronize()
        assert self._log is not None
        self._log.flush()
        self._write_tables(status="partial")
        if trace_workload and self.state.rank == 0 and self.state.options.workload:
            self._never_raise(self._trace_workload)
        elif self.state.rank == 0 and self.state.options.workload:
            self.state.warnings.append("no workload was traced, because the loop ended with an exception")
        finish.write_mfu(self._write_tables(status="complete"), self._scalars)
        directory = self.state.options.directory
        if self.state.rank == 0:
            logger.info("llmprof: %d steps captured; see: llmprof show %s", len(self.rows), directory)

    def _trace_workload(self) -> None:
        workload = tracing.trace(self)
        self.state.workload = workload
        if workload is not None and self._writer is not None:
            self._writer.write_workload(workload)

    def _write_tables(self, *, status: str) -> Profile:
        profile = finish.make_profile(self, status=status)
        if self._writer is not None:
            self._writer.write_rank(profile)
        return profile
