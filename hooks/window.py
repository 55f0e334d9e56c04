"""Opens and closes the profiled windows at step boundaries, by a schedule of step numbers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch
from torch import nn

from llmprof.hooks import private

if TYPE_CHECKING:
    from llmprof.hooks.recorder import Recording

FIRST_STEP = 3
"""No window opens before this step: the roots are found in the second step, their inputs in the third."""


class StepRecorder(Protocol):
    """What a window needs of `llmprof.hooks.recorder.Recorder`."""

    def start(self) -> object: ...

    def enter(self, module: nn.Module) -> None: ...

    def mark_step(self, step: int) -> None: ...

    def stop(self) -> Recording: ...


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """Cycles of `wait` + `warmup` + `active` steps, `repeat` of them; the first window is not before FIRST_STEP."""

    wait: int
    warmup: int
    active: int
    repeat: int

    def windows(self) -> tuple[range, ...]:
        """Step indices of each window."""
        if self.active == 0:
            return ()
        found: list[range] = []
        for _ in range(self.repeat):
            after = found[-1].stop if found else 0
            first = max(after + self.wait + self.warmup, FIRST_STEP)
            found.append(range(first, first + self.active))
        return tuple(found)


@dataclass(frozen=True, kw_only=True)
class RecordedWindow:
    """A closed window: which steps it holds, and what was recorded."""

    steps: tuple[int, ...]
    recording: Recording


class Windows:
    """Drives a recorder over the windows of a schedule.

    Args:
        schedule: when.
        make_recorder: called at the start of each window.
        export: called with the stopped profiler of a recorder that has one, to keep its raw trace.
    """

    def __init__(
        self,
        schedule: Schedule,
        make_recorder: Callable[[], StepRecorder],
        *,
        export: Callable[[torch.profiler.profile], None] | None = None,
    ) -> None:
        self._export = export
        self._planned = schedule.windows()
        self._ahead = list(self._planned)
        self._warmup = schedule.warmup
        self._make_recorder = make_recorder
        self._recorder: StepRecorder | None = None
        self._first = 0
        self.recorded: list[RecordedWindow] = []
        self.warnings: list[str] = []

    @property
    def is_open(self) -> bool:
        """True inside a window."""
        return self._recorder is not None

    @property
    def first_planned(self) -> int | None:
        """First step of the first window, None when none was asked for."""
        return self._planned[0].start if self._planned else None

    def closes_at(self, step: int) -> bool:
        """True when the open window ends where `step` begins."""
        return self.is_open and step >= self._ahead[0].stop

    def opens_at(self, step: int) -> bool:
        """True when a window starts where `step` begins."""
        return not self.is_open and bool(self._ahead) and step >= self._ahead[0].start

    def mark(self, step: int) -> None:
        """`step` begins inside the open window."""
        if self._recorder is not None:
            self._recorder.mark_step(step)

    def prepare(self, step: int) -> None:
        """At the first warm-up step: start and stop a profiler once, so that its set-up is not in the window."""
        is_due = bool(self._ahead) and self._warmup > 0 and step == self._ahead[0].start - self._warmup
        if is_due and not private.profiler_active():
            with private.quiet_kineto(), torch.profiler.profile(activities=profiler_activities()):
                pass

    def open(self, step: int, *, entering: nn.Module | None = None) -> None:
        """Start recording; skipped with a warning while another profiler runs.

        Args:
            step: index of the step that begins.
            entering: the root whose forward begins the step, when the boundary falls there.
        """
        if private.profiler_active():
            self._ahead.pop(0)
            self.warnings.append(f"another profiler was active at step {step}: the window was skipped")
            return
        recorder = self._make_recorder()
        length = len(self._ahead[0])
        self._ahead[0] = range(step, step + length)
        recorder.start()
        self._recorder, self._first = recorder, step
        recorder.mark_step(step)
        if entering is not None:
            recorder.enter(entering)

    def close(self, step: int) -> None:
        """Stop recording; `step` is the first that is not in the window."""
        recorder, self._recorder = self._recorder, None
        self._ahead.pop(0)
        if recorder is None:
            return
        profiler = getattr(recorder, "_profiler", None)
        recording = recorder.stop()
        if self._export is not None and profiler is not None:
            self._export(profiler)
        if step > self._first:
            self.recorded.append(RecordedWindow(steps=tuple(range(self._first, step)), recording=recording))
        else:
            self.warnings.append(
                f"the run ended in step {step}, the first of the profiled window: nothing recorded"
            )

    def abandon(self) -> None:
        """Stop without keeping anything."""
        recorder, self._recorder = self._recorder, None
        self._ahead.clear()
        if recorder is not None:
            recorder.stop()


def profiler_activities() -> list[torch.profiler.ProfilerActivity]:
    """CPU, and CUDA where there is one."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    return activities
