"""How the target runs work: costs become segments, segments run on the main stream or beside it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from llmprof.extrapolate.calibration import evidence_of
from llmprof.extrapolate.cost import Cost, Prices
from llmprof.extrapolate.ledger import Calls, Ledger, Parts, add_into
from llmprof.extrapolate.simulate import MAIN, Array, Pass, Span, Streams
from llmprof.extrapolate.uncertainty import Factors

HOST_SPREAD = 0.2
"""Spread of host time: one factor for all launches, assumed."""
INTERFERENCE = 0.08
"""Share of hidden communication time that is lost again on a GPU, where it shares memory and cores with the
computation beside it: assumed."""
INTERFERENCE_SPREAD = 0.5


@dataclass(frozen=True, kw_only=True, slots=True)
class Segment:
    """Work without a choice of order inside, sampled.

    Attributes:
        device_s, host_s: time on the device, and on the host to launch it.
        parts: owners of the nominal device time.
        evidence: the nominal device and host time by kind of evidence, assumed prices by class ("assumed:link").
        calls: its collectives.
    """

    device_s: Array
    host_s: Array
    parts: Parts
    evidence: Parts
    calls: Calls


class Round(NamedTuple):
    """Computation and messages that start together; what comes next waits for both.

    Attributes:
        part, axis: owners of the computation, and of what is left of the messages after it.
    """

    part: str
    axis: str
    compute: Cost
    messages: Cost


@dataclass(frozen=True, kw_only=True, slots=True)
class Stretch:
    """Segments that always run one after the other on the main stream, such as one layer's backward.

    Attributes:
        steps: the segments with their label and phase.
        device_s, host_s: sums over the segments.
        launched_s: when the device is done if it was free all the time and the host began at 0: it waits for launches.
        ledger: the segments.
    """

    steps: tuple[tuple[Segment, str, str], ...]
    device_s: Array
    host_s: Array
    launched_s: Array
    ledger: Ledger

    def alone_s(self, machine: Machine) -> Array:
        """Time of one run on a main stream that nothing else holds up."""
        return self.device_s + self.host_s if machine.cpu else np.maximum(self.device_s, self.launched_s)

    def launching(self, host_s: Array) -> Stretch:
        """The same work with further launches at its end, of work beside the main stream."""
        return replace(self, host_s=self.host_s + host_s)

    @classmethod
    def of(cls, *steps: tuple[Segment, str, str]) -> Stretch:
        """Put segments, at least one, in a row."""
        device = host = launched = steps[0][0].device_s * 0.0
        ledger = Ledger()
        for segment, _, _ in steps:
            start = np.maximum(launched, host)
            host = host + segment.host_s
            launched = np.maximum(start + segment.device_s, host)
            device = device + segment.device_s
            ledger.add(segment)
        return cls(steps=steps, device_s=device, host_s=host, launched_s=launched, ledger=ledger)


@dataclass(frozen=True, kw_only=True, slots=True)
class Machine:
    """How the target runs work.

    Attributes:
        cpu: host and device are one, so launching adds to the time; on a GPU it runs beside.
        serial_fsdp: gathering and scattering shards blocks the main stream (gloo on CPU).
    """

    prices: Prices
    factors: Factors
    cpu: bool
    serial_fsdp: bool

    def segment(self, costs: dict[str, Cost], rounds: Sequence[Round] = ()) -> Segment:
        """Costs by the part that owns them, and rounds of computation beside messages, as one piece of work."""
        device = np.zeros(1 + self.factors.draws)
        parts: Parts = {}
        for part, cost in costs.items():
            if cost.seconds:
                sampled = cost.sample(self.factors)
                device += sampled
                parts[part] = float(sampled[0])
        for each in rounds:
            device += self._round(each, parts)
        evidence: Parts = {}
        calls: Calls = {}
        host_s = 0.0
        for cost in (*costs.values(), *(cost for each in rounds for cost in (each.compute, each.messages))):
            host_s += cost.host_s
            add_into(calls, cost.calls)
            for (name, kind), seconds in cost.seconds.items():
                factor = f"{name}:{kind}"
                known = evidence_of(factor)
                evidence[known] = evidence.get(known, 0.0) + seconds * self.factors.nominal(factor)
        launches = f"host:{self.prices.operators.host_kind()}"
        host = host_s * self.factors.factor(launches, HOST_SPREAD)
        if self.cpu:
            add_into(evidence, {evidence_of(launches): float(host[0])})
        return Segment(device_s=device, host_s=host, parts=parts, evidence=evidence, calls=calls)

    def _round(self, each: Round, parts: Parts) -> Array:
        """Time of a round; what is left of the messages owns time. On a GPU hidden messages slow what hides them."""
        compute, messages = each.compute.sample(self.factors), each.messages.sample(self.factors)
        exposed = np.maximum(messages - compute, 0.0)
        if not self.cpu:
            exposed = exposed + self._interference(np.minimum(messages, compute))
        add_into(parts, {each.part: float(compute[0]), each.axis: float(exposed[0])})
        return compute + exposed

    def _interference(self, hidden_s: Array | float) -> Array:
        """Time that computation loses to communication beside it."""
        lost: Array = INTERFERENCE * hidden_s * self.factors.factor("interference", INTERFERENCE_SPREAD)
        return lost

    def run(self, streams: Streams, segment: Segment, label: str = "", phase: str = "") -> Array:
        """Run a segment on the main stream; returns when it ends. On a GPU the device may wait for its launch."""
        streams.ledger.add(segment)
        if self.cpu:
            if segment.host_s[0]:
                streams.ledger.give("host", float(segment.host_s[0]))
            return streams.run_main(segment.device_s + segment.host_s, label=label, phase=phase)
        launch = streams.now("host")
        launched = streams.run("host", segment.host_s)
        streams.wait(launch, "host")
        streams.run_main(segment.device_s, label=label, phase=phase)
        streams.wait(launched, "host")
        return streams.now()

    def repeat(self, streams: Streams, stretch: Stretch, times: int = 1) -> Array:
        """Run a stretch a number of times; returns when the last one ends.

        On a GPU one run is main' = max(main + D, host + L), host' = host + H with the stretch's device, launched and
        host times D, L and H; n runs are main' = max(main + n D, host + L + (n - 1) max(D, H)), host' = host + n H.
        """
        streams.ledger.add(stretch.ledger, times)
        start = streams.now()
        if self.cpu:
            end = start + times * (stretch.device_s + stretch.host_s)
        else:
            host = streams.now("host")
            slower = np.maximum(stretch.device_s, stretch.host_s) if times > 1 else 0.0
            end = np.maximum(
                start + times * stretch.device_s, host + stretch.launched_s + (times - 1) * slower
            )
            streams.clocks["host"] = host + times * stretch.host_s
        streams.clocks[MAIN] = end
        device = times * float(stretch.device_s[0])
        waited = float(end[0] - start[0]) - device
        if waited > 1e-12 * device:
            streams.ledger.give("host", waited)
        if streams.record:
            streams.spans.extend(self._spans(stretch, times, float(start[0]), float(end[0])))
        return end

    def _spans(self, stretch: Stretch, times: int, start_s: float, end_s: float) -> Iterator[Span]:
        """What the nominal run shows: the runs at even distances, waits for the host at the end of each."""
        each = (end_s - start_s) / times
        for i in range(times):
            at = start_s + i * each
            for segment, label, phase in stretch.steps:
                length = float(segment.device_s[0]) + (float(segment.host_s[0]) if self.cpu else 0.0)
                if label:
                    yield Span(MAIN, label, phase, at, length)
                at += length

    def beside(self, streams: Streams, segment: Segment, after: Sequence[Array], label: str) -> Array:
        """Run communication on the data-parallel stream once `after` is reached; returns when it ends."""
        streams.ledger.beside.append((segment, 1.0))
        if not self.cpu:
            streams.run("host", segment.host_s)
        return streams.run("dp", segment.device_s, after=after, label=label)

    def finish(self, streams: Streams) -> Pass:
        """Close a pass; on a GPU hidden communication has slowed the computation it hid behind."""
        if not self.cpu and "dp" in streams.clocks:
            end = float(streams.now()[0])
            exposed = streams.ledger.own.get("dp", 0.0) + max(0.0, float(streams.clocks["dp"][0]) - end)
            hidden = max(0.0, min(streams.busy_s - exposed, end))
            if hidden > 0:
                lost = self._interference(hidden)
                streams.run_main(lost, "dp")
                streams.delay("dp", lost)
        return streams.finish()
