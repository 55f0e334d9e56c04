"""A live model and its optimizers in, the bytes that each category holds on this rank out."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from llmprof.hooks.meshes import local_part
from llmprof.schema.profile import MemoryRow


def static_memory(
    model: nn.Module, optimizer: Optimizer | Iterable[Optimizer] | None, *, rank: int
) -> tuple[MemoryRow, ...]:
    """Bytes of parameters, gradients, optimizer state and buffers that this rank holds.

    Sharded parameters count with their local shard (with its padding), storages that are shared (tied weights,
    views of one flat buffer) count once. A trainable parameter whose gradient is not there at the moment
    counts as if it had one of its own dtype: the gradient exists at the end of the backward pass.

    Args:
        model: the root module, wrapped or not.
        optimizer: the optimizer or optimizers that update it, or None.
        rank: global rank, written into the rows.
    """
    seen = _Storages()
    parameters = sum(map(seen.add, model.parameters()))
    gradients = sum(_gradient_bytes(parameter, seen) for parameter in model.parameters())
    optimizers = _optimizers(optimizer)
    state = sum(seen.add(tensor) for each in optimizers for tensor in _tensors(each.state))
    buffers = sum(map(seen.add, model.buffers()))
    sizes = {"parameters": parameters, "gradients": gradients, "optimizer": state, "buffers": buffers}
    return tuple(MemoryRow(rank=rank, category=category, size_bytes=size) for category, size in sizes.items())


class _Storages:
    """Storages by address, each counted once."""

    def __init__(self) -> None:
        self._seen: set[int] = set()

    def add(self, tensor: torch.Tensor) -> int:
        """Bytes that this tensor adds: its storage's, or 0 when that was counted before or is empty."""
        storage = _storage(tensor)
        if storage is None or storage.data_ptr() in self._seen:
            return 0
        self._seen.add(storage.data_ptr())
        return storage.nbytes()


def _storage(tensor: torch.Tensor) -> torch.UntypedStorage | None:
    """Storage of a tensor or of its local shard; None for one without data (meta, resharded)."""
    local = local_part(tensor)
    if local.device.type == "meta":
        return None
    try:
        storage = local.untyped_storage()
    except (NotImplementedError, RuntimeError):  # a subclass without storage of its own
        return None
    return storage if storage.nbytes() else None


def _gradient_bytes(parameter: nn.Parameter, seen: _Storages) -> int:
    if parameter.grad is not None:
        return seen.add(parameter.grad)
    if not parameter.requires_grad:
        return 0
    local = local_part(parameter)
    return local.numel() * local.element_size()


def _optimizers(optimizer: Optimizer | Iterable[Optimizer] | None) -> list[Optimizer]:
    """All optimizers, and those that a sharding wrapper (ZeroRedundancyOptimizer) keeps inside."""
    given = [] if optimizer is None else [optimizer] if isinstance(optimizer, Optimizer) else list(optimizer)
    inner = (getattr(each, "optim", None) for each in given)
    return [*given, *(each for each in inner if isinstance(each, Optimizer))]


def _tensors(tree: Any) -> Iterator[torch.Tensor]:
    if isinstance(tree, torch.Tensor):
        yield tree
    elif isinstance(tree, Mapping):
        for value in tree.values():
            yield from _tensors(value)
    elif isinstance(tree, list | tuple):
        for value in tree:
            yield from _tensors(value)
