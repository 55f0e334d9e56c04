"""Collects finished steps as rows: in memory, in the journal on disk, and as live scalars."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from llmprof.hooks.clock import Mark, duration_us
from llmprof.hooks.steps import StepFacts
from llmprof.schema.profile import StepRow

MAX_ROWS = 1_000_000
"""Steps kept in memory; later ones are only journaled."""


@dataclass(frozen=True, kw_only=True)
class FinishedStep:
    """A step between two marks, the later of which the device may not have reached yet."""

    step: int
    start: Mark
    end: Mark
    facts: StepFacts
    kind: str
    instrumented: bool
    peak_memory_bytes: int | None


class StepLog:
    """Rows of all steps, handed on as soon as their times are known.

    Args:
        rank: global rank of the rows.
        sink: called with each row, outside the timed steps.
    """

    def __init__(self, rank: int, sink: Callable[[StepRow], None]) -> None:
        self._rank = rank
        self._sink = sink
        self._waiting: deque[FinishedStep] = deque()
        self.rows: list[StepRow] = []

    def add(self, step: FinishedStep) -> None:
        """Take a finished step; nothing is written yet."""
        self._waiting.append(step)

    def flush(self) -> None:
        """Write the rows of the steps that the device has finished."""
        while self._waiting and self._waiting[0].end.reached and self._waiting[0].start.reached:
            row = self._row(self._waiting.popleft())
            if len(self.rows) < MAX_ROWS:
                self.rows.append(row)
            self._sink(row)

    def _row(self, finished: FinishedStep) -> StepRow:
        facts = finished.facts
        return StepRow(
            rank=self._rank,
            step=finished.step,
            start_us=finished.start.host_us,
            duration_us=duration_us(finished.start, finished.end),
            tokens=facts.tokens,
            sequences=facts.sequences,
            microbatches=facts.microbatches,
            instrumented=finished.instrumented,
            kind=finished.kind,
            peak_memory_bytes=finished.peak_memory_bytes,
        )


def settle_kinds(rows: list[StepRow]) -> list[StepRow]:
    """Evaluation that happens in most steps is part of the loop (generation in every step), not an exception."""
    judged = [row for row in rows if row.kind in ("train", "evaluation")]
    evaluated = [row for row in judged if row.kind == "evaluation"]
    if 2 * len(evaluated) <= len(judged):
        return rows
    return [msgspec.structs.replace(r, kind="train") if r.kind == "evaluation" else r for r in rows]
