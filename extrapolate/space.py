"""A workload, a cluster and a number of devices -> every layout that a search considers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import TypedDict

from llmprof.errors import LayoutError
from llmprof.extrapolate.experts import experts_of
from llmprof.extrapolate.request import check_passes
from llmprof.schema.cluster import Cluster
from llmprof.schema.layout import CP_KINDS, Layout, divisors
from llmprof.schema.workload import Workload

MOST_CP = 64
MOST_VPP = 8
MOST_MB = 16
"""Largest context-parallel degree, virtual stages on a device and sequences of a microbatch that are considered."""
RECOMPUTE = ("none", "full")


class _Axes(TypedDict):
    """Degrees that make up the devices."""

    dp: int
    tp: int
    sp: bool
    cp: int
    cp_kind: str
    pp: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Space:
    """What layouts are made of.

    Attributes:
        blocks: of the model, which stages share out.
        experts: of a block, 0 where there are none; several sizes are refused by the forecast itself.
        classes: (tp, sp) that were traced.
        seq: tokens of a sequence.
        node: devices of one node.
    """

    blocks: int
    experts: int
    classes: tuple[tuple[int, bool], ...]
    seq: int
    node: int

    @classmethod
    def of(cls, workload: Workload, cluster: Cluster, *, seq: int) -> Space:
        """The space of a workload on a cluster."""
        kinds = {layer.name: layer.kind for layer in workload.layers}
        trace = workload.find_class(1, sp=False)
        experts = 0
        for layer in workload.layers:
            routed = experts_of(layer, trace.layers.get(layer.name) if trace else None)
            sizes = [p.shape[0] for p in layer.parameters if p.name in routed]
            experts = max([experts, *sizes])
        return cls(
            blocks=sum(count for name, count in workload.sequence if kinds[name] == "block"),
            experts=experts,
            classes=tuple(dict.fromkeys((c.tp, c.sp) for c in workload.classes)),
            seq=seq,
            node=cluster.devices_per_node,
        )

    def layouts(self, gpus: int, global_batch: int) -> Iterator[Layout]:
        """Every combination of degrees that makes up so many devices and sequences, each once.

        Degrees are divisors, not only powers of two. Left out: pp beyond the number of blocks, cp that does not cut the
        sequence into pieces of equal size, zero where there is nobody to share with.
        """
        for tp, sp in self.classes:
            for cp, kind in self._context(gpus // tp) if gpus % tp == 0 else ():
                for pp in divisors(gpus // (tp * cp), at_most=max(1, self.blocks)):
                    dp = gpus // (tp * cp * pp)
                    if global_batch % dp:
                        continue
                    axes = _Axes(dp=dp, tp=tp, sp=sp, cp=cp, cp_kind=kind, pp=pp)
                    yield from self._filled(axes, global_batch // dp)

    def _context(self, rest: int) -> Iterator[tuple[int, str]]:
        for cp in divisors(rest, at_most=MOST_CP):
            if cp == 1:
                yield 1, CP_KINDS[0]
            elif self.seq % (2 * cp) == 0:
                yield from ((cp, kind) for kind in CP_KINDS)

    def _filled(self, axes: _Axes, sequences: int) -> Iterator[Layout]:
        """Layouts of these axes, with `sequences` in a step of each replica."""
        replicas = axes["dp"] * axes["cp"]
        experts = [ep for ep in divisors(max(1, self.experts)) if replicas % ep == 0]
        for ep, (zero, shard), mb, recompute in product(
            experts,
            self._sharding(axes["dp"], axes["cp"], axes["tp"]),
            divisors(sequences, at_most=MOST_MB),
            RECOMPUTE,
        ):
            accum = sequences // mb
            for schedule, vpp in self._schedules(axes["pp"]):
                try:
                    layout = Layout(
                        **axes,
                        ep=ep, zero=zero, shard=shard, mb=mb, accum=accum,
                        schedule=schedule, vpp=vpp, recompute=recompute,
                    )  # fmt: skip
                    check_passes(layout)
                except LayoutError:
                    continue  # degrees that contradict each other, or microbatches that fill no round, are no layout
                yield layout

    def _sharding(self, dp: int, cp: int, tp: int) -> list[tuple[int, int]]:
        """(zero, shard): all of dp, or the largest group inside a node."""
        if dp * cp == 1:
            return [(0, 0)]
        inside = max(n for n in divisors(dp) if n * tp * cp <= max(self.node, tp * cp))
        hybrid = [(3, inside)] if 1 < inside < dp else []
        return [(0, 0), (1, 0), (2, 0), (3, 0), *hybrid]

    def _schedules(self, pp: int) -> Iterator[tuple[str, int]]:
        """(schedule, vpp)."""
        yield "1f1b", 1
        if pp == 1:
            return
        yield "gpipe", 1
        yield "zero-bubble", 1
        if self.blocks % pp == 0:
            for vpp in divisors(self.blocks // pp, at_most=MOST_VPP):
                if vpp > 1:
                    yield "interleaved", vpp
