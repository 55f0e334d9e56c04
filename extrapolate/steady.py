"""A step of many microbatches from a few: once a pipeline repeats itself, every further microbatch adds the same.

Task times are constant, so a schedule is a max-plus linear system, which becomes periodic (Baccelli et al. 1992,
Synchronization and Linearity, theorem 3.112). Three short steps, each one microbatch longer, show whether it has.
A stage that is slower than the rest by less than a transfer may take the lead later than that: then the long step comes
out short, by at most the difference of the two periods (a test bounds it by 3 % for stages that differ tenfold).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache

import numpy as np

from llmprof.extrapolate.schedule import (
    SCHEDULES,
    Backward,
    Forward,
    Instruction,
    gathers_needed,
    in_flight,
)
from llmprof.extrapolate.simulate import Array, Pipeline, StageClock, add_into
from llmprof.extrapolate.stage import Stage

AGREEMENT = 1e-9
"""Relative difference of two increments that are taken as equal."""
TRIALS = ((1, 3), (2, 6))
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


def run_step(
    stages: Sequence[Stage], transfer_s: Sequence[Array], start_s: Array, *, every: bool = False
) -> list[StageClock]:
    """Clocks of all stages at the end of their last backward.

    Args:
        stages: in order; their layout says the schedule and the number of microbatches.
        transfer_s: for each boundary, the time of one message.
        start_s: common start, shape (1 + draws,).
        every: simulate every microbatch and keep spans; else there are none.
    """
    total, number = stages[0].plan.layout.accum, len(stages)
    if not every:
        for times, plus in TRIALS:
            fewest = times * number + plus
            if total <= fewest + 2:
                break
            trial = [_run(stages, transfer_s, start_s, fewest + i, record=False) for i in range(3)]
            if _periodic(trial, _busiest(stages)):
                return [_longer(b, c, total - fewest - 2) for b, c in zip(trial[1], trial[2], strict=True)]
    return _run(stages, transfer_s, start_s, total, record=every)


def _run(
    stages: Sequence[Stage], transfer_s: Sequence[Array], start_s: Array, microbatches: int, *, record: bool
) -> list[StageClock]:
    found = programs(stages[0].plan.layout.schedule, len(stages), microbatches)
    for stage, program in zip(stages, found, strict=True):
        stage.microbatches, stage.record = microbatches, record
        stage.gathers = gathers_needed(program) if stage.plan.layout.zero == 3 else {}
    return Pipeline(programs=found, stages=stages, transfer_s=transfer_s).run(start_s)


def _busiest(stages: Sequence[Stage]) -> Array:
    """Time of one microbatch on the stage that works longest: no period is shorter."""
    middle = 1  # neither the first microbatch, which has nothing to accumulate, nor the last, which reduces
    work = [s.run(Forward(middle)).duration_s + s.run(Backward(middle)).duration_s for s in stages]
    return np.asarray(np.maximum.reduce(work))


def _periodic(trial: Sequence[Sequence[StageClock]], busiest_s: Array) -> bool:
    """Whether the last microbatch added to every clock what the one before it had added, and no stage falls behind.

    A stage that works longer than the others wait may catch up with the rest only later: then the period is not yet
    the final one, and it is shorter than that stage's work.
    """
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


def _longer(before: StageClock, last: StageClock, more: int) -> StageClock:
    """The clock after `more` further microbatches, each adding what the last one added."""
    longer = replace(
        last,
        now_s=last.now_s + more * (last.now_s - before.now_s),
        tail_end_s=last.tail_end_s + more * (last.tail_end_s - before.tail_end_s),
        parts=dict(last.parts),
        evidence=dict(last.evidence),
        calls=dict(last.calls),
    )
    for name in ("parts", "evidence", "calls"):
        total, earlier = getattr(longer, name), getattr(before, name)
        add_into(total, {k: v - earlier.get(k, 0.0) for k, v in getattr(last, name).items()}, more)
    return longer
