"""Instructions of all stages become a graph of tasks, made once for a schedule; a layout fills in times and reads clocks.

A task is a pass of a stage or a message over a boundary. It starts when the tasks before it have ended, so its end is
their maximum plus its own time. Tasks stand in an order in which each comes after those it waits for.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from llmprof.extrapolate.schedule import Compute, Instruction, Phase, Transfer, Wait, gathers_needed
from llmprof.extrapolate.simulate import Array

Programs = Sequence[Sequence[Instruction]]
"""Instructions of every stage."""
Ends = frozenset[int]
"""A moment: the latest end of these tasks."""
START = -1
"""Index of the common start in a table of ends."""


class Kind(NamedTuple):
    """Passes of one chunk of a stage that take equally long.

    Attributes:
        first, last: of the step's microbatches.
        gather: sharded parameters must be gathered before it.
    """

    stage: int
    chunk: int
    phase: Phase
    first: bool
    last: bool
    gather: bool


class Task(NamedTuple):
    """One pass or message.

    Attributes:
        time: index of its duration: of a kind, or beyond the kinds of a boundary.
        after: tasks that it waits for, at least one.
    """

    time: int
    after: tuple[int, ...]


class Run(NamedTuple):
    """A pass in the course of a step."""

    task: int
    kind: int
    microbatch: int


@dataclass(frozen=True, slots=True)
class Standstill:
    """A stage waits for messages: it was free at `since` and goes on when the last of the messages has ended."""

    since: tuple[int, ...]
    messages: tuple[int, ...]
    transfers: tuple[Transfer, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Course:
    """One step in a graph, by stage.

    Attributes:
        ends: tasks whose latest end is the stage's.
        runs: passes in order.
        waits: in order.
        counts: how often each kind runs.
    """

    ends: tuple[tuple[int, ...], ...]
    runs: tuple[tuple[Run, ...], ...]
    waits: tuple[tuple[Standstill, ...], ...]
    counts: tuple[dict[int, int], ...]
    _index: list[tuple[NDArray[np.intp], NDArray[np.intp], NDArray[np.intp]]] = field(default_factory=list)

    def exposed_s(self, ends_s: Array, transfer_s: Array) -> list[tuple[float, float]]:
        """Nominal seconds that each stage stood still while a message moved, and beyond that.

        Args:
            ends_s: nominal ends of the tasks, the start last.
            transfer_s: nominal time of a message over each boundary.
        """
        if not self._index:
            self._index.extend(map(_padded, self.waits))
        return [_standing_s(index, ends_s, transfer_s) for index in self._index]


def _padded(
    waits: Sequence[Standstill],
) -> tuple[NDArray[np.intp], NDArray[np.intp], NDArray[np.intp]]:
    """Index arrays (waits, most tasks) of moments, messages and their boundaries; short rows repeat their first entry."""

    def table(rows: Sequence[Sequence[int]]) -> NDArray[np.intp]:
        width = max(map(len, rows), default=1)
        return np.array([[*r, *[r[0]] * (width - len(r))] for r in rows], dtype=np.intp).reshape(-1, width)

    boundaries = [[t.boundary for t in w.transfers] for w in waits]
    return table([w.since for w in waits]), table([w.messages for w in waits]), table(boundaries)


def _standing_s(
    index: tuple[NDArray[np.intp], NDArray[np.intp], NDArray[np.intp]], ends_s: Array, transfer_s: Array
) -> tuple[float, float]:
    since, messages, boundaries = index
    if not len(since):
        return 0.0, 0.0
    arrivals = ends_s[messages]
    gap = np.maximum(arrivals.max(axis=1) - ends_s[since].max(axis=1), 0.0)
    slowest = boundaries[np.arange(len(gap)), arrivals.argmax(axis=1)]
    moving = np.minimum(gap, transfer_s[slowest])
    return float(moving.sum()), float(gap.sum() - moving.sum())


@dataclass(frozen=True, kw_only=True, slots=True)
class Graph:
    """Tasks of one or several steps of one schedule; what the steps have in common is there once."""

    kinds: tuple[Kind, ...]
    tasks: tuple[Task, ...]
    courses: tuple[Course, ...]

    def ends(self, durations_s: Sequence[Array], start_s: Array) -> list[Array]:
        """When each task ends in every draw, and as the last entry (START) the start.

        Args:
            durations_s: of each kind, then of a message over each boundary; arrays like `start_s`.
        """
        table = np.empty((len(self.tasks) + 1, len(start_s)))
        rows = list(table)
        rows[START][:] = start_s
        maximum, add = np.maximum, np.add
        for row, (time, after) in zip(rows, self.tasks, strict=False):
            if len(after) == 1:
                add(rows[after[0]], durations_s[time], out=row)
                continue
            maximum(rows[after[0]], rows[after[1]], out=row)
            for other in after[2:]:
                maximum(row, rows[other], out=row)
            add(row, durations_s[time], out=row)
        return rows


def build_graph(steps: Iterable[Programs], *, lean: bool = True) -> Graph:
    """The graph of one or several steps.

    Args:
        steps: for each step the instructions of every stage, of the same number of stages.
        lean: leave out what a task waits for anyway through another; not worth it for a graph that is used once.

    Raises:
        AssertionError: a schedule in which stages wait for each other.
    """
    builder = _Builder(lean=lean)
    courses = tuple(builder.course(programs) for programs in steps)
    boundary = len(builder.kinds)
    tasks = [Task(time if time >= 0 else boundary + ~time, after) for time, after in builder.tasks]
    return Graph(kinds=tuple(builder.kinds), tasks=tuple(tasks), courses=courses)


@dataclass(slots=True)
class _Builder:
    """Tasks so far. Equal ones (same time, same tasks before) are one; a message's time is ~boundary while building."""

    lean: bool
    kinds: dict[Kind, int] = field(default_factory=dict)
    tasks: dict[Task, int] = field(default_factory=dict)
    _behind: list[int] = field(default_factory=list)

    def kind(self, kind: Kind) -> int:
        return self.kinds.setdefault(kind, len(self.kinds))

    def task(self, time: int, after: Ends) -> int:
        task = Task(time, tuple(sorted(after)))
        found = self.tasks.get(task)
        if found is None:
            found = self.tasks[task] = len(self.tasks)
            if self.lean:
                behind = 0
                for other in after:
                    if other != START:
                        behind |= self._behind[other] | 1 << other
                self._behind.append(behind)
        return found

    def latest(self, ends: Ends) -> Ends:
        """The same moment without tasks that end before others of it anyway."""
        if len(ends) == 1:
            return ends
        ends = ends - {START}
        if not self.lean:
            return ends
        behind = 0
        for end in ends:
            behind |= self._behind[end]
        return frozenset(end for end in ends if not behind >> end & 1)

    def course(self, programs: Programs) -> Course:
        walk = _Walk(builder=self, programs=programs)
        walk.run()
        return Course(
            ends=tuple(tuple(sorted(now)) for now in walk.now),
            runs=tuple(map(tuple, walk.runs)),
            waits=tuple(map(tuple, walk.waits)),
            counts=tuple(dict(Counter(run.kind for run in runs)) for runs in walk.runs),
        )


@dataclass(slots=True)
class _Walk:
    """Goes through the instructions of one step; a transfer begins when both sides have posted it."""

    builder: _Builder
    programs: Programs
    now: list[Ends] = field(default_factory=list)
    runs: list[list[Run]] = field(default_factory=list)
    waits: list[list[Standstill]] = field(default_factory=list)
    _passes: list[Iterator[tuple[int, int]]] = field(default_factory=list)
    _posted: dict[tuple[Transfer, int], Ends] = field(default_factory=dict)
    _arrived: dict[Transfer, int] = field(default_factory=dict)
    _link: dict[tuple[int, int], int] = field(default_factory=dict)

    def run(self) -> None:
        count = len(self.programs)
        self.now = [frozenset({START})] * count
        self.runs, self.waits = [[] for _ in range(count)], [[] for _ in range(count)]
        self._passes = [self._kinds(stage) for stage in range(count)]
        position = [0] * count
        moved = True
        while moved:
            moved = False
            for stage, program in enumerate(self.programs):
                first = position[stage]
                while position[stage] < len(program) and self._done(stage, program[position[stage]]):
                    position[stage] += 1
                moved |= position[stage] > first
        stuck = [i for i, p in enumerate(self.programs) if position[i] < len(p)]
        assert not stuck, f"schedule deadlock on stages {stuck}"

    def _kinds(self, stage: int) -> Iterator[tuple[int, int]]:
        """(kind, microbatch) of every pass of a stage in order."""
        passes = [i for i in self.programs[stage] if isinstance(i, Compute)]
        gathers = gathers_needed(passes)
        last = max((p.microbatch for p in passes), default=0)
        for one in passes:
            index = one.microbatch
            kind = Kind(stage, one.chunk, one.phase, index == 0, index == last, gathers[one])
            yield self.builder.kind(kind), index

    def _done(self, stage: int, instruction: Instruction) -> bool:
        """Carry out one instruction; False when it needs a transfer that the other side has not posted."""
        if isinstance(instruction, Compute):
            kind, microbatch = next(self._passes[stage])
            task = self.builder.task(kind, self.now[stage])
            self.runs[stage].append(Run(task, kind, microbatch))
            self.now[stage] = frozenset({task})
        elif isinstance(instruction, Wait):
            return self._waited(stage, instruction.transfers)
        else:
            for transfer in instruction.transfers:
                self._post(transfer, stage)
        return True

    def _waited(self, stage: int, transfers: tuple[Transfer, ...]) -> bool:
        arrived = tuple(self._arrived[t] for t in transfers if t in self._arrived)
        if len(arrived) < len(transfers):
            return False
        since = self.now[stage]
        self.now[stage] = self.builder.latest(since.union(arrived))
        self.waits[stage].append(Standstill(tuple(since), arrived, transfers))
        return True

    def _post(self, transfer: Transfer, stage: int) -> None:
        """Offer one side of a transfer; with both it begins, once the message before it on its link has ended."""
        link = transfer.sides(len(self.programs))
        other = self._posted.pop((transfer, link[stage == link[0]]), None)
        if other is None:
            self._posted[transfer, stage] = self.now[stage]
            return
        before = {self._link[link]} if link in self._link else set()
        task = self.builder.task(
            ~transfer.boundary, self.builder.latest(self.now[stage].union(other, before))
        )
        self._link[link] = self._arrived[transfer] = task
