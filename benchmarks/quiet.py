"""Tells how much of the machine other programs used while we measured (Linux; elsewhere it is taken as none)."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from pathlib import Path

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


class ForeignLoad:
    """Share of all cores that went to processes other than the given ones, since this object was made.

    Args:
        pids: the processes that are ours; this one is added.
    """

    def __init__(self, pids: Iterable[int]) -> None:
        self._pids = (os.getpid(), *pids)
        self._start = self._read()

    def share(self) -> float:
        """0 when the machine was ours alone, 1 when others used every core all the time."""
        start, now = self._start, self._read()
        seconds, busy, own = (b - a for a, b in zip(start, now, strict=True))
        return max(0.0, busy - own) / max(1e-9, seconds * (os.cpu_count() or 1))

    def _read(self) -> tuple[float, float, float]:
        return time.monotonic(), _busy_s(), sum(_process_s(pid) for pid in self._pids)


def _busy_s() -> float:
    """Seconds that all cores together did not idle, since the machine started."""
    try:
        user, nice, system, _idle, _wait, irq, soft_irq, steal, *_ = (
            int(ticks) for ticks in Path("/proc/stat").read_text().splitlines()[0].split()[1:]
        )
    except OSError:
        return 0.0
    return (user + nice + system + irq + soft_irq + steal) / _TICKS_PER_S


def _process_s(pid: int) -> float:
    """Seconds of CPU that a process has used."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / _TICKS_PER_S
