"""Times of single calls."""

from __future__ import annotations

from collections.abc import Callable
from statistics import median


def median_s(call: Callable[[], object], *, repeats: int, clock: Callable[[], float]) -> float:
    """Median time of one call, warm (seconds of the clock)."""
    call()
    times = []
    for _ in range(repeats):
        started = clock()
        call()
        times.append(clock() - started)
    return median(times)
