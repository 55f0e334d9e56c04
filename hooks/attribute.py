"""Events in, calls of operators and collectives out, each with the module and the phase that it belongs to."""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

from llmprof.hooks.calls import INPUT, OPTIMIZER, Attribution, Call, Owner, Range
from llmprof.hooks.events import (
    COLLECTIVE,
    COLLECTIVE_NAME,
    COMPOSITE,
    GLOO_PREFIX,
    NODE,
    OPERATOR,
    SCOPE,
    DeviceEvent,
    Event,
    Events,
)
from llmprof.hooks.modules import ModuleNames
from llmprof.hooks.phases import is_weight_gradient
from llmprof.schema.operators import collective_kind

MODULE_SCOPE, STEP_SCOPE = "##module ", "##step "
"""Prefixes of the scopes that the recorder opens: a module's number, a step's index."""

_FSDP_MODULE = re.compile(r"^FSDP::\w+(?: for)? \(?([^()]+)\)?$")
_ACCUMULATE = "torch::autograd::AccumulateGrad"
_KERNEL_KINDS = (
    ("allreduce", "all_reduce"),
    ("allgather", "all_gather"),
    ("reducescatter", "reduce_scatter"),
    ("alltoall", "all_to_all"),
    ("broadcast", "broadcast"),
    ("sendrecv", "send"),
    ("send", "send"),
    ("recv", "recv"),
    ("reduce", "reduce"),
)
_WAIT = "_c10d_functional::wait_tensor"


class _Context(NamedTuple):
    owner: Owner
    phase: str = "forward"
    node: str = ""
    higher_order: bool = False
    compiled: bool = False
    fsdp: bool = False


def attribute(events: Events, modules: ModuleNames, labels: Sequence[tuple[str, bool]]) -> Attribution:
    """Finds module and phase of every operator and collective.

    Args:
        events: what the window recorded.
        modules: names and parameter shapes of the model.
        labels: by number in a module scope, the module's name and whether it is part of the model.
    """
    walker = _Walker(modules, labels)
    for root in events.roots:
        walker.visit_root(root)
    for orphan in events.orphans:
        walker.orphan(orphan)
    found = walker.finish()
    found.waits_us = list(events.waits_us)
    return found


class _Walker:
    def __init__(self, modules: ModuleNames, labels: Sequence[tuple[str, bool]]) -> None:
        self._modules = modules
        self._labels = labels
        self._found = Attribution()
        self._creators: dict[tuple[int, int], Owner] = {}
        self._last_node: dict[int, Owner] = {}
        self._shapes: dict[str, frozenset[tuple[int, ...]]] = {}

    def visit_root(self, event: Event) -> None:
        if event.name.startswith(GLOO_PREFIX):
            self._found.transfers.append(_range(event))
            return
        self._visit(event, _Context(Owner("", outside=True)))

    def orphan(self, activity: DeviceEvent) -> None:
        """Device work that nobody is seen to launch still owns its time."""
        thread = next((thread for thread, name in self._found.threads.items() if name == "main"), 0)
        event = Event(
            name=activity.name,
            kind=SCOPE,
            start_us=activity.start_us,
            duration_us=0.0,
            thread=thread,
            device=(activity,),
        )
        self._call(event, _Context(Owner("", attributed=False)), "other")

    def finish(self) -> Attribution:
        """Drops threads without model code, tells work after the backward pass from forward work, sorts."""
        found = self._found
        found.calls = [call for call in found.calls if call.device or call.thread in found.threads]
        found.calls.sort(key=lambda call: call.start_us)
        found.marks.sort(key=lambda mark: mark[1])
        ends = _step_ends(found)
        found.calls = [_late_phase(call, ends) for call in found.calls]
        return found

    def _visit(self, event: Event, context: _Context) -> None:
        if event.kind == OPERATOR:
            self._operator(event, context)
            return
        if event.kind == NODE:
            context = self._node(event, context)
        elif event.kind == SCOPE:
            context = self._scope(event, context)
        if event.kind != NODE:  # a custom autograd function is a scope
            self._note_creator(event, context)
        before = len(self._found.calls)
        for child in event.children:
            self._visit(child, context)
        if event.kind == COMPOSITE and event.wrapper and len(self._found.calls) > before:
            local_us = sum(call.duration_us for call in self._found.calls[before:])
            self._found.wrapper_us.append(max(0.0, event.duration_us - local_us))
        elif event.device:
            self._call(event, context, _phase(event, context))

    def _operator(self, event: Event, context: _Context) -> None:
        self._note_creator(event, context)
        phase = _phase(event, context)
        if phase == "backward_input" and self._is_weight_gradient(event, context):
            phase = "backward_weight"
        self._call(event, context, phase)

    def _call(self, event: Event, context: _Context, phase: str) -> None:
        kind = "wait" if event.name == _WAIT else collective_kind(event.name) or _launched_kind(event)
        if event.name.startswith("_c10d_functional") and not kind:
            return
        self._found.calls.append(
            Call(
                op=event.name,
                owner=context.owner,
                phase="communication" if kind else phase,
                thread=event.thread,
                start_us=event.start_us,
                duration_us=event.duration_us,
                kind=kind,
                inputs=event.inputs,
                scalars=event.scalars,
                metadata=tuple(event.metadata.items()),
                device=event.device,
                fsdp=context.fsdp,
            )
        )

    def _note_creator(self, event: Event, context: _Context) -> None:
        # The last event that starts with a sequence number is the one that creates the node of that number.
        if event.sequence >= 0:
            self._creators[event.thread, event.sequence] = context.owner

    def _is_weight_gradient(self, event: Event, context: _Context) -> bool:
        if context.node == _ACCUMULATE:
            return True
        inputs = [tensor.shape for tensor in event.inputs if tensor.shape]
        shapes = self._shapes_of(context.owner.module)
        return is_weight_gradient(event.name, inputs, shapes, transposed=event.transposed)

    def _shapes_of(self, module: str) -> frozenset[tuple[int, ...]]:
        """Shapes of the matrices that a module may use: its own and those below, else the whole model's."""
        if module not in self._shapes:
            own = self._modules.parameter_shapes(module)
            whole = self._modules.parameter_shapes()
            self._shapes[module] = own if any(len(shape) > 1 for shape in own) else whole
        return self._shapes[module]

    def _node(self, event: Event, context: _Context) -> _Context:
        self._found.threads.setdefault(event.thread, "autograd")
        self._found.backward.append(_range(event))
        if event.name == _ACCUMULATE:
            owner = self._last_node.get(event.thread, Owner("", attributed=False))
        else:
            creator = self._creators.get((event.forward_thread or event.thread, event.sequence))
            owner = creator or Owner("", attributed=False)
            self._last_node[event.thread] = owner
        return context._replace(
            owner=owner, phase="backward", node=event.name, higher_order=_builds_graph(event.children)
        )

    def _scope(self, event: Event, context: _Context) -> _Context:
        name = event.name
        if name.startswith(MODULE_SCOPE):
            self._found.threads.setdefault(event.thread, "main")
            return self._module_scope(name, context)
        if name.startswith(STEP_SCOPE):
            self._found.threads[event.thread] = "main"
            self._found.marks.append((int(name[len(STEP_SCOPE) :]), event.start_us))
        elif name.startswith("Optimizer."):
            if name.startswith("Optimizer.step"):
                self._found.optimizer.append(_range(event))
            return context._replace(owner=Owner(OPTIMIZER), phase="optimizer", node="")
        elif name.startswith("enumerate(DataLoader)"):
            self._found.inputs.append(_range(event))
            return context._replace(owner=Owner(INPUT), phase="input")
        elif name.startswith("FSDP::"):
            return self._fsdp_scope(name, context)
        elif name.startswith("torch.distributed.ddp.reducer"):  # after the last bucket, outside every node
            return context._replace(owner=context.owner._replace(outside=False), phase="backward_weight")
        elif name.startswith("Torch-Compiled Region"):
            self._found.compiled_regions += 1
            below = self._modules.has_children(context.owner.module)
            owner = context.owner._replace(attributed=not below, outside=False)
            return context._replace(compiled=True, owner=owner)
        return context

    def _module_scope(self, name: str, context: _Context) -> _Context:
        module, known = self._labels[int(name[len(MODULE_SCOPE) :])]
        inside = not context.owner.outside and not context.node
        if not known and inside:
            if context.compiled:  # the graph module that a compiler made
                return context
            module = f"{context.owner.module}.{module}".lstrip(".")
        phase = "recompute" if context.node or context.phase == "recompute" else context.phase
        owner = Owner(module, outside=not known and not inside)
        return context._replace(owner=owner, phase=phase, node="", compiled=False)

    def _fsdp_scope(self, name: str, context: _Context) -> _Context:
        match = _FSDP_MODULE.match(name)
        owner = context.owner
        if match and self._modules.known(match.group(1)):
            owner = Owner(match.group(1))
        elif owner.outside:
            owner = Owner("")
        phase = context.phase
        if "post_backward" in name:
            phase = "backward_weight"
        elif phase == "backward":
            phase = "backward_input"
        return context._replace(owner=owner, phase=phase, fsdp=True)


def _launched_kind(event: Event) -> str:
    """Kind of the collective whose kernel an event launched itself, "" when it launched none."""
    if not any(activity.kind == COLLECTIVE for activity in event.device):
        return ""
    told = event.metadata.get(COLLECTIVE_NAME, "") or event.device[0].name
    plain = told.lower().replace("_", "").replace("nccl", "")
    return next((kind for text, kind in _KERNEL_KINDS if text in plain), "all_reduce")


def _phase(event: Event, context: _Context) -> str:
    if context.phase != "backward":
        return context.phase
    # An operator that builds a graph inside a backward pass that builds none is a checkpointed one running again.
    return "recompute" if event.sequence >= 0 and not context.higher_order else "backward_input"


def _builds_graph(events: Iterable[Event]) -> bool:
    """True when every operator below a node, modules aside, takes part in a new graph (create_graph=True)."""
    operators = list(_own_operators(events))
    return bool(operators) and all(operator.sequence >= 0 for operator in operators)


def _own_operators(events: Iterable[Event]) -> Iterator[Event]:
    for event in events:
        if event.kind == OPERATOR:
            yield event
        elif event.kind != NODE and not event.name.startswith(MODULE_SCOPE):
            yield from _own_operators(event.children)


def _range(event: Event) -> Range:
    return Range(event.name, event.start_us, event.end_us, event.thread, event.inputs)


class _StepEnds(NamedTuple):
    start_us: float
    backward_us: float
    optimizer_us: float


def _step_ends(found: Attribution) -> list[_StepEnds]:
    """Per step: its start, the end of its last backward node, the end of its last optimizer step."""
    starts = [time for _, time in found.marks] or [0.0]
    backward = [float("inf")] * len(starts)
    optimizer = [0.0] * len(starts)
    for node in found.backward:
        step = max(0, bisect_right(starts, node.start_us) - 1)
        backward[step] = node.end_us if backward[step] == float("inf") else max(backward[step], node.end_us)
    for update in found.optimizer:
        step = max(0, bisect_right(starts, update.start_us) - 1)
        optimizer[step] = max(optimizer[step], update.end_us)
    return [_StepEnds(*ends) for ends in zip(starts, backward, optimizer, strict=True)]


def _late_phase(call: Call, steps: Sequence[_StepEnds]) -> Call:
    """Work outside the model after the step's backward pass: the optimizer's (clipping), or other (logging)."""
    if call.phase != "forward" or not call.owner.outside:
        return call
    step = steps[max(0, bisect_right(steps, call.start_us, key=lambda ends: ends.start_us) - 1)]
    if call.start_us < step.backward_us:
        return call
    if call.start_us < step.optimizer_us:
        return replace(call, owner=Owner(OPTIMIZER), phase="optimizer")
    return replace(call, phase="other")
