"""A row of an operator table becomes the operator calls it timed, with concrete tensors, or the reason why it has none."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import NamedTuple

from llmprof.judge.cells import Reject, Row, flag, number, required, text
from llmprof.schema.operators import Tensor

DTYPES = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16", "fp8": "float8"}


class OpCall(NamedTuple):
    """One call of an operator."""

    op: str
    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]
    attributes: frozenset[str] = frozenset()


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
    adapter = ADAPTERS.get(name)
    if adapter is None:
        raise Reject(f"not an operator that is priced: {name}", defect=True)
    calls = adapter(row, phase, dtype)
    if not calls:
        raise Reject(f"not an operator that is priced: {name} {phase}", defect=True)
    return calls


def _gemm(row: Row, phase: str, dtype: str) -> list[OpCall]:
    m, n, k = (required(row, key) for key in ("m", "n", "k"))
    batch = int(number(row, "batch") or 1)
    if phase == "bwd":  # m, n, k are those of the forward: gradient of the input, then of the weight
        return [_product(batch, m, k, n, dtype), _product(batch, k, n, m, dtype)]
    return [_product(batch, m, n, k, dtype)]


def _product(batch: int, m: int, n: int, k: int, dtype: str) -> OpCall:
    out = "bfloat16" if dtype == "float8" else dtype
    outer = (batch,) if batch > 1 else ()
    name = "aten::bmm" if outer else "aten::_scaled_mm" if dtype == "float8" else "aten::mm"
    inputs = Tensor((*outer, m, k), dtype), Tensor((*outer, k, n), dtype)
    return OpCall(name, inputs, (Tensor((*outer, m, n), out),))


def _grouped(row: Row, phase: str, dtype: str) -> list[OpCall]:
    """m rows for each expert; m, n, k stay the forward's in all phases."""
    m, n, k, experts = (required(row, key) for key in ("m", "n", "k", "experts"))
    dims = {"fwd": (m, n, k), "dgrad": (m, k, n), "wgrad": (k, n, m)}.get(phase)
    if dims is None:
        return []
    rows, columns, inner = dims
    shapes = (experts, rows, inner), (experts, inner, columns), (experts, rows, columns)
    return [OpCall("aten::bmm", tuple(Tensor(s, dtype) for s in shapes[:2]), (Tensor(shapes[2], dtype),))]


def _attention(row: Row, phase: str, dtype: str) -> list[OpCall]:
    batch, heads, seq_q, dim = (required(row, key) for key in ("batch", "heads", "seq_q", "head_dim"))
    kv_heads, seq_kv = int(number(row, "kv_heads") or heads), int(number(row, "seq_kv") or seq_q)
    value = re.search(r"v head dim (\d+)", text(row, "notes"))
    value_dim = int(value.group(1)) if value else dim
    query, key = Tensor((batch, heads, seq_q, dim), dtype), Tensor((batch, kv_heads, seq_kv, dim), dtype)
    val = Tensor((batch, kv_heads, seq_kv, value_dim), dtype)
    out = Tensor((batch, heads, seq_q, value_dim), dtype)
    attributes = frozenset({"causal"} if flag(row, "causal") else ())
    name = "aten::_scaled_dot_product_flash_attention"
    if phase == "fwd":
        return [OpCall(name, (query, key, val), (out,), attributes)]
    if phase == "bwd":
        return [OpCall(f"{name}_backward", (out, query, key, val, out), (query, key, val), attributes)]
    return []


def _matrix(row: Row) -> tuple[int, int]:
    """Rows and columns of a matrix from the `shape` cell (ROWSxCOLS), else from its key=value form."""
    shape = text(row, "shape")
    found = re.match(r"^(\d+)x(\d+)", shape)
    if found:
        return int(found.group(1)), int(found.group(2))
    keys = dict(re.findall(r"(\w+)=(\d+)", shape))
    width = re.search(r"width (\d+)", shape)
    if "b" in keys and "l" in keys and ("dim" in keys or width):
        return int(keys["b"]) * int(keys["l"]), int(width.group(1) if width else keys["dim"])
    raise Reject(f"shape is not read: {text(row, 'op')}", defect=True)


def _elementwise(
    forward: str, backward: str = "", *, operands: int = 1
) -> Callable[[Row, str, str], list[OpCall]]:
    """An operator on one matrix; `backward` reads the gradient and the saved input."""

    def calls(row: Row, phase: str, dtype: str) -> list[OpCall]:
        x = Tensor(_matrix(row), dtype)
        if phase == "bwd":
            return [OpCall(backward, (x, x), (x,))] if backward else []
        return [OpCall(forward, (x,) * operands, (x,))]

    return calls


def _activation(row: Row, phase: str, dtype: str) -> list[OpCall]:
    rows, width = _matrix(row)
    inputs = 2 * width if "gated" in text(row, "shape") else width
    return [OpCall("aten::silu", (Tensor((rows, inputs), dtype),), (Tensor((rows, width), dtype),))]


def _embedding(row: Row, phase: str, dtype: str) -> list[OpCall]:
    found = re.match(r"^vocab (\d+)/(\d+)$", text(row, "shape"))
    if not found or phase != "fwd":
        raise Reject("shape is not read: embedding", defect=True)
    tokens, hidden = required(row, "tokens"), required(row, "hidden")
    table = Tensor((-(-int(found.group(1)) // int(found.group(2))), hidden), dtype)
    return [
        OpCall("aten::embedding", (table, Tensor((tokens,), "int64")), (Tensor((tokens, hidden), dtype),))
    ]


def _rope(row: Row, phase: str, dtype: str) -> list[OpCall]:
    """Queries and keys rotated in place."""
    if not number(row, "tokens") or phase != "fwd":
        raise Reject("shape is not read: rope", defect=True)
    heads = required(row, "heads") + required(row, "kv_heads")
    x = Tensor((required(row, "tokens"), heads * required(row, "head_dim")), dtype)
    return [OpCall("fused::rope", (x,), (x,))]


ADAPTERS: dict[str, Callable[[Row, str, str], list[OpCall]]] = {
    "gemm": _gemm,
    "bmm": _gemm,
    "grouped_gemm": _grouped,
    "attention": _attention,
    "layernorm": _elementwise("aten::native_layer_norm", "aten::native_layer_norm_backward"),
    "rmsnorm": _elementwise("aten::_fused_rms_norm", "aten::_fused_rms_norm_backward"),
    "norm": _elementwise("aten::_fused_rms_norm"),
    "softmax": _elementwise("aten::_softmax", "aten::_softmax_backward_data"),
    "gelu": _elementwise("aten::gelu", "aten::gelu_backward"),
    "relu": _elementwise("aten::relu"),
    "tanh": _elementwise("aten::tanh"),
    "add": _elementwise("aten::add", operands=2),
    "mul": _elementwise("aten::mul", operands=2),
    "residual_add": _elementwise("aten::add", operands=2),
    "activation": _activation,
    "embedding": _embedding,
    "rope": _rope,
}
"""How a row of an operator is read; a backward that its source only copied from the forward has none."""
