"""A twin and inputs become the operators of one forward and backward pass on one rank, without running a kernel."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree

from llmprof.errors import WorkloadError
from llmprof.hooks.backward import Walk
from llmprof.hooks.fake import (
    current_node,
    local_tensor,
    no_checkpointing,
    quiet,
    sharding_rules_inside,
    storage_key,
)
from llmprof.hooks.record import ModuleClock, OpTracer, TracedOp, attached, describe, dtype_name
from llmprof.schema.operators import Tensor


@dataclass(frozen=True, kw_only=True)
class Subject:
    """What is traced: a model on fake tensors.

    Attributes:
        module: the twin, possibly sharded by torch's own code.
        mode: the mode its tensors belong to.
        names: FQN of each module by `id`, as in the live model.
        blocks: FQNs of the repeated blocks.
        axes: mesh axis by process group name.
        loss_fn: called with the output (and a fake target when it takes two), or None.
        autocast: compute dtype of a mixed-precision region around the passes, or None.
        engine: run backward passes with torch's engine; False to do without (see `llmprof.hooks.backward`).
    """

    module: nn.Module
    mode: FakeTensorMode
    names: Mapping[int, str]
    blocks: Sequence[str] = ()
    axes: Mapping[str, str] = field(default_factory=dict)
    loss_fn: Callable[..., Any] | None = None
    autocast: torch.dtype | None = None
    engine: bool = True


@dataclass(frozen=True, kw_only=True)
class PassTrace:
    """One forward and backward pass.

    Attributes:
        ops: in execution order.
        visits: FQN of the block of each visit, in order.
        saved: tensors kept for the backward pass by segment; each storage once, parameters and buffers left out.
        boundaries: first floating output of each visit by segment (0: the first block's input).
        first_segment: segment in which each module ran first.
        matmul_parameters: FQNs of parameters that a matmul used.
        returns_loss: True when the root module returned a scalar that the backward pass started from.
        outputs: floating outputs of the root module.
        notes: what was ambiguous.
    """

    ops: tuple[TracedOp, ...]
    visits: tuple[str, ...]
    saved: dict[int, tuple[Tensor, ...]]
    boundaries: dict[int, Tensor]
    first_segment: dict[str, int]
    matmul_parameters: frozenset[str]
    returns_loss: bool
    outputs: tuple[Tensor, ...]
    notes: tuple[str, ...]


def materialise(module: nn.Module, mode: FakeTensorMode) -> None:
    """Meta parameters, buffers and tensor attributes become fake CPU tensors in place; ties and shardings stay."""
    done: dict[int, torch.Tensor] = {}

    def fake(tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) not in done:
            with mode, torch.no_grad():
                empty = torch.empty_like(tensor, device="cpu")
            if isinstance(tensor, nn.Parameter):
                empty = nn.Parameter(empty, requires_grad=tensor.requires_grad)
            done[id(tensor)] = empty
        return done[id(tensor)]

    keep = []  # an `id` is only an identity while the object lives
    for part in module.modules():
        stores: tuple[dict[str, Any], ...] = (part._parameters, part._buffers, part.__dict__)
        for store in stores:
            for key, value in list(store.items()):
                if isinstance(value, torch.Tensor) and value.device.type == "meta":
                    keep.append(value)
                    store[key] = fake(value)


def trace_passes(subject: Subject, args: Sequence[Any], kwargs: Mapping[str, Any]) -> PassTrace:
    """Trace one forward and backward pass; gradients of outputs are fake where the loss is not in the model.

    Args:
        subject: the model.
        args, kwargs: inputs of the root module, made under the subject's mode.

    Raises:
        WorkloadError: the model cannot be traced; the innermost module that was running is named.
    """
    walk = None if subject.engine else Walk()
    clock = ModuleClock(subject.names, subject.blocks, walk.current_node if walk else current_node)
    module = subject.module
    owned = [
        (subject.names.get(id(part), ""), key, parameter)
        for part in module.modules()
        for key, parameter in part._parameters.items()
        if parameter is not None
    ]
    for _, _, parameter in owned:
        parameter.grad = None
    tracer = OpTracer(clock, [(owner, p) for owner, _, p in owned], subject.axes)
    saved = _SavedTensors(tracer, clock, module)
    try:
        with (
            subject.mode,
            quiet(),
            no_checkpointing(),
            sharding_rules_inside(tracer.paused),
            attached(clock, module),
            walk.installed() if walk else contextlib.nullcontext(),
        ):
            result = _run(subject, tracer, saved, (args, kwargs))
    except WorkloadError:
        raise
    except Exception as error:
        where = clock.current or "root"
        raise WorkloadError(
            f"module {where!r} ({_class_of(subject, where)}) cannot be traced: {_first_line(error)}",
            hint="shapes must not depend on data, and custom operators need register_fake",
        ) from error
    outputs, returns_loss, notes = result
    return PassTrace(
        ops=gaps_to_following_blocks(tracer.finished_rows(), len(clock.visits)),
        visits=tuple(clock.visits),
        saved=saved.by_segment(),
        boundaries=_boundaries(clock),
        first_segment=dict(clock.first_segment),
        matmul_parameters=_matmul_parameters(tracer, owned),
        returns_loss=returns_loss,
        outputs=outputs,
        notes=notes,
    )


def gaps_to_following_blocks(rows: Sequence[TracedOp], num_visits: int) -> tuple[TracedOp, ...]:
    """Let what the root does before each block alike (slicing a position table) belong to the block after it.

    That holds when the same forward operators, without a backward part, run before the first block and between
    any two; otherwise the rows stay as they are, and what lies between blocks belongs to the block before.
    """
    gaps: dict[int, list[int]] = {2 * k: [] for k in range(1, num_visits)}
    before = []
    for index, row in enumerate(rows):
        if row.segment in gaps:
            gaps[row.segment].append(index)
        elif row.segment == 0 and row.phase == "forward":
            before.append(index)
    lists = [[rows[i]._replace(segment=0) for i in indices] for indices in gaps.values()]
    if not lists or not lists[0] or any(g != lists[0] for g in lists):
        return tuple(rows)
    first = before[-len(lists[0]) :]
    if any(row.phase != "forward" for row in lists[0]) or [rows[i] for i in first] != lists[0]:
        return tuple(rows)
    moved = {i: 2 * k + 1 for k, indices in enumerate([first, *gaps.values()]) for i in indices}
    return tuple(row._replace(segment=moved.get(i, row.segment)) for i, row in enumerate(rows))


def _run(
    subject: Subject, tracer: OpTracer, saved: _SavedTensors, inputs: tuple[Any, Any]
) -> tuple[tuple[Tensor, ...], bool, tuple[str, ...]]:
    clock, notes = tracer.clock, []
    args, kwargs = inputs
    cast = torch.autocast("cpu", dtype=subject.autocast) if subject.autocast else contextlib.nullcontext()
    hooks = torch.autograd.graph.saved_tensors_hooks(saved.pack, saved.unpack)
    clock.begin()
    with torch.enable_grad(), cast, hooks, tracer:
        output = subject.module(*args, **kwargs)
    outputs = [t for t in pytree.tree_leaves(output) if isinstance(t, torch.Tensor)]
    roots = [t for t in outputs if t.requires_grad]
    described = tuple(describe(t) for t in outputs if t.is_floating_point())
    scalar = next((t for t in roots if t.dim() == 0), None)
    if scalar is None and subject.loss_fn is not None:
        target = _fake_target(subject.loss_fn, outputs, inputs)
        clock.enter_loss()
        with torch.enable_grad(), cast, hooks, tracer:
            scalar = subject.loss_fn(*target)
    if scalar is None and not roots:
        raise WorkloadError("the model's outputs do not require gradients", hint="is it a training step?")
    start = scalar if scalar is not None else roots[0]
    if scalar is None and len(roots) > 1:
        notes.append(f"{len(roots)} outputs require gradients; the backward pass was traced from the first.")
    gradient = None if scalar is not None else torch.empty_like(start)
    tracer.segment_of_owner = dict(clock.first_segment)
    tracer.phase = "backward"
    with tracer:
        start.backward(gradient)
    return described, scalar is not None and subject.loss_fn is None, tuple(notes)


def _fake_target(loss_fn: Callable[..., Any], outputs: list[torch.Tensor], inputs: Any) -> tuple[Any, ...]:
    """Arguments of a loss function: the output, and a target like the integer input when it takes a second one."""
    output = outputs[0]
    if len(inspect.signature(loss_fn).parameters) < 2:
        return (output,)
    tokens = [
        t for t in pytree.tree_leaves(inputs)
        if isinstance(t, torch.Tensor) and not t.is_floating_point() and t.shape == output.shape[:-1]
    ]  # fmt: skip
    return output, torch.zeros_like(tokens[0]) if tokens else torch.zeros(output.shape[:-1], dtype=torch.long)


class _SavedTensors:
    """What autograd keeps from forward to backward, by segment, as storages."""

    def __init__(self, tracer: OpTracer, clock: ModuleClock, module: nn.Module) -> None:
        self._tracer, self._clock = tracer, clock
        self._excluded = {storage_key(b) for b in module.buffers()} | set(tracer.parameter_storages)
        self._segments: dict[int, list[int]] = {}
        self._tensors: dict[int, torch.Tensor] = {}

    def pack(self, tensor: torch.Tensor) -> torch.Tensor:
        """Saved-tensor hook; keeps the tensor as it is."""
        self._tracer.forget_detach(tensor)
        key = storage_key(tensor)
        if key not in self._excluded:
            self._tensors.setdefault(key, local_tensor(tensor))
            self._segments.setdefault(key, []).append(self._clock.segment)
        return tensor

    @staticmethod
    def unpack(tensor: torch.Tensor) -> torch.Tensor:
        """Saved-tensor hook."""
        return tensor

    def by_segment(self) -> dict[int, tuple[Tensor, ...]]:
        """A storage that several visits keep belongs to where it was made, else to the visit that keeps it."""
        found: dict[int, list[Tensor]] = {}
        for key, segments in self._segments.items():
            shared = len({s for s in segments if s % 2}) > 1
            segment = self._tracer.created_in.get(key, 0) if shared else segments[0]
            found.setdefault(segment, []).append(_storage_spec(self._tensors[key]))
        return {segment: tuple(tensors) for segment, tensors in found.items()}


def _storage_spec(tensor: torch.Tensor) -> Tensor:
    """The tensor's own shape when it fills its storage, else the storage as one row of elements."""
    elements = tensor.untyped_storage().nbytes() // tensor.element_size()
    shape = tuple(tensor.shape) if tensor.numel() == elements else (elements,)
    return Tensor(tuple(int(n) for n in shape), dtype_name(tensor.dtype))


def _boundaries(clock: ModuleClock) -> dict[int, Tensor]:
    sources = {0: clock.block_input, **clock.block_outputs}
    found = {}
    for segment, value in sources.items():
        for leaf in pytree.tree_leaves(value):
            if isinstance(leaf, torch.Tensor) and leaf.is_floating_point():
                found[segment] = describe(leaf)
                break
    return found


def _matmul_parameters(tracer: OpTracer, owned: list[tuple[str, str, nn.Parameter]]) -> frozenset[str]:
    """A parameter counts where its own module used it in a matmul, or a module that does not own it did."""
    owners: dict[int, set[str]] = {}
    for owner, _, parameter in owned:
        owners.setdefault(storage_key(parameter), set()).add(owner)
    foreign = {source for source, module in tracer.matmul_uses if module not in owners.get(source, ())}
    names = set()
    for owner, key, parameter in owned:
        storage = storage_key(parameter)
        if (storage, owner) in tracer.matmul_uses or storage in foreign:
            names.add(f"{owner}.{key}" if owner else key)
    return frozenset(names)


def _class_of(subject: Subject, name: str) -> str:
    for module in subject.module.modules():
        if subject.names.get(id(module)) == name:
            return type(module).__name__
    return type(subject.module).__name__


def _first_line(error: Exception) -> str:
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0][:300]}" if text else type(error).__name__
