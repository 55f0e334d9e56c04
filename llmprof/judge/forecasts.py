"""Cases become Outcomes on several processes; in calibrated mode the first rows of each group calibrate the rest."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import groupby
from statistics import median
from typing import NamedTuple, TypeVar

from llmprof.extrapolate.calibration import Calibration
from llmprof.judge.outcomes import Bench, Outcome
from llmprof.judge.runs import Case
from llmprof.schema.priors import load_priors

LARGEST_TASK = 64
"""Cases that one process takes at a time: enough to share what they have in common, few enough to balance the load."""
FEWEST_PARALLEL = 64
"""Below this number of cases one process is faster than starting more."""
_A = TypeVar("_A")
_B = TypeVar("_B")
Progress = Callable[[int], None]
"""Told how many more cases are done."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Group:
    """Rows that share a calibration.

    Attributes:
        key: of the group.
        calibrating: rows that calibrate; empty when the group is forecast cold.
        scored: all others.
    """

    key: str
    calibrating: tuple[Case, ...]
    scored: tuple[Case, ...]


class GroupResult(NamedTuple):
    """Forecasts of a group's scored rows, in their order.

    Attributes:
        mfu: of the naive baseline: the median of the calibrating rows, else the prior's.
        calibration: None when cold.
    """

    outcomes: tuple[Outcome, ...]
    mfu: float
    calibration: Calibration | None


class _Task(NamedTuple):
    """Some cases of one group."""

    group: int
    cases: tuple[Case, ...]
    calibration: Calibration | None


class _Fit(NamedTuple):
    mfu: float
    calibration: Calibration | None


def forecast_groups(
    groups: Sequence[Group], *, jobs: int = 2, progress: Progress | None = None
) -> list[GroupResult]:
    """Forecast the scored rows of all groups; the result does not depend on `jobs`.

    Args:
        jobs: processes.
        progress: told of cases as they are done.
    """
    with _workers(jobs if _size(groups) >= FEWEST_PARALLEL else 1) as pool:
        fits = list(_mapped(pool, _fit, [group.calibrating for group in groups]))
        tasks = [t for i, group in enumerate(groups) for t in _tasks(i, group, fits[i].calibration)]
        outcomes: list[dict[str, Outcome]] = [{} for _ in groups]
        for task, found in zip(tasks, _mapped(pool, _forecast, tasks), strict=True):
            outcomes[task.group].update({case.row_id: o for case, o in zip(task.cases, found, strict=True)})
            if progress:
                progress(len(found))
    return [
        GroupResult(tuple(found[case.row_id] for case in group.scored), fit.mfu, fit.calibration)
        for group, found, fit in zip(groups, outcomes, fits, strict=True)
    ]


def _size(groups: Sequence[Group]) -> int:
    return sum(len(group.scored) + len(group.calibrating) for group in groups)


def _tasks(index: int, group: Group, calibration: Calibration | None) -> Iterator[_Task]:
    """Cases of one model and machine together, for what they share, in pieces."""
    ordered = sorted(group.scored, key=lambda case: (_shared(case), _degrees(case)))
    for _, same in groupby(ordered, key=_shared):
        cases = tuple(same)
        for start in range(0, len(cases), LARGEST_TASK):
            yield _Task(index, cases[start : start + LARGEST_TASK], calibration)


def _shared(case: Case) -> tuple[str, ...]:
    cluster = case.alternatives[0].cluster
    return (
        repr(case.shape),
        case.implementation,
        case.gradients,
        case.attention,
        case.precision,
        cluster.name,
    )


def _degrees(case: Case) -> tuple[int, ...]:
    """What layers are evaluated and priced for."""
    layout = case.alternatives[0].layout
    return (layout.tp, layout.sp, layout.cp, layout.ep, layout.mb)


def _fit(cases: tuple[Case, ...]) -> _Fit:
    """The calibration of a group and the MFU of its calibrating rows."""
    prior = load_priors().mfu
    if not cases:
        return _Fit(prior, None)
    bench = Bench(cases)
    found = [(case, bench.forecast(case)) for case in cases]
    reached = [
        prior * o.naive_s / case.step_time_s for case, o in found if case.step_time_s and not o.problem
    ]
    return _Fit(median(reached) if reached else prior, bench.calibrate(cases))


def _forecast(task: _Task) -> list[Outcome]:
    bench = Bench(task.cases)
    return [bench.forecast(case, task.calibration) for case in task.cases]


@contextmanager
def _workers(jobs: int) -> Iterator[ProcessPoolExecutor | None]:
    """A pool of processes, None for one; what has not begun when an error passes is dropped."""
    if jobs <= 1:
        yield None
        return
    pool = ProcessPoolExecutor(jobs, mp_context=multiprocessing.get_context("spawn"))
    try:
        yield pool
    finally:
        pool.shutdown(cancel_futures=True)


def _mapped(
    pool: ProcessPoolExecutor | None, function: Callable[[_A], _B], items: Sequence[_A]
) -> Iterator[_B]:
    """Results in the order of the items."""
    return pool.map(function, items) if pool else map(function, items)
