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
CHOICE = ((64, 64), (128, 64), (64, 128), (128, 128), (256, 64), (64, 256), (256, 128), (128, 256))
"""Tiles from which matmul libraries choose."""
REUSE = 32.0
"""Operands are loaded once for each tile: a side of so many rows or columns takes twice the time. Assumed."""
QUERY_BLOCK = 128
"""Queries that one compute unit works on at a time: common in attention kernels."""
ALIGNED = 7
"""Sizes are aligned to powers of two up to this one."""
SHORT_ROW = 10.0
"""Base-2 logarithm of the columns up to which softmax and norms keep a row in registers: another kernel takes longer ones."""
VECTOR = 3
"""Base-2 logarithm of the elements that a kernel loads at once."""
APART = 4.0
"""How far, in octaves, calls with an attribute, or of another kernel, stand from those without: assumed."""
_LARGEST = 40.0
_FIRST_OPERANDS = 2


class Sizes(NamedTuple):
    """What one call works on.

    Attributes:
        kind: "product" (batch, m, n, k), "attention" (batch x heads, the same of keys, tokens of queries, of keys, width),
            or "other" (rows, columns of its first tensors; elements and number of a list of tensors).
        logs: base-2 logarithms of the sizes.
        tensors: number of a list of tensors, 1 where there is none.
    """

    kind: str
    logs: tuple[float, ...]
    tensors: int = 1


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
    first = inputs[0].group if inputs else 0
    return Sizes("other", _others(inputs), sum(1 for t in inputs if t.group == first) if first else 1)


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
            columns.append(_idle(batch * np.ceil(m / high) * np.ceil(n / wide), units))
    return np.column_stack(columns)


def attention_features(logs: Array, units: int | None) -> Array:
    """How well blocks of queries fill the units of a device, shape (n, 1 or 0): as of products.

    Args:
        logs: of (batch x heads, the same of keys, tokens of queries, of keys, width), shape (n, 5).
    """
    if not units:
        return np.zeros((len(logs), 0))
    heads, _, tokens, *_ = np.exp2(logs).round().T
    return _idle(heads * np.ceil(tokens / QUERY_BLOCK), units)[:, None]


def row_features(logs: Array, *, alone: Array) -> Array:
    """Which kernel takes rows of a length, and how they fill it, shape (n, 3).

    Long rows have another kernel than short ones; rows with odd columns do not divide into vectors; short ones are padded
    to a power of two.

    Args:
        logs: of (rows, columns, ...), shape (n, sizes).
        alone: False for lists of tensors, which have no rows: their features are 0; shape (n,).
    """
    long = logs[:, 1] > SHORT_ROW
    columns = np.exp2(np.minimum(logs[:, 1], _LARGEST)).round().astype(np.int64)
    vectors = 0.5 * np.minimum(np.log2(columns & -columns), VECTOR)
    padding = np.where(long, 0.0, 2.0 * (np.ceil(logs[:, 1] - 1e-9) - logs[:, 1]))
    return np.where(alone[:, None], np.stack([APART * long, vectors, padding], axis=1), 0.0)


def _idle(tiles: Array, units: int) -> Array:
    """Base-2 logarithm of the units' time over that of the tiles."""
    return np.asarray(np.log2(np.ceil(tiles / units) * units / tiles))


def tile_waste(logs: Array, units: int | None) -> Array:
    """Natural logarithm of the least time of a product over the choice of tile, relative to full waves of 128 x 128.

    waves x units x area / (batch m n), times what a tile of that size loads again; shape (n,), 0 where `units` is None.
    """
    if not units:
        return np.zeros(len(logs))
    batch, m, n, _ = np.exp2(logs).round().T
    rows, columns = np.array(CHOICE, dtype=float).T[:, :, None]
    waves = np.ceil(batch * np.ceil(m / rows) * np.ceil(n / columns) / units)
    found = waves * units * rows * columns / (batch * m * n) * (1.0 + REUSE * (1.0 / rows + 1.0 / columns))
    return np.asarray(np.log(found.min(axis=0) / (1.0 + 2.0 * REUSE / 128)))
