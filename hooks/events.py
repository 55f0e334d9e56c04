"""A stopped torch profiler in, normalised events out. The only reader of Kineto's and the event tree's field names."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from llmprof.schema.operators import Tensor, collective_kind

Scalar = int | float | bool | str | None

OPERATOR, COMPOSITE, SCOPE, NODE = "operator", "composite", "scope", "node"
"""Kinds of host events: a dispatched operator, one that only calls others, a named range, an autograd node."""

KERNEL, COPY, COLLECTIVE = "kernel", "copy", "collective"
"""Kinds of device events."""

GLOO_PREFIX = "gloo:"
"""Names of the ranges that gloo opens on its own threads."""

COMMUNICATION_RECORD = "record_param_comms"
"""Name of the event that carries a backend's metadata about a collective."""

COLLECTIVE_NAME, GROUP_SIZE, GROUP_DESCRIPTION = "Collective name", "Group size", "Process Group Description"
INPUT_ELEMENTS, OUTPUT_ELEMENTS, ELEMENT_TYPE = "In msg nelems", "Out msg nelems", "dtype"
"""Keys of a collective's metadata."""

_ACTIVITIES = ("kernel", "concurrent_kernel", "gpu_memcpy", "gpu_memset")
_WAITS = ("cudaDeviceSynchronize", "cudaStreamSynchronize", "cudaEventSynchronize")
_NODE_PREFIX = "autograd::engine::evaluate_function: "
_NOT_OPERATORS = (
    "autograd::",
    "torch::",
    "torch.distributed.",
    "profiler::",
    "prim::",
    "##",
    "FSDP::",
    "PP:",
)
_MAX_SEQUENCE = 1 << 62


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceEvent:
    """One activity of an accelerator: a kernel, a copy or a collective's kernel; times as in `Event`."""

    name: str
    kind: str
    start_us: float
    duration_us: float
    stream: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Event:
    """One host event and what it encloses on its thread.

    Attributes:
        name: as recorded, without overload; a node has the name of the backward function.
        kind: OPERATOR, COMPOSITE, SCOPE or NODE.
        start_us, duration_us: on the profiler's clock, relative to the start of the window.
        thread: the profiler's number of the thread.
        inputs, scalars: tensor inputs in order, and the plain values among the inputs.
        wrapper: an input is a tensor subclass without storage (DTensor): the real work is below.
        transposed: the first matrix among the inputs is a transposed view; None when strides do not tell.
        sequence: autograd's number of the node that the operator creates or the node has; -1 for none.
        forward_thread: for a node, the thread that created it; 0 when not known.
        metadata: what the backend told about a collective.
        device: activities that this event launched itself.
        children: enclosed events in order of start; empty below an operator that is a row of its own.
    """

    name: str
    kind: str
    start_us: float
    duration_us: float
    thread: int
    inputs: tuple[Tensor, ...] = ()
    scalars: tuple[Scalar, ...] = ()
    wrapper: bool = False
    transposed: bool | None = None
    sequence: int = -1
    forward_thread: int = 0
    metadata: Mapping[str, str] = field(default_factory=dict)
    device: tuple[DeviceEvent, ...] = ()
    children: tuple[Event, ...] = ()

    @property
    def end_us(self) -> float:
        return self.start_us + self.duration_us


@dataclass(frozen=True, kw_only=True, slots=True)
class Events:
    """All that a window recorded.

    Attributes:
        roots: host events without a parent, in order of start.
        orphans: device activities that no recorded host event launched.
        waits_us: (start, end) of the calls in which the host waited for the device.
    """

    roots: tuple[Event, ...]
    orphans: tuple[DeviceEvent, ...] = ()
    waits_us: tuple[tuple[float, float], ...] = ()


LookThrough = Callable[[str, str], bool]
"""(name, overload) -> True when an operator's children are the rows, not the operator itself."""


def read(results: Any, *, look_through: LookThrough, device: str) -> Events:
    """Turns a profiler's raw results into events.

    Args:
        results: the profiler's Kineto results (see `llmprof.hooks.private.kineto_results`).
        look_through: tells which operators to descend into.
        device: "cpu", or the accelerator whose activities to link to the operators that launched them.
    """
    roots = results.experimental_event_tree()
    origin_ns = min((root.start_time_ns for root in roots), default=0)
    reader = _TreeReader(origin_ns, look_through)
    if device != "cpu" or len({root.start_tid for root in roots}) > 1:
        reader.link(results.events(), device)
    events = [event for root in roots if (event := reader.read(root)) is not None]
    events.sort(key=lambda event: event.start_us)
    return Events(roots=tuple(events), orphans=tuple(reader.unclaimed()), waits_us=tuple(reader.waits_us))


class _TreeReader:
    def __init__(self, origin_ns: int, look_through: LookThrough) -> None:
        self._origin_ns = origin_ns
        self._look_through = look_through
        self._forward_threads: dict[int, int] = {}
        self._device: dict[int, list[DeviceEvent]] = {}
        self._metadata: dict[int, dict[str, str]] = {}
        self.waits_us: list[tuple[float, float]] = []

    def link(self, kineto_events: Iterable[Any], device: str) -> None:
        """Notes forward threads, collective metadata and device activities by the operator's correlation."""
        for event in kineto_events:
            if event.device_type().name == "CPU":
                self._link_host(event)
            elif event.device_type().name.lower() == device and _is_activity(event):
                activity = DeviceEvent(
                    name=event.name(),
                    kind=device_kind(event.name()),
                    start_us=self._since_origin_us(event.start_ns()),
                    duration_us=event.duration_ns() / 1e3,
                    stream=event.device_resource_id(),
                )
                self._device.setdefault(event.linked_correlation_id(), []).append(activity)

    def _link_host(self, event: Any) -> None:
        if event.fwd_thread_id():
            self._forward_threads[event.correlation_id()] = event.fwd_thread_id()
        name = event.name()
        if name == COMMUNICATION_RECORD:
            self._metadata[event.correlation_id()] = dict(event.extra_meta())
        elif name in _WAITS:
            begin_us = self._since_origin_us(event.start_ns())
            self.waits_us.append((begin_us, begin_us + event.duration_ns() / 1e3))

    def _since_origin_us(self, time_ns: int) -> float:
        return (time_ns - self._origin_ns) / 1e3

    def unclaimed(self) -> list[DeviceEvent]:
        """Device activities whose operator was not in the tree."""
        return [event for events in self._device.values() for event in events]

    def read(self, node: Any) -> Event | None:
        fields = node.extra_fields
        if type(fields).__name__ != "_ExtraFields_TorchOp":
            return None
        name, kind = _name_and_kind(node.name, fields.scope.name)
        details = _NO_INPUTS
        if kind == OPERATOR or name.startswith(GLOO_PREFIX):
            details = _inputs(fields.inputs)
            if node.overload_name == "out":  # the last tensor is the result, not an input
                details = details._replace(inputs=details.inputs[:-1])
        composite = kind == OPERATOR and (details.wrapper or self._look_through(name, node.overload_name))
        device = self._device.pop(node.correlation_id, [])
        children: tuple[Event, ...] = ()
        if kind != OPERATOR or composite:
            children = tuple(c for child in node.children if (c := self.read(child)) is not None)
        elif self._device:
            device = [*device, *self._claimed(node.children)]
        # The inner event of a node repeats its number without creating anything.
        sequence = -1 if fields.scope.name == "BACKWARD_FUNCTION" else fields.sequence_number
        return Event(
            name=name,
            kind=COMPOSITE if composite else kind,
            start_us=self._since_origin_us(node.start_time_ns),
            duration_us=node.duration_time_ns / 1e3,
            thread=node.start_tid,
            **details._asdict(),
            sequence=sequence if 0 <= sequence < _MAX_SEQUENCE else -1,
            forward_thread=self._forward_threads.get(node.correlation_id, 0),
            metadata=self._collective_metadata(node),
            device=tuple(device),
            children=children,
        )

    def _claimed(self, nodes: Sequence[Any]) -> list[DeviceEvent]:
        claimed: list[DeviceEvent] = []
        pending = list(nodes)
        while pending:
            node = pending.pop()
            claimed += self._device.pop(node.correlation_id, ())
            pending.extend(node.children)
        return claimed

    def _collective_metadata(self, node: Any) -> dict[str, str]:
        if not self._metadata or not (collective_kind(node.name) or node.name == COMMUNICATION_RECORD):
            return {}
        pending = [node]
        while pending:
            current = pending.pop()
            if current.correlation_id in self._metadata:
                return self._metadata[current.correlation_id]
            pending.extend(current.children)
        return {}


def _is_activity(event: Any) -> bool:
    """True for kernels and copies, not for ranges that are repeated on the device's timeline."""
    activity_type = getattr(event, "activity_type", None)
    if activity_type is None:
        return not event.is_user_annotation()
    return str(activity_type()) in _ACTIVITIES


def _name_and_kind(name: str, scope: str) -> tuple[str, str]:
    if name.startswith(_NODE_PREFIX):
        return name[len(_NODE_PREFIX) :], NODE
    if scope == "FUNCTION" and "::" in name and not name.startswith(_NOT_OPERATORS):
        return name, OPERATOR
    return name, SCOPE


class _Inputs(NamedTuple):
    inputs: tuple[Tensor, ...] = ()
    scalars: tuple[Scalar, ...] = ()
    wrapper: bool = False
    transposed: bool | None = None


_NO_INPUTS = _Inputs()


def _inputs(recorded: Sequence[Any]) -> _Inputs:
    tensors: list[Tensor] = []
    scalars: list[Scalar] = []
    wrapper, groups = False, 0
    transposed: bool | None = None
    for value in recorded:
        if hasattr(value, "sizes"):
            tensors.append(_tensor(value))
            wrapper = wrapper or _without_storage(value)
            strides = value.strides  # none of a sparse tensor
            if transposed is None and len(value.sizes) == len(strides) == 2 and strides[0] != strides[1]:
                transposed = strides[0] == 1
        elif isinstance(value, list | tuple):
            if value and hasattr(value[0], "sizes"):
                groups += 1
                tensors.extend(_tensor(item, groups) for item in value)
                wrapper = wrapper or any(map(_without_storage, value))
        elif isinstance(value, int | float | str):
            scalars.append(value)
    return _Inputs(tuple(tensors), tuple(scalars), wrapper, transposed)


def _without_storage(value: Any) -> bool:
    return value.storage_data_ptr is None and 0 not in value.sizes


def _tensor(value: Any, group: int = 0) -> Tensor:
    return Tensor(tuple(value.sizes), str(value.dtype).removeprefix("torch."), group)


def device_kind(name: str) -> str:
    """Kind of a device activity by its name."""
    lowered = name.lower()
    if lowered.startswith(("nccl", "rccl")):
        return COLLECTIVE
    return COPY if lowered.startswith(("memcpy", "memset")) else KERNEL
