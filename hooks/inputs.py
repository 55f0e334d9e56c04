"""Recorded inputs of the root module become fake inputs of any batch and sequence size."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree

from llmprof.errors import WorkloadError


@dataclass(frozen=True)
class FakeSpec:
    """Shape and dtype of a tensor input; a leaf of a recorded pytree.

    Attributes:
        shape: as recorded.
        dtype: torch dtype, or its name ("int64").
    """

    shape: tuple[int, ...]
    dtype: Any

    @property
    def torch_dtype(self) -> torch.dtype:
        """The dtype as torch has it."""
        found = self.dtype if isinstance(self.dtype, torch.dtype) else getattr(torch, str(self.dtype), None)
        if not isinstance(found, torch.dtype):
            raise WorkloadError(f"input dtype {self.dtype!r} is not known", hint="use a torch.dtype")
        return found


def describe_inputs(args: Any, kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Tensors of recorded inputs as FakeSpec, other values as they are; keeps no tensor alive."""

    def spec(value: Any) -> Any:
        return FakeSpec(tuple(value.shape), value.dtype) if isinstance(value, torch.Tensor) else value

    described: tuple[tuple[Any, ...], dict[str, Any]] = pytree.tree_map(spec, (tuple(args), dict(kwargs)))
    return described


@dataclass(frozen=True, kw_only=True)
class InputSizes:
    """Where the batch and the sequence are in the recorded inputs.

    Attributes:
        batch, seq: recorded sizes; seq is 1 when there is no sequence.
        batch_dim, seq_dim: the dimensions of the token input.
        has_tokens: True when an integer input has a sequence dimension.
        notes: what was ambiguous.
    """

    batch: int
    seq: int
    batch_dim: int
    seq_dim: int
    has_tokens: bool
    notes: tuple[str, ...]

    def resized(self, shape: tuple[int, ...], batch: int, seq: int) -> tuple[int, ...]:
        """A recorded shape with the batch and sequence sizes replaced wherever they recur.

        The batch is looked for at its own dimension only, the sequence at every other one.
        """
        sizes = list(shape)
        for dim, size in enumerate(shape):
            if dim == self.batch_dim and size == self.batch:
                sizes[dim] = batch
            elif self.has_tokens and dim != self.batch_dim and size == self.seq:
                sizes[dim] = seq
        return tuple(sizes)


def find_sizes(args: Any, kwargs: Any, *, batch_dim: int = 0, seq_dim: int = 1) -> InputSizes:
    """Batch from the first tensor input, sequence from the first integer input of two or more dimensions.

    Raises:
        WorkloadError: no tensor among the inputs.
    """
    specs = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, FakeSpec) and leaf.shape]
    if not specs:
        raise WorkloadError(
            "the root module was called without a tensor input", hint="profile the outer model"
        )
    tokens = next(
        (
            s for s in specs
            if not (s.torch_dtype.is_floating_point or s.torch_dtype.is_complex or s.torch_dtype == torch.bool)
            and len(s.shape) > max(batch_dim, seq_dim)
        ),
        None,
    )  # fmt: skip
    first = tokens or next((s for s in specs if len(s.shape) > batch_dim), specs[0])
    batch = first.shape[min(batch_dim, len(first.shape) - 1)]
    notes = []
    if tokens is not None and batch == tokens.shape[seq_dim]:
        notes.append(f"batch and sequence have the same size {batch}: told apart by their dimension only.")
    return InputSizes(
        batch=batch,
        seq=tokens.shape[seq_dim] if tokens is not None else 1,
        batch_dim=batch_dim,
        seq_dim=seq_dim,
        has_tokens=tokens is not None,
        notes=tuple(notes),
    )


def make_inputs(
    args: Any, kwargs: Any, sizes: InputSizes, point: tuple[int, int]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Inputs of another batch and sequence size; call it under a fake mode, so that nothing is allocated."""
    batch, seq = point

    def tensor(leaf: Any) -> Any:
        if isinstance(leaf, FakeSpec):
            return torch.zeros(sizes.resized(leaf.shape, batch, seq), dtype=leaf.torch_dtype)
        return torch.device("cpu") if isinstance(leaf, torch.device) else leaf

    made: tuple[tuple[Any, ...], dict[str, Any]] = pytree.tree_map(tensor, (tuple(args), dict(kwargs)))
    return made


InputMaker = Callable[[tuple[int, int]], tuple[tuple[Any, ...], dict[str, Any]]]
"""Inputs of the root module at a (batch, seq)."""
