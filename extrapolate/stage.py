"""Time of one stage's forward, backward and end of step: its layers and data-parallel traffic run on its streams."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from llmprof.extrapolate.buckets import (
    BucketKind,
    Reducer,
    bucket_copies,
    bucket_reduction,
    gradient_bytes,
    stage_buckets,
)
from llmprof.extrapolate.cost import Cost
from llmprof.extrapolate.fsdp import Gatherer, Unit, fsdp_unit, run_equal, scatter
from llmprof.extrapolate.graph import Kind
from llmprof.extrapolate.groups import COMMON, EXPERTS
from llmprof.extrapolate.layers import LayerPricer, LayerSegments
from llmprof.extrapolate.ledger import Call
from llmprof.extrapolate.machine import Machine, Segment, Stretch
from llmprof.extrapolate.partition import Plan, held_bytes
from llmprof.extrapolate.simulate import Array, Pass, Streams
from llmprof.extrapolate.split import Names
from llmprof.extrapolate.work import Parameter, parameter_bytes


def equal_stages(
    plan: Plan, machine: Machine, pricer: LayerPricer, segments: dict[str, LayerSegments], *, record: bool
) -> list[Stage]:
    """All stages of a plan; those with the same layers and the same part in ties are one.

    Args:
        record: keep spans.
    """
    found: dict[tuple[object, ...], Chunk] = {}
    last = len(plan.stages) - 1

    def one(index: int, layers: Names) -> Chunk:
        key = (layers, index == 0, bool(plan.tied) and index in (0, last))
        if key not in found:
            found[key] = Chunk(
                index=index,
                layers=layers,
                plan=plan,
                machine=machine,
                pricer=pricer,
                segments=segments,
                record=record,
            )
        return found[key]

    return [
        Stage(
            chunks=tuple(one(index, chunk) for chunk in plan.virtual[index :: len(plan.stages)]),
            whole=one(index, layers),
        )
        for index, layers in enumerate(plan.stages)
    ]


@dataclass(frozen=True, slots=True)
class Stage:
    """One pipeline stage on one rank: its virtual stages, and all its layers as one for what they do together."""

    chunks: tuple[Chunk, ...]
    whole: Chunk

    def run(self, kind: Kind) -> Pass:
        """The pass of a kind."""
        return self.chunks[kind.chunk].run(kind)

    def end_of_step(self) -> Pass:
        """What follows the last backward: copies out of buckets, tied gradients, optimizer, updated parameters."""
        return self.whole.end_of_step()


@dataclass(slots=True)
class Chunk:
    """Layers of one virtual stage on one rank.

    Attributes:
        index: of its stage, or of the first of those that are equal to it.
        layers: in forward order, equal ones together.
        pricer: what layouts share.
        segments: of each kind of layer.
        record: keep spans.
    """

    index: int
    layers: Names
    plan: Plan
    machine: Machine
    pricer: LayerPricer
    segments: dict[str, LayerSegments]
    record: bool = True
    _passes: dict[tuple[object, ...], Pass] = field(default_factory=dict)
    _units: dict[str, Unit] = field(default_factory=dict)
    _copied: dict[str, Segment] = field(default_factory=dict)
    _stretches: dict[tuple[str, str, bool], Stretch] = field(default_factory=dict)

    @property
    def holds_tied(self) -> bool:
        """Whether it holds a copy of a parameter that is tied over stages."""
        return bool(self.plan.tied) and self.index in (0, self.plan.layout.pp - 1)

    def run(self, kind: Kind) -> Pass:
        """The pass of a kind; equal passes are simulated once.

        Gradients are reduced with the last microbatch; sharded gradients (zero=2, and zero=3 outside a
        pipeline) with every one.
        """
        layout = self.plan.layout
        pipelined = layout.pp > 1
        gather = layout.zero == 3 and (not pipelined or kind.gather)
        if kind.phase == "forward":
            root = layout.zero == 3 and (kind.first or not pipelined)
            key: tuple[object, ...] = ("forward", gather, root)
            if key not in self._passes:
                self._passes[key] = self._forward(gather=gather, root=root)
        else:
            makes = kind.phase != "input"
            sync = makes and (kind.last or layout.zero == 2 or (layout.zero == 3 and not pipelined))
            accumulate = makes and not kind.first
            key = (kind.phase, gather, accumulate, sync and (layout.replicas > 1 or layout.zero == 3))
            if key not in self._passes:
                work = "weight" if kind.phase == "weight" else f"recompute and {kind.phase}"
                run = self._sharded_backward if layout.zero == 3 else self._backward
                self._passes[key] = run(work, gather=gather, accumulate=accumulate, sync=sync)
        return self._passes[key]

    def _forward(self, *, gather: bool, root: bool) -> Pass:
        streams = self._streams()
        if root:
            Gatherer(self.machine, streams, [self._root_unit()]).use()
        gatherer = self._gatherer(streams, self.layers if gather else ())
        for name, count in self.layers:
            stretch = self._stretch(name, "forward")
            if not gather:
                self.machine.repeat(streams, stretch, count)
                continue

            def one(name: str = name, stretch: Stretch = stretch) -> None:
                if self._is_block(name):
                    gatherer.use()
                self.machine.repeat(streams, stretch)

            run_equal(streams, gatherer, count, one)
        return self.machine.finish(streams)

    def _backward(self, work: str, *, gather: bool, accumulate: bool, sync: bool) -> Pass:
        streams, layout = self._streams(), self.plan.layout
        order = self.layers[::-1]
        reduces = sync and layout.replicas > 1
        kind = f"{work} and copies" if reduces and layout.zero == 0 else work
        reducer = self._reducer(order) if reduces else None
        for run, (name, count) in enumerate(order):
            stretch = self._stretch(name, kind, accumulate=accumulate)
            launches = reducer.launches_s(run, count) if reducer else None
            started = streams.now()
            ended = self.machine.repeat(
                streams, stretch if launches is None else stretch.launching(launches), count
            )
            if reducer:
                reducer.row_done(count, started, ended, share=self._backward_share(name, work, stretch))
        if reducer:
            reducer.run(streams)
        if layout.pp == 1:
            # torch's backward ends when its reductions have; in a pipeline other stages' work goes on beside them
            streams.wait(streams.now("dp"), "dp")
        return self.machine.finish(streams)

    def _backward_share(self, name: str, work: str, stretch: Stretch) -> Array | float:
        """Share of a layer's recomputation and backward that is backward."""
        if "recompute" not in work or not self._recomputes(name):
            return 1.0
        again = self._stretch(name, "recompute")
        return 1.0 - again.alone_s(self.machine) / stretch.alone_s(self.machine)

    def _sharded_backward(self, work: str, *, gather: bool, accumulate: bool, sync: bool) -> Pass:
        streams = self._streams()
        order = self.layers[::-1]
        gatherer = self._gatherer(streams, order if gather else ())
        gatherer.prefetch()
        for name, count in order:
            stretch = self._stretch(name, work, accumulate=accumulate)
            if not gather and not sync:
                self.machine.repeat(streams, stretch, count)
                continue

            def one(name: str = name, stretch: Stretch = stretch) -> None:
                if gather and self._is_block(name):
                    gatherer.use()
                self.machine.repeat(streams, stretch)
                if sync and self._is_block(name):
                    scatter(self._unit(name, self._held(name)), self.machine, streams)

            run_equal(streams, gatherer, count, one)
        if sync:
            scatter(self._root_unit(), self.machine, streams)
        if self.plan.layout.pp == 1:
            # torch's backward ends when its reductions have; in a pipeline other stages' work goes on beside them
            streams.wait(streams.now("dp"), "dp")
        return self.machine.finish(streams)

    def _stretch(self, name: str, kind: str, *, accumulate: bool = False) -> Stretch:
        """What one layer runs on the main stream in a pass; equal ones are composed once."""
        key = (name, kind, accumulate)
        if key not in self._stretches:
            self._stretches[key] = self.pricer.stretch(*self._steps(name, kind, accumulate=accumulate))
        return self._stretches[key]

    def _copies(self, name: str) -> Segment:
        """Copies of a layer's gradients into or out of the buckets."""
        if name not in self._copied:
            self._copied[name] = bucket_copies(self._trainable(name), self.machine)
        return self._copied[name]

    def _steps(self, name: str, kind: str, *, accumulate: bool) -> Iterator[tuple[Segment, str, str]]:
        segments = self.segments[name]
        if kind == "forward":
            yield segments.forward, f"{name} forward", "forward"
        if "recompute" in kind and self._recomputes(name):
            yield segments.recompute, f"{name} recompute", "recompute"
        if "backward" in kind:
            yield segments.backward, f"{name} backward", "backward"
        if "input" in kind and segments.input:
            yield segments.input, f"{name} gradient of input", "backward"
        if "weight" in kind and segments.weight:
            yield segments.weight, f"{name} gradient of weights", "backward"
        if accumulate and segments.accumulate:
            yield segments.accumulate, "", ""
        if "copies" in kind:
            yield self._copies(name), "", ""
        if kind == "optimizer":
            yield segments.optimizer, f"{name} optimizer", "optimizer"

    def end_of_step(self) -> Pass:
        """See `Stage`."""
        key = ("end",)
        if key not in self._passes:
            self._passes[key] = self._end_of_step()
        return self._passes[key]

    def _end_of_step(self) -> Pass:
        streams, machine, layout = self._streams(), self.machine, self.plan.layout
        if layout.zero == 0 and layout.replicas > 1:
            for name, count in self.layers:
                machine.repeat(streams, self._stretch(name, "copies"), count)
        if self.holds_tied:
            segment = machine.segment({"pp": self._tied_reduction()})
            machine.run(streams, segment, "reduce tied gradients", "communication")
        for name, count in self.layers:
            machine.repeat(streams, self._stretch(name, "optimizer"), count)
        if layout.zero in (1, 2):
            working = self.plan.precision.activation if self.plan.precision.mixed else ""
            cost = Cost()
            for groups, experts in ((COMMON, False), (EXPERTS, True)):
                size = held_bytes(self.plan, self.index, working, experts=experts)
                cost.include(machine.prices.collective("all_gather", size, groups.shard))
            segment = machine.segment({"dp": cost})
            machine.run(streams, segment, "all_gather parameters", "communication")
        return machine.finish(streams)

    def _tied_reduction(self) -> Cost:
        prices = self.machine.prices
        return prices.call(
            Call("all_reduce", "pp", 2, prices.group["pp"][1], parameter_bytes(self.plan.tied))
        )

    def _streams(self) -> Streams:
        return Streams(zero=np.zeros(1 + self.machine.factors.draws), record=self.record)

    def _reducer(self, order: Names) -> Reducer:
        buckets = stage_buckets(
            tuple(
                (*gradient_bytes(self._trainable(name), self.plan.precision.gradients), count)
                for name, count in order
            )
        )
        plan, machine, group = self.plan, self.machine, self.machine.prices.group
        groups = (plan.layout.zero == 0, *(group[name] for name in (*COMMON, *EXPERTS)))

        def reduction(kind: BucketKind) -> Segment:
            return machine.segment({"dp": bucket_reduction(kind, plan, machine.prices)})

        segments = {
            kind: self.pricer.once(("bucket", kind, groups), partial(reduction, kind))
            for kind in buckets.kinds
        }
        return Reducer(machine, buckets, segments)

    def _held(self, name: str) -> tuple[Parameter, ...]:
        return self.plan.held(self.index, name)

    def _trainable(self, name: str) -> tuple[Parameter, ...]:
        return tuple(p for p in self._held(name) if p.trainable)

    def _is_block(self, name: str) -> bool:
        return self.plan.layers[name].kind == "block"

    def _recomputes(self, name: str) -> bool:
        return self._is_block(name) and self.plan.layout.recompute == "full"

    def _gatherer(self, streams: Streams, layers: Names) -> Gatherer:
        blocks = [(self._unit(n, self._held(n)), count) for n, count in layers if self._is_block(n)]
        return Gatherer(self.machine, streams, [unit for unit, count in blocks for _ in range(count)])

    def _root_unit(self) -> Unit:
        rest = [(name, count) for name, count in self.layers if not self._is_block(name)]
        return self._unit("root", tuple(p for name, count in rest for p in self._held(name) * count))

    def _unit(self, name: str, parameters: tuple[Parameter, ...]) -> Unit:
        if name not in self._units:
            self._units[name] = fsdp_unit(parameters, self.plan, self.machine)
        return self._units[name]
