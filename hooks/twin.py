"""A live model, wrapped and sharded or not, becomes an unsharded, unwrapped twin on the meta device.

Nothing is copied with `deepcopy` (FSDP refuses it): each module object is rebuilt without its wrapper, with
parameters of the global shape, ties kept and hooks left out. The live model is only read.
"""

from __future__ import annotations

import collections
import copy
import types
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from llmprof.errors import WorkloadError

_WRAPPED_IN = {
    "DistributedDataParallel": "module",
    "DataParallel": "module",
    "OptimizedModule": "_orig_mod",
    "FullyShardedDataParallel": "_fsdp_wrapped_module",
    "CheckpointWrapper": "_checkpoint_wrapped_module",
    "OffloadWrapper": "_checkpoint_wrapped_module",
}
"""Attribute that holds the inner module, by the class name of a wrapper."""

_MIXED_IN = ("FSDPModule", "ReplicateModule", "DDP")
"""Classes that torch puts before a module's own class when it shards or replicates it in place."""

_DROPPED = ("__composable_api", "_compiled_call_impl", "_fsdp", "_is_fsdp_managed_module")


@dataclass(frozen=True, kw_only=True)
class Twin:
    """A meta copy of a live model.

    Attributes:
        module: the copy; parameters and buffers are empty meta tensors of global shape.
        parameters_of: twin parameters by the `id` of the live parameter (several for a flat parameter).
    """

    module: nn.Module
    parameters_of: dict[int, list[nn.Parameter]]


@dataclass(kw_only=True)
class _Builder:
    """Memory of one copy: twins by the id of the live object."""

    modules: dict[int, nn.Module] = field(default_factory=dict)
    parameters: dict[int, nn.Parameter] = field(default_factory=dict)
    tensors: dict[int, torch.Tensor] = field(default_factory=dict)
    parameters_of: dict[int, list[nn.Parameter]] = field(default_factory=dict)
    flat: dict[tuple[int, str], nn.Parameter] = field(default_factory=dict)
    original_shape: dict[int, tuple[int, ...]] = field(default_factory=dict)


def build_twin(model: nn.Module) -> Twin:
    """Unsharded, unwrapped copy of a live model on the meta device; costs no memory and runs no kernel.

    Raises:
        WorkloadError: a module cannot be rebuilt; its name is in the message.
    """
    builder = _Builder()
    for name, module in model.named_modules():
        if type(module).__name__ == "FullyShardedDataParallel":
            _read_flat_parameter(builder, name, module)
    twin = _rebuild(builder, model, "")
    for module in list(builder.modules.values()):
        _replace_references(builder, module)
    return Twin(module=twin, parameters_of=builder.parameters_of)


def unwrap(module: nn.Module) -> nn.Module:
    """The module inside wrappers of data parallelism, compilation and checkpointing."""
    while True:
        attribute = _WRAPPED_IN.get(type(module).__name__)
        inner = getattr(module, attribute, None) if attribute else None
        if not isinstance(inner, nn.Module):
            return module
        module = inner


def own_class(module: nn.Module) -> type[nn.Module]:
    """The user's class of a module that torch sharded or replicated in place."""
    mro = type(module).__mro__
    for index, base in enumerate(mro):
        if base.__name__ in _MIXED_IN and base.__module__.startswith("torch.distributed"):
            found = next(c for c in mro[index + 1 :] if issubclass(c, nn.Module) and c is not nn.Module)
            return found
    return type(module)


def child_modules(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Direct children without their wrappers, by attribute name."""
    for name, child in module._modules.items():
        if child is not None:
            yield name, unwrap(child)


def _rebuild(builder: _Builder, module: nn.Module, name: str) -> nn.Module:
    module = unwrap(module)
    if id(module) in builder.modules:
        return builder.modules[id(module)]
    if isinstance(module, torch.jit.ScriptModule):
        raise WorkloadError(
            f"module {name or 'root'!r} is a {type(module).__name__}: compiled code cannot be traced again",
            hint="profile the model before torch.jit.script",
        )
    cls = own_class(module)
    try:
        twin = cls.__new__(cls)
    except Exception as error:
        raise WorkloadError(
            f"module {name or 'root'!r} ({cls.__name__}) cannot be rebuilt: {error}",
            hint="give the class a __new__ without required arguments",
        ) from error
    builder.modules[id(module)] = twin
    state = {k: _copied(builder, v) for k, v in module.__dict__.items() if not k.startswith(_DROPPED)}
    state["_compiled_call_impl"] = None
    for key, value in state.items():
        if key.endswith("_hooks") or "_hooks_" in key:
            state[key] = collections.OrderedDict() if isinstance(value, dict) else type(value)()
    state["_parameters"] = _twin_parameters(builder, module, state)
    state["_buffers"] = {
        k: None if b is None else _meta_tensor(builder, b) for k, b in module._buffers.items()
    }
    state["_modules"] = {
        k: None if child is None else _rebuild(builder, child, f"{name}.{k}" if name else k)
        for k, child in module._modules.items()
    }
    object.__setattr__(twin, "__dict__", state)
    return twin


def _twin_parameters(
    builder: _Builder, module: nn.Module, state: dict[str, Any]
) -> dict[str, nn.Parameter | None]:
    parameters: dict[str, nn.Parameter | None] = {}
    for key, live in module._parameters.items():
        if live is None:
            parameters[key] = None
        elif key != "_flat_param":
            parameters[key] = _meta_parameter(builder, live)
    for (owner, key), parameter in builder.flat.items():
        if owner == id(module) and key not in parameters:
            parameters[key] = parameter
            state.pop(key, None)
    return parameters


def _meta_parameter(builder: _Builder, live: nn.Parameter) -> nn.Parameter:
    if id(live) not in builder.parameters:
        shape = builder.original_shape.get(id(live), tuple(live.shape))
        data = torch.empty(shape, dtype=live.dtype, device="meta")
        builder.parameters[id(live)] = nn.Parameter(data, requires_grad=live.requires_grad)
        builder.parameters_of[id(live)] = [builder.parameters[id(live)]]
    return builder.parameters[id(live)]


def _meta_tensor(builder: _Builder, live: torch.Tensor) -> torch.Tensor:
    if id(live) not in builder.tensors:
        builder.tensors[id(live)] = torch.empty(tuple(live.shape), dtype=live.dtype, device="meta")
    return builder.tensors[id(live)]


def _copied(builder: _Builder, value: Any) -> Any:
    """Containers are copied one level deep, tensors become meta tensors, accelerator devices become the CPU."""
    if isinstance(value, nn.Parameter):
        return _meta_parameter(builder, value)
    if isinstance(value, torch.Tensor):
        return _meta_tensor(builder, value)
    if isinstance(value, torch.device):
        return torch.device("cpu")
    if isinstance(value, (list, set)) or type(value) in (dict, collections.OrderedDict):
        return copy.copy(value)
    return value


def _replace_references(builder: _Builder, twin: nn.Module) -> None:
    """Point what a rebuilt module holds outside `_modules` (lists, bound methods) at the twins."""

    def swap(value: Any) -> Any:
        if isinstance(value, nn.Module):
            return builder.modules.get(id(unwrap(value)), value)
        if isinstance(value, types.MethodType) and isinstance(value.__self__, nn.Module):
            owner = builder.modules.get(id(value.__self__))
            return types.MethodType(value.__func__, owner) if owner is not None else value
        return _copied(builder, value) if isinstance(value, torch.Tensor) else value

    for key, value in list(twin.__dict__.items()):
        if key in ("_modules", "_parameters", "_buffers"):
            continue
        if type(value) is list:
            twin.__dict__[key] = [swap(v) for v in value]
        elif type(value) is dict:
            twin.__dict__[key] = {k: swap(v) for k, v in value.items()}
        else:
            twin.__dict__[key] = swap(value) if not isinstance(value, torch.Tensor) else value


def _read_flat_parameter(builder: _Builder, name: str, wrapper: nn.Module) -> None:
    """FSDP1 keeps one flat parameter per wrapper: its metadata holds the original shapes."""
    flat: Any = getattr(wrapper, "_flat_param", None)
    if flat is None:
        return
    try:
        shapes = [tuple(shape) for shape in flat._shapes]
        owners = [(info.module, info.param_name) for info in flat._param_infos]
        shared = list(flat._shared_param_infos)
        originals = flat._params or [None] * len(shapes)
    except AttributeError as error:
        raise WorkloadError(
            f"module {name or 'root'!r} is wrapped by a version of FSDP1 whose metadata is not known: {error}",
            hint="use fully_shard (FSDP2)",
        ) from error
    for shape, (owner, key), original in zip(shapes, owners, originals, strict=True):
        if original is not None:
            builder.original_shape[id(original)] = shape
            continue
        data = torch.empty(shape, dtype=flat.dtype, device="meta")
        parameter = nn.Parameter(data, requires_grad=flat.requires_grad)
        builder.flat[id(owner), key] = parameter
        builder.parameters_of.setdefault(id(flat), []).append(parameter)
    for info in shared:
        primary = builder.flat.get((id(info.prim_module), info.prim_param_name))
        if primary is not None:
            builder.flat[id(info.module), info.param_name] = primary
