"""Records what the root module is called with: shapes, dtypes and plain values, never the tensors themselves."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree

from llmprof.hooks.dynamo import run_as_is
from llmprof.hooks.guard import Guard
from llmprof.hooks.inputs import FakeSpec

_PLAIN = (int, float, complex, bool, str, bytes, type(None), torch.dtype, torch.device)


class _Once:
    """A forward pre-hook that records one call; a copy or a pickle of the module carries one that does nothing."""

    def __init__(self, function: Callable[[tuple[Any, ...], dict[str, Any]], None] | None = None) -> None:
        self._function = function

    def __call__(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None
    ) -> None:
        # without kwargs: an earlier hook of the same call has taken this one out
        if self._function is not None and kwargs is not None and not torch.compiler.is_compiling():
            self._function(args, kwargs)

    def __reduce__(self) -> tuple[type[_Once], tuple[()]]:
        return _Once, ()


class RootInputs:
    """The arguments of one forward of the main root.

    Attributes:
        args, kwargs: the whole pytree, tensors as FakeSpec; `args` is None until it was recorded.
        batch, seq: sequences and tokens in each, None when no tensor was passed.
        counts_tokens: True when the input is a matrix of integers (tokens).
        autocast: dtype of the autocast region around the call, or None.
        dropped: types of values that are neither tensors nor plain; they are recorded as None.
    """

    def __init__(self) -> None:
        self._dims = (0, 1)
        self._handle: Any = None
        self.args: tuple[Any, ...] | None = None
        self.kwargs: dict[str, Any] = {}
        self.batch: int | None = None
        self.seq: int | None = None
        self.counts_tokens = False
        self.autocast: torch.dtype | None = None
        self.dropped: list[str] = []

    def set_dims(self, batch_dim: int, seq_dim: int) -> None:
        """Say which dimension of the inputs counts sequences, and which of the token input counts tokens."""
        self._dims = (batch_dim, seq_dim)

    def watch(self, root: nn.Module | None, guard: Guard) -> None:
        """Record the next forward of `root`, then take the hook out."""
        if root is None or self._handle is not None or self.args is not None:
            return
        run_as_is(_Once.__call__)
        self._handle = root.register_forward_pre_hook(_Once(guard.wrap(self.record)), with_kwargs=True)

    def remove(self) -> None:
        """Take the hook out when it has not fired."""
        if self._handle is not None:
            self._handle.remove()
            self._handle = None

    def size(self, args: tuple[Any, ...]) -> tuple[int | None, int | None]:
        """(tokens, sequences) of a call: from its positional tensors, else as recorded."""
        found = self._batch_and_seq(args)
        batch, seq, counts_tokens = found or (self.batch, self.seq, self.counts_tokens)
        if batch is None or seq is None:
            return None, None
        return (batch * seq if counts_tokens else None), batch

    def record(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Describe the arguments of a call, the first time."""
        self.remove()
        if self.args is not None:
            return
        self.args = tuple(_pytree.tree_map(self._describe, args))
        self.kwargs = dict(_pytree.tree_map(self._describe, kwargs))
        for device in ("cuda", "cpu"):
            if torch.is_autocast_enabled(device):
                self.autocast = torch.get_autocast_dtype(device)
        found = self._batch_and_seq(_pytree.tree_leaves((args, kwargs)))
        if found is not None:
            self.batch, self.seq, self.counts_tokens = found

    def _describe(self, leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            return FakeSpec(tuple(leaf.shape), leaf.dtype)
        if isinstance(leaf, _PLAIN):
            return leaf
        self.dropped.append(type(leaf).__name__)
        return None

    def _batch_and_seq(self, leaves: Iterable[Any]) -> tuple[int, int, bool] | None:
        """Size of the first integer tensor with a sequence, which counts tokens; else of the first tensor."""
        batch_dim, seq_dim = self._dims
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.dim() > batch_dim]
        for tensor in tensors:
            if _is_integer(tensor) and tensor.dim() > seq_dim:
                return tensor.shape[batch_dim], tensor.shape[seq_dim], True
        return (tensors[0].shape[batch_dim], 1, False) if tensors else None


def _is_integer(tensor: torch.Tensor) -> bool:
    return not (tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool)
