"""Which devices the groups of a mesh axis spread over, from the layout's order and the cluster's link levels."""

from __future__ import annotations

from math import prod
from typing import NamedTuple

from llmprof.schema.cluster import Cluster
from llmprof.schema.layout import Layout


class StateGroups(NamedTuple):
    """Names of the groups that share parameters of one kind.

    Attributes:
        summed: ranks that sum gradients.
        shard, replicate: its halves: ranks that divide state, and copies of that.
    """

    summed: str
    shard: str
    replicate: str


COMMON = StateGroups("dp", "shard", "replicate")
EXPERTS = StateGroups("expert_dp", "expert_shard", "expert_replicate")


def axis_stride(layout: Layout, axis: str) -> int:
    """Distance in ranks between neighbours of an axis: the product of the degrees of the axes inside it."""
    degrees = {"tp": layout.tp, "cp": layout.cp, "dp": layout.dp, "pp": layout.pp}
    order = layout.order.split("-")
    return prod(degrees.get(inner, 1) for inner in order[: order.index(axis)])


def axis_groups(layout: Layout, cluster: Cluster) -> dict[str, tuple[int, int]]:
    """(group size, span in devices) by name.

    "tp", "cp", "ep" and "pp"; "dp" are the ranks that sum gradients, with those of context parallelism; "shard" and
    "replicate" are its halves. The names of EXPERTS are the same for the parameters of experts.
    """
    stride = axis_stride(layout, "dp")
    context = axis_stride(layout, "cp") * layout.cp
    sizes = {
        "tp": (layout.tp, axis_stride(layout, "tp") * layout.tp),
        "cp": (layout.cp, context),
        "dp": (layout.replicas, max(stride * layout.dp, context)),
        "shard": (layout.state_shards, max(stride * layout.dp_shard, context) if layout.zero else 1),
        "replicate": (layout.dp_replicate, stride * layout.dp),
        "pp": (layout.pp, axis_stride(layout, "pp") * layout.pp),
        **_expert_groups(layout),
    }
    return {name: (size, _aligned_span(span, cluster, layout.gpus)) for name, (size, span) in sizes.items()}


def _expert_groups(layout: Layout) -> dict[str, tuple[int, int]]:
    """Groups among the ranks of dp x cp: expert-parallel neighbours innermost, unless the order puts dp inside ep."""
    order = layout.order.split("-")
    near, far = sorted(
        (axis_stride(layout, axis), degree) for axis, degree in (("cp", layout.cp), ("dp", layout.dp))
    )

    def span(ranks: int) -> int:
        """Devices from the first of so many neighbours among dp x cp to the last."""
        return near[0] * ranks if ranks <= near[1] else far[0] * -(-ranks // near[1])

    copies, shards = layout.expert_replicas, layout.expert_shards
    inside = order.index("ep") < order.index("dp")
    within = layout.ep if inside else 1
    return {
        "ep": (layout.ep, span(layout.ep if inside else layout.replicas)),
        EXPERTS.summed: (copies, span(copies * within)),
        EXPERTS.shard: (shards, span(shards * within)),
        EXPERTS.replicate: (copies // shards, span(copies * within)),
    }


def boundary_span(layout: Layout, cluster: Cluster, boundary: int) -> int:
    """Devices that the slowest pair over a boundary spreads over: of neighbours, or of the last stage and the first.

    Args:
        boundary: between virtual stages `boundary` and `boundary` + 1.
    """
    stride = axis_stride(layout, "pp")
    near, far = sorted((boundary % layout.pp, (boundary + 1) % layout.pp))
    apart = (far - near) * stride
    first = range(near * stride, (near + 1) * stride)
    for level in cluster.links:
        if level.span and all(rank // level.span == (rank + apart) // level.span for rank in first):
            return min(level.span, apart + stride)
    return max(apart + stride, _beyond_finite_levels(cluster))


def _aligned_span(span: int, cluster: Cluster, world: int) -> int:
    """A group of `span` devices that does not divide the level it would fit in lies across two of its units."""
    if span >= world:
        return span
    for level in cluster.links:
        if level.span and span <= level.span:
            if level.span % span == 0:
                return span
            span = level.span + 1
    return span


def _beyond_finite_levels(cluster: Cluster) -> int:
    return 1 + max((level.span for level in cluster.links), default=0)
