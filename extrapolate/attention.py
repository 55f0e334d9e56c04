"""A layer traced with a fused attention kernel becomes one that writes its scores out: two matmuls and a softmax."""

from __future__ import annotations

from functools import partial

import msgspec

from llmprof.schema.operators import family, split_name
from llmprof.schema.workload import Dim, LayerTrace, OpSpec, Poly, TensorSpec

FIRST, NATIVE = "first", "native"
"""Attributes of a fused kernel: the first FlashAttention, and one written for the very generation of the device."""
_NATIVE_NAMES = ("cudnn", "flash_attn_3", "flash_attn3", "flash_attention_3")


def attention_kernel(op: str, attributes: frozenset[str]) -> str:
    """Class of a fused attention kernel: FIRST, NATIVE, or "" for the usual one (FlashAttention-2 and its like)."""
    if FIRST in attributes:
        return FIRST
    name = op.lower()
    return NATIVE if NATIVE in attributes or any(part in name for part in _NATIVE_NAMES) else ""


def attention_prior(op: str, kernel: str) -> str:
    """Name of the prior of a fused attention kernel: of its class and direction."""
    stem = "attention:first" if kernel == FIRST else "attention"
    return f"{stem}:backward" if "backward" in split_name(op)[1] else stem


def with_kernel(layer: LayerTrace, kernel: str) -> LayerTrace:
    """Fused attention kernels marked as FIRST or NATIVE."""
    ops = (
        msgspec.structs.replace(op, attributes=(*op.attributes, kernel))
        if family(op.op) == "attention"
        else op
        for op in layer.ops
    )
    return msgspec.structs.replace(layer, ops=tuple(ops))


def with_math_attention(layer: LayerTrace) -> LayerTrace:
    """Fused attention kernels replaced by batched matmuls over the full square of scores and a softmax between them.

    Kept for the backward are the probabilities instead of the kernel's statistics. A causal mask saves no work here,
    so executed FLOPs double; the attribute "causal" stays, for what counts as model FLOPs.
    """
    ops: list[OpSpec] = []
    saved = list(layer.saved)
    for op in layer.ops:
        shape = _Shape.of(op) if family(op.op) == "attention" else None
        if shape is None:
            ops.append(op)
        elif op.phase == "forward":
            ops += _forward(op, shape)
            for spec in op.outputs[1:]:
                if spec in saved:
                    saved.remove(spec)
            saved.append(shape.scores())
        else:
            ops += _backward(op, shape)
    return msgspec.structs.replace(layer, ops=tuple(ops), saved=tuple(saved))


class _Shape(msgspec.Struct, frozen=True):
    """Heads over all sequences, tokens of queries and keys, width of a head."""

    heads: Dim
    query: Dim
    key: Dim
    width: Dim
    dtype: str

    @classmethod
    def of(cls, op: OpSpec) -> _Shape | None:
        tensors = op.inputs if op.phase == "forward" else op.inputs[1:]
        if len(tensors) < 3 or any(len(t.dims) != 4 for t in tensors[:3]):
            return None
        batch, heads, query, width = tensors[0].dims
        product = _product(batch, heads)
        if product is None:
            return None
        return cls(product, query, tensors[1].dims[2], width, tensors[0].dtype)

    def tensor(self, rows: Dim, columns: Dim) -> TensorSpec:
        return TensorSpec((self.heads, rows, columns), self.dtype)

    def scores(self) -> TensorSpec:
        return self.tensor(self.query, self.key)


def _product(one: Dim, other: Dim) -> Dim | None:
    """Product of two dimensions of which one is a plain number; None when neither is."""
    if isinstance(one, int) and isinstance(other, int):
        return one * other
    if isinstance(one, int):
        one, other = other, one
    if not isinstance(one, Poly) or not isinstance(other, int):
        return None
    n = other
    return Poly(n * one.c, n * one.cb, n * one.cs, n * one.cbs, n * one.css, n * one.cbss, one.div)


def _forward(op: OpSpec, shape: _Shape) -> list[OpSpec]:
    query, key = shape.tensor(shape.query, shape.width), shape.tensor(shape.width, shape.key)
    value, scores = shape.tensor(shape.key, shape.width), shape.scores()
    mask = TensorSpec((shape.query, shape.key), shape.dtype)
    causal = "causal" in op.attributes
    make = partial(_written_out, op)
    masked = [make("add", scores, mask, output=scores)] if causal else []
    return [
        make("bmm", query, key, output=scores),
        make("mul", scores, output=scores),
        *masked,
        make("_softmax", scores, output=scores),
        make("bmm", scores, value, output=shape.tensor(shape.query, shape.width)),
    ]


def _backward(op: OpSpec, shape: _Shape) -> list[OpSpec]:
    rows, columns = shape.tensor(shape.query, shape.width), shape.tensor(shape.key, shape.width)
    scores, transposed = shape.scores(), shape.tensor(shape.key, shape.query)
    make = partial(_written_out, op)
    return [
        make("bmm", transposed, rows, output=columns),
        make("bmm", rows, shape.tensor(shape.width, shape.key), output=scores),
        make("_softmax_backward_data", scores, scores, output=scores),
        make("mul", scores, output=scores),
        make("bmm", scores, columns, output=rows),
        make("bmm", transposed, rows, output=columns),
    ]


def _written_out(op: OpSpec, name: str, *inputs: TensorSpec, output: TensorSpec) -> OpSpec:
    """One operator of what replaces the kernel `op`; its attributes belong to the matmuls."""
    return msgspec.structs.replace(
        op,
        op=f"aten::{name}",
        inputs=inputs,
        outputs=(output,),
        attributes=op.attributes if name == "bmm" else (),
    )
