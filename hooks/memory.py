"""A live model and its optimizers in, the bytes that each category holds on this rank out."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.optim import Optimizer

from llmprof.hooks.meshes import local_part
from llmprof.schema.profile import MemoryRow

if TYPE_CHECKING:
    from typing_extensions import Self


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


class SavedActivations:
    """While entered, counts the bytes that autograd keeps for the backward pass, each storage once.

    `peak_bytes` is the most that was alive at once: the activations of the microbatches in flight, without
    parameters. Tensors that a non-reentrant checkpoint holds are its own and are not seen. Enter it around one
    step; it changes nothing that is computed, but while entered autograd does not check that saved tensors
    were left alone, so a loop must have passed that check once before.

    Args:
        model: its parameters and buffers do not count.
    """

    def __init__(self, model: nn.Module) -> None:
        kept = _Storages()
        for tensor in (*model.parameters(), *model.buffers()):
            kept.add(tensor)
        self._kept = kept
        self._references: dict[int, int] = {}
        self._alive_bytes = 0
        self.peak_bytes = 0
        self._hooks = saved_tensors_hooks(self._pack, lambda saved: saved.tensor)

    def __enter__(self) -> Self:
        self._hooks.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._hooks.__exit__(kind, error, trace)

    def _pack(self, tensor: torch.Tensor) -> _Saved:
        saved = _Saved(tensor)
        storage = _storage(tensor)
        if storage is not None and storage.data_ptr() not in self._kept:
            pointer, size = storage.data_ptr(), storage.nbytes()
            self._hold(pointer, size)
            weakref.finalize(saved, self._release, pointer, size).atexit = False
        return saved

    def _hold(self, pointer: int, size_bytes: int) -> None:
        count = self._references.get(pointer, 0)
        self._references[pointer] = count + 1
        if count == 0:
            self._alive_bytes += size_bytes
            self.peak_bytes = max(self.peak_bytes, self._alive_bytes)

    def _release(self, pointer: int, size_bytes: int) -> None:
        self._references[pointer] -= 1
        if self._references[pointer] == 0:
            del self._references[pointer]
            self._alive_bytes -= size_bytes


class _Saved:
    """What autograd keeps instead of a tensor, so that its release can be seen."""

    __slots__ = ("__weakref__", "tensor")

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor


class _Storages:
    """Storages by address, each counted once."""

    def __init__(self) -> None:
        self._seen: set[int] = set()

    def __contains__(self, pointer: int) -> bool:
        return pointer in self._seen

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
