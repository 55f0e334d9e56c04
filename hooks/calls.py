"""What attribution makes of events: calls of operators and collectives with an owner, and named intervals."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from llmprof.hooks.events import DeviceEvent, Scalar
from llmprof.schema.operators import Tensor, family

OPTIMIZER, INPUT = "optimizer", "input"
"""Owners that are no modules."""


class Owner(NamedTuple):
    """Who runs an operator: a module's FQN, "optimizer" or "input".

    `attributed` is False when it is known that a module below did; `outside` is True beyond every module of
    the model.
    """

    module: str
    attributed: bool = True
    outside: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Call:
    """One call of an operator or a collective.

    Attributes:
        kind: collective kind ("all_reduce", ..., "wait"), "" for an operator.
        start_us, duration_us: host time on `thread`.
        fsdp: it ran inside a range of FSDP.
    """

    op: str
    owner: Owner
    phase: str
    thread: int
    start_us: float
    duration_us: float
    kind: str = ""
    inputs: tuple[Tensor, ...] = ()
    scalars: tuple[Scalar, ...] = ()
    metadata: tuple[tuple[str, str], ...] = ()
    device: tuple[DeviceEvent, ...] = ()
    fsdp: bool = False

    @property
    def end_us(self) -> float:
        return self.start_us + self.duration_us


class Range(NamedTuple):
    """A named interval of one thread."""

    name: str
    start_us: float
    end_us: float
    thread: int
    inputs: tuple[Tensor, ...] = ()


@dataclass(kw_only=True)
class Attribution:
    """What `attribute` found; all times in microseconds on the profiler's clock.

    Attributes:
        calls: operators and collectives on the main and autograd threads, in order of start.
        marks: (step index, time) of every step boundary.
        inputs: intervals in which the main thread waited for the data loader.
        transfers: what the communication backend's own threads did.
        backward, optimizer: intervals of the backward nodes and the optimizer steps.
        wrapper_us: host cost of each operator on tensor subclasses (DTensor), beyond the local operators.
        threads: name of each thread that runs model code.
        waits_us: (start, end) of the calls in which the host waited for the device.
        compiled_regions: how often a compiled region ran; there are no modules inside.
    """

    calls: list[Call] = field(default_factory=list)
    marks: list[tuple[int, float]] = field(default_factory=list)
    inputs: list[Range] = field(default_factory=list)
    transfers: list[Range] = field(default_factory=list)
    backward: list[Range] = field(default_factory=list)
    optimizer: list[Range] = field(default_factory=list)
    wrapper_us: list[float] = field(default_factory=list)
    threads: dict[int, str] = field(default_factory=dict)
    waits_us: list[tuple[float, float]] = field(default_factory=list)
    compiled_regions: int = 0


def attributes(op: str, scalars: Sequence[Scalar]) -> frozenset[str]:
    """What changes an operator's cost beside shapes: "causal" for attention.

    In every attention operator the flag follows the dropout probability, its first floating-point argument.
    """
    if family(op) != "attention":
        return frozenset()
    after_dropout = False
    for value in scalars:
        if isinstance(value, bool):
            if after_dropout:
                return frozenset({"causal"}) if value else frozenset()
        elif isinstance(value, float):
            after_dropout = True
    return frozenset()
