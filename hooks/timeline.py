"""Attributed calls of a window in, the spans of its representative step out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from llmprof.hooks.calls import INPUT, Call, Range
from llmprof.schema.profile import SpanRow

MAX_SPANS = 20_000
"""Spans kept of the representative step; the longest ones win."""


class Step(NamedTuple):
    """One step of the window on the profiler's clock."""

    number: int
    start_us: float
    end_us: float

    @property
    def duration_us(self) -> float:
        return self.end_us - self.start_us


class Timeline:
    """Collects the spans of the step of median duration; times are relative to its start.

    Args:
        rank: global rank, written into the rows.
        threads: name of each host thread.
        steps: the steps of the window.
    """

    def __init__(self, rank: int, threads: Mapping[int, str], steps: Sequence[Step]) -> None:
        ordered = sorted(steps, key=lambda step: step.duration_us)
        self._step = ordered[len(ordered) // 2]
        self._rank = rank
        self._threads = threads
        self._spans: list[SpanRow] = []

    def add_call(self, call: Call, row: int) -> None:
        """Adds an operator or collective, and what it launched on a device; `row` is its row's index."""
        if row < 0 or not self._contains(call.start_us):
            return
        table = "collectives" if call.kind else "operators"
        thread = self._threads.get(call.thread, "main")
        host = Range(call.op, call.start_us, call.end_us, call.thread)
        self._add(thread, call.phase, host, table=table, row=row)
        for event in call.device:
            activity = Range(event.name, event.start_us, event.start_us + event.duration_us, event.stream)
            self._add(f"stream {event.stream}", call.phase, activity, table=table, row=row)

    def add_transfer(self, transfer: Range, row: int) -> None:
        """Adds what a communication backend's thread did for a collective."""
        if row >= 0 and self._contains(transfer.start_us):
            backend = transfer.name.split(":")[0]
            self._add(backend, "communication", transfer, table="collectives", row=row)

    def add_input(self, found: Range) -> None:
        """Adds a wait for the data loader."""
        if self._contains(found.start_us):
            self._add("main", INPUT, found)

    def spans(self) -> tuple[SpanRow, ...]:
        """The longest MAX_SPANS, by stream and start."""
        longest = sorted(self._spans, key=lambda span: -span.duration_us)[:MAX_SPANS]
        return tuple(sorted(longest, key=lambda span: (span.stream, span.start_us)))

    def _contains(self, start_us: float) -> bool:
        return self._step.start_us <= start_us < self._step.end_us

    def _add(self, stream: str, phase: str, interval: Range, *, table: str = "", row: int = -1) -> None:
        span = SpanRow(
            rank=self._rank,
            stream=stream,
            name=interval.name,
            phase=phase,
            start_us=interval.start_us - self._step.start_us,
            duration_us=interval.end_us - interval.start_us,
            table=table,
            row=row,
        )
        self._spans.append(span)
