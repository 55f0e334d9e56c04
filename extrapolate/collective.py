"""Collective prices: from a kind, message size and group to seconds on a cluster's links.

Measured curves of the same backend come first; where there are none, ring, tree and hierarchical algorithms on the
link levels that the group spans, of which the library is taken to choose the fastest.
"""

from __future__ import annotations

from collections import defaultdict
from statistics import median

import numpy as np
from numpy.typing import NDArray

from llmprof.extrapolate.compute import OpPrice
from llmprof.extrapolate.curves import MAX_SPREAD, MIN_SPREAD
from llmprof.extrapolate.links import POINT_TO_POINT, LinkModel, transfer_s, wire_share
from llmprof.extrapolate.measured import NORMAL_IQR
from llmprof.extrapolate.sweep import Measured, Message, Sweep
from llmprof.schema.cluster import Cluster, LinkLevel
from llmprof.schema.priors import Priors, load_priors
from llmprof.schema.profile import CollectiveRow, Profile

_SCALED_SPREAD = 0.25
"""Spread of a curve that was measured for another kind or group size, or back to back: assumed."""
_BULK_BYTES = 65_536
"""Calls with smaller messages show a latency, and say nothing of the rate at which larger ones move."""


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
        loaded = priors or load_priors()
        self._links = LinkModel.of(cluster, loaded)
        rows = [r for r in profile.collectives if _usable(r, cluster)] if same_device else []
        self._curves = _curves([r for r in rows if not r.span])
        placed = [r for r in rows if r.span]
        self._back_to_back = not all(r.in_situ for r in placed)
        self._sweep = Sweep([Measured(_message(r), r.time_us * 1e-6) for r in placed], self._links)
        self._measured_level = self._level_of(profile)
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

    def _level_of(self, profile: Profile) -> str:
        """Name of the one link level that the measured groups can have used, "" when there may be several."""
        inner = self.level(profile.manifest.world_size)
        return inner.name if inner is self.cluster.links[0] else ""

    def level(self, span: int) -> LinkLevel:
        """The innermost link level that connects `span` neighbouring devices."""
        return self.cluster.level(span)

    def assumptions(self) -> tuple[str, ...]:
        """What is assumed about the links, one sentence each."""
        if self._curves or self._sweep.levels:
            return ()
        links = ", ".join(f"{k.name} {k.bandwidth_bytes_per_s / 1e9:g} GB/s" for k in self.cluster.links)
        return (
            f"no collective was measured: {links} per device, {self.cluster.backend} efficiencies are priors",
        )

    def _price(self, kind: str, size_bytes: int, group_size: int, span: int) -> OpPrice:
        link = self.level(span)
        name = f"link:{link.name}"
        if group_size <= 1 and kind not in POINT_TO_POINT:
            return OpPrice(0.0, 0.0, "measured", name)
        placed = self._sweep.estimate(Message(kind, size_bytes, max(group_size, 2), span))
        if placed is not None:
            waiting_s = self._links.routes[link.name].prior.in_situ_us * 1e-6 if self._back_to_back else 0.0
            return OpPrice(placed.time_s + waiting_s, placed.spread, "interpolated", name, placed.rows)
        if link.name == self._measured_level:
            kind = "send" if kind in POINT_TO_POINT else kind
            curve = self._curves.get((kind, group_size))
            if curve is not None and curve.in_situ and curve.reaches(size_bytes):
                rows = (f"{kind} over {group_size}",)
                return OpPrice(curve.at(size_bytes), curve.spread, "measured", name, rows)
            if self._curves:
                return self._from_other_curve(kind, size_bytes, group_size, link)
        time_s = self._links.seconds(kind, size_bytes, group_size, span)
        return OpPrice(time_s, self._links.routes[link.name].prior.spread, "assumed", name)

    def _from_other_curve(self, kind: str, size_bytes: int, group_size: int, link: LinkLevel) -> OpPrice:
        """Price from a sweep, or from the curve of another group size or kind.

        Another curve is read at the message for which each rank sends as much; a back-to-back sweep lacks what a
        call in a running step waits. Where all curves end at small messages, the rest moves at the prior's rate.
        """
        own = self._curves.get((kind, group_size))
        if own is None or not own.reaches(size_bytes):
            kind = self._links.effective(kind)

        def distance(key: tuple[str, int]) -> tuple[object, ...]:
            works_as, size = self._links.effective(key[0]), abs(key[1] - group_size)
            far = not self._curves[key].reaches(size_bytes)
            return far, key[0] != kind, works_as != kind, key[0] != "all_reduce", size, key

        source = min(self._curves, key=distance)
        measured, route = self._curves[source], self._links.routes[link.name]
        prior, source_share = route.prior, wire_share(self._links.effective(source[0]), source[1])
        equal = size_bytes * wire_share(self._links.effective(kind), group_size) / source_share
        waiting_s = 0.0 if measured.in_situ else prior.in_situ_us * 1e-6
        if not measured.reaches(equal):
            waiting_s += transfer_s((equal - measured.largest) * source_share, route)
            equal = measured.largest
        spread = min(MAX_SPREAD, measured.spread + _SCALED_SPREAD)
        rows = (f"{source[0]} over {source[1]}",)
        return OpPrice(measured.at(equal) + waiting_s, spread, "interpolated", f"link:{link.name}", rows)


def _message(row: CollectiveRow) -> Message:
    return Message(row.kind, row.size_bytes, row.group_size, row.span)


def _usable(row: CollectiveRow, cluster: Cluster) -> bool:
    return row.backend == cluster.backend and row.group_size > 1 and row.time_us > 0


class _Curve:
    """Time over message size, piecewise linear in the logarithms.

    Below the smallest size the time is flat, above the largest it grows with the size. Rows from the running step
    are preferred: a back-to-back sweep gives the form, scaled by what the step showed; `in_situ` says whether it did.
    """

    def __init__(self, rows: list[CollectiveRow]) -> None:
        sweep, situ = _points([r for r in rows if not r.in_situ]), _points([r for r in rows if r.in_situ])
        points = situ or sweep
        self.in_situ = bool(situ)
        if situ and sweep:
            x, y = _arrays(sweep)
            factor = median(time / _interpolate(x, y, size) for size, time in situ.items())
            points = {size: time * factor for size, time in sweep.items()} | situ
        self.sizes, self.times = _arrays(points)
        own = [r.time_iqr_us / NORMAL_IQR / r.time_us for r in rows]
        self.spread = min(MAX_SPREAD, max(MIN_SPREAD, median(own)))

    @property
    def largest(self) -> float:
        """The largest measured message (bytes)."""
        return float(self.sizes[-1])

    def reaches(self, size_bytes: float) -> bool:
        """Whether the curve can be read at a message: inside it, or beyond it at a rate that it shows."""
        return size_bytes <= self.largest or self.largest >= _BULK_BYTES

    def at(self, size_bytes: float) -> float:
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
        groups["send" if row.kind in POINT_TO_POINT else row.kind, row.group_size].append(row)
    return {key: _Curve(group) for key, group in groups.items()}
