"""Operator calls with concrete tensors: single ones, both gradients of a product, and what eager torch runs as a chain."""

from __future__ import annotations

from math import prod
from typing import NamedTuple

from llmprof.schema.operators import Tensor

FLASH = "aten::_scaled_dot_product_flash_attention"


class OpCall(NamedTuple):
    """One call of an operator."""

    op: str
    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]
    attributes: frozenset[str] = frozenset()


class Product(NamedTuple):
    """Sizes of (batch, m, k) x (batch, k, n)."""

    m: int
    n: int
    k: int
    batch: int = 1


Chain = tuple[tuple[str, str, str], ...]
"""Operators in order, each (name, what it reads, what it writes); a letter is one tensor: x of the row's shape and
dtype, f the same in float32, h half of its columns, r one number for each row, m one byte for each element."""

NORM: Chain = (("linalg_vector_norm", "x", "r"), ("div", "xr", "x"), ("mul", "x", "x"))
"""A root-mean-square norm written with torch operators: x / |x| x scale."""
NORM_BACKWARD: Chain = (
    ("mul", "xx", "x"), ("sum", "x", "r"), ("mul", "x", "x"), ("div", "xr", "x"), ("neg", "x", "x"), ("div", "xr", "x"),
    ("div", "xr", "x"), ("mul", "xx", "x"), ("sum", "x", "r"), ("mul", "xr", "x"), ("add", "xx", "x"),
)  # fmt: skip
"""Its gradients as autograd's formulas for `mul`, `div` by a tensor and `norm` run them."""
ROPE: Chain = (
    ("mul", "x", "x"), ("neg", "h", "h"), ("cat", "hh", "x"), ("mul", "x", "x"), ("add", "xx", "x"),
)  # fmt: skip
"""x cos + rotate_half(x) sin."""
ROPE_BACKWARD: Chain = (
    ("mul", "x", "x"), ("mul", "x", "x"), ("neg", "h", "h"), ("slice_backward", "h", "x"), ("slice_backward", "h", "x"),
    ("add", "xx", "x"), ("add", "xx", "x"),
)  # fmt: skip
CROSS_ENTROPY: Chain = (
    ("_to_copy", "x", "f"), ("amax", "f", "r"), ("sub", "fr", "f"), ("exp", "f", "f"), ("sum", "f", "r"),
    ("div", "fr", "f"),
)  # fmt: skip
"""Over a vocabulary that several devices share, as Megatron writes it, without the network; keeps the softmax."""
CROSS_ENTROPY_BACKWARD: Chain = (("mul", "fr", "f"), ("_to_copy", "f", "x"))


def product(size: Product, dtype: str, *, out: str = "") -> OpCall:
    """One matmul; `out` is the dtype of the result where it is another."""
    m, n, k, batch = size
    outer = (batch,) if batch > 1 else ()
    name = "aten::bmm" if outer else "aten::_scaled_mm" if dtype == "float8" else "aten::mm"
    result = Tensor((*outer, m, n), out or ("bfloat16" if dtype == "float8" else dtype))
    return OpCall(name, (Tensor((*outer, m, k), dtype), Tensor((*outer, k, n), dtype)), (result,))


def gradients(forward: Product, dtype: str) -> list[OpCall]:
    """The two matmuls behind a matmul: gradients of its left and of its right operand."""
    m, n, k, batch = forward
    return [product(Product(m, k, n, batch), dtype), product(Product(k, n, m, batch), dtype)]


def attention(query: Tensor, key: Tensor, value: Tensor, *, causal: bool, backward: bool = False) -> OpCall:
    """A fused attention kernel on (batch, heads, tokens, width)."""
    out = Tensor((*query.shape[:3], value.shape[3]), query.dtype)
    attributes = frozenset({"causal"} if causal else ())
    if backward:
        return OpCall(f"{FLASH}_backward", (out, query, key, value, out), (query, key, value), attributes)
    return OpCall(FLASH, (query, key, value), (out,), attributes)


def embedding(table: Tensor, tokens: tuple[int, ...], *, backward: bool = False) -> OpCall:
    """Rows looked up in a table; the backward writes a gradient of the whole table."""
    ids = Tensor(tokens, "int64")
    rows = Tensor((*tokens, table.shape[-1]), table.dtype)
    if backward:
        return OpCall("aten::embedding_dense_backward", (rows, ids), (table,))
    return OpCall("aten::embedding", (table, ids), (rows,))


def adam(parameters: int, *, tensors: int = 1) -> OpCall:
    """One fused Adam step in float32: reads parameters, gradients and two moments, writes all but the gradients.

    Args:
        parameters: elements in all.
        tensors: among which they are spread; as evenly as it goes where their sizes are not known.
    """
    tensors = max(1, min(tensors, parameters))
    sizes = [parameters // tensors + (i < parameters % tensors) for i in range(tensors)]
    read = tuple(Tensor((size,), "float32", group) for group in (1, 2, 3, 4) for size in sizes)
    return OpCall("aten::_fused_adamw_", read, tuple(t for t in read if t.group != 2))


def chain(steps: Chain, x: Tensor) -> list[OpCall]:
    """The calls of a chain on a tensor."""
    return [
        OpCall(f"aten::{name}", tuple(_operand(c, x) for c in reads), tuple(_operand(c, x) for c in writes))
        for name, reads, writes in steps
    ]


def _operand(letter: str, x: Tensor) -> Tensor:
    *outer, columns = x.shape
    return {
        "x": x,
        "f": Tensor(x.shape, "float32"),
        "h": Tensor((*outer, -(-columns // 2)), x.dtype),
        "r": Tensor((prod(outer), 1), x.dtype),
        "m": Tensor(x.shape, "bool"),
    }[letter]
