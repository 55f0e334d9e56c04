"""Replicated parameters: gradients in buckets, reduced while the backward goes on."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from llmprof.extrapolate.cost import Cost, Prices
from llmprof.extrapolate.machine import Machine, Segment
from llmprof.extrapolate.partition import Parameter, Plan
from llmprof.extrapolate.simulate import Array, Streams
from llmprof.schema.operators import ITEM_BYTES

FIRST_BUCKET_BYTES = 1 << 20
BUCKET_BYTES = 25 << 20
FEWEST_TOGETHER = 4
"""More buckets than these in one layer are reduced as one row of equal ones."""
LABEL = "reduce gradients"


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
    """Reduces the buckets of one backward in order, each as soon as it is complete."""

    machine: Machine
    streams: Streams
    plan: Plan
    buckets: Sequence[Bucket]
    _by_layer: dict[int, list[Bucket]] = field(default_factory=dict)
    _segments: dict[int, Segment] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for bucket in self.buckets:
            self._by_layer.setdefault(bucket.layer, []).append(bucket)

    def layer_done(self, position: int, started: Array) -> None:
        """The backward of the layer at `position` ran from `started` until now."""
        buckets = self._by_layer.get(position)
        if not buckets:
            return
        length = self.streams.now() - started
        first, last = buckets[0], buckets[-1]
        if len(buckets) <= FEWEST_TOGETHER:
            for bucket in buckets:
                ready = started + bucket.fraction * length
                self.machine.beside(self.streams, self._reduction(bucket.size_bytes), (ready,), LABEL)
            return
        # equal buckets at equal distances: the stream is behind from the first on, or keeps up until the last
        ready = started + first.fraction * length
        for size, count in Counter(bucket.size_bytes for bucket in buckets[:-1]).items():
            self.machine.beside(self.streams, self._reduction(size), (ready,), LABEL, times=count)
        ready = started + last.fraction * length
        self.machine.beside(self.streams, self._reduction(last.size_bytes), (ready,), LABEL)

    def _reduction(self, size_bytes: int) -> Segment:
        found = self._segments.get(size_bytes)
        if found is None:
            cost = bucket_reduction(size_bytes, self.plan, self.machine.prices)
            found = self._segments[size_bytes] = self.machine.segment({"dp": cost})
        return found
