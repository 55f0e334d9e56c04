"""Event simulation: tasks on the streams of a stage, then instructions of all stages. Overlap is an outcome.

Every time is an array of shape (1 + draws,): index 0 is the nominal run, the rest are sampled ones, so that one
pass simulates all. Parts (who owns the time) are kept for the nominal run and add up to it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from llmprof.extrapolate.schedule import Backward, Forward, Instruction, Post, Transfer, Wait

Array = NDArray[np.float64]
MAIN = "compute"
"""Name of a stage's main stream."""
Parts = dict[str, float]
"""Nominal seconds by part of the breakdown."""


class Call(NamedTuple):
    """One kind of collective call: over which group, spread over how many devices, with which message."""

    kind: str
    axis: str
    group_size: int
    span: int
    size_bytes: int


Calls = dict[Call, float]
"""How often each kind of collective is called."""


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
        parts: owners of the nominal duration; they sum to it.
        tail_s: work on other streams that ends this much later than the main stream (gradient reduction).
        tail_part: owner of the tail when nothing hides it.
        evidence: nominal seconds of all work in it by kind of evidence, hidden or not.
        calls: its collectives.
    """

    duration_s: Array
    parts: Parts
    evidence: Parts = field(default_factory=dict)
    calls: Calls = field(default_factory=dict)
    spans: tuple[Span, ...] = ()
    tail_s: Array | None = None
    tail_part: str = "dp"


Key = TypeVar("Key")


def add_into(total: dict[Key, float], values: Mapping[Key, float], times: float = 1.0) -> None:
    """Add `values`, `times` over, into `total`, key by key."""
    for key, value in values.items():
        total[key] = total.get(key, 0.0) + times * value


@dataclass(slots=True)
class Streams:
    """Clocks of one stage's streams. Tasks of one stream run in the order in which they are given.

    Attributes:
        zero: an array of zeros, the start.
        parts: owners of the main stream's time so far.
        evidence: nominal seconds of all work so far by kind of evidence.
        calls: collectives so far.
        spans: what ran, in the nominal run, where `record` is on.
        busy_s: nominal time of side streams with a label, such as communication.
    """

    zero: Array
    clocks: dict[str, Array] = field(default_factory=dict)
    parts: Parts = field(default_factory=dict)
    evidence: Parts = field(default_factory=dict)
    calls: Calls = field(default_factory=dict)
    spans: list[Span] = field(default_factory=list)
    record: bool = True
    busy_s: float = 0.0

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

    def run_main(self, duration_s: Array, parts: Parts, *, label: str = "", phase: str = "") -> Array:
        """Run a task on the main stream; `parts` own its nominal time."""
        start = self.now()
        self.clocks[MAIN] = end = start + duration_s
        add_into(self.parts, parts)
        if label and self.record:
            self.spans.append(Span(MAIN, label, phase, float(start[0]), float(duration_s[0])))
        return end

    def wait(self, until: Array, part: str) -> None:
        """Hold the main stream until another task has ended; the wait belongs to `part`."""
        start = self.now()
        end = np.maximum(start, until)
        gap = float(end[0] - start[0])
        if gap > 0:
            self.parts[part] = self.parts.get(part, 0.0) + gap
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
            parts=self.parts,
            evidence=self.evidence,
            calls=self.calls,
            spans=tuple(self.spans),
            tail_s=tail,
            tail_part=side,
        )


class StagePasses(Protocol):
    """What the pipeline asks of a stage."""

    def run(self, instruction: Forward | Backward) -> Pass:
        """The pass behind a forward or backward instruction."""
        ...


@dataclass(slots=True)
class StageClock:
    """One stage while the pipeline runs.

    Attributes:
        now_s: end of its last instruction.
        tail_end_s: when work on side streams ends; `tail_part` owns what that exposes.
        parts: owners of its time, complete when the pipeline has run.
        evidence, calls: of all its passes, complete when the pipeline has run.
        runs: passes with their nominal start.
        waits: messages that it stood still for, in the nominal run.
        position: next instruction.
    """

    now_s: Array
    tail_end_s: Array
    tail_part: str = "dp"
    parts: Parts = field(default_factory=dict)
    evidence: Parts = field(default_factory=dict)
    calls: Calls = field(default_factory=dict)
    runs: list[tuple[Forward | Backward, float, Pass]] = field(default_factory=list)
    waits: list[Span] = field(default_factory=list)
    position: int = 0

    def add_up(self) -> None:
        """Add the passes into parts, evidence and calls; equal passes are one object."""
        passes = {id(run): run for _, _, run in self.runs}
        for key, times in Counter(id(run) for _, _, run in self.runs).items():
            add_into(self.parts, passes[key].parts, times)
            add_into(self.evidence, passes[key].evidence, times)
            add_into(self.calls, passes[key].calls, times)

    def spans(self) -> Iterator[Span]:
        """Instructions on the stream "schedule", what ran inside them on its own streams, and waits."""
        yield from self.waits
        for instruction, start, run in self.runs:
            phase = type(instruction).__name__.lower()
            name = f"{phase} {instruction.microbatch}"
            yield Span("schedule", name, phase, start, float(run.duration_s[0]))
            for span in run.spans:
                yield Span(span.stream, span.name, span.phase, start + span.start_s, span.duration_s)


@dataclass(slots=True)
class Pipeline:
    """Runs the instructions of all stages against each other.

    Attributes:
        programs: instructions by stage.
        stages: passes by stage.
        transfer_s: for each boundary, the time of one message.
    """

    programs: Sequence[Sequence[Instruction]]
    stages: Sequence[StagePasses]
    transfer_s: Sequence[Array]
    clocks: list[StageClock] = field(default_factory=list)
    _posted: dict[tuple[Transfer, int], Array] = field(default_factory=dict)
    _arrived: dict[Transfer, Array] = field(default_factory=dict)
    _link_free: dict[tuple[str, int], Array] = field(default_factory=dict)

    def run(self, start_s: Array) -> list[StageClock]:
        """Run the step from a common start; returns the clock of each stage at its end."""
        self.clocks = [StageClock(now_s=start_s, tail_end_s=start_s) for _ in self.programs]
        running = True
        while running:
            running = False
            for stage in range(len(self.programs)):
                running |= self._advance(stage)
        stuck = [i for i, c in enumerate(self.clocks) if c.position < len(self.programs[i])]
        assert not stuck, f"schedule deadlock on stages {stuck}"
        for clock in self.clocks:
            clock.add_up()
        return self.clocks

    def _advance(self, stage: int) -> bool:
        """Run a stage until it needs a transfer that the other side has not posted; True when it moved."""
        program, clock = self.programs[stage], self.clocks[stage]
        first = clock.position
        while clock.position < len(program):
            instruction = program[clock.position]
            if isinstance(instruction, (Forward, Backward)):
                self._compute(stage, instruction)
            elif isinstance(instruction, Post):
                for transfer in instruction.transfers:
                    self._posted[(transfer, stage)] = clock.now_s
            elif not self._wait(clock, instruction):
                break
            clock.position += 1
        return clock.position > first

    def _compute(self, stage: int, instruction: Forward | Backward) -> None:
        clock = self.clocks[stage]
        run = self.stages[stage].run(instruction)
        clock.runs.append((instruction, float(clock.now_s[0]), run))
        clock.now_s = clock.now_s + run.duration_s
        if run.tail_s is not None:
            clock.tail_end_s, clock.tail_part = clock.now_s + run.tail_s, run.tail_part

    def _wait(self, clock: StageClock, instruction: Wait) -> bool:
        arrived: Array | None = None
        slowest = instruction.transfers[0]
        for transfer in instruction.transfers:
            end = self._end(transfer)
            if end is None:
                return False
            if arrived is None:
                arrived = end
            else:
                slowest = transfer if end[0] > arrived[0] else slowest
                arrived = np.maximum(arrived, end)
        assert arrived is not None, "a wait names its transfers"
        until = np.maximum(clock.now_s, arrived)
        gap = float(until[0] - clock.now_s[0])
        if gap > 0:
            moving = min(gap, float(self.transfer_s[slowest.boundary][0]))
            clock.parts["pp"] = clock.parts.get("pp", 0.0) + moving
            clock.parts["bubble"] = clock.parts.get("bubble", 0.0) + gap - moving
            name = f"{slowest.what} {slowest.microbatch}"
            clock.waits.append(Span("pp", name, "pp", float(until[0]) - moving, moving))
        clock.now_s = until
        return True

    def _end(self, transfer: Transfer) -> Array | None:
        """When a transfer has ended, None while a side has not posted it. A link moves one message at a time."""
        if transfer in self._arrived:
            return self._arrived[transfer]
        sides = [self._posted.get((transfer, s)) for s in (transfer.boundary, transfer.boundary + 1)]
        if sides[0] is None or sides[1] is None:
            return None
        start: Array = np.maximum(sides[0], sides[1])
        link = (transfer.what, transfer.boundary)
        free = self._link_free.get(link)
        if free is not None:
            start = np.maximum(start, free)
        end: Array = start + self.transfer_s[transfer.boundary]
        self._link_free[link] = self._arrived[transfer] = end
        return end
