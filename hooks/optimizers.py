"""A live optimizer becomes the operators of one step per layer, traced on fake parameters of local shape."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from llmprof.hooks.fake import storage_key
from llmprof.hooks.record import TracedOp, dtype_name, operator_tensors
from llmprof.schema.workload import OptimizerSpec

LocalParameter = tuple[str, tuple[int, ...], torch.dtype]
"""Layer name, local shape and dtype of one parameter."""


def describe_optimizer(optimizer: torch.optim.Optimizer | None) -> OptimizerSpec:
    """State slots and launch mode of a live optimizer, from its state and parameter groups."""
    if optimizer is None:
        return OptimizerSpec(name="", state_slots=0)
    slots, dtype = 0, "float32"
    for parameter, state in optimizer.state.items():
        full = [
            v for v in state.values()
            if isinstance(v, torch.Tensor) and v.dim() and v.numel() == parameter.numel()
        ]  # fmt: skip
        if full:
            slots, dtype = len(full), dtype_name(full[0].dtype)
            break
    return OptimizerSpec(
        name=type(optimizer).__name__, state_slots=slots, state_dtype=dtype, launch=launch_mode(optimizer)
    )


def launch_mode(optimizer: torch.optim.Optimizer) -> str:
    """ "fused", "foreach" or "single"; where the user left it open, what torch chooses on the parameters' device."""
    groups = optimizer.param_groups
    if any(group.get("fused") for group in groups):
        return "fused"
    if any(group.get("foreach") for group in groups):
        return "foreach"
    left_open = all("foreach" in g and g["foreach"] is None and g.get("fused") is None for g in groups)
    on_device = all(p.device.type == "cuda" for g in groups for p in g["params"])
    return "foreach" if left_open and on_device else "single"


def trace_optimizer(
    optimizer: torch.optim.Optimizer,
    parameters: Mapping[int, Sequence[LocalParameter]],
    mode: FakeTensorMode,
) -> dict[str, tuple[TracedOp, ...]]:
    """Operators of one `step()` by layer, after a first step that made the state.

    Args:
        optimizer: the live one; its class, defaults and group options are used, its state is not touched.
        parameters: local parameters by `id` of the live parameter.
        mode: fake mode to run in.

    Raises:
        Exception: whatever the optimizer's class raises when built or stepped on fake tensors.
    """
    groups, layers, made = [], {}, []
    launch = launch_mode(optimizer)
    with mode:
        for group in optimizer.param_groups:
            members = []
            for live in group["params"]:
                for layer, shape, dtype in parameters.get(id(live), ()):
                    fake = nn.Parameter(torch.empty(shape, dtype=dtype))
                    fake.grad = torch.empty(shape, dtype=dtype)
                    members.append(fake)
                    made.append(fake)
                    layers[storage_key(fake)] = layers[storage_key(fake.grad)] = layer
            options = {k: _without_device(k, v) for k, v in group.items() if k != "params"}
            if launch == "foreach" and "foreach" in options:
                options["foreach"] = True
            if members:
                groups.append({**options, "params": members})
        if not groups:
            return {}
        kind: Any = type(optimizer)
        twin = kind(groups, **_constructor_options(kind, optimizer.defaults))
        twin.step()
        for parameter, state in twin.state.items():
            for value in state.values():
                if isinstance(value, torch.Tensor):
                    layers[storage_key(value)] = layers[storage_key(parameter)]
        tracer = _StepTracer(layers)
        with tracer:
            twin.step()
    return {name: tuple(rows) for name, rows in tracer.rows.items()}


def _constructor_options(kind: type, defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Defaults that the class's constructor takes (AdamW stores one that it does not)."""
    parameters = inspect.signature(kind).parameters
    takes_all = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())
    return {k: _without_device(k, v) for k, v in defaults.items() if takes_all or k in parameters}


def _without_device(name: str, value: Any) -> Any:
    """An option that works on fake CPU parameters: a step size that lives on a device becomes one that does not."""
    if isinstance(value, torch.Tensor):
        return torch.empty(tuple(value.shape), dtype=value.dtype)
    return False if name == "capturable" else value


class _StepTracer(TorchDispatchMode):
    """Gives each operator to the layer of the parameter, gradient or state that it reads; lists are split."""

    def __init__(self, layers: dict[int, str]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.rows: dict[str, list[TracedOp]] = {}
        self._layers = layers
        self._current = next(iter(layers.values()), "prologue")
        self._alive: list[torch.Tensor] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        owners = self._owners((*args, *kwargs.values()))
        out = func(*args, **kwargs)
        for value in pytree.tree_leaves(out):
            if isinstance(value, torch.Tensor):
                self._alive.append(value)
        if not owners:
            owners = {self._current: None}
        outputs = out if isinstance(out, (list, tuple)) else [out]
        layer_of_output = [next(iter(owners))] * len(outputs)
        lists = [a for a in args if isinstance(a, (list, tuple)) and a and isinstance(a[0], torch.Tensor)]
        if lists and len(outputs) == len(lists[0]):
            layer_of_output = [self._layer(t) for t in lists[0]]
        for value, layer in zip(outputs, layer_of_output, strict=True):
            if isinstance(value, torch.Tensor):
                self._layers.setdefault(storage_key(value), layer)
        self._current = next(iter(owners))
        for layer in owners:
            self._record(func, layer, (*args, *kwargs.values()), outputs)
        return out

    def _record(self, func: Any, layer: str, values: Sequence[Any], outputs: Sequence[Any]) -> None:
        mine = [self._members(v, layer) for v in values]
        results = self._members(list(outputs), layer) if len(outputs) > 1 else list(outputs)
        row = TracedOp(
            op=str(func._schema.name),
            phase="optimizer",
            module="",
            segment=0,
            inputs=tuple(operator_tensors(mine)),
            outputs=tuple(operator_tensors(results)),
            attributes=(),
            collective="",
            axis="",
        )
        self.rows.setdefault(layer, []).append(row)

    def _members(self, value: Any, layer: str) -> Any:
        if isinstance(value, (list, tuple)) and value and isinstance(value[0], torch.Tensor):
            return [t for t in value if self._layer(t) == layer]
        return value

    def _layer(self, tensor: torch.Tensor) -> str:
        return self._layers.get(storage_key(tensor), self._current)

    def _owners(self, values: Sequence[Any]) -> dict[str, None]:
        """Layers of the tensors among the arguments, in order."""
        return {
            self._layers[storage_key(t)]: None
            for t in pytree.tree_leaves(values)
            if isinstance(t, torch.Tensor) and storage_key(t) in self._layers
        }
