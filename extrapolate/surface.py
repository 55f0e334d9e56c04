"""Measured calls of one operator -> its time at any sizes: a form fitted to all of them, corrected by those nearby."""

from __future__ import annotations

from collections.abc import Sequence
from math import exp, log2
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from llmprof.extrapolate.curves import MAX_SPREAD, MIN_SPREAD, Estimate, Work
from llmprof.extrapolate.features import Sizes, fill_features
from llmprof.extrapolate.kriging import Kriging
from llmprof.extrapolate.saturation import Rows, fit_saturation
from llmprof.schema.cluster import Device

Array = NDArray[np.float64]
FEWEST_ROWS = 6
_NAMED = 4
SPREAD_PER_OCTAVE = 0.02
"""Growth of the spread for each doubling of the work outside the measured range: assumed."""
_APART = 4.0
"""How far, in octaves, calls with an attribute stand from those without: assumed."""


class Call(NamedTuple):
    """What is timed: sizes, attributes such as "causal", work."""

    sizes: Sizes
    attributes: frozenset[str]
    work: Work


class Timed(NamedTuple):
    """A measured call."""

    call: Call
    time_s: float
    name: str


class Surface:
    """Times of one operator over its sizes.

    Args:
        rows: at least FEWEST_ROWS, with sizes of one kind.
        by_flops: whether arithmetic counts.
        device: whose compute units and cache count where they are known.
    """

    def __init__(self, rows: Sequence[Timed], *, by_flops: bool, device: Device | None = None) -> None:
        self._device = device
        self._names = [row.name for row in rows]
        self._attributes = sorted(frozenset().union(*(row.call.attributes for row in rows)))
        calls = [row.call for row in rows]
        times_s = np.array([row.time_s for row in rows])
        work = self._rows(calls)
        self._form = fit_saturation(work, times_s, by_flops=by_flops)
        corrections = np.log(times_s / self._form.seconds(work))
        features = self._features(calls)
        self._kept = np.ptp(features, axis=0) > 0
        self._median = float(np.median(corrections))
        self._kriging = Kriging(features[:, self._kept], corrections) if self._kept.any() else None
        measure = work.flops if by_flops else work.bytes
        self._range = float(measure.min()), float(measure.max())
        self._by_flops = by_flops
        self._apart = float(np.clip(np.std(corrections), MIN_SPREAD, MAX_SPREAD))

    def estimate(self, call: Call) -> Estimate:
        """Time of a call with sizes of the rows' kind."""
        return self.estimates([call])[0]

    def estimates(self, calls: Sequence[Call]) -> list[Estimate]:
        """Times of many such calls."""
        form_s = self._form.seconds(self._rows(calls))
        if self._kriging is None:
            names = tuple(self._names[:_NAMED])
            return [Estimate(float(s) * exp(self._median), self._apart, names) for s in form_s]
        look = self._kriging.look(self._features(calls)[:, self._kept])
        outside = [SPREAD_PER_OCTAVE * self._octaves_outside(call.work) for call in calls]
        spreads = np.clip(np.hypot(look.spreads, outside), MIN_SPREAD, MAX_SPREAD)
        return [
            Estimate(float(time_s), float(spread), tuple(self._names[i] for i in nearest[:_NAMED]))
            for time_s, spread, nearest in zip(
                form_s * np.exp(look.values), spreads, look.nearest, strict=True
            )
        ]

    def _octaves_outside(self, work: Work) -> float:
        measure = max(work.flops if self._by_flops else work.bytes, 1)
        low, high = self._range
        return max(0.0, log2(low / measure), log2(measure / high))

    def times_s(self, calls: Sequence[Call]) -> Array:
        """Times of many calls at once, shape (n,)."""
        form_s = self._form.seconds(self._rows(calls))
        if self._kriging is None:
            return np.asarray(form_s * exp(self._median))
        return np.asarray(form_s * np.exp(self._kriging.at(self._features(calls)[:, self._kept])))

    def _features(self, calls: Sequence[Call]) -> Array:
        logs = np.array([call.sizes.logs for call in calls])
        said = [[_APART * (name in call.attributes) for name in self._attributes] for call in calls]
        parts = [logs, np.array(said).reshape(len(calls), -1)]
        if calls[0].sizes.kind == "product":
            parts.append(fill_features(logs, self._device.compute_units if self._device else None))
        return np.concatenate(parts, axis=1)

    def _rows(self, calls: Sequence[Call]) -> Rows:
        bytes_ = np.array([max(call.work.bytes, 1) for call in calls], dtype=float)
        cache = self._device.cache_bytes if self._device else None
        return Rows(
            logs=np.array([call.sizes.logs for call in calls]),
            flops=np.array([max(call.work.flops, 1) for call in calls], dtype=float),
            bytes=bytes_,
            cached=1.0 / (1.0 + np.square(bytes_ / cache)) if cache else np.zeros(len(calls)),
        )
