"""Wanted calls and a time budget -> measured rows, the most important first, each stored as soon as it is known."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import torch

from llmprof.hooks.captured import source_row
from llmprof.hooks.measure_arguments import CannotRebuild, Rebuilt, first_line, rebuild
from llmprof.hooks.measure_timing import Effort, OutOfTime, Stopwatch, Timing
from llmprof.schema.measurements import MODULE, OpCall, Wanted
from llmprof.schema.operators import bytes_moved, family, flops
from llmprof.schema.profile import OperatorRow, SourceRow

LEAST_S, USUAL_S, MOST_S = 0.15, 0.3, 0.6
"""Seconds for one operator: at least (the operands included), without a budget, and at most while others wait."""
_CALLS = 7
"""Calls of which an operator takes at least: one that warms it, one that tells how long it takes, and the samples."""


_LATE, _LATEST = 1.5, 20.0
"""By what factor operators may outlast their plan, before any was measured and at most."""


class Budget:
    """Seconds that are left.

    Args:
        seconds: of the whole, None for no limit.
        clock: seconds, rising.
        started: when the time began to run; now when None.
    """

    def __init__(
        self,
        seconds: float | None,
        *,
        clock: Callable[[], float] = time.perf_counter,
        started: float | None = None,
    ) -> None:
        self.clock = clock
        self.started = clock() if started is None else started
        self.deadline = float("inf") if seconds is None else self.started + seconds
        self._late = _LATE

    @property
    def left_s(self) -> float:
        """Seconds until the deadline."""
        return self.deadline - self.clock()

    @property
    def spent_s(self) -> float:
        """Seconds since the start."""
        return self.clock() - self.started

    def spent(self, seconds: float, *, planned_s: float) -> None:
        """Learn from an operator how much longer they take than planned; later ones that are as late still end in time."""
        self._late = min(_LATEST, max(self._late, seconds / planned_s))

    def effort(self, estimate_s: float, waiting: int) -> Effort | None:
        """What one operator may take, None when it would not be done in time.

        Args:
            estimate_s: what one call is thought to take.
            waiting: operators that are left, this one included.
        """
        left = self.left_s
        if left < self._late * max(LEAST_S, _CALLS * estimate_s):
            return None
        fair = USUAL_S if left == float("inf") else min(MOST_S, max(LEAST_S, left / max(waiting, 1)))
        return Effort(seconds=min(fair, left), deadline=self.deadline, clock=self.clock)


class Skipped(NamedTuple):
    """An operator that cannot be measured, and why."""

    call: OpCall
    reason: str


class Measured(NamedTuple):
    """An operator that was measured."""

    wanted: Wanted
    timing: Timing
    row: OperatorRow

    @property
    def call(self) -> OpCall:
        """What ran."""
        return self.wanted.call


@dataclass(kw_only=True)
class Outcome:
    """What a round of measuring gave; `remaining` are calls for which the time did not suffice."""

    measured: list[Measured] = field(default_factory=list)
    skipped: list[Skipped] = field(default_factory=list)
    remaining: list[Wanted] = field(default_factory=list)


class Instrument(Protocol):
    """What measures one call."""

    def __call__(self, call: OpCall, effort: Effort) -> Timing:
        """Time of a call; raises CannotRebuild or OutOfTime."""


def present_device() -> tuple[str, SourceRow]:
    """("cuda" or "cpu", what this machine is)."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    return device, source_row(rank=0, device=device, clock="measured alone", backend="")


def torch_instrument(device: str) -> Instrument:
    """The instrument that runs operators with torch.

    Args:
        device: "cpu" or "cuda".
    """
    stopwatch = Stopwatch(device)

    def measure(call: OpCall, effort: Effort) -> Timing:
        rebuilt: Rebuilt = rebuild(call, device)
        try:
            return stopwatch.time(rebuilt, call, effort)
        except (CannotRebuild, OutOfTime):
            raise
        except Exception as error:
            raise CannotRebuild(f"torch cannot run it: {first_line(error)}") from error

    return measure


def measure_all(
    wanted: Sequence[Wanted],
    instrument: Instrument,
    *,
    budget: Budget,
    device: str,
    done: Callable[[Measured | Skipped], None] = lambda _: None,
) -> Outcome:
    """Measure in the given order; what would outlast the budget is left out, and smaller calls behind it are not.

    Args:
        wanted: calls, the most important first.
        device: device type in the rows.
        done: called after each operator, so that its row is stored at once.
    """
    outcome = Outcome()
    for number, one in enumerate(wanted):
        effort = budget.effort(one.estimate_s, len(wanted) - number)
        if effort is None:
            outcome.remaining.append(one)
            continue
        begun = budget.clock()
        try:
            timing = instrument(one.call, effort)
        except OutOfTime:
            outcome.remaining.append(one)
        except CannotRebuild as error:
            outcome.skipped.append(Skipped(one.call, str(error)))
            done(outcome.skipped[-1])
        else:
            outcome.measured.append(Measured(one, timing, operator_row(one.call, timing, device)))
            done(outcome.measured[-1])
        budget.spent(budget.clock() - begun, planned_s=max(effort.seconds, _CALLS * one.estimate_s))
    return outcome


def operator_row(call: OpCall, timing: Timing, device: str) -> OperatorRow:
    """The row of a measured call; `count` 0, since it is no part of the captured step."""
    key = call.key
    return OperatorRow(
        rank=0,
        op=key.op,
        family=family(key.op),
        module=MODULE,
        phase=call.phase,
        shapes=key.shapes,
        dtype=key.dtype,
        attributes=key.attributes,
        device=device,
        count=0.0,
        time_us=timing.median_us,
        time_iqr_us=timing.iqr_us,
        time_n=timing.n,
        exclusive_us=0.0,
        host_us=timing.cpu_us if device != "cpu" else None,
        flops=flops(call.op, call.inputs, (), call.attributes),
        bytes=bytes_moved(call.op, call.inputs),
    )
