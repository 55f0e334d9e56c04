"""Intervals that overlap in, a partition of time out: each instant has one owner."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

COMPUTE, COPY, COMMUNICATION, INPUT, IDLE = range(5)
"""Priorities of what may own an instant, the strongest first; what nobody owns is host time."""


class Interval(NamedTuple):
    """A claim on [start_us, end_us) by `owner` (an index); the lowest priority number wins, then the earliest."""

    start_us: float
    end_us: float
    priority: int
    owner: int


def partition(
    intervals: Sequence[Interval], boundaries_us: Sequence[float], num_owners: int
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """Gives every instant between the first and the last boundary to one owner, or to nobody.

    Args:
        intervals: claims, in any order; they may overlap and reach outside the boundaries.
        boundaries_us: increasing step boundaries, one more than there are steps.
        num_owners: owners are 0 .. num_owners - 1.

    Returns:
        exclusive time in microseconds, shape (num_owners, num_steps), and the time that nobody owns, shape
        (num_steps,). Per step, the two sum to the step's duration.
    """
    num_steps = len(boundaries_us) - 1
    owned = np.zeros((num_owners, num_steps))
    free = np.zeros(num_steps)
    pending = sorted(i for i in intervals if i.end_us > i.start_us)
    active: list[tuple[int, float, int, float]] = []  # (priority, start, owner, end)
    position = 0
    for step in range(num_steps):
        now, stop = boundaries_us[step], boundaries_us[step + 1]
        while now < stop:
            while position < len(pending) and pending[position].start_us <= now:
                start, end, priority, owner = pending[position]
                heapq.heappush(active, (priority, start, owner, end))
                position += 1
            while active and active[0][3] <= now:
                heapq.heappop(active)
            upcoming = pending[position].start_us if position < len(pending) else stop
            until = min(stop, upcoming, active[0][3] if active else stop)
            if active:
                owned[active[0][2], step] += until - now
            else:
                free[step] += until - now
            now = until
    return owned, free


def union_length(intervals: Sequence[tuple[float, float]]) -> float:
    """Length of the union of (start, end) intervals."""
    total, covered = 0.0, -np.inf
    for start, end in sorted(intervals):
        total += max(0.0, end - max(start, covered))
        covered = max(covered, end)
    return float(total)
