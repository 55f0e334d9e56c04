"""Time of one stage's forward, backward and end of step: its layers and data-parallel traffic run on its streams."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import numpy as np

from llmprof.extrapolate.buckets import Bucket, Reducer, bucket_copies, gradient_buckets, gradient_bytes
from llmprof.extrapolate.cost import Cost
from llmprof.extrapolate.fsdp import Gatherer, Unit, fsdp_unit, scatter
from llmprof.extrapolate.layers import LayerSegments
from llmprof.extrapolate.machine import Machine, Segment, Stretch
from llmprof.extrapolate.partition import Parameter, Plan, held_bytes, parameter_bytes
from llmprof.extrapolate.schedule import Backward, Forward
from llmprof.extrapolate.simulate import Call, Pass, Streams


def equal_stages(plan: Plan, machine: Machine, segments: dict[str, LayerSegments]) -> list[Stage]:
    """All stages of a plan; those with the same layers and the same part in ties share their passes."""
    first_of: dict[tuple[object, ...], Stage] = {}
    stages = []
    for index, layers in enumerate(plan.stages):
        stage = Stage(index=index, plan=plan, machine=machine, segments=segments)
        alike = first_of.setdefault((layers, index == 0, stage.holds_tied), stage)
        stages.append(replace(alike, index=index))
    return stages


@dataclass(slots=True)
class Stage:
    """One pipeline stage on one rank.

    Attributes:
        segments: of each kind of layer.
        gathers: for each instruction, whether sharded blocks must be gathered first.
        microbatches: of the step that is run.
        record: keep spans.
    """

    index: int
    plan: Plan
    machine: Machine
    segments: dict[str, LayerSegments]
    gathers: dict[Forward | Backward, bool] = field(default_factory=dict)
    microbatches: int = 1
    record: bool = True
    _passes: dict[tuple[object, ...], Pass] = field(default_factory=dict)
    _units: dict[str, Unit] = field(default_factory=dict)
    _stretches: dict[tuple[str, str, bool], Stretch] = field(default_factory=dict)

    @property
    def holds_tied(self) -> bool:
        """Whether it holds a copy of a parameter that is tied over stages."""
        return bool(self.plan.tied) and self.index in (0, self.plan.layout.pp - 1)

    @property
    def names(self) -> list[str]:
        """Layers in forward order."""
        return [name for name, count in self.plan.stages[self.index] for _ in range(count)]

    def run(self, instruction: Forward | Backward) -> Pass:
        """The pass behind an instruction; equal passes are simulated once.

        Gradients are reduced with the last microbatch; sharded gradients (zero=2, and zero=3 outside a
        pipeline) with every one.
        """
        layout = self.plan.layout
        pipelined = layout.pp > 1
        first = instruction.microbatch == 0
        gather = layout.zero == 3 and (not pipelined or self.gathers[instruction])
        if isinstance(instruction, Forward):
            root = layout.zero == 3 and (first or not pipelined)
            key: tuple[object, ...] = ("forward", gather, root)
            if key not in self._passes:
                self._passes[key] = self._forward(gather=gather, root=root)
        else:
            last = instruction.microbatch == self.microbatches - 1
            sync = last or layout.zero == 2 or (layout.zero == 3 and not pipelined)
            key = ("backward", gather, not first, sync)
            if key not in self._passes:
                self._passes[key] = self._backward(gather=gather, accumulate=not first, sync=sync)
        return self._passes[key]

    def _forward(self, *, gather: bool, root: bool) -> Pass:
        streams = self._streams()
        if root:
            Gatherer(self.machine, streams, [self._root_unit()]).use()
        if not gather:
            for name, count in self.plan.stages[self.index]:
                self.machine.repeat(streams, self._stretch(name, "forward"), count)
            return self.machine.finish(streams)
        gatherer = self._gatherer(streams, self.names)
        for name in self.names:
            if self._is_block(name):
                gatherer.use()
            self.machine.repeat(streams, self._stretch(name, "forward"))
        return self.machine.finish(streams)

    def _backward(self, *, gather: bool, accumulate: bool, sync: bool) -> Pass:
        streams, layout = self._streams(), self.plan.layout
        reduces = sync and layout.zero < 3 and layout.dp > 1
        if not gather and not reduces and not (sync and layout.zero == 3):
            for name, count in reversed(self.plan.stages[self.index]):
                stretch = self._stretch(name, "recompute and backward", accumulate=accumulate)
                self.machine.repeat(streams, stretch, count)
            return self.machine.finish(streams)
        order = self.names[::-1]
        gatherer = self._gatherer(streams, order if gather else [])
        gatherer.prefetch()
        reducer = Reducer(self.machine, streams, self.plan, self._buckets(order) if reduces else ())
        kind = "backward and copies" if reduces and layout.zero == 0 else "backward"
        for position, name in enumerate(order):
            is_block = self._is_block(name)
            if gather and is_block:
                gatherer.use()
            if self._recomputes(name):
                self.machine.repeat(streams, self._stretch(name, "recompute"))
            started = streams.now()
            self.machine.repeat(streams, self._stretch(name, kind, accumulate=accumulate))
            if sync and layout.zero == 3 and is_block:
                scatter(self._unit(name, self._held(name)), self.machine, streams)
            reducer.layer_done(position, started)
        if sync and layout.zero == 3:
            scatter(self._root_unit(), self.machine, streams)
        if layout.pp == 1:
            # torch's backward ends when its reductions have; in a pipeline other stages' work goes on beside them
            streams.wait(streams.now("dp"), "dp")
        return self.machine.finish(streams)

    def _stretch(self, name: str, kind: str, *, accumulate: bool = False) -> Stretch:
        """What one layer runs on the main stream in a pass; equal ones are composed once."""
        key = (name, kind, accumulate)
        if key not in self._stretches:
            self._stretches[key] = Stretch.of(*self._steps(name, kind, accumulate=accumulate))
        return self._stretches[key]

    def _steps(self, name: str, kind: str, *, accumulate: bool) -> Iterator[tuple[Segment, str, str]]:
        segments = self.segments[name]
        if kind == "forward":
            yield segments.forward, f"{name} forward", "forward"
        if "recompute" in kind and self._recomputes(name):
            yield segments.recompute, f"{name} recompute", "recompute"
        if "backward" in kind:
            yield segments.backward, f"{name} backward", "backward"
            if accumulate:
                yield segments.accumulate, "", ""
        if "copies" in kind:
            yield bucket_copies(self._trainable(name), self.machine), "", ""
        if kind == "optimizer":
            yield segments.optimizer, f"{name} optimizer", "optimizer"

    def end_of_step(self) -> Pass:
        """What follows the last backward: copies out of buckets, tied gradients, optimizer, updated parameters."""
        streams, machine, layout = self._streams(), self.machine, self.plan.layout
        if layout.zero == 0 and layout.dp > 1:
            for name, count in self.plan.stages[self.index]:
                machine.repeat(streams, self._stretch(name, "copies"), count)
        if self.holds_tied:
            segment = machine.segment({"pp": self._tied_reduction()})
            machine.run(streams, segment, "reduce tied gradients", "communication")
        for name, count in self.plan.stages[self.index]:
            machine.repeat(streams, self._stretch(name, "optimizer"), count)
        if layout.zero in (1, 2):
            working = self.plan.precision.activation if self.plan.precision.mixed else ""
            size = held_bytes(self.plan, self.index, working)
            segment = machine.segment({"dp": machine.prices.collective("all_gather", size, "shard")})
            machine.run(streams, segment, "all_gather parameters", "communication")
        return machine.finish(streams)

    def _tied_reduction(self) -> Cost:
        prices = self.machine.prices
        return prices.call(
            Call("all_reduce", "pp", 2, prices.group["pp"][1], parameter_bytes(self.plan.tied))
        )

    def _streams(self) -> Streams:
        return Streams(zero=np.zeros(1 + self.machine.factors.draws), record=self.record)

    def _buckets(self, order: list[str]) -> tuple[Bucket, ...]:
        sizes = {name: tuple(map(gradient_bytes, self._trainable(name))) for name in set(order)}
        return tuple(gradient_buckets([sizes[name] for name in order]))

    def _held(self, name: str) -> tuple[Parameter, ...]:
        return self.plan.held(self.index, name)

    def _trainable(self, name: str) -> tuple[Parameter, ...]:
        return tuple(p for p in self._held(name) if p.trainable)

    def _is_block(self, name: str) -> bool:
        return self.plan.layers[name].kind == "block"

    def _recomputes(self, name: str) -> bool:
        return self._is_block(name) and self.plan.layout.recompute == "full"

    def _gatherer(self, streams: Streams, names: list[str]) -> Gatherer:
        units = [self._unit(n, self._held(n)) for n in names if self._is_block(n)]
        return Gatherer(self.machine, streams, units)

    def _root_unit(self) -> Unit:
        held = tuple(p for name in self.names if not self._is_block(name) for p in self._held(name))
        return self._unit("root", held)

    def _unit(self, name: str, parameters: tuple[Parameter, ...]) -> Unit:
        if name not in self._units:
            self._units[name] = fsdp_unit(parameters, self.plan, self.machine)
        return self._units[name]
