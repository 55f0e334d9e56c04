"""Layouts of a workload on a cluster -> the fastest that fit: bounded first, then simulated while they can still win."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from time import monotonic

import numpy as np

from llmprof.errors import LlmprofError
from llmprof.extrapolate.bound import Bounds
from llmprof.extrapolate.forecast import Forecaster, Simulation
from llmprof.extrapolate.simulate import Array
from llmprof.schema.layout import Layout

Fits = Callable[[Layout], bool]


@dataclass(frozen=True, kw_only=True, slots=True)
class Wish:
    """What is searched for.

    Attributes:
        top: how many of the fastest layouts are wanted.
        margin: share of the usable memory that must stay free.
        seconds: after which the best so far is returned; None for no limit.
        seq: tokens per sequence; None for the captured length.
    """

    top: int = 10
    margin: float = 0.0
    seconds: float | None = None
    seq: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Tightest:
    """The layout that needs the least memory of those that do not fit."""

    layout: Layout
    peak_bytes: int
    usable_bytes: int


@dataclass(kw_only=True, slots=True)
class Found:
    """What a search found, best first, and what became of every layout.

    Attributes:
        layouts: (seconds of the nominal step, layout) of those that fit, the fastest first.
        considered: layouts of the space.
        simulated: whose step was simulated.
        pruned: slower than the last wanted by their bound alone.
        too_large: that do not fit in memory.
        refused: how many were refused, by reason.
        proven: no layout of the space that fits is faster than the last of `layouts`.
        tightest: of those too large, None when there are none.
    """

    layouts: list[tuple[float, Layout]] = field(default_factory=list)
    considered: int = 0
    simulated: int = 0
    pruned: int = 0
    too_large: int = 0
    refused: Counter[str] = field(default_factory=Counter)
    proven: bool = False
    tightest: Tightest | None = None

    @property
    def left(self) -> int:
        """Layouts that were not dealt with when the search was stopped."""
        return self.considered - self.simulated - self.pruned - self.too_large - self.refused.total()


def search(forecaster: Forecaster, layouts: Iterable[Layout], wish: Wish) -> Found:
    """The fastest layouts that fit.

    Args:
        forecaster: of the workload on the cluster; its draws decide whether a layout fits.
        layouts: with their final `accum`.
    """
    found = Found()
    for _ in searching(forecaster, layouts, wish, found):
        pass
    return found


def searching(forecaster: Forecaster, layouts: Iterable[Layout], wish: Wish, found: Found) -> Iterator[int]:
    """Fill `found` step by step; it can be stopped at any time and holds the best so far.

    Equally fast layouts are ordered by their text.

    Yields:
        How many layouts are dealt with.
    """
    start = monotonic()
    nominal = forecaster.with_draws(0)
    bounds = Bounds(nominal, seq=wish.seq)
    queue = _bounded(bounds, layouts, found)
    heapify(queue)
    while queue:
        bound_s, text, refined, layout = heappop(queue)
        if len(found.layouts) >= wish.top and bound_s > found.layouts[-1][0]:
            found.pruned += len(queue) + 1
            break
        if wish.seconds is not None and monotonic() - start > wish.seconds:
            return
        yield found.considered - len(queue)
        try:
            if not refined:
                heappush(queue, (bounds.bound_s(layout), text, True, layout))
                continue
            if not _fits(forecaster, layout, wish, found):
                continue
            simulation = nominal.simulate(layout, global_batch=layout.global_batch, seq=wish.seq)
        except LlmprofError as error:
            found.refused[error.message] += 1
            continue
        found.simulated += 1
        found.layouts.append((float(simulation.step_s[0]), layout))
        found.layouts.sort(key=lambda timed: (timed[0], str(timed[1])))
        del found.layouts[wish.top :]
    found.proven = True


def _bounded(
    bounds: Bounds, layouts: Iterable[Layout], found: Found
) -> list[tuple[float, str, bool, Layout]]:
    """Layouts that are not refused, with their coarse bounds."""
    queue = []
    for layout in layouts:
        found.considered += 1
        try:
            queue.append((bounds.coarse_s(layout), str(layout), False, layout))
        except LlmprofError as error:
            found.refused[error.message] += 1
    return queue


def _fits(forecaster: Forecaster, layout: Layout, wish: Wish, found: Found) -> bool:
    memory = forecaster.memory(layout, global_batch=layout.global_batch, seq=wish.seq)
    if memory.verdict != "oom" and memory.p50 <= (1 - wish.margin) * memory.usable:
        return True
    found.too_large += 1
    if found.tightest is None or memory.p50 < found.tightest.peak_bytes:
        found.tightest = Tightest(layout=layout, peak_bytes=memory.p50, usable_bytes=memory.usable)
    return False


def probability_best(simulations: list[Simulation]) -> list[float]:
    """How often each is the fastest for a sequence over the draws; errors that layouts share are the same in all.

    Args:
        simulations: of one forecaster, with draws.
    """
    if not simulations or len(simulations[0].step_s) == 1:
        return [1.0 / len(simulations)] * len(simulations) if simulations else []
    winners = np.argmin(_draws(simulations), axis=0)
    return [float(np.mean(winners == i)) for i in range(len(simulations))]


def least_regret(simulations: list[Simulation]) -> int:
    """The place of the layout whose largest loss against the best of a draw is the smallest, over 80 % of draws."""
    each = _draws(simulations)
    losses = each / each.min(axis=0)
    return int(np.argmin(np.quantile(losses, 0.9, axis=1)))


def _draws(simulations: list[Simulation]) -> Array:
    """Seconds for a sequence, shape (layouts, draws)."""
    return np.stack([s.step_s[1:] / s.plan.layout.global_batch for s in simulations])
