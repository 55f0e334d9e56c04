"""Instructions of all stages become a graph of tasks, made once for a schedule; a layout fills in times and reads clocks.

A task is a pass of a stage or a message over a boundary. It starts when the tasks before it have ended, so its end is
their maximum plus its own time. Tasks stand in an order in which each comes after those it waits for.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from llmprof.extrapolate.schedule import Compute, Instruction, Phase, Transfer, Wait, gathers_needed
from llmprof.extrapolate.simulate import Array

Programs = Sequence[Sequence[Instruction]]
"""Instructions of every stage."""
Index = NDArray[np.intp]
Ends = frozenset[int]
"""A moment: the latest end of these tasks."""
START = -1
"""Index of the common start in a table of ends."""
WIDE = 6
"""Tasks of a level, on average, from which whole levels are faster than single tasks."""


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
    _index: list[_Waits] = field(default_factory=list)

    def exposed_s(self, ends_s: Array, transfer_s: Array) -> list[tuple[float, float]]:
        """Nominal seconds that each stage stood still while a message moved, and beyond that.

        Args:
            ends_s: nominal ends of the tasks, the start last.
            transfer_s: nominal time of a message over each boundary.
        """
        if not self._index:
            self._index.extend(map(_Waits.of, self.waits))
        return [waits.standing_s(ends_s, transfer_s) for waits in self._index]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Waits:
    """Standstills of one stage as arrays: tasks of all of them in a row, and where each one's begin.

    Attributes:
        boundaries: of the messages.
    """

    since: Index
    since_at: Index
    messages: Index
    messages_at: Index
    boundaries: Index

    @classmethod
    def of(cls, waits: Sequence[Standstill]) -> _Waits:
        since, since_at = _in_a_row([w.since for w in waits])
        messages, messages_at = _in_a_row([w.messages for w in waits])
        boundaries, _ = _in_a_row([[t.boundary for t in w.transfers] for w in waits])
        return cls(
            since=since,
            since_at=since_at,
            messages=messages,
            messages_at=messages_at,
            boundaries=boundaries,
        )

    def standing_s(self, ends_s: Array, transfer_s: Array) -> tuple[float, float]:
        if not len(self.since):
            return 0.0, 0.0
        arrivals = ends_s[self.messages]
        last = np.maximum.reduceat(arrivals, self.messages_at)
        gap = np.maximum(last - np.maximum.reduceat(ends_s[self.since], self.since_at), 0.0)
        # the message that came last, the first of several that came together
        of = np.repeat(np.arange(len(last)), np.diff(self.messages_at, append=len(arrivals)))
        latest = np.flatnonzero(arrivals == last[of])
        _, first = np.unique(of[latest], return_index=True)
        moving = np.minimum(gap, transfer_s[self.boundaries[latest[first]]])
        return float(moving.sum()), float(gap.sum() - moving.sum())


def _in_a_row(rows: Sequence[Sequence[int]]) -> tuple[Index, Index]:
    """All entries of rows, none of them empty, and where each row begins."""
    lengths = [len(row) for row in rows]
    return (
        np.fromiter(chain.from_iterable(rows), dtype=np.intp, count=sum(lengths)),
        np.cumsum([0, *lengths], dtype=np.intp)[:-1],
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Graph:
    """Tasks of one or several steps of one schedule; what the steps have in common is there once."""

    kinds: tuple[Kind, ...]
    tasks: tuple[Task, ...]
    courses: tuple[Course, ...]
    _levels: list[_Level] = field(default_factory=list)

    def ends(self, durations_s: Sequence[Array], start_s: Array) -> list[Array]:
        """When each task ends in every draw, and as the last entry (START) the start.

        Args:
            durations_s: of each kind, then of a message over each boundary; arrays like `start_s`.
        """
        table = np.empty((len(self.tasks) + 1, len(start_s)))
        table[START] = start_s
        if not self._levels:
            self._levels.extend(_levels(self.tasks))
        if len(self.tasks) < WIDE * len(self._levels):
            self._one_by_one(list(table), durations_s)
        else:
            times = np.stack(durations_s)
            for level in self._levels:
                ends = table[level.before[0]]
                for before in level.before[1:]:
                    np.maximum(ends, table[before], out=ends)
                table[level.tasks] = np.add(ends, times[level.times], out=ends)
        return list(table)

    def _one_by_one(self, rows: Sequence[Array], durations_s: Sequence[Array]) -> None:
        maximum, add = np.maximum, np.add
        for row, (time, after) in zip(rows, self.tasks, strict=False):
            if len(after) == 1:
                add(rows[after[0]], durations_s[time], out=row)
                continue
            maximum(rows[after[0]], rows[after[1]], out=row)
            for other in after[2:]:
                maximum(row, rows[other], out=row)
            add(row, durations_s[time], out=row)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Level:
    """Tasks that wait for earlier levels alone.

    Attributes:
        before: for each of the most tasks that one waits for, an entry for each task; short ones repeat their last.
    """

    tasks: Index
    times: Index
    before: tuple[Index, ...]


def _levels(tasks: Sequence[Task]) -> Iterator[_Level]:
    depth: list[int] = []
    members: list[list[int]] = []
    for index, task in enumerate(tasks):
        level = max((depth[other] + 1 for other in task.after if other != START), default=0)
        depth.append(level)
        if level == len(members):
            members.append([])
        members[level].append(index)
    for level_members in members:
        after = [tasks[index].after for index in level_members]
        width = max(map(len, after))
        yield _Level(
            tasks=np.array(level_members, dtype=np.intp),
            times=np.array([tasks[index].time for index in level_members], dtype=np.intp),
            before=tuple(
                np.array([a[min(i, len(a) - 1)] for a in after], dtype=np.intp) for i in range(width)
            ),
        )


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
