"""Reads a Kineto JSON trace (as torch's `export_chrome_trace` writes it) into the recorder's events, for tests."""

from __future__ import annotations

import ast
import gzip
import json
from collections import defaultdict
from pathlib import Path
from typing import Any

from llmprof.hooks import private
from llmprof.hooks.attribute import STEP_SCOPE
from llmprof.hooks.events import COMPOSITE, NODE, OPERATOR, SCOPE, DeviceEvent, Event, Events, device_kind
from llmprof.schema.operators import Tensor

_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset", "Kernel", "Memcpy", "Memset")
_HOST = ("cpu_op", "user_annotation", "Operator")
_RUNTIME = ("cuda_runtime", "Runtime", "cuda_driver", "hip_runtime")
_NODE_PREFIX = "autograd::engine::evaluate_function: "
_DTYPES = {
    "float": "float32",
    "double": "float64",
    "long int": "int64",
    "int": "int32",
    "c10::BFloat16": "bfloat16",
}


def read_trace(path: Path) -> Events:
    """Events of a recorded trace, with a step mark at each ProfilerStep's start and the last one's end."""
    content = path.read_bytes()
    trace = json.loads(gzip.decompress(content) if path.suffix == ".gz" else content)
    raw = [event for event in trace["traceEvents"] if event.get("ph") == "X" and "dur" in event]
    origin = min(float(event["ts"]) for event in raw if event.get("cat") in _HOST)
    device = defaultdict(list)
    for event in raw:
        if event.get("cat") in _DEVICE:
            device[_correlation(event)].append(_activity(event, origin))
    by_thread = defaultdict(list)
    for event in raw:
        if event.get("cat") in _HOST + _RUNTIME:
            by_thread[int(event["tid"])].append(event)
    ordered = sorted(by_thread.values(), key=lambda events: -sum(map(_is_forward, events)))
    roots = [
        root
        for number, events in enumerate(ordered, 1)  # thread 1 ran most of the forward pass
        for root in _nest(events, number, origin, device)
    ]
    roots += _marks(raw, origin)
    orphans = [activity for activities in device.values() for activity in activities]
    return Events(roots=tuple(sorted(roots, key=lambda event: event.start_us)), orphans=tuple(orphans))


def _correlation(event: dict[str, Any]) -> int:
    return int(event.get("args", {}).get("correlation", -1))


def _is_forward(event: dict[str, Any]) -> bool:
    arguments = event.get("args", {})
    return "Sequence number" in arguments and not int(arguments.get("Fwd thread id", 0))


def _activity(event: dict[str, Any], origin: float) -> DeviceEvent:
    return DeviceEvent(
        name=event["name"],
        kind=device_kind(event["name"]),
        start_us=float(event["ts"]) - origin,
        duration_us=float(event["dur"]),
        stream=int(event.get("args", {}).get("stream", 0)),
    )


def _marks(raw: list[dict[str, Any]], origin: float) -> list[Event]:
    steps = sorted(
        {
            (float(e["ts"]), float(e["dur"]), int(e["name"].split("#")[1]))
            for e in raw
            if e["name"].startswith("ProfilerStep#") and e.get("cat") in _HOST
        }
    )
    times = [(ts, number) for ts, _, number in steps]
    if steps:
        times.append((steps[-1][0] + steps[-1][1], steps[-1][2] + 1))
    return [
        Event(name=f"{STEP_SCOPE}{number}", kind=SCOPE, start_us=ts - origin, duration_us=0.0, thread=1)
        for ts, number in times
    ]


def _nest(
    raw: list[dict[str, Any]], thread: int, origin: float, device: dict[int, list[DeviceEvent]]
) -> list[Event]:
    """Forest of one thread's events, by containment."""
    ordered = sorted(raw, key=lambda e: (float(e["ts"]), -float(e["dur"])))
    tree: list[tuple[dict[str, Any], list[Any]]] = []
    stack: list[tuple[float, list[Any]]] = []
    for event in ordered:
        start, end = float(event["ts"]), float(event["ts"]) + float(event["dur"])
        while stack and start >= stack[-1][0]:
            stack.pop()
        children: list[Any] = []
        (stack[-1][1] if stack else tree).append((event, children))
        stack.append((end, children))
    return [_event(node, thread, origin, device) for node in tree]


def _event(
    node: tuple[dict[str, Any], list[Any]], thread: int, origin: float, device: dict[int, list[DeviceEvent]]
) -> Event:
    raw, below = node
    arguments = raw.get("args", {})
    name = raw["name"]
    kind = SCOPE
    if name.startswith(_NODE_PREFIX):
        name, kind = name[len(_NODE_PREFIX) :], NODE
    elif (
        raw.get("cat") != "user_annotation"
        and "::" in name
        and not name.startswith(("autograd::", "torch::"))
    ):
        kind = COMPOSITE if private.is_composite(name, "", "cuda") else OPERATOR
    activities = device.pop(_correlation(raw), []) if raw.get("cat") in _RUNTIME else []
    if kind == OPERATOR:
        activities = activities + [a for child in below for a in _claimed(child, device)]
    sequence = int(arguments.get("Sequence number", -1))
    return Event(
        name=name,
        kind=kind,
        start_us=float(raw["ts"]) - origin,
        duration_us=float(raw["dur"]),
        thread=thread,
        inputs=_inputs(arguments),
        sequence=sequence if kind != SCOPE else -1,
        forward_thread=1 if kind == NODE and int(arguments.get("Fwd thread id", 0)) else 0,
        metadata={key: str(value) for key, value in arguments.items()}
        if "Collective name" in arguments
        else {},
        device=tuple(activities),
        children=() if kind == OPERATOR else tuple(_event(child, thread, origin, device) for child in below),
    )


def _claimed(
    node: tuple[dict[str, Any], list[Any]], device: dict[int, list[DeviceEvent]]
) -> list[DeviceEvent]:
    raw, below = node
    own = device.pop(_correlation(raw), []) if raw.get("cat") in _RUNTIME else []
    return own + [activity for child in below for activity in _claimed(child, device)]


def _inputs(arguments: dict[str, Any]) -> tuple[Tensor, ...]:
    shapes = arguments.get("Input Dims", arguments.get("Input dims", ()))
    types = arguments.get("Input type", ())
    if isinstance(shapes, str):
        shapes = ast.literal_eval(shapes)
    found = []
    for shape, dtype in zip(shapes, types, strict=False):
        if shape and all(isinstance(size, int) for size in shape):
            found.append(Tensor(tuple(shape), _DTYPES.get(dtype, str(dtype))))
    return tuple(found)
