"""How the target runs work: costs become segments, segments run on the main stream or beside it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from llmprof.extrapolate.calibration import evidence_of
from llmprof.extrapolate.cost import Cost, Prices
from llmprof.extrapolate.simulate import Array, Calls, Parts, Pass, Streams, add_into
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

    def segment(self, costs: dict[str, Cost]) -> Segment:
        """Costs by the part that owns them, as one piece of work."""
        device = self.factors.factor("none", 0.0) * 0.0
        total = Cost()
        parts: Parts = {}
        for part, cost in costs.items():
            sampled = cost.sample(self.factors)
            device = device + sampled
            if sampled[0]:
                parts[part] = parts.get(part, 0.0) + float(sampled[0])
            total = total.plus(cost)
        evidence: Parts = {}
        for (name, kind), seconds in total.seconds.items():
            factor = f"{name}:{kind}"
            add_into(evidence, {evidence_of(factor): seconds * self.factors.nominal(factor)})
        launches = f"host:{self.prices.operators.host_kind()}"
        host = total.host_s * self.factors.factor(launches, HOST_SPREAD)
        if self.cpu:
            add_into(evidence, {evidence_of(launches): float(host[0])})
        return Segment(device_s=device, host_s=host, parts=parts, evidence=evidence, calls=total.calls)

    def run(self, streams: Streams, segment: Segment, label: str = "", phase: str = "") -> Array:
        """Run a segment on the main stream; returns when it ends. On a GPU the device may wait for its launch."""
        _account(streams, segment)
        if self.cpu:
            parts = segment.parts
            if segment.host_s[0]:
                parts = {**parts, "host": parts.get("host", 0.0) + float(segment.host_s[0])}
            return streams.run_main(segment.device_s + segment.host_s, parts, label=label, phase=phase)
        launch = streams.now("host")
        launched = streams.run("host", segment.host_s)
        streams.wait(launch, "host")
        streams.run_main(segment.device_s, segment.parts, label=label, phase=phase)
        streams.wait(launched, "host")
        return streams.now()

    def beside(self, streams: Streams, segment: Segment, after: Sequence[Array], label: str) -> Array:
        """Run communication on the data-parallel stream once `after` is reached; returns when it ends."""
        _account(streams, segment)
        if not self.cpu:
            streams.run("host", segment.host_s)
        return streams.run("dp", segment.device_s, after=after, label=label)

    def finish(self, streams: Streams) -> Pass:
        """Close a pass; on a GPU hidden communication has slowed the computation it hid behind."""
        if not self.cpu and "dp" in streams.clocks:
            end = float(streams.now()[0])
            busy = sum(s.duration_s for s in streams.spans if s.stream == "dp")
            exposed = streams.parts.get("dp", 0.0) + max(0.0, float(streams.clocks["dp"][0]) - end)
            hidden = max(0.0, min(busy - exposed, end))
            if hidden > 0:
                lost = INTERFERENCE * hidden * self.factors.factor("interference", INTERFERENCE_SPREAD)
                streams.run_main(lost, {"dp": float(lost[0])})
                streams.delay("dp", lost)
        return streams.finish()


def _account(streams: Streams, segment: Segment) -> None:
    add_into(streams.evidence, segment.evidence)
    add_into(streams.calls, segment.calls)
