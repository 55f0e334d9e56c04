"""Collectives measured on known link levels -> prices on these levels: algorithms fitted to them, corrected by those nearby."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from math import ceil, exp, log, log2
from typing import NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from llmprof.extrapolate.curves import MAX_SPREAD, MIN_SPREAD, Estimate
from llmprof.extrapolate.fitting import fit_times
from llmprof.extrapolate.kriging import Kriging
from llmprof.extrapolate.links import POINT_TO_POINT, LinkModel, Route, members_inside
from llmprof.schema.cluster import LinkLevel

Array = NDArray[np.float64]
FEWEST_CALLS = 4
_PRIOR_SPREADS = np.array([1.0, 0.7, 1.0])
"""Of the logarithms of latency, bandwidth and ramp around the catalogue's: assumed."""
_MOST_FITTED = 240
_OTHER_KIND_SPREAD = 0.25
"""Spread of a kind that was not measured on a level, beside the errors of those that were: assumed."""
SPREAD_PER_DOUBLING = 0.1
"""Growth of the spread for each doubling of the group beyond those measured: assumed."""


class Message(NamedTuple):
    """One call: kind, bytes (of the full buffer), ranks, devices over which they spread."""

    kind: str
    size_bytes: int
    group_size: int
    span: int


class Measured(NamedTuple):
    """A measured call."""

    message: Message
    time_s: float


class Sweep:
    """Prices on the link levels that calls were measured on.

    Args:
        calls: with known spans; levels with fewer than FEWEST_CALLS are left out.
        links: of the cluster, with the catalogue's efficiencies.
    """

    def __init__(self, calls: Sequence[Measured], links: LinkModel) -> None:
        self._cluster = links.cluster
        groups: dict[str, list[Measured]] = defaultdict(list)
        for call in calls:
            groups[links.cluster.level(call.message.span).name].append(call)
        self._levels = {k: rows for k, rows in groups.items() if len(rows) >= FEWEST_CALLS}
        self._lone = {
            name
            for name, rows in self._levels.items()
            if name != links.cluster.links[0].name and all(self._inside(c.message) == 1 for c in rows)
        }
        routes = dict(links.routes)
        # innermost first: calls on an outer level cross the inner ones, too
        for level in links.cluster.links:
            if level.name in self._levels:
                fitted = _fit(
                    self._levels[level.name], level, LinkModel(cluster=self._cluster, routes=routes)
                )
                routes[level.name] = fitted
        self._links = LinkModel(cluster=self._cluster, routes=routes)
        self._nearby = {
            (name, kind): _Nearby(
                [self._features(c.message) for c in rows],
                [float(np.log(c.time_s / self._links.seconds(*c.message))) for c in rows],
            )
            for name, of_level in self._levels.items()
            for kind, rows in _by_kind(of_level).items()
        }

    @property
    def levels(self) -> tuple[str, ...]:
        """Names of the link levels that are priced."""
        return tuple(self._levels)

    def estimate(self, message: Message) -> Estimate | None:
        """Time of a call; None on a level where too little was measured."""
        level = self._cluster.level(message.span).name
        rows = self._levels.get(level)
        if rows is None:
            return None
        shared = self._inside(message) if level in self._lone else 1
        form_s = self._sharing(level, shared).seconds(*message)
        sharing = log(shared) / 2
        nearby = self._nearby.get((level, _kind(message)))
        if nearby is None:
            errors = [value for (name, _), n in self._nearby.items() if name == level for value in n.values]
            spread = float(np.hypot(np.std(errors), _OTHER_KIND_SPREAD) + sharing)
            return Estimate(form_s, min(spread, MAX_SPREAD), (f"other kinds on {level}",))
        correction, spread = nearby.at(self._features(message))
        largest = max(c.message.group_size for c in rows)
        beyond = SPREAD_PER_DOUBLING * max(0.0, log2(message.group_size / largest))
        spread = float(np.clip(np.hypot(spread, beyond) + sharing, MIN_SPREAD, MAX_SPREAD))
        return Estimate(form_s * exp(correction), spread, (f"{message.kind} on {level}",))

    def _inside(self, message: Message) -> int:
        """Members of a group that share a unit of the level inside; 1 on the innermost."""
        index = self._cluster.links.index(self._cluster.level(message.span))
        if not index:
            return 1
        return members_inside(message.group_size, message.span, self._cluster.links[index - 1].span)

    def _features(self, message: Message) -> list[float]:
        """Octaves of bytes, ranks and units of the level inside."""
        units = ceil(message.group_size / self._inside(message))
        return [log2(max(message.size_bytes, 1)), log2(message.group_size), log2(units)]

    def _sharing(self, level: str, members: int) -> LinkModel:
        """The links when `members` of a unit leave it at once and nobody measured whether each has an adapter of its own.

        Between one for all and one for each lies the square root of their number.
        """
        if members == 1:
            return self._links
        routes = {
            **self._links.routes,
            level: _scaled(self._links.routes[level], np.array([0.0, -log(members) / 2, 0.0])),
        }
        return LinkModel(cluster=self._cluster, routes=routes)


class _Nearby:
    """Corrections of one kind on one level."""

    def __init__(self, features: list[list[float]], values: list[float]) -> None:
        self.values = values
        points = np.array(features)
        self._kept = np.ptp(points, axis=0) > 0
        self._kriging = None
        if len(values) >= FEWEST_CALLS and self._kept.any():
            self._kriging = Kriging(points[:, self._kept], np.array(values))
        self._median, self._spread = float(np.median(values)), float(np.std(values))

    def at(self, features: list[float]) -> tuple[float, float]:
        """Correction of the logarithm, and its spread."""
        if self._kriging is None:
            return self._median, max(self._spread, _OTHER_KIND_SPREAD)
        look = self._kriging.look(np.array([features])[:, self._kept])
        return float(look.values[0]), float(look.spreads[0])


def _kind(message: Message) -> str:
    return "send" if message.kind in POINT_TO_POINT else message.kind


def _by_kind(calls: Sequence[Measured]) -> dict[str, list[Measured]]:
    groups: dict[str, list[Measured]] = defaultdict(list)
    for call in calls:
        groups[_kind(call.message)].append(call)
    return groups


def _fit(calls: Sequence[Measured], level: LinkLevel, links: LinkModel) -> Route:
    """The level's route with the latency, bandwidth and ramp that the calls show."""
    prior = links.routes[level.name]
    chosen = np.random.default_rng(0).permutation(len(calls))[:_MOST_FITTED]
    some = [calls[i] for i in chosen]

    def seconds(at: Array) -> Array:
        routes = {**links.routes, level.name: _scaled(prior, at)}
        model = LinkModel(cluster=links.cluster, routes=routes)
        return np.array([model.seconds(*call.message) for call in some])

    times_s = np.array([call.time_s for call in some])
    return _scaled(prior, fit_times(seconds, times_s, guess=np.zeros(3), spreads=_PRIOR_SPREADS))


def _scaled(route: Route, logs: Array) -> Route:
    latency, bandwidth, ramp = (float(x) for x in np.exp(logs))
    link = msgspec.structs.replace(route.link, latency_s=route.link.latency_s * latency)
    prior = msgspec.structs.replace(
        route.prior,
        base_latency_us=route.prior.base_latency_us * latency,
        bandwidth_efficiency=route.prior.bandwidth_efficiency * bandwidth,
        ramp_bytes=route.prior.ramp_bytes * ramp,
    )
    return Route(link, prior)
