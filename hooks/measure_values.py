"""Blueprints -> real tensors: numbers of ordinary size, indices inside what they point into."""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING

import torch

from llmprof.hooks.measure_rules import as_dtype

if TYPE_CHECKING:
    from llmprof.hooks.measure_arguments import Blueprint

_TILE = 2**20


class Values:
    """Makes tensors on one device.

    Floating values lie in [0.5, 1.5): sums stay finite, and nothing becomes so small that a CPU slows down.

    Args:
        device: "cpu" or "cuda".
        seed: of the values.
    """

    def __init__(self, device: str, seed: int = 0) -> None:
        self.device = device
        self._generator = torch.Generator().manual_seed(seed)

    def tensor(self, blueprint: Blueprint) -> torch.Tensor:
        """A new tensor; a swapped one is a transposed view."""
        shape, dtype = list(blueprint.tensor.shape), as_dtype(blueprint.tensor.dtype)
        assert dtype is not None, "rebuild() refuses dtypes that torch does not have"
        if not blueprint.swapped:
            return self._filled(shape, dtype, blueprint.limit)
        one, other = (1, 2) if len(shape) == 4 else (-2, -1)
        shape[one], shape[other] = shape[other], shape[one]
        return self._filled(shape, dtype, blueprint.limit).transpose(one, other)

    def _filled(self, shape: list[int], dtype: torch.dtype, limit: int) -> torch.Tensor:
        count = prod(shape)
        tile = min(count, _TILE)
        if limit:
            dtype = torch.int32 if dtype is torch.int32 else torch.int64
            base = torch.randint(0, limit, (tile,), generator=self._generator, dtype=dtype)
        elif dtype is torch.bool:
            base = torch.arange(tile) % 2 == 0
        elif dtype.is_floating_point or dtype.is_complex:
            base = (torch.rand(tile, generator=self._generator) + 0.5).to(dtype)
        else:
            base = (torch.arange(tile) % 4).to(dtype)
        flat = torch.empty(count, dtype=dtype, device=self.device)
        base = base.to(self.device)
        for start in range(0, count, _TILE):
            flat[start : start + _TILE] = base[: min(_TILE, count - start)]
        return flat.view(shape)
