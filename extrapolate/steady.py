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
from typing import Protocol

import numpy as np

from llmprof.extrapolate.graph import Course, Graph, Kind, build_graph
from llmprof.extrapolate.ledger import Ledger, Parts
from llmprof.extrapolate.schedule import SCHEDULES, Instruction, in_flight
from llmprof.extrapolate.simulate import Array, Pass, Span

AGREEMENT = 1e-9
"""Relative difference of two increments that are taken as equal."""
TRIALS = ((1, 3), (2, 6), (5, 15))
"""(times the stages, plus) microbatches after which a schedule may have become periodic."""


@lru_cache(maxsize=512)
def programs(schedule: str, num_stages: int, microbatches: int) -> tuple[tuple[Instruction, ...], ...]:
    """Instructions of every stage."""
    make = SCHEDULES[schedule]
    return tuple(tuple(make(stage, num_stages, microbatches)) for stage in range(num_stages))


@lru_cache(maxsize=4096)
def most_in_flight(schedule: str, num_stages: int, microbatches: int) -> tuple[int, ...]:
    """For each stage, the most microbatches whose activations are held at once."""
    short = num_stages + 2
    if microbatches <= short:
        return tuple(in_flight(p) for p in programs(schedule, num_stages, microbatches))
    before, last = (most_in_flight(schedule, num_stages, n) for n in (short - 1, short))
    return tuple(b + (microbatches - short) * (b - a) for a, b in zip(before, last, strict=True))


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
def _graph(schedule: str, num_stages: int, microbatches: tuple[int, ...]) -> Graph:
    return build_graph(programs(schedule, num_stages, n) for n in microbatches)


def run_step(schedule: str, microbatches: int, times: Times, *, every: bool = False) -> list[StageClock]:
    """Clocks of all stages at the end of their last backward.

    Args:
        every: simulate every microbatch and keep spans; else there are none.
    """
    number = len(times.stages)
    if every:
        whole = [programs(schedule, number, microbatches)]
        filled = _fill(build_graph(whole, lean=False), times)
        return filled.clocks(filled.graph.courses[0], spans=True)
    for factor, plus in TRIALS:
        fewest = factor * number + plus
        if microbatches <= fewest + 2:
            break
        filled = _fill(_graph(schedule, number, (fewest, fewest + 1, fewest + 2)), times)
        if not filled.in_rhythm(filled.graph.courses[2]):
            continue
        trial = [filled.clocks(course) for course in filled.graph.courses]
        if _periodic(trial):
            more = microbatches - fewest - 2
            return [_longer(b, c, more) for b, c in zip(trial[1], trial[2], strict=True)]
    filled = _fill(_graph(schedule, number, (microbatches,)), times)
    return filled.clocks(filled.graph.courses[0])


def _fill(graph: Graph, times: Times) -> _Filled:
    passes = [times.stages[kind.stage].run(kind) for kind in graph.kinds]
    return _Filled(
        graph=graph,
        times=times,
        passes=passes,
        ends=graph.ends([run.duration_s for run in passes] + list(times.transfer_s), times.start_s),
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class _Filled:
    """A graph with the times of a layout.

    Attributes:
        passes: by kind.
        ends: of the tasks, the start last.
    """

    graph: Graph
    times: Times
    passes: Sequence[Pass]
    ends: Sequence[Array]

    def in_rhythm(self, course: Course) -> bool:
        """Whether the last three forwards of all stages, and the backwards before them, are equally far apart.

        Everything later depends on them alone, so it goes on like that. True of a schedule in which they do not alternate.
        """
        apart: list[Array] = []
        for runs in course.runs:
            last = max(i for i, run in enumerate(runs) if not self.graph.kinds[run.kind].backward)
            beats = runs[max(last - 5, 0) : last + 1]
            if [self.graph.kinds[run.kind].backward for run in beats] != [True, False] * 3:
                return True
            ends = [self.ends[run.task] for run in beats]
            apart.extend(later - earlier for earlier, later in zip(ends, ends[2:], strict=False))
        tolerance = AGREEMENT * self.ends[course.ends[0][-1]]
        return all(bool((np.abs(gap - apart[0]) <= tolerance).all()) for gap in apart)

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
        tail_end_s, part = self.times.start_s, "dp"
        for run in reversed(course.runs[stage]):
            found = self.passes[run.kind]
            if found.tail_s is not None:
                tail_end_s, part = self.ends[run.task] + found.tail_s, found.tail_part
                break
        return StageClock(
            now_s=np.maximum.reduce([self.ends[task] for task in course.ends[stage]]),
            tail_end_s=tail_end_s,
            tail_part=part,
            passes={kind: (self.passes[kind], float(n)) for kind, n in course.counts[stage].items()},
            waits={"pp": moving_s, "bubble": bubble_s},
            spans=spans,
        )

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
            phase = "backward" if self.graph.kinds[kind].backward else "forward"
            yield Span("schedule", f"{phase} {microbatch}", phase, start, length)
            for span in run.spans:
                yield Span(span.stream, span.name, span.phase, start + span.start_s, span.duration_s)


def _periodic(trial: Sequence[Sequence[StageClock]]) -> bool:
    """Whether the last microbatch added to every clock what the one before it had added, and no stage falls behind.

    A stage that works longer than the others wait may catch up with the rest only later: then the period is not yet
    the final one, and it is shorter than that stage's work.
    """
    busiest_s = np.maximum.reduce([_added_s(b, c) for b, c in zip(trial[1], trial[2], strict=True)])
    for a, b, c in zip(*trial, strict=True):
        for earlier, middle, later in (
            (a.now_s, b.now_s, c.now_s),
            (a.tail_end_s, b.tail_end_s, c.tail_end_s),
        ):
            tolerance = AGREEMENT * later
            difference = (later - middle) - (middle - earlier)
            if bool((np.abs(difference) > tolerance).any()):
                return False
        if bool((c.now_s - b.now_s < busiest_s - AGREEMENT * c.now_s).any()):
            return False
    return True


def _added_s(before: StageClock, last: StageClock) -> Array:
    """Work of the one microbatch that the last step has more: no period is shorter."""
    total = np.zeros_like(last.now_s)
    for kind, (run, times) in last.passes.items():
        more = times - (before.passes[kind][1] if kind in before.passes else 0.0)
        if more:
            total = total + more * run.duration_s
    return total


def _longer(before: StageClock, last: StageClock, more: int) -> StageClock:
    """The clock after `more` further microbatches, each adding what the last one added."""
    counts = {kind: n for kind, (_, n) in before.passes.items()}
    return replace(
        last,
        now_s=last.now_s + more * (last.now_s - before.now_s),
        tail_end_s=last.tail_end_s + more * (last.tail_end_s - before.tail_end_s),
        passes={k: (run, n + more * (n - counts.get(k, 0.0))) for k, (run, n) in last.passes.items()},
        waits={part: w + more * (w - before.waits[part]) for part, w in last.waits.items()},
    )
