"""Replicated parameters: gradients in buckets, reduced while the backward goes on."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np

from llmprof.extrapolate.cost import Cost, Prices
from llmprof.extrapolate.machine import Machine, Segment
from llmprof.extrapolate.partition import Parameter, Plan
from llmprof.extrapolate.simulate import Array, Span, Streams
from llmprof.schema.operators import ITEM_BYTES

FIRST_BUCKET_BYTES = 1 << 20
BUCKET_BYTES = 25 << 20
LABEL = "reduce gradients"
Runs = tuple[tuple[tuple[int, ...], int], ...]
"""Gradient bytes of the parameters of one layer, and how many such layers follow each other."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Bucket:
    """Gradients that are reduced together.

    Attributes:
        layer: position in backward order of the layer whose backward completes it.
        fraction: how far into that layer's backward it is complete (by gradient bytes).
    """

    size_bytes: int
    layer: int
    fraction: float


def gradient_buckets(layers: Sequence[Sequence[int]]) -> Iterator[Bucket]:
    """Buckets as torch's DistributedDataParallel fills them: in reverse order of the parameters.

    Args:
        layers: gradient bytes of each trainable parameter of each layer in backward order (last layer first), each in
            forward order.

    Yields:
        Buckets in the order in which they are reduced: the first closes at 1 MiB, the others at 25 MiB.
    """
    filled, limit = 0, FIRST_BUCKET_BYTES
    at, fraction = 0, 1.0
    for index, sizes in enumerate(layers):
        total, done = sum(sizes), 0
        for size in reversed(sizes):
            filled += size
            done += size
            at, fraction = index, done / total
            if filled >= limit:
                yield Bucket(size_bytes=filled, layer=at, fraction=fraction)
                filled, limit = 0, BUCKET_BYTES
    if filled:
        yield Bucket(size_bytes=filled, layer=at, fraction=fraction)


@lru_cache(maxsize=1024)
def stage_buckets(runs: Runs) -> tuple[Bucket, ...]:
    """Buckets of a stage, from its layers in backward order, equal ones together."""
    return tuple(gradient_buckets([sizes for sizes, count in runs for _ in range(count)]))


def gradient_bytes(parameter: Parameter) -> int:
    """Bytes of a parameter's gradient, in the parameter's own dtype."""
    return parameter.numel * ITEM_BYTES.get(parameter.dtype, 4)


def bucket_reduction(size_bytes: int, plan: Plan, prices: Prices) -> Cost:
    """One bucket: all-reduce (zero=0), else reduce-scatter over the shards and all-reduce of the rest."""
    if plan.layout.zero == 0:
        return prices.collective("all_reduce", size_bytes, "dp")
    shard = prices.group["shard"][0]
    scattered = prices.collective("reduce_scatter", size_bytes, "shard")
    return scattered.plus(prices.collective("all_reduce", -(-size_bytes // shard), "replicate"))


def bucket_copies(parameters: Sequence[Parameter], machine: Machine) -> Segment:
    """Copies of a layer's gradients into (or out of) the buckets: one call each."""
    cost = Cost()
    for parameter in parameters:
        dtype = parameter.dtype
        cost.include(machine.prices.copy("aten::copy_", parameter.numel, source=dtype, target=dtype))
    return machine.segment({"dp": cost})


@dataclass(slots=True)
class Reducer:
    """Reduces the buckets of one backward in order, each as soon as it is complete.

    Attributes:
        starts_s: for each layer so far when its backward began, and lengths of these backwards.
    """

    machine: Machine
    plan: Plan
    buckets: Sequence[Bucket]
    _starts: list[Array] = field(default_factory=list)
    _lengths: list[Array] = field(default_factory=list)
    _segments: dict[int, Segment] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for size in {bucket.size_bytes for bucket in self.buckets}:
            cost = bucket_reduction(size, self.plan, self.machine.prices)
            self._segments[size] = self.machine.segment({"dp": cost})

    def launches_s(self, first: int, count: int) -> Array | None:
        """Host time, per layer, of reductions that `count` layers complete, None where there is none."""
        if self.machine.cpu:
            return None
        done = Counter(b.size_bytes for b in self.buckets if first <= b.layer < first + count)
        total = [times * self._segments[size].host_s for size, times in done.items()]
        return np.add.reduce(total) / count if total else None

    def layers_done(self, count: int, start_s: Array, end_s: Array, *, share: Array | float = 1.0) -> None:
        """`count` equal layers ran one after the other; the backward is the last `share` of each one's time."""
        each = (end_s - start_s) / count
        for index in range(count):
            self._starts.append(start_s + (index + 1 - share) * each)
            self._lengths.append(share * each)

    def run(self, streams: Streams) -> None:
        """Run all reductions on the data-parallel stream.

        A bucket ends when it is complete, or the one before has ended, plus its own time: with the sums S of the
        times up to each bucket, end = S + max over the buckets so far of (complete - sum before).
        """
        if not self.buckets:
            return
        ready = np.stack([self._starts[b.layer] + b.fraction * self._lengths[b.layer] for b in self.buckets])
        each = np.stack([self._segments[b.size_bytes].device_s for b in self.buckets])
        total = np.cumsum(each, axis=0)
        ready[0] = np.maximum(ready[0], streams.now("dp"))
        ends = total + np.maximum.accumulate(ready - (total - each), axis=0)
        streams.clocks["dp"] = ends[-1]
        streams.busy_s += float(total[-1, 0])
        for size, times in Counter(b.size_bytes for b in self.buckets).items():
            streams.ledger.beside.append((self._segments[size], times))
        if streams.record:
            starts = ends[:, 0] - each[:, 0]
            streams.spans.extend(
                Span("dp", LABEL, "dp", float(a), float(n)) for a, n in zip(starts, each[:, 0], strict=True)
            )
