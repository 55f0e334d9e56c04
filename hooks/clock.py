"""Times steps from boundary to boundary: the host clock, and on CUDA events, read only when the device is done."""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch


@dataclass(frozen=True, kw_only=True)
class Mark:
    """A moment: host time in microseconds since the start of the session, and the same moment on the device."""

    host_us: float
    event: torch.cuda.Event | None = None

    @property
    def reached(self) -> bool:
        """True when the device has come here too."""
        return self.event is None or self.event.query()


class StepClock:
    """Makes marks. `device` is "cpu" until the parameters of the model are seen on another one."""

    def __init__(self) -> None:
        self._origin = time.perf_counter()
        self.device = "cpu"

    @property
    def name(self) -> str:
        """What the times are read from."""
        return "cuda events" if self.device == "cuda" else "perf_counter"

    def mark(self) -> Mark:
        """Now."""
        event = None
        if self.device == "cuda":
            event = torch.cuda.Event(enable_timing=True)
            event.record()
        return Mark(host_us=self.since_start_us(time.perf_counter()), event=event)

    def since_start_us(self, perf_counter_s: float) -> float:
        """A `time.perf_counter()` value in microseconds since the start of the session."""
        return (perf_counter_s - self._origin) * 1e6

    def synchronize(self) -> None:
        """Wait for the device; only at the edges of a window and at the end."""
        if self.device == "cuda":
            torch.cuda.synchronize()


def duration_us(start: Mark, end: Mark) -> float:
    """Time between two marks; `end` must be reached."""
    if start.event is not None and end.event is not None:
        return float(start.event.elapsed_time(end.event)) * 1e3
    return end.host_us - start.host_us
