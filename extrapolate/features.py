"""Shapes of a call -> the sizes that its time depends on, as base-2 logarithms; and how they fill a device's units."""

from __future__ import annotations

from collections.abc import Sequence
from math import log2, prod
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from llmprof.schema.operators import Tensor

Array = NDArray[np.float64]
TILES = ((128, 128), (256, 128), (64, 64))
"""Rows and columns of the result that one compute unit works out at a time: common tiles of matmul kernels."""
ALIGNED = 7
"""Sizes are aligned to powers of two up to this one."""
_LARGEST = 40.0
_FIRST_OPERANDS = 2


class Sizes(NamedTuple):
    """What one call works on.

    Attributes:
        kind: "product" (batch, m, n, k), "attention" (batch x heads, the same of keys, tokens of queries, of keys, width),
            or "other" (rows, columns of its first tensors; elements and number of a list of tensors).
        logs: base-2 logarithms of the sizes.
    """

    kind: str
    logs: tuple[float, ...]


def call_sizes(family: str, op: str, inputs: Sequence[Tensor]) -> Sizes:
    """Sizes of a call from its inputs."""
    if family in ("matmul", "batched_matmul"):
        found = _product(inputs)
        if found:
            return Sizes("product", found)
    if family == "attention":
        operands = inputs[1:] if "backward" in op else inputs
        if len(operands) >= 2 and all(len(t.shape) == 4 for t in operands[:2]):
            (batch, heads, tokens, width), (_, kv_heads, kv_tokens, _) = (t.shape for t in operands[:2])
            return Sizes("attention", _logs(batch * heads, batch * kv_heads, tokens, kv_tokens, width))
    return Sizes("other", _others(inputs))


def _product(inputs: Sequence[Tensor]) -> tuple[float, ...] | None:
    """Sizes of a product of two matrices, batched or not; the second may be stored transposed, as of a linear layer."""
    matrices = [t.shape for t in inputs if len(t.shape) >= 2]
    if len(matrices) < 2:
        return None
    left, right = matrices[-2:]
    k = left[-1]
    if right[-2] == k:
        n = right[-1]
    elif right[-1] == k:
        n = right[-2]
    else:
        return None
    rows = prod(left[:-1])
    batch = prod(left[:-2]) if len(right) > 2 else 1
    return _logs(batch, rows // max(batch, 1), n, k)


def _others(inputs: Sequence[Tensor]) -> tuple[float, ...]:
    found: list[float] = []
    for tensor in inputs[:_FIRST_OPERANDS]:
        if tensor.group:
            members = [prod(t.shape) for t in inputs if t.group == tensor.group]
            return _logs(sum(members), len(members), 1, 1)
        columns = tensor.shape[-1] if tensor.shape else 1
        found += _logs(prod(tensor.shape) // max(columns, 1), columns)
    return (*found, *[0.0] * (2 * _FIRST_OPERANDS - len(found)))


def _logs(*sizes: int) -> tuple[float, ...]:
    return tuple(log2(max(size, 1)) for size in sizes)


def fill_features(logs: Array, units: int | None) -> Array:
    """How well products fill the units of a device, shape (n, features).

    Waves: tiles run on `units` compute units at a time, so that the last wave leaves some idle; the logarithm of
    (waves x units / tiles) for each of TILES. Alignment: the largest power of two in m, n and k, at half weight.

    Args:
        logs: of (batch, m, n, k), shape (n, 4).
        units: compute units of the device, None where not known: alignment alone.
    """
    batch, m, n, _ = np.exp2(logs).round().T
    whole = np.exp2(np.minimum(logs, _LARGEST)).round().astype(np.int64).T
    columns = [0.5 * np.minimum(np.log2(size & -size), ALIGNED) for size in whole[1:]]
    if units:
        for high, wide in TILES:
            tiles = batch * np.ceil(m / high) * np.ceil(n / wide)
            columns.append(np.log2(np.ceil(tiles / units) * units / tiles))
    return np.column_stack(columns)
