"""Collectives on link levels: ring, tree and hierarchical algorithms, of which the library takes the fastest."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil, inf, log2
from typing import NamedTuple

from llmprof.schema.cluster import Cluster, LinkLevel
from llmprof.schema.priors import LinkPrior, Priors

POINT_TO_POINT = ("send", "recv")


class Route(NamedTuple):
    """A link level and what the collective library reaches of it."""

    link: LinkLevel
    prior: LinkPrior


@dataclass(frozen=True, kw_only=True, slots=True)
class LinkModel:
    """The algorithms on one cluster; `routes` by name of the level."""

    cluster: Cluster
    routes: Mapping[str, Route]

    @classmethod
    def of(cls, cluster: Cluster, priors: Priors) -> LinkModel:
        """With the efficiencies of the priors."""
        routes = {k.name: Route(k, priors.link(cluster.backend, k.name)) for k in cluster.links}
        return cls(cluster=cluster, routes=routes)

    def seconds(self, kind: str, size_bytes: int, group_size: int, span: int) -> float:
        """Time of one call; arguments as of `CollectivePrices.price`."""
        route = self.routes[self.cluster.level(max(span, 2)).name]
        base_s = route.prior.base_latency_us * 1e-6
        if kind in POINT_TO_POINT:
            return base_s + route.link.latency_s + transfer_s(size_bytes, route)
        kind = self.effective(kind)
        flat = flat_time_s(kind, size_bytes, group_size, route)
        return base_s + min(flat, self._hierarchical(kind, size_bytes, group_size, span))

    def effective(self, kind: str) -> str:
        """gloo runs a reduce-scatter as an all-reduce of the full buffer."""
        return "all_reduce" if self.cluster.backend == "gloo" and kind == "reduce_scatter" else kind

    def _hierarchical(self, kind: str, size_bytes: int, group_size: int, span: int) -> float:
        """Inside a unit of the inner level, then across units with 1/m of the message on the rail of every member.

        all_reduce: reduce-scatter inside, all-reduce across, all-gather inside; all_gather and reduce_scatter: one
        inside, one across; all_to_all: what goes outside and what stays inside move at the same time.
        """
        outer = self.cluster.level(span)
        index = self.cluster.links.index(outer)
        if index == 0 or kind not in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all"):
            return inf
        inner = self.cluster.links[index - 1]
        inside = members_inside(group_size, span, inner.span)
        outside = ceil(group_size / inside)
        if inside < 2 or outside < 2:
            return inf
        rail, unit = self.routes[outer.name], self.routes[inner.name]
        if kind == "all_to_all":
            leaving = transfer_s(size_bytes * (group_size - inside) // group_size, rail)
            staying = transfer_s(size_bytes * inside // group_size, unit)
            return max(leaving + outer.latency_s * ceil(log2(group_size)), staying)
        within = flat_time_s("all_gather", size_bytes, inside, unit)
        across = flat_time_s(kind, size_bytes // inside, outside, rail)
        return (2 if kind == "all_reduce" else 1) * within + across


def wire_share(kind: str, group_size: int) -> float:
    """Bytes that each rank sends for each byte of the message, by the ring algorithm."""
    if kind in ("all_reduce", "barrier"):
        return 2 * (group_size - 1) / group_size
    if kind in ("all_gather", "reduce_scatter", "all_to_all"):
        return (group_size - 1) / group_size
    return 1.0


def members_inside(group_size: int, span: int, level_span: int) -> int:
    """How many members of a group spread evenly over `span` devices share one unit of `level_span` devices.

    Example: 16 members over 64 devices are 4 apart, so 2 of them share a node of 8.
    """
    stride = max(1, span // group_size)
    return max(1, min(group_size, level_span // stride))


def flat_time_s(kind: str, size_bytes: int, group_size: int, route: Route) -> float:
    """One algorithm on one level, without the base latency: ring, or tree where it is faster (seconds).

    Ring: n-1 steps of S/n for all_gather, reduce_scatter and all_to_all, twice that for all_reduce.
    Tree: 2 log2 n steps, the message sent up and down once.
    """
    n, alpha, share = group_size, route.link.latency_s, (group_size - 1) / max(group_size, 1)
    if n <= 1:
        return 0.0
    if kind == "all_reduce":
        ring = 2 * (n - 1) * alpha + transfer_s(2 * share * size_bytes, route)
        tree = 2 * ceil(log2(n)) * alpha + transfer_s(2 * size_bytes, route)
        return min(ring, tree)
    if kind == "broadcast":
        return ceil(log2(n)) * alpha + transfer_s(size_bytes, route)
    if kind == "barrier":
        return 2 * ceil(log2(n)) * alpha
    if kind == "all_to_all":
        return alpha * min(n - 1, ceil(log2(n)) + 1) + transfer_s(share * size_bytes, route)
    return (n - 1) * alpha + transfer_s(share * size_bytes, route)


def transfer_s(wire_bytes: float, route: Route) -> float:
    """Seconds to move what each rank sends. The first `ramp_bytes` cost twice: pipelines fill, protocols are small."""
    link, prior = route
    bandwidth = link.bandwidth_bytes_per_s / link.oversubscription * prior.bandwidth_efficiency
    return (wire_bytes + min(wire_bytes, prior.ramp_bytes)) / bandwidth
