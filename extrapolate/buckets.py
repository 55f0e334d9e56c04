"""Replicated parameters: gradients in buckets, reduced while the backward goes on."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from llmprof.extrapolate.cost import Cost, Prices
from llmprof.extrapolate.groups import COMMON, EXPERTS
from llmprof.extrapolate.machine import Machine, Segment
from llmprof.extrapolate.partition import Plan
from llmprof.extrapolate.simulate import Array, Span, Streams
from llmprof.extrapolate.work import Parameter
from llmprof.schema.operators import ITEM_BYTES

FIRST_BUCKET_BYTES = 1 << 20
BUCKET_BYTES = 25 << 20
LABEL = "reduce gradients"
Index = NDArray[np.intp]
Runs = tuple[tuple[tuple[int, ...], tuple[int, ...], int], ...]
"""Gradient bytes of the parameters of one layer, those of experts apart, and how many such layers follow each other."""


class BucketKind(NamedTuple):
    """What buckets have in common that take the same time."""

    size_bytes: int
    experts: bool


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
            at, fraction = index, done / total if total else 1.0
            if filled >= limit:
                yield Bucket(size_bytes=filled, layer=at, fraction=fraction)
                filled, limit = 0, BUCKET_BYTES
    if filled:
        yield Bucket(size_bytes=filled, layer=at, fraction=fraction)


@dataclass(frozen=True, slots=True, eq=False)
class Buckets:
    """Buckets of a stage in the order of their reduction, one array entry for each.

    Attributes:
        kinds: distinct sizes in bytes, of experts or not.
        kind: index into `kinds`.
        run: which row of equal layers completes it.
        before: layers of that row before the one that completes it.
        fraction: as in Bucket.
        counts: for each row of equal layers how many buckets of which kind it completes.
    """

    kinds: tuple[BucketKind, ...]
    kind: Index
    run: Index
    before: Index
    fraction: Array
    counts: tuple[dict[BucketKind, int], ...]


@lru_cache(maxsize=1024)
def stage_buckets(runs: Runs) -> Buckets:
    """Buckets of a stage, from its layers in backward order, equal ones together; those of experts are filled apart."""
    both = [
        (b, experts)
        for experts in (False, True)
        for b in gradient_buckets([run[1] if experts else run[0] for run in runs for _ in range(run[2])])
    ]
    both.sort(key=lambda found: (found[0].layer, found[0].fraction))
    firsts = np.cumsum([0, *(run[2] for run in runs)])
    layer = np.array([b.layer for b, _ in both], dtype=np.intp)
    run = np.searchsorted(firsts, layer, side="right") - 1
    found = [BucketKind(b.size_bytes, experts) for b, experts in both]
    kinds = sorted(set(found))
    counts = [Counter(k for k, r in zip(found, run, strict=True) if r == i) for i in range(len(runs))]
    return Buckets(
        kinds=tuple(kinds),
        kind=np.array([kinds.index(k) for k in found], dtype=np.intp),
        run=run,
        before=layer - firsts[run],
        fraction=np.array([b.fraction for b, _ in both]),
        counts=tuple(map(dict, counts)),
    )


def gradient_bytes(
    parameters: Sequence[Parameter], dtype: str = ""
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Bytes of the gradients of parameters, in their own dtype or the one given: those that all replicas hold, and of experts."""
    sizes = [(p.expert, p.numel * ITEM_BYTES.get(dtype or p.dtype, 4)) for p in parameters]
    return tuple(n for expert, n in sizes if not expert), tuple(n for expert, n in sizes if expert)


def bucket_reduction(kind: BucketKind, plan: Plan, prices: Prices) -> Cost:
    """One bucket: all-reduce (zero=0), else reduce-scatter over the shards and all-reduce of the rest."""
    groups = EXPERTS if kind.experts else COMMON
    if plan.layout.zero == 0:
        return prices.collective("all_reduce", kind.size_bytes, groups.summed)
    shard = prices.group[groups.shard][0]
    scattered = prices.collective("reduce_scatter", kind.size_bytes, groups.shard)
    return scattered.plus(prices.collective("all_reduce", -(-kind.size_bytes // shard), groups.replicate))


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
        buckets: of the stage.
        segments: the reduction of a bucket by its kind.
    """

    machine: Machine
    buckets: Buckets
    segments: dict[BucketKind, Segment]
    _rows: list[tuple[Array, Array, Array]] = field(default_factory=list)

    def launches_s(self, run: int, count: int) -> Array | None:
        """Host time, per layer, of reductions that a row of `count` layers completes; None where there is none."""
        if self.machine.cpu or not self.buckets.counts[run]:
            return None
        done = self.buckets.counts[run].items()
        return np.asarray(sum(times * self.segments[kind].host_s for kind, times in done) / count)

    def row_done(self, count: int, start_s: Array, end_s: Array, *, share: Array | float = 1.0) -> None:
        """A row of `count` equal layers ran; the backward is the last `share` of each one's time."""
        each = (end_s - start_s) / count
        self._rows.append((start_s, each, share * each))

    def run(self, streams: Streams) -> None:
        """Run all reductions on the data-parallel stream.

        A bucket ends when it is complete, or the one before has ended, plus its own time: with the sums S of the
        times up to each bucket, end = S + max over the buckets so far of (complete - sum before).
        """
        at = self.buckets
        if not at.kinds:
            return
        start, each, backward = (np.stack(rows)[at.run] for rows in zip(*self._rows, strict=True))
        ready = start + (at.before + 1)[:, None] * each - (1 - at.fraction)[:, None] * backward
        ready[0] = np.maximum(ready[0], streams.now("dp"))
        time = np.stack([self.segments[kind].device_s for kind in at.kinds])[at.kind]
        total = np.cumsum(time, axis=0)
        ends = total + np.maximum.accumulate(ready - (total - time), axis=0)
        streams.clocks["dp"] = ends[-1]
        streams.busy_s += float(total[-1, 0])
        for count in at.counts:
            streams.ledger.beside.extend((self.segments[kind], float(n)) for kind, n in count.items())
        if streams.record:
            pairs = zip(ends[:, 0] - time[:, 0], time[:, 0], strict=True)
            streams.spans.extend(Span("dp", LABEL, "dp", float(a), float(n)) for a, n in pairs)
