"""Layouts -> a time that none of them can beat, from one simulated microbatch of each class of layouts.

Layouts that differ in data parallelism, sharding, accumulation and schedule alone run the same passes. One microbatch
through the pipeline, simulated without data parallelism, gives the busy time w_s of every stage s. With m microbatches
and p stages a step takes at least

    max over s of  m w_s + k (w_0 + .. + w_(s-1))

as stage s does all of its work, starts after the first forward has come through the stages before it, and its last
backward goes back through them. k is 1, divided by the number of chunks of a stage; where gradients of the weights may
be put off, only the forward is sure to lie in between. What data parallelism, the optimizer and stragglers add is left out.
A coarser bound needs one simulation for all numbers of stages: the busiest of p stages does at least 1/p of the work.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import gcd

from llmprof.errors import LlmprofError
from llmprof.extrapolate.forecast import Forecaster
from llmprof.extrapolate.schedule import SPLIT_BACKWARD
from llmprof.schema.layout import Layout

_NOT_OF_A_PASS = ("dp", "pp", "bubble", "optimizer", "input", "straggler")


@dataclass(frozen=True, slots=True)
class _Passes:
    """Busy seconds of each stage in one microbatch, and of its forward alone."""

    whole_s: tuple[float, ...]
    forward_s: tuple[float, ...]

    def bound_s(self, layout: Layout) -> float:
        """Least seconds of a step."""
        travelling = self.forward_s if layout.schedule in SPLIT_BACKWARD else self.whole_s
        before = best = 0.0
        for whole, way in zip(self.whole_s, travelling, strict=True):
            best = max(best, layout.accum * whole + before)
            before += way / layout.vpp
        return best


class Bounds:
    """Bounds of any number of layouts; each class is simulated once.

    Args:
        forecaster: of the workload on the cluster, without draws.
        seq: tokens per sequence; None for the captured length.
    """

    def __init__(self, forecaster: Forecaster, *, seq: int | None = None) -> None:
        self._forecaster, self._seq = forecaster, seq
        self._passes: dict[Layout, _Passes | LlmprofError] = {}

    @property
    def classes(self) -> int:
        """How many classes were simulated."""
        return len(self._passes)

    def coarse_s(self, layout: Layout) -> float:
        """Least seconds of a step of a layout whose `accum` is final, from its work alone.

        Raises:
            LlmprofError: why no layout of its class can be forecast.
        """
        passes = self._of(probe_of(layout, pp=1))
        return layout.accum * passes.whole_s[0] / layout.pp

    def bound_s(self, layout: Layout) -> float:
        """The same from its stages too; never below `coarse_s`.

        Raises:
            LlmprofError: why no layout of its class can be forecast.
        """
        return max(self.coarse_s(layout), self._of(probe_of(layout, pp=layout.pp)).bound_s(layout))

    def _of(self, probe: Layout) -> _Passes:
        found = self._passes.get(probe)
        if found is None:
            found = self._passes[probe] = self._simulate(probe)
        if isinstance(found, LlmprofError):
            raise found
        return found

    def _simulate(self, probe: Layout) -> _Passes | LlmprofError:
        try:
            simulation = self._forecaster.simulate(probe, global_batch=probe.global_batch, seq=self._seq)
        except LlmprofError as error:
            return error
        parts = [stage.clock.ledger().flat().parts() for stage in simulation.stages]
        return _Passes(
            tuple(sum(v for k, v in stage.items() if k not in _NOT_OF_A_PASS) for stage in parts),
            tuple(stage.get("forward", 0.0) for stage in parts),
        )


def probe_of(layout: Layout, *, pp: int) -> Layout:
    """The layout that stands for its class: one microbatch on as few replicas as its experts allow, over `pp` stages."""
    fewest = layout.ep // gcd(layout.ep, layout.cp)
    return replace(layout, dp=fewest, pp=pp, zero=0, shard=0, accum=1, schedule="1f1b", vpp=1)
