"""A step of many microbatches from a few: once a pipeline repeats itself, every further microbatch adds the same.

Task times are constant, so a schedule is a max-plus linear system, which becomes periodic (Baccelli et al. 1992,
Synchronization and Linearity, theorem 3.112). Three short steps, each one microbatch longer, show whether it has: where
forwards and backwards alternate, every stage must have been in the same rhythm twice; where they do not, every clock must
have moved on as before, by no less than the slowest stage works.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple, Protocol

import numpy as np

from llmprof.extrapolate.graph import Course, Graph, Kind, build_graph
from llmprof.extrapolate.ledger import Ledger, Parts
from llmprof.extrapolate.schedule import SCHEDULES, Instruction, Pipeline, in_flight
from llmprof.extrapolate.simulate import Array, Pass, Span

AGREEMENT = 1e-9
"""Relative difference of two increments that are taken as equal."""
TRIALS = ((1, 3), (2, 6), (5, 15))
"""(times the stages, plus) microbatches after which a schedule may have become periodic."""
_NAMES = {"forward": "forward", "backward": "backward", "input": "backward", "weight": "weight gradients"}
ROUND_TRIALS = (3, 6)
"""Rounds after which a schedule in rounds of as many microbatches as stages may have become periodic."""


class Timetable(NamedTuple):
    """A schedule and what it depends on."""

    schedule: str
    pipeline: Pipeline

    @property
    def period(self) -> int:
        """Microbatches after which a long step repeats itself, at the earliest."""
        return self.pipeline.stages if self.pipeline.chunks > 1 else 1

    def of(self, microbatches: int) -> Timetable:
        """The same for another number of microbatches."""
        return self._replace(pipeline=self.pipeline._replace(microbatches=microbatches))

    def trials(self) -> Iterator[tuple[Timetable, Timetable, Timetable]]:
        """Three shorter steps, each one period longer and ending like the long one, earlier ones first."""
        stages, _, total = self.pipeline
        period = self.period
        fewest = [r * period for r in ROUND_TRIALS] if period > 1 else [f * stages + p for f, p in TRIALS]
        for start in fewest:
            first = start + (total - start) % period
            if total <= first + 2 * period or total % period:
                return
            yield self.of(first), self.of(first + period), self.of(first + 2 * period)


@lru_cache(maxsize=512)
def programs(timetable: Timetable) -> tuple[tuple[Instruction, ...], ...]:
    """Instructions of every stage."""
    make = SCHEDULES[timetable.schedule]
    return tuple(tuple(make(stage, timetable.pipeline)) for stage in range(timetable.pipeline.stages))


@lru_cache(maxsize=4096)
def most_in_flight(timetable: Timetable) -> tuple[float, ...]:
    """For each stage, the most microbatches whose activations are held at once; one of many chunks is a part of one."""
    _, chunks, total = timetable.pipeline
    short = next(timetable.trials(), None)
    if short is None:
        return tuple(in_flight(p) / chunks for p in programs(timetable))
    before, last = most_in_flight(short[1]), most_in_flight(short[2])
    more = (total - short[2].pipeline.microbatches) // timetable.period
    return tuple(b + more * (b - a) for a, b in zip(before, last, strict=True))


class StagePasses(Protocol):
    """What a step asks of a stage."""

    def run(self, kind: Kind) -> Pass:
        """A pass of a kind; kinds of other stages are not asked for."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class StageClock:
    """One stage at the end of its last backward.

    Attributes:
        now_s: end of its last instruction.
        tail_end_s: when work on side streams ends; `tail_part` owns what that exposes.
        passes: by kind its passes and how often they ran.
        waits: nominal seconds that it stood still: "pp" while a message moved, "bubble" before.
        spans: of the nominal step, where they were asked for.
    """

    now_s: Array
    tail_end_s: Array
    tail_part: str
    passes: dict[int, tuple[Pass, float]]
    waits: Parts
    spans: tuple[Span, ...] = ()

    def ledger(self) -> Ledger:
        """All its passes and waits."""
        found = Ledger(own=dict(self.waits))
        for run, times in self.passes.values():
            found.add(run.ledger, times)
        return found


@dataclass(frozen=True, kw_only=True, slots=True)
class Times:
    """What a layout fills into a graph.

    Attributes:
        stages: their passes.
        transfer_s: for each boundary, the time of one message.
        start_s: common start, shape (1 + draws,).
    """

    stages: Sequence[StagePasses]
    transfer_s: Sequence[Array]
    start_s: Array


@lru_cache(maxsize=256)
def _graph(*timetables: Timetable) -> Graph:
    return build_graph(map(programs, timetables))


def run_step(timetable: Timetable, times: Times, *, every: bool = False) -> list[StageClock]:
    """Clocks of all stages at the end of their last backward.

    Args:
        every: simulate every microbatch and keep spans; else there are none.
    """
    if every:
        filled = _fill(build_graph([programs(timetable)], lean=False), times)
        return filled.clocks(filled.graph.courses[0], spans=True)
    for trial in timetable.trials():
        filled = _fill(_graph(*trial), times)
        first, middle, last = filled.graph.courses
        if filled.in_rhythm(last, timetable.period * timetable.pipeline.chunks):
            clocks = filled.clocks(first), filled.clocks(middle), filled.clocks(last)
            if _periodic(*clocks):
                more = timetable.pipeline.microbatches - trial[2].pipeline.microbatches
                return [_longer(b, c, more // timetable.period) for b, c in zip(*clocks[1:], strict=True)]
    filled = _fill(_graph(timetable), times)
    return filled.clocks(filled.graph.courses[0])


def _fill(graph: Graph, times: Times) -> _Filled:
    passes = [times.stages[kind.stage].run(kind) for kind in graph.kinds]
    return _Filled(
        graph=graph,
        times=times,
        passes=passes,
        chunks=1 + max(kind.chunk for kind in graph.kinds),
        ends=graph.ends([run.duration_s for run in passes] + list(times.transfer_s), times.start_s),
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class _Filled:
    """A graph with the times of a layout.

    Attributes:
        passes: by kind.
        ends: of the tasks, the start last.
        chunks: on each stage.
    """

    graph: Graph
    times: Times
    passes: Sequence[Pass]
    ends: Sequence[Array]
    chunks: int

    def in_rhythm(self, course: Course, forwards: int) -> bool:
        """Whether in the last three periods before the last forward every pass comes equally long after its like.

        Everything later depends on them alone, so it goes on like that. True of a schedule whose last forwards stand
        together: there is nothing to compare.

        Args:
            forwards: number of forwards in a period.
        """
        tolerance = AGREEMENT * self.ends[course.ends[0][-1]]
        rhythm: Array | None = None
        for runs in course.runs:
            phases = [self.graph.kinds[run.kind].phase for run in runs]
            last = len(phases) - phases[::-1].index("forward")
            length = forwards * len(phases) // phases.count("forward")
            window = phases[last - length : last]
            if last < 3 * length or window.count("forward") != forwards:
                return window.count("forward") > forwards
            ends = np.stack([self.ends[run.task] for run in runs[last - 3 * length : last]])
            apart = ends[length:] - ends[:-length]
            rhythm = apart[0] if rhythm is None else rhythm
            if bool((np.abs(apart - rhythm) > tolerance).any()):
                return False
        return True

    def clocks(self, course: Course, *, spans: bool = False) -> list[StageClock]:
        nominal = np.array([end[0] for end in self.ends])
        exposed = course.exposed_s(nominal, np.array([t[0] for t in self.times.transfer_s]))
        return [
            self._clock(
                course, stage, *waits, spans=tuple(self._spans(course, stage, nominal)) if spans else ()
            )
            for stage, waits in enumerate(exposed)
        ]

    def _clock(
        self, course: Course, stage: int, moving_s: float, bubble_s: float, *, spans: tuple[Span, ...]
    ) -> StageClock:
        tail_end_s, part = self._tail(course, stage)
        return StageClock(
            now_s=np.maximum.reduce([self.ends[task] for task in course.ends[stage]]),
            tail_end_s=tail_end_s,
            tail_part=part,
            passes={kind: (self.passes[kind], float(n)) for kind, n in course.counts[stage].items()},
            waits={"pp": moving_s, "bubble": bubble_s},
            spans=spans,
        )

    def _tail(self, course: Course, stage: int) -> tuple[Array, str]:
        """When the side streams end, and who owns that.

        What the last pass of a chunk leaves waits for what that of the chunk before has left, if it goes on so long.
        """
        left: dict[int, tuple[Array, Pass]] = {}
        for run in reversed(course.runs[stage]):
            chunk, found = self.graph.kinds[run.kind].chunk, self.passes[run.kind]
            if found.tail_s is not None and chunk not in left:
                left[chunk] = self.ends[run.task] + found.tail_s, found
                if len(left) == self.chunks:
                    break
        if not left:
            return self.times.start_s, "dp"
        (end_s, found), *later = reversed(left.values())
        for own_s, found in later:
            end_s = np.maximum(own_s, end_s + found.side_s)
        return end_s, found.tail_part

    def _spans(self, course: Course, stage: int, nominal: Array) -> Iterator[Span]:
        """Waits, instructions on the stream "schedule", and what ran inside them on its own streams."""
        for wait in course.waits[stage]:
            arrived = max(range(len(wait.messages)), key=lambda i: float(nominal[wait.messages[i]]))
            until, slowest = float(nominal[wait.messages[arrived]]), wait.transfers[arrived]
            gap = until - float(max(nominal[task] for task in wait.since))
            if gap > 0:
                moving = min(gap, float(self.times.transfer_s[slowest.boundary][0]))
                yield Span("pp", f"{slowest.what} {slowest.microbatch}", "pp", until - moving, moving)
        for task, kind, microbatch in course.runs[stage]:
            run = self.passes[kind]
            length = float(run.duration_s[0])
            start = float(nominal[task]) - length
            of = self.graph.kinds[kind]
            phase = "forward" if of.phase == "forward" else "backward"
            name = f"{_NAMES[of.phase]} {microbatch}" + (f" of chunk {of.chunk}" if of.chunk else "")
            yield Span("schedule", name, phase, start, length)
            for span in run.spans:
                yield Span(span.stream, span.name, span.phase, start + span.start_s, span.duration_s)


def _periodic(first: Sequence[StageClock], middle: Sequence[StageClock], last: Sequence[StageClock]) -> bool:
    """Whether the last period added to every clock what the one before it had added, and no stage falls behind.

    A stage that works longer than the others wait may catch up with the rest only later: then the period is not yet
    the final one, and it is shorter than that stage's work.
    """
    busiest_s = np.maximum.reduce([_added_s(b, c) for b, c in zip(middle, last, strict=True)])
    for a, b, c in zip(first, middle, last, strict=True):
        for earlier, between, later in (
            (a.now_s, b.now_s, c.now_s),
            (a.tail_end_s, b.tail_end_s, c.tail_end_s),
        ):
            tolerance = AGREEMENT * later
            difference = (later - between) - (between - earlier)
            if bool((np.abs(difference) > tolerance).any()):
                return False
        if bool((c.now_s - b.now_s < busiest_s - AGREEMENT * c.now_s).any()):
            return False
    return True


def _added_s(before: StageClock, last: StageClock) -> Array:
    """Work of the one period that the last step has more: none is shorter."""
    total = np.zeros_like(last.now_s)
    for kind, (run, times) in last.passes.items():
        more = times - (before.passes[kind][1] if kind in before.passes else 0.0)
        if more:
            total = total + more * run.duration_s
    return total


def _longer(before: StageClock, last: StageClock, more: int) -> StageClock:
    """The clock after `more` further periods, each adding what the last one added."""
    counts = {kind: n for kind, (_, n) in before.passes.items()}
    return replace(
        last,
        now_s=last.now_s + more * (last.now_s - before.now_s),
        tail_end_s=last.tail_end_s + more * (last.tail_end_s - before.tail_end_s),
        passes={k: (run, n + more * (n - counts.get(k, 0.0))) for k, (run, n) in last.passes.items()},
        waits={part: w + more * (w - before.waits[part]) for part, w in last.waits.items()},
    )
