"""Tasks on the streams of one stage: overlap is an outcome of launch order and dependencies.

Every time is an array of shape (1 + draws,): index 0 is the nominal run, the rest are sampled ones, so that one
pass simulates all. Who owns the time is kept for the nominal run and adds up to it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from llmprof.extrapolate.ledger import Ledger, Parts

Array = NDArray[np.float64]
MAIN = "compute"
"""Name of a stage's main stream."""


@dataclass(frozen=True, slots=True)
class Span:
    """One interval of the nominal run, seconds from the start of what it belongs to."""

    stream: str
    name: str
    phase: str
    start_s: float
    duration_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Pass:
    """One run over a stage's layers.

    Attributes:
        duration_s: time on the stage's main stream.
        ledger: its work; the owners sum to the nominal duration.
        tail_s: work on other streams that ends this much later than the main stream (gradient reduction).
        tail_part: owner of the tail when nothing hides it.
        side_s: nominal time of that other work, all of it.
    """

    duration_s: Array
    ledger: Ledger
    spans: tuple[Span, ...] = ()
    tail_s: Array | None = None
    tail_part: str = "dp"
    side_s: float = 0.0


@dataclass(slots=True)
class Streams:
    """Clocks of one stage's streams. Tasks of one stream run in the order in which they are given.

    Attributes:
        zero: an array of zeros, the start.
        ledger: what ran so far.
        spans: what ran, in the nominal run, where `record` is on.
        busy_s: nominal time of side streams with a label, such as communication.
    """

    zero: Array
    clocks: dict[str, Array] = field(default_factory=dict)
    ledger: Ledger = field(default_factory=Ledger)
    spans: list[Span] = field(default_factory=list)
    record: bool = True
    busy_s: float = 0.0

    @property
    def parts(self) -> Parts:
        """Owners of the main stream's time so far."""
        return self.ledger.parts()

    def now(self, stream: str = MAIN) -> Array:
        """When the stream is free."""
        return self.clocks.get(stream, self.zero)

    def run(self, stream: str, duration_s: Array, *, after: Iterable[Array] = (), label: str = "") -> Array:
        """Run a task on a side stream after other tasks; returns when it ends."""
        start = self.now(stream)
        for other in after:
            start = np.maximum(start, other)
        end: Array = start + duration_s
        self.clocks[stream] = end
        if label:
            self.busy_s += float(duration_s[0])
            if self.record:
                self.spans.append(Span(stream, label, stream, float(start[0]), float(duration_s[0])))
        return end

    def run_main(self, duration_s: Array, part: str = "", *, label: str = "", phase: str = "") -> Array:
        """Run a task on the main stream; its time belongs to `part`, where it is not in the ledger already."""
        start = self.now()
        self.clocks[MAIN] = end = start + duration_s
        if part:
            self.ledger.give(part, float(duration_s[0]))
        if label and self.record:
            self.spans.append(Span(MAIN, label, phase, float(start[0]), float(duration_s[0])))
        return end

    def wait(self, until: Array, part: str) -> None:
        """Hold the main stream until another task has ended; the wait belongs to `part`."""
        start = self.now()
        end = np.maximum(start, until)
        gap = float(end[0] - start[0])
        if gap > 0:
            self.ledger.give(part, gap)
        self.clocks[MAIN] = end

    def delay(self, stream: str, by_s: Array) -> None:
        """Move a stream's clock on."""
        self.clocks[stream] = self.now(stream) + by_s

    def finish(self, side: str = "dp") -> Pass:
        """The pass so far, with what still runs on the side stream as its tail."""
        end = self.now()
        tail = None
        if side in self.clocks:
            tail = np.maximum(self.clocks[side] - end, 0.0)
        return Pass(
            duration_s=end - self.zero,
            ledger=self.ledger,
            spans=tuple(self.spans),
            tail_s=tail,
            tail_part=side,
            side_s=self.busy_s,
        )
