"""Attributed calls in, rows of a Profile out: medians per call, exclusive time per step, phases that add up."""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from llmprof.hooks.calls import Attribution, Call, attributes
from llmprof.hooks.events import COLLECTIVE, COPY, DeviceEvent
from llmprof.hooks.groups import Groups, Message, match_transfers
from llmprof.hooks.intervals import COMMUNICATION, COMPUTE, IDLE, Interval, partition
from llmprof.hooks.intervals import COPY as COPY_PRIORITY
from llmprof.hooks.intervals import INPUT as INPUT_PRIORITY
from llmprof.hooks.timeline import Step, Timeline
from llmprof.schema.operators import Tensor, bytes_moved, family, flops, format_shapes
from llmprof.schema.profile import PHASES, CollectiveRow, OperatorRow, PhaseRow, SpanRow


class Statistics(NamedTuple):
    """Median, interquartile range and number of samples."""

    median: float
    iqr: float
    n: int

    @classmethod
    def of(cls, samples: Sequence[float]) -> Statistics:
        if not samples:
            return cls(0.0, 0.0, 0)
        low, median, high = np.percentile(samples, (25, 50, 75))
        return cls(float(median), float(high - low), len(samples))


class OperatorKey(NamedTuple):
    """What makes calls the same row."""

    op: str
    module: str
    phase: str
    shapes: str
    dtype: str
    attributes: frozenset[str]
    attributed: bool
    outside: bool
    inputs: tuple[Tensor, ...]


@dataclass(frozen=True, kw_only=True)
class Tables:
    """The rows of one window on one rank; see `llmprof.schema.profile` and `llmprof.hooks.recorder.Recording`."""

    operators: tuple[OperatorRow, ...]
    collectives: tuple[CollectiveRow, ...]
    phases: tuple[PhaseRow, ...]
    spans: tuple[SpanRow, ...]
    outside_rows: tuple[OperatorRow, ...]
    attributed_fraction: float | None
    root_fraction: float | None
    host_us_per_operator: tuple[float, ...]


class Aggregator:
    """Turns the attributed calls of a window into tables.

    Args:
        found: what ran.
        steps: the steps of the window, contiguous.
        groups: process groups, to describe collectives.
        rank, device: of this process.
    """

    def __init__(
        self, found: Attribution, steps: Sequence[Step], groups: Groups, *, rank: int, device: str
    ) -> None:
        self._found = found
        self._steps = steps
        self._groups = groups
        self._rank = rank
        self._device = device
        self._starts = [step.start_us for step in steps]
        self._operators = [c for c in found.calls if not c.kind]
        self._collectives = [c for c in found.calls if c.kind and c.kind != "wait"]
        self._transfers = match_transfers(self._collectives, found.transfers)
        self._claims = self._all_claims()

    def tables(self) -> Tables:
        """All tables of the window."""
        boundaries = [*self._starts, self._steps[-1].end_us]
        num_owners = len(self._operators) + len(self._collectives) + 2  # the last two: input, idle
        owned, free = partition(self._claims, boundaries, num_owners)
        num = len(self._operators)
        operator_us, collective_us = owned[:num], owned[num:-2]
        operators, operator_row, outside = self._operator_rows(operator_us.sum(axis=1))
        collectives, collective_row = self._collective_rows(collective_us.sum(axis=1))
        totals = self._attribution_totals(operator_us)
        return Tables(
            operators=operators,
            collectives=collectives,
            phases=self._phases(
                operator_us, collective_us, {"input": owned[-2], "idle": owned[-1], "host": free}
            ),
            spans=self._spans(operator_row, collective_row),
            outside_rows=outside,
            attributed_fraction=totals[0],
            root_fraction=totals[1],
            host_us_per_operator=self._host_us_per_operator(free),
        )

    def _step_of(self, start_us: float) -> int:
        """Index of the step that a call belongs to by its start, or -1 outside the steps."""
        if not self._starts or start_us >= self._steps[-1].end_us:
            return -1
        return bisect_right(self._starts, start_us) - 1

    def _all_claims(self) -> list[Interval]:
        claims: list[Interval] = []
        for owner, call in enumerate(self._operators):
            claims += self._claims_of(call, owner)
        base = len(self._operators)
        for owner, call in enumerate(self._collectives, base):
            claims += self._claims_of(call, owner)
            transfer = self._transfers[owner - base]
            if transfer is not None:
                claims.append(Interval(transfer.start_us, transfer.end_us, COMMUNICATION, owner))
        for wait in (call for call in self._found.calls if call.kind == "wait"):
            latest = bisect_right(self._collectives, wait.start_us, key=lambda call: call.start_us) - 1
            if latest >= 0 and self._device == "cpu":
                claims.append(Interval(wait.start_us, wait.end_us, COMMUNICATION, base + latest))
        last = base + len(self._collectives)
        claims += [Interval(r.start_us, r.end_us, INPUT_PRIORITY, last) for r in self._found.inputs]
        claims += [Interval(start, end, IDLE, last + 1) for start, end in self._found.waits_us]
        return claims

    def _claims_of(self, call: Call, owner: int) -> list[Interval]:
        if self._device == "cpu":
            priority = COMMUNICATION if call.kind else COMPUTE
            return [Interval(call.start_us, call.end_us, priority, owner)]
        return [
            Interval(event.start_us, event.start_us + event.duration_us, _priority(event), owner)
            for event in call.device
        ]

    def _duration(self, call: Call) -> float:
        if self._device == "cpu":
            return call.duration_us
        return sum(event.duration_us for event in call.device)

    def _operator_rows(
        self, exclusive_us: npt.NDArray[np.float64]
    ) -> tuple[tuple[OperatorRow, ...], list[int], tuple[OperatorRow, ...]]:
        members: dict[OperatorKey, list[int]] = defaultdict(list)
        for index, call in enumerate(self._operators):
            if self._step_of(call.start_us) >= 0:
                members[_key(call)].append(index)
        row_of = [-1] * len(self._operators)
        rows, outside = [], []
        for number, (key, indices) in enumerate(members.items()):
            row = self._operator_row(key, indices, float(exclusive_us[indices].sum()))
            rows.append(row)
            if key.outside:
                outside.append(row)
            for index in indices:
                row_of[index] = number
        return tuple(rows), row_of, tuple(outside)

    def _operator_row(self, key: OperatorKey, indices: Sequence[int], exclusive_us: float) -> OperatorRow:
        calls = [self._operators[index] for index in indices]
        time = Statistics.of([self._duration(call) for call in calls])
        host_us = None
        if self._device != "cpu":
            host_us = Statistics.of([call.duration_us for call in calls]).median
        return OperatorRow(
            rank=self._rank,
            op=key.op,
            family=family(key.op),
            module=key.module,
            phase=key.phase,
            shapes=key.shapes,
            dtype=key.dtype,
            attributes=",".join(sorted(key.attributes)),
            device=self._device,
            count=len(calls) / len(self._steps),
            time_us=time.median,
            time_iqr_us=time.iqr,
            time_n=time.n,
            exclusive_us=exclusive_us / len(self._steps),
            host_us=host_us,
            flops=flops(key.op, key.inputs, (), key.attributes),
            bytes=bytes_moved(key.op, key.inputs),
            attributed=key.attributed,
        )

    def _collective_rows(
        self, exposed_us: npt.NDArray[np.float64]
    ) -> tuple[tuple[CollectiveRow, ...], list[int]]:
        members: dict[tuple[Message, str], list[int]] = defaultdict(list)
        for index, call in enumerate(self._collectives):
            if self._step_of(call.start_us) >= 0:
                members[self._groups.message(call), call.owner.module].append(index)
        row_of = [-1] * len(self._collectives)
        rows = []
        for number, ((message, module), indices) in enumerate(members.items()):
            time = Statistics.of([self._transfer_us(index) for index in indices])
            rows.append(
                CollectiveRow(
                    rank=self._rank,
                    kind=message.kind,
                    axis=message.axis,
                    group_size=message.group_size,
                    size_bytes=message.size_bytes,
                    dtype=message.dtype,
                    backend=self._groups.backend,
                    module=module,
                    count=len(indices) / len(self._steps),
                    time_us=time.median,
                    time_iqr_us=time.iqr,
                    time_n=time.n,
                    exposed_us=float(exposed_us[indices].sum()) / len(self._steps),
                )
            )
            for index in indices:
                row_of[index] = number
        return tuple(rows), row_of

    def _transfer_us(self, index: int) -> float:
        transfer = self._transfers[index]
        if transfer is not None:
            return transfer.end_us - transfer.start_us
        return self._duration(self._collectives[index])

    def _phases(
        self,
        operator_us: npt.NDArray[np.float64],
        collective_us: npt.NDArray[np.float64],
        without_owner_us: Mapping[str, npt.NDArray[np.float64]],
    ) -> tuple[PhaseRow, ...]:
        by_phase = {phase: np.zeros(len(self._steps)) for phase in PHASES}
        for call, exclusive in zip(self._operators, operator_us, strict=True):
            by_phase[call.phase] += exclusive
        by_phase["communication"] += collective_us.sum(axis=0)
        for phase, exclusive in without_owner_us.items():
            by_phase[phase] += exclusive
        return tuple(
            PhaseRow(
                rank=self._rank, step=step.number, phase=phase, exclusive_us=float(by_phase[phase][number])
            )
            for number, step in enumerate(self._steps)
            for phase in PHASES
        )

    def _attribution_totals(self, operator_us: npt.NDArray[np.float64]) -> tuple[float | None, float | None]:
        exclusive = operator_us.sum(axis=1)
        total = float(exclusive.sum())
        if total <= 0:
            return None, None
        attributed = np.array([call.owner.attributed for call in self._operators])
        root = np.array([call.owner.module == "" for call in self._operators])
        return float(exclusive[attributed].sum()) / total, float(exclusive[root].sum()) / total

    def _spans(self, operator_row: Sequence[int], collective_row: Sequence[int]) -> tuple[SpanRow, ...]:
        timeline = Timeline(self._rank, self._found.threads, self._steps)
        for call, row in zip(self._operators, operator_row, strict=True):
            timeline.add_call(call, row)
        for call, row, transfer in zip(self._collectives, collective_row, self._transfers, strict=True):
            timeline.add_call(call, row)
            if transfer is not None:
                timeline.add_transfer(transfer, row)
        for found in self._found.inputs:
            timeline.add_input(found)
        return timeline.spans()

    def _host_us_per_operator(self, free_us: npt.NDArray[np.float64]) -> tuple[float, ...]:
        counts = np.zeros(len(self._steps))
        for call in self._operators:
            step = self._step_of(call.start_us)
            if step >= 0:
                counts[step] += 1
        return tuple(float(free / count) for free, count in zip(free_us, counts, strict=True) if count)


def _priority(event: DeviceEvent) -> int:
    if event.kind == COLLECTIVE:
        return COMMUNICATION
    return COPY_PRIORITY if event.kind == COPY else COMPUTE


def _key(call: Call) -> OperatorKey:
    return OperatorKey(
        op=call.op,
        module=call.owner.module,
        phase=call.phase,
        shapes=_shapes(call.inputs),
        dtype=call.inputs[0].dtype if call.inputs else "",
        attributes=attributes(call.op, call.scalars),
        attributed=call.owner.attributed,
        outside=call.owner.outside,
        inputs=_sized(call.inputs),
    )


@lru_cache(maxsize=4096)
def _shapes(inputs: tuple[Tensor, ...]) -> str:
    return format_shapes(inputs)


def _sized(inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return tuple(tensor for tensor in inputs if tensor.shape)
