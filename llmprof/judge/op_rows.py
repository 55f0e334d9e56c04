"""A row of an operator table becomes the operator calls it timed, with concrete tensors, or the reason why it has none."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

from llmprof.judge import op_calls
from llmprof.judge.cells import Reject, Row, flag, required, text, whole
from llmprof.judge.op_blocks import block_calls, curvature_calls, precondition_calls
from llmprof.judge.op_calls import OpCall, Product, chain, gradients, product
from llmprof.judge.op_shapes import Block, Fields, Matrix, Traced, Vocabulary, read_shape_cell
from llmprof.judge.op_traces import TRACED
from llmprof.schema.operators import Tensor

DTYPES = {
    "fp32": "float32",
    "fp16": "float16",
    "bf16": "bfloat16",
    "fp8": "float8",
    "('float', 'float')": "float32",
}
_VOCABULARY = 50257
_PADDING = 128
"""The vocabulary of a stage whose row does not say it, padded to a multiple of this for each tensor-parallel rank."""

Adapter = Callable[[Row, str, str], list[OpCall]]
"""(row, phase, dtype) -> calls; none where there is nothing to price."""


def read_calls(row: Row) -> list[OpCall]:
    """The calls behind a row; their times add up to it.

    Raises:
        Reject: an operator that is not priced, a missing size, or a row that its source flags.
    """
    said = text(row, "qc")
    if said != "ok":
        raise Reject(f"qc: {re.split(r'[:;(,]', said)[0].strip() or 'empty'}")
    name, phase = text(row, "op"), text(row, "phase")
    dtype = DTYPES.get(text(row, "dtype"))
    if dtype is None:
        raise Reject(f"unknown dtype: {text(row, 'dtype') or 'empty'}")
    if (name, phase) in PASSED_ON:
        raise Reject(f"no kernel of its own: {name} {phase}")
    cell = read_shape_cell(text(row, "shape"))
    traced = TRACED.get(name)
    if isinstance(cell, Traced) and traced is not None and not whole(row, "m"):
        calls = traced(row, cell, phase == "bwd", dtype)
    elif name in ADAPTERS:
        calls = ADAPTERS[name](row, phase, dtype)
    else:
        raise Reject(f"not an operator that is priced: {name}", defect=True)
    if not calls:
        raise Reject(f"not an operator that is priced: {name} {phase}", defect=True)
    return calls


PASSED_ON = {("add", "bwd"), ("residual_add", "bwd")}
"""Autograd hands the gradient of a sum on, so that there is nothing to measure; a source may repeat the forward."""


def _gemm(row: Row, phase: str, dtype: str) -> list[OpCall]:
    m, n, k = (required(row, key) for key in ("m", "n", "k"))
    size = Product(m, n, k, whole(row, "batch") or 1)
    if phase == "bwd":  # m, n, k are those of the forward
        return gradients(size, dtype)
    return [product(size, dtype, out="float32" if "out fp32" in text(row, "notes") else "")]


def _grouped(row: Row, phase: str, dtype: str) -> list[OpCall]:
    """m rows for each expert; m, n, k stay the forward's in all phases."""
    m, n, k, experts = (required(row, key) for key in ("m", "n", "k", "experts"))
    dims = {"fwd": (m, n, k), "dgrad": (m, k, n), "wgrad": (k, n, m)}.get(phase)
    return [product(Product(*dims, experts), dtype)] if dims else []


def _attention(row: Row, phase: str, dtype: str) -> list[OpCall]:
    batch, heads, seq_q, width = (required(row, key) for key in ("batch", "heads", "seq_q", "head_dim"))
    kv_heads, seq_kv = whole(row, "kv_heads") or heads, whole(row, "seq_kv") or seq_q
    stated = re.search(r"v head dim ([1-9]\d{0,5})\b", text(row, "notes"))
    value_width = int(stated.group(1)) if stated else width
    if phase not in ("fwd", "bwd"):
        return []
    call = op_calls.attention(
        Tensor((batch, heads, seq_q, width), dtype),
        Tensor((batch, kv_heads, seq_kv, width), dtype),
        Tensor((batch, kv_heads, seq_kv, value_width), dtype),
        causal=bool(flag(row, "causal")),
        backward=phase == "bwd",
    )
    return [call]


def _matrix(row: Row, dtype: str) -> Tensor:
    """Tokens by width, from ROWSxCOLUMNS or from b, l and dim (or width)."""
    cell = read_shape_cell(text(row, "shape"))
    if isinstance(cell, Matrix):
        return Tensor((cell.rows, cell.columns), dtype)
    b, length, width = _sizes(row, ("b", "l", "width" if "width " in text(row, "shape") else "dim"))
    return Tensor((b * length, width), dtype)


def _scores(row: Row, dtype: str) -> Tensor:
    """Attention scores of one device: b sequences, its share of the heads, l x l; or a matrix."""
    if isinstance(read_shape_cell(text(row, "shape")), Matrix):
        return _matrix(row, dtype)
    b, h, length, parts = _sizes(row, ("b", "h", "l", "mp"))
    return Tensor((b * _shared(h, parts) * length, length), dtype)


def _sizes(row: Row, keys: tuple[str, ...]) -> list[int]:
    cell = read_shape_cell(text(row, "shape"))
    if not isinstance(cell, Fields) or any(key not in cell.sizes for key in keys):
        raise Reject(f"shape is not read: {text(row, 'op')}", defect=True)
    return [cell.sizes[key] for key in keys]


def _shared(size: int, parts: int) -> int:
    return -(-size // parts)


def _elementwise(
    forward: str,
    backward: str = "",
    *,
    operands: int = 1,
    tensor: Callable[[Row, str], Tensor] = _matrix,
    attributes: frozenset[str] = frozenset(),
) -> Adapter:
    """An operator on one tensor; `backward` reads the gradient and the saved input."""

    def calls(row: Row, phase: str, dtype: str) -> list[OpCall]:
        x = tensor(row, dtype)
        if phase == "bwd":
            return [OpCall(f"aten::{backward}", (x, x), (x,), attributes)] if backward else []
        return [OpCall(f"aten::{forward}", (x,) * operands, (x,), attributes)]

    return calls


def _chained(forward: op_calls.Chain, backward: op_calls.Chain) -> Adapter:
    def calls(row: Row, phase: str, dtype: str) -> list[OpCall]:
        return chain(backward if phase == "bwd" else forward, _matrix(row, dtype))

    return calls


def _cross_entropy(row: Row, phase: str, dtype: str) -> list[OpCall]:
    b, length, columns = _sizes(row, ("b", "l", "vocabulary slice"))
    steps = op_calls.CROSS_ENTROPY_BACKWARD if phase == "bwd" else op_calls.CROSS_ENTROPY
    return chain(steps, Tensor((b * length, columns), dtype))


def _masked_fill(row: Row, phase: str, dtype: str) -> list[OpCall]:
    if phase != "fwd":
        raise Reject("not timed as one kernel: masked_fill bwd")
    x = _scores(row, dtype)
    mask = Tensor((x.shape[1], x.shape[1]), "bool")
    return [OpCall("aten::masked_fill", (x, mask), (x,))]


def _activation(row: Row, phase: str, dtype: str) -> list[OpCall]:
    cell = read_shape_cell(text(row, "shape"))
    if not isinstance(cell, Matrix) or phase != "fwd":
        raise Reject("shape is not read: activation", defect=True)
    out = Tensor((cell.rows, cell.columns), dtype)
    read = Tensor((cell.rows, cell.columns * (2 if cell.gated else 1)), dtype)
    return [OpCall("aten::silu", (read,), (out,))]


def _embedding(row: Row, phase: str, dtype: str) -> list[OpCall]:
    cell = read_shape_cell(text(row, "shape"))
    if isinstance(cell, Vocabulary):
        rows = _shared(cell.rows, cell.parts)
        tokens, hidden = required(row, "tokens"), required(row, "hidden")
    else:
        b, length, hidden, rows = _sizes(row, ("b", "l", "dim", "vocabulary slice"))
        tokens = b * length
    return [op_calls.embedding(Tensor((rows, hidden), dtype), (tokens,), backward=phase == "bwd")]


def _rope(row: Row, phase: str, dtype: str) -> list[OpCall]:
    """Queries and keys rotated: in place by one kernel, or each by a chain of torch operators."""
    if isinstance(read_shape_cell(text(row, "shape")), Fields):
        b, h, length, parts, width = _sizes(row, ("b", "h", "l", "mp", "head_dim"))
        x = Tensor((b * length * _shared(h, parts), width), dtype)
        return 2 * chain(op_calls.ROPE_BACKWARD if phase == "bwd" else op_calls.ROPE, x)
    if phase != "fwd":
        return []
    heads = required(row, "heads") + required(row, "kv_heads")
    x = Tensor((required(row, "tokens"), heads * required(row, "head_dim")), dtype)
    return [OpCall("fused::rope", (x,), (x,))]


def _adam(row: Row, phase: str, dtype: str) -> list[OpCall]:
    """A whole model's parameters, or a pipeline stage's: 12 d^2 + 13 d in each block, vocabulary x d at either end.

    A block has 12 tensors of them, either end one.
    """
    cell = read_shape_cell(text(row, "shape"))
    if isinstance(cell, Fields) and cell.stage:
        blocks, width, parts = _sizes(row, ("encoders", "dim", "mp"))
        count, tensors = blocks * (12 * width**2 + 13 * width) // parts, 12 * blocks
        if cell.stage != "middle":
            padded = _shared(_VOCABULARY, _PADDING * parts) * _PADDING
            count, tensors = count + padded * width, tensors + 1
        return [op_calls.adam(count, tensors=tensors)]
    count, tensors = _sizes(row, ("params", "param_tensors"))
    return [op_calls.adam(count, tensors=tensors)]


def _block(row: Row, phase: str, dtype: str) -> list[OpCall]:
    cell = _block_cell(row)
    phases = {"fwd": ("forward",), "bwd": ("backward_input", "backward_weight")}.get(phase, ())
    return block_calls(cell, heads=required(row, "heads"), dtype=dtype, phases=phases)


def _block_cell(row: Row) -> Block:
    cell = read_shape_cell(text(row, "shape"))
    if not isinstance(cell, Block):
        raise Reject(f"shape is not read: {text(row, 'op')}", defect=True)
    return cell


def _moe_layer(row: Row, phase: str, dtype: str) -> list[OpCall]:
    """One device's time in a layer of experts holds its exchanges with the others, whose links no cell names."""
    raise Reject("holds collectives on links that are not stated: moe_layer", defect=True)


ADAPTERS: Mapping[str, Adapter] = {
    "gemm": _gemm,
    "bmm": _gemm,
    "grouped_gemm": _grouped,
    "attention": _attention,
    "layernorm": _elementwise("native_layer_norm", "native_layer_norm_backward"),
    "rmsnorm": _chained(op_calls.NORM, op_calls.NORM_BACKWARD),
    "norm": _elementwise("_fused_rms_norm"),
    "softmax": _elementwise("_softmax", "_softmax_backward_data", tensor=_scores),
    "softmax_causal_fused": _elementwise(
        "_masked_softmax", "_masked_softmax_backward", tensor=_scores, attributes=frozenset({"causal"})
    ),
    "masked_fill": _masked_fill,
    "cross_entropy": _cross_entropy,
    "gelu": _elementwise("gelu", "gelu_backward"),
    "relu": _elementwise("relu"),
    "tanh": _elementwise("tanh"),
    "add": _elementwise("add", operands=2),
    "mul": _elementwise("mul", operands=2),
    "residual_add": _elementwise("add", operands=2),
    "activation": _activation,
    "embedding": _embedding,
    "rope": _rope,
    "adam_step": _adam,
    "transformer_block": _block,
    "kfac_curvature_block": lambda row, _, dtype: curvature_calls(_block_cell(row), dtype=dtype),
    "kfac_precondition_block": lambda row, _, dtype: precondition_calls(_block_cell(row), dtype=dtype),
    "moe_layer": _moe_layer,
}
"""How a row of an operator is read; operators of a traced step with their own shapes are in `op_traces`."""
