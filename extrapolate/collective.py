"""Collective prices: from a kind, message size and group to seconds on a cluster's links.

Measured curves of the same backend come first; where there are none, ring, tree and hierarchical algorithms on the
link levels that the group spans, of which the library is taken to choose the fastest.
"""

from __future__ import annotations

from collections import defaultdict
from math import ceil, exp, log, log2
from statistics import median

import numpy as np
from numpy.typing import NDArray

from llmprof.extrapolate.compute import OpPrice
from llmprof.extrapolate.measured import MAX_SPREAD, MIN_SPREAD, NORMAL_IQR
from llmprof.schema.cluster import Cluster, LinkLevel
from llmprof.schema.priors import LinkPrior, Priors, load_priors
from llmprof.schema.profile import CollectiveRow, Profile

POINT_TO_POINT = ("send", "recv")
_SCALED_SPREAD = 0.25
"""Spread of a curve that was measured for another kind or group size: assumed."""


class CollectivePrices:
    """Prices collectives on one cluster.

    Args:
        profile: where measured rows come from.
        cluster: whose links are priced.
        same_device: whether the rows were measured on this kind of machine; if not, none is used.
        priors: link efficiencies where nothing is measured.
    """

    def __init__(
        self, profile: Profile, cluster: Cluster, *, same_device: bool, priors: Priors | None = None
    ) -> None:
        self.cluster = cluster
        self._prior = (priors or load_priors()).link(cluster.backend)
        rows = [r for r in profile.collectives if _usable(r, cluster)] if same_device else []
        self._curves = _curves(rows)
        self._scale, self._scale_spread = self._calibrate()
        self._cache: dict[tuple[str, int, int, int], OpPrice] = {}

    def price(self, kind: str, size_bytes: int, group_size: int, span: int) -> OpPrice:
        """Cost of one call.

        Args:
            kind: "all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "send", "recv", "barrier".
            size_bytes: message; for all_gather and reduce_scatter the full (gathered) buffer.
            group_size: ranks in the group.
            span: devices over which the group's members spread, innermost-first rank order; picks the link levels.
        """
        key = (kind, size_bytes, group_size, span)
        found = self._cache.get(key)
        if found is None:
            found = self._cache[key] = self._price(*key)
        return found

    def level(self, span: int) -> LinkLevel:
        """The innermost link level that connects `span` neighbouring devices."""
        for link in self.cluster.links:
            if link.span == 0 or link.span >= span:
                return link
        return self.cluster.links[-1]

    def assumptions(self) -> tuple[str, ...]:
        """What is assumed about the links, one sentence each."""
        if self._curves:
            return ()
        links = ", ".join(f"{k.name} {k.bandwidth_bytes_per_s / 1e9:g} GB/s" for k in self.cluster.links)
        return (
            (
                f"no collective was measured: {links} per device at {self._prior.bandwidth_efficiency:g} efficiency "
                f"({self._prior.source})"
            ),
        )

    def _price(self, kind: str, size_bytes: int, group_size: int, span: int) -> OpPrice:
        link = self.level(span)
        name = f"link:{link.name}"
        if group_size <= 1 and kind not in POINT_TO_POINT:
            return OpPrice(0.0, 0.0, "measured", name)
        curve = self._curves.get((_curve_kind(kind), group_size))
        if curve is not None and len(self.cluster.links) == 1:
            return OpPrice(
                curve.at(size_bytes), curve.spread, "measured", name, (f"{kind} over {group_size}",)
            )
        time_s = self._model(kind, size_bytes, group_size, span)
        if self._curves and len(self.cluster.links) == 1:
            rows = tuple(f"{k} over {n}" for k, n in self._curves)
            return OpPrice(time_s * self._scale, self._scale_spread, "interpolated", name, rows)
        return OpPrice(time_s, self._prior.spread, "assumed", name)

    def _calibrate(self) -> tuple[float, float]:
        """Median factor of the measured curves over the model, and the spread of that factor."""
        errors = [
            log(time / self._model(kind, int(size), n, n))
            for (kind, n), curve in self._curves.items()
            for size, time in zip(curve.sizes, curve.times, strict=True)
        ]
        if not errors:
            return 1.0, self._prior.spread
        center = median(errors)
        spread = float(np.sqrt(np.mean(np.square(np.array(errors) - center))))
        return exp(center), min(MAX_SPREAD, max(_SCALED_SPREAD, spread))

    def _model(self, kind: str, size_bytes: int, group_size: int, span: int) -> float:
        base_s = self._prior.base_latency_us * 1e-6
        if kind in POINT_TO_POINT:
            link = self.level(max(span, 2))
            return base_s + link.latency_s + size_bytes / _bandwidth(link, self._prior)
        kind = self._effective(kind)
        flat = flat_time_s(kind, size_bytes, group_size, self.level(span), self._prior)
        return base_s + min(flat, self._hierarchical(kind, size_bytes, group_size, span))

    def _effective(self, kind: str) -> str:
        """gloo runs a reduce-scatter as an all-reduce of the full buffer."""
        return "all_reduce" if self.cluster.backend == "gloo" and kind == "reduce_scatter" else kind

    def _hierarchical(self, kind: str, size_bytes: int, group_size: int, span: int) -> float:
        """Reduce-scatter inside, the operation across with 1/m of the message on every rail, all-gather inside."""
        outer = self.level(span)
        index = self.cluster.links.index(outer)
        if index == 0 or kind not in ("all_reduce", "all_gather", "reduce_scatter"):
            return float("inf")
        inner = self.cluster.links[index - 1]
        inside = members_inside(group_size, span, inner.span)
        outside = ceil(group_size / inside)
        if inside < 2 or outside < 2:
            return float("inf")
        inner_time = flat_time_s("all_gather", size_bytes, inside, inner, self._prior)
        across = flat_time_s(kind, size_bytes // inside, outside, outer, self._prior)
        return (2 if kind == "all_reduce" else 1) * inner_time + across


def members_inside(group_size: int, span: int, level_span: int) -> int:
    """How many members of a group spread evenly over `span` devices share one unit of `level_span` devices.

    Example: 16 members over 64 devices are 4 apart, so 2 of them share a node of 8.
    """
    stride = max(1, span // group_size)
    return max(1, min(group_size, level_span // stride))


def flat_time_s(kind: str, size_bytes: int, group_size: int, link: LinkLevel, prior: LinkPrior) -> float:
    """One algorithm on one level, without the base latency: ring, or tree where it is faster (seconds).

    Ring: n-1 steps of S/n for all_gather, reduce_scatter and all_to_all, twice that for all_reduce.
    Tree: 2 log2 n steps, the message sent up and down once.
    """
    n, alpha, bandwidth = group_size, link.latency_s, _bandwidth(link, prior)
    if n <= 1:
        return 0.0
    moved = size_bytes / bandwidth
    share = (n - 1) / n
    if kind == "all_reduce":
        ring = 2 * (n - 1) * alpha + 2 * share * moved
        tree = 2 * ceil(log2(n)) * alpha + 2 * moved
        return min(ring, tree)
    if kind == "broadcast":
        return ceil(log2(n)) * alpha + moved
    if kind == "barrier":
        return 2 * ceil(log2(n)) * alpha
    if kind == "all_to_all":
        return alpha * min(n - 1, ceil(log2(n)) + 1) + share * moved
    return (n - 1) * alpha + share * moved


def _bandwidth(link: LinkLevel, prior: LinkPrior) -> float:
    return link.bandwidth_bytes_per_s / link.oversubscription * prior.bandwidth_efficiency


def _usable(row: CollectiveRow, cluster: Cluster) -> bool:
    return row.backend == cluster.backend and row.group_size > 1 and row.time_us > 0


def _curve_kind(kind: str) -> str:
    return "send" if kind in POINT_TO_POINT else kind


class _Curve:
    """Time over message size, piecewise linear in the logarithms.

    Below the smallest size the time is flat, above the largest it grows with the size. Rows from the running step
    are preferred: a back-to-back sweep gives the form, scaled by what the step showed at the nearest sizes.
    """

    def __init__(self, rows: list[CollectiveRow]) -> None:
        sweep, situ = _points([r for r in rows if not r.in_situ]), _points([r for r in rows if r.in_situ])
        points = situ or sweep
        if situ and sweep:
            x, y = _arrays(sweep)
            factor = median(time / _interpolate(x, y, size) for size, time in situ.items())
            points = {size: time * factor for size, time in sweep.items()} | situ
        self.sizes, self.times = _arrays(points)
        own = [r.time_iqr_us / NORMAL_IQR / r.time_us for r in rows]
        self.spread = min(MAX_SPREAD, max(MIN_SPREAD, median(own)))

    def at(self, size_bytes: int) -> float:
        """Seconds for a message."""
        return _interpolate(self.sizes, self.times, size_bytes)


def _points(rows: list[CollectiveRow]) -> dict[int, float]:
    groups: dict[int, list[CollectiveRow]] = defaultdict(list)
    for row in rows:
        groups[max(row.size_bytes, 1)].append(row)
    return {
        size: sum(r.time_us * max(r.count, 1e-9) for r in group)
        / sum(max(r.count, 1e-9) for r in group)
        * 1e-6
        for size, group in groups.items()
    }


def _arrays(points: dict[int, float]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    sizes = sorted(points)
    return np.array(sizes, dtype=float), np.array([points[s] for s in sizes])


def _interpolate(sizes: NDArray[np.float64], times: NDArray[np.float64], size_bytes: float) -> float:
    if size_bytes >= sizes[-1]:
        return float(times[-1] * size_bytes / sizes[-1])
    return float(np.exp(np.interp(np.log(max(size_bytes, 1)), np.log(sizes), np.log(times))))


def _curves(rows: list[CollectiveRow]) -> dict[tuple[str, int], _Curve]:
    groups: dict[tuple[str, int], list[CollectiveRow]] = defaultdict(list)
    for row in rows:
        groups[_curve_kind(row.kind), row.group_size].append(row)
    return {key: _Curve(group) for key, group in groups.items()}
