"""Replicated parameters: gradients in buckets, reduced while the backward goes on."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from llmprof.extrapolate.cost import Cost, Prices
from llmprof.extrapolate.machine import Machine, Segment
from llmprof.extrapolate.partition import Parameter, Plan
from llmprof.extrapolate.simulate import Array, Streams
from llmprof.schema.operators import ITEM_BYTES

FIRST_BUCKET_BYTES = 1 << 20
BUCKET_BYTES = 25 << 20


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


def gradient_buckets(layers: Sequence[Sequence[Parameter]]) -> Iterator[Bucket]:
    """Buckets as torch's DistributedDataParallel fills them: in reverse order of the parameters.

    Args:
        layers: trainable parameters of each layer in backward order (last layer first), each in forward order.

    Yields:
        Buckets in the order in which they are reduced: the first closes at 1 MiB, the others at 25 MiB.
    """
    filled, limit = 0, FIRST_BUCKET_BYTES
    at, fraction = 0, 1.0
    for index, parameters in enumerate(layers):
        total = sum(gradient_bytes(p) for p in parameters)
        done = 0
        for parameter in reversed(parameters):
            filled += gradient_bytes(parameter)
            done += gradient_bytes(parameter)
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
        cost = cost.plus(
            machine.prices.copy(
                "aten::copy_", parameter.numel, source=parameter.dtype, target=parameter.dtype
            )
        )
    return machine.segment({"dp": cost})


@dataclass(slots=True)
class Reducer:
    """Reduces the buckets of one backward in order, each as soon as it is complete."""

    machine: Machine
    streams: Streams
    plan: Plan
    buckets: Sequence[Bucket]

    def layer_done(self, position: int, started: Array) -> None:
        """The backward of the layer at `position` ran from `started` until now."""
        end = self.streams.now()
        for bucket in self.buckets:
            if bucket.layer == position:
                ready = started + bucket.fraction * (end - started)
                cost = bucket_reduction(bucket.size_bytes, self.plan, self.machine.prices)
                segment = self.machine.segment({"dp": cost})
                self.machine.beside(self.streams, segment, (ready,), "reduce gradients")
