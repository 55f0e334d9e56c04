"""Measured calls of one operator -> its time at any sizes: a form fitted to all of them, corrected by those nearby."""

from __future__ import annotations

from collections.abc import Sequence
from math import log, log2
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from llmprof.errors import ClusterError
from llmprof.extrapolate.curves import LONE_SPREAD, MAX_SPREAD, Estimate, Evidence, Neighbour, Work
from llmprof.extrapolate.features import (
    APART,
    Sizes,
    attention_features,
    fill_features,
    row_features,
    tile_waste,
)
from llmprof.extrapolate.kriging import Kriging
from llmprof.extrapolate.peaks import peak_flops
from llmprof.extrapolate.saturation import Rates, Rows, fit_saturation
from llmprof.schema.cluster import Device
from llmprof.schema.priors import load_priors

Array = NDArray[np.float64]
FEWEST_TO_TELL = 3
"""With fewer rows their differences say nothing."""
_NAMED = 4
_SHOWN = 6
"""Rows that explain a price."""
LEAST_SPREAD = 0.005
SPREAD_OUTSIDE = 0.15
"""Spread far outside the measured range, where rows do not tell: assumed."""
_GROWTHS = (0.005, 0.4)
FEWEST_TO_CHAIN = 12
SMALLER_PART = 0.6
OUTSIDE = 0.25
"""Octaves outside the smaller rows from which a row tells."""
RAMP = 2.0
"""Doublings outside over which the spread grows: assumed."""
MARGIN = 0.1
"""How far features go beyond those of the rows; farther out the form alone says what changes."""
_Q80 = 1.2816
"""80 % of normal values lie within so many standard deviations."""


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
        rows: at least one, with sizes of one kind.
        by_flops: whether arithmetic counts.
        device: whose compute units, rates and cache count where they are known.
        dtype: of the rows, for the device's rate.
        chained: whether the smaller rows tell how large the spread is outside.
    """

    def __init__(
        self,
        rows: Sequence[Timed],
        *,
        by_flops: bool,
        device: Device | None = None,
        dtype: str = "",
        chained: bool = True,
    ) -> None:
        self._device, self._by_flops, self._dtype = device, by_flops, dtype
        self._names = [row.name for row in rows]
        self._attributes = sorted(frozenset().union(*(row.call.attributes for row in rows)))
        calls = [row.call for row in rows]
        times_s = self._times_s = np.array([row.time_s for row in rows])
        work = self._rows(calls)
        rates = device_rates(device, dtype) if device else None
        self._form = fit_saturation(work, times_s, by_flops=by_flops, rates=rates)
        corrections = np.log(times_s / self._form.seconds(work))
        features = self._features(calls)
        self._low, self._high = features.min(axis=0), features.max(axis=0)
        self._kriging = Kriging(features, corrections)
        measure = work.flops if by_flops else work.bytes
        self._range = float(measure.min()), float(measure.max())
        self._growth = self._chained(rows, measure) if chained else SPREAD_OUTSIDE

    def estimate(self, call: Call) -> Estimate:
        """Time of a call with sizes of the rows' kind."""
        return self.estimates([call])[0]

    def estimates(self, calls: Sequence[Call]) -> list[Estimate]:
        """Times of many such calls."""
        form_s = self._form.seconds(self._rows(calls))
        look = self._kriging.look(self._near(self._features(calls)))
        outside = self._growth * _ramp(np.array([self._octaves_outside(call.work) for call in calls]))
        own = look.spreads if len(self._names) >= FEWEST_TO_TELL else np.full(len(calls), LONE_SPREAD)
        spreads = np.minimum(np.hypot(np.maximum(own, LEAST_SPREAD), outside), MAX_SPREAD)
        return [
            Estimate(time_s, spread, tuple(self._names[i] for i in nearest[:_NAMED]))
            for time_s, spread, nearest in zip(
                (form_s * np.exp(look.values)).tolist(), spreads.tolist(), look.nearest.tolist(), strict=True
            )
        ]

    def evidence(self, call: Call) -> Evidence:
        """The rows behind `estimate`."""
        point = self._near(self._features([call]))
        form_s = float(self._form.seconds(self._rows([call]))[0])
        correction = float(np.exp(self._kriging.look(point).values[0]))
        rows, weights = self._kriging.weights(point[0])
        basis = f"form of {len(self._names)} rows, {form_s * 1e6:.4g} us, times {correction:.3f} by those that resemble it"
        shown = zip(rows[:_SHOWN].tolist(), weights[:_SHOWN].tolist(), strict=True)
        found = (Neighbour(self._names[i], float(self._times_s[i]), weight) for i, weight in shown)
        return Evidence("surface", basis, tuple(found))

    def _near(self, features: Array) -> Array:
        """Features kept to those of the rows: beyond them the form alone says what changes."""
        return np.asarray(np.clip(features, self._low - MARGIN, self._high + MARGIN))

    def _octaves_outside(self, work: Work) -> float:
        measure = max(work.flops if self._by_flops else work.bytes, 1)
        low, high = self._range
        return max(0.0, log2(low / measure), log2(measure / high))

    def _chained(self, rows: Sequence[Timed], measure: Array) -> float:
        """Spread far outside the rows, from what the smaller ones miss the larger ones by."""
        order = np.argsort(measure, kind="stable")
        cut = int(SMALLER_PART * len(rows))
        if len(rows) < FEWEST_TO_CHAIN:
            return SPREAD_OUTSIDE
        smaller = [rows[i] for i in order[:cut]]
        surface = Surface(
            smaller, by_flops=self._by_flops, device=self._device, dtype=self._dtype, chained=False
        )
        larger = [rows[i] for i in order[cut:]]
        octaves = np.array([surface._octaves_outside(row.call.work) for row in larger])
        if not (octaves > OUTSIDE).any():
            return SPREAD_OUTSIDE
        told = surface.estimates([row.call for row in larger])
        errors = np.abs([log(e.time_s / row.time_s) for e, row in zip(told, larger, strict=True)])
        beyond = octaves > OUTSIDE
        found = np.quantile(errors[beyond] / _ramp(octaves[beyond]), 0.8) / _Q80
        return float(np.clip(load_priors().outside_share * found, *_GROWTHS))

    def _features(self, calls: Sequence[Call]) -> Array:
        logs, units = np.array([call.sizes.logs for call in calls]), self._units
        said = [[APART * (name in call.attributes) for name in self._attributes] for call in calls]
        parts = [logs, np.array(said).reshape(len(calls), -1)]
        work = self._rows(calls)
        parts.append(np.log2(self._form.seconds(work))[:, None])
        if self._by_flops:
            parts.append(np.log2(work.flops / work.bytes)[:, None])
        if calls[0].sizes.kind == "product":
            parts.append(fill_features(logs, units))
        elif calls[0].sizes.kind == "attention":
            parts.append(attention_features(logs, units))
        else:
            parts.append(row_features(logs, alone=self._tensors(calls) == 1.0))
        return np.concatenate(parts, axis=1)

    @property
    def _units(self) -> int | None:
        return self._device.compute_units if self._device else None

    def _rows(self, calls: Sequence[Call]) -> Rows:
        bytes_ = np.array([max(call.work.bytes, 1) for call in calls], dtype=float)
        cache = self._device.cache_bytes if self._device else None
        return Rows(
            logs=np.array([call.sizes.logs for call in calls]),
            flops=np.array([max(call.work.flops, 1) for call in calls], dtype=float),
            bytes=bytes_,
            waste=self._waste(calls),
            tensors=self._tensors(calls),
            cached=1.0 / (1.0 + np.square(bytes_ / cache)) if cache else np.zeros(len(calls)),
        )

    def _waste(self, calls: Sequence[Call]) -> Array:
        if calls[0].sizes.kind != "product":
            return np.zeros(len(calls))
        return tile_waste(np.array([call.sizes.logs for call in calls]), self._units)

    @staticmethod
    def _tensors(calls: Sequence[Call]) -> Array:
        return np.array([float(call.sizes.tensors) for call in calls])


def device_rates(device: Device, dtype: str) -> Rates | None:
    """What a device can do in a dtype, None where it lists no peak."""
    try:
        return Rates(flops_per_s=peak_flops(device, dtype), bytes_per_s=device.bandwidth_bytes_per_s)
    except ClusterError:
        return None


def _ramp(octaves: Array) -> Array:
    """How much of the spread outside is there already so many doublings outside."""
    return np.asarray(np.sqrt(1.0 - np.exp(-octaves / RAMP)))
