"""Names of operator families -> usual shapes of them, coarse ones first, so that a time budget covers all families."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from itertools import chain, zip_longest

import torch

from llmprof.errors import RequestError
from llmprof.schema.measurements import OpCall, Wanted
from llmprof.schema.operators import Tensor, bytes_moved, flops

TOKENS = {"cpu": (512, 2048, 128, 1024, 4096, 256), "cuda": (2048, 8192, 512, 4096, 16384, 1024)}
WIDTHS = {"cpu": (1024, 256, 2048, 512, 768, 4096), "cuda": (4096, 1024, 8192, 2048, 5120, 768)}
DTYPES = {"cpu": "float32", "cuda": "bfloat16"}
HEADS = ((16, 64), (32, 128), (12, 64), (40, 128))
"""(heads, width of one)."""
VOCABULARY = 32000
_LONGEST_S = {"cpu": 0.5, "cuda": 0.2}
"""Calls that would take longer are left out: by the rate of one matmul, and of one copy."""
_PROBE = {"cpu": 512, "cuda": 4096}


def sweep_calls(families: str, device: str) -> tuple[Wanted, ...]:
    """Calls of the named families, in an order in which any beginning is spread over families and sizes.

    Args:
        families: names separated by commas, or "all".
        device: "cpu" (float32) or "cuda" (bfloat16).

    Raises:
        RequestError: a family that is not known.
    """
    names = list(_FAMILIES) if families.strip() == "all" else [n.strip() for n in families.split(",")]
    unknown = [n for n in names if n not in _FAMILIES]
    if unknown:
        raise RequestError(
            f"there is no sweep of {unknown[0]!r}", hint=f"families are {', '.join(_FAMILIES)}; or all"
        )
    estimate_s = _estimate(device, DTYPES[device])
    calls = filter(None, chain.from_iterable(zip_longest(*(_FAMILIES[n](device) for n in names))))
    priced = [Wanted(call=call, estimate_s=estimate_s(call)) for call in dict.fromkeys(calls)]
    short = [w for w in priced if w.estimate_s <= _LONGEST_S[device]]
    return tuple(
        Wanted(call=w.call, estimate_s=w.estimate_s, importance=1 / (1 + i)) for i, w in enumerate(short)
    )


def _estimate(device: str, dtype: str) -> Callable[[OpCall], float]:
    """Seconds of a call, by what one matmul and one copy reach here."""
    size = _PROBE[device]
    a = torch.ones(size, size, dtype=getattr(torch, dtype), device=device)
    flops_per_s = 2 * size**3 / _seconds(lambda: a @ a, device)
    bytes_per_s = 3 * a.nbytes / _seconds(lambda: a + a, device)

    def estimate(call: OpCall) -> float:
        moved = bytes_moved(call.op, call.inputs, call.outputs)
        work = flops(call.op, call.inputs, call.outputs, call.attributes)
        return work / flops_per_s + moved / bytes_per_s

    return estimate


def _seconds(run: Callable[[], object], device: str) -> float:
    best = float("inf")
    for _ in range(3):
        start = time.perf_counter()
        run()
        if device == "cuda":
            torch.cuda.synchronize()
        best = min(best, time.perf_counter() - start)
    return best


def _sizes(device: str) -> Iterator[tuple[int, int]]:
    """(tokens, width), by anti-diagonals: the usual ones first."""
    tokens, widths = TOKENS[device], WIDTHS[device]
    pairs = [(i + j, i, j) for i in range(len(tokens)) for j in range(len(widths))]
    for _, i, j in sorted(pairs):
        yield tokens[i], widths[j]


def _gemm(device: str) -> Iterator[OpCall]:
    """A linear layer and its two gradients: to the same width, to four times it, and back."""
    dtype = DTYPES[device]
    for tokens, width in _sizes(device):
        for n, k in ((width, width), (4 * width, width), (width, 4 * width)):
            for m, columns, inner, phase in (
                (tokens, n, k, "forward"),
                (tokens, k, n, "backward_input"),
                (n, k, tokens, "backward_weight"),
            ):
                tensors = Tensor((m, inner), dtype), Tensor((inner, columns), dtype)
                yield OpCall(
                    op="aten::mm", inputs=tensors, outputs=(Tensor((m, columns), dtype),), phase=phase
                )


def _attention(device: str) -> Iterator[OpCall]:
    """A causal fused kernel on one or more sequences, forward and backward."""
    dtype = DTYPES[device]
    name = "aten::_scaled_dot_product_flash_attention"
    name += "" if dtype == "bfloat16" else "_for_cpu"
    causal = frozenset({"causal"})
    for tokens in TOKENS[device]:
        for heads, width in HEADS:
            for batch in (1, 4):
                x = Tensor((batch, heads, tokens, width), dtype)
                lse = Tensor((batch, heads, tokens), "float32")
                if dtype == "bfloat16":
                    yield OpCall(op=name, inputs=(x, x, x), attributes=causal)
                    continue
                yield OpCall(op=name, inputs=(x, x, x), outputs=(x, lse), attributes=causal)
                back = (x, x, x, x, x, lse)
                yield OpCall(
                    op=f"{name}_backward",
                    inputs=back,
                    outputs=(x, x, x),
                    attributes=causal,
                    phase="backward_input",
                )


def _norm(device: str) -> Iterator[OpCall]:
    dtype = DTYPES[device]
    for tokens, width in _sizes(device):
        x, w, one = Tensor((tokens, width), dtype), Tensor((width,), dtype), Tensor((tokens, 1), "float32")
        yield OpCall(op="aten::native_layer_norm", inputs=(x, w, w), outputs=(x, one, one))
        yield OpCall(
            op="aten::native_layer_norm_backward",
            inputs=(x, x, one, one, w, w),
            outputs=(x, w, w),
            phase="backward_input",
        )


def _elementwise(device: str) -> Iterator[OpCall]:
    dtype = DTYPES[device]
    for tokens, width in _sizes(device):
        x = Tensor((tokens, width), dtype)
        yield OpCall(op="aten::add", inputs=(x, x), outputs=(x,))
        yield OpCall(op="aten::mul", inputs=(x, x), outputs=(x,))
        yield OpCall(op="aten::silu", inputs=(x,), outputs=(x,))
        yield OpCall(op="aten::gelu_backward", inputs=(x, x), outputs=(x,), phase="backward_input")


def _softmax(device: str) -> Iterator[OpCall]:
    dtype = DTYPES[device]
    for tokens in TOKENS[device]:
        for vocabulary in (VOCABULARY, 4 * VOCABULARY):
            x = Tensor((tokens, vocabulary), dtype)
            yield OpCall(op="aten::_log_softmax", inputs=(x,), outputs=(x,))
            yield OpCall(
                op="aten::_log_softmax_backward_data", inputs=(x, x), outputs=(x,), phase="backward_input"
            )


def _embedding(device: str) -> Iterator[OpCall]:
    dtype = DTYPES[device]
    for tokens, width in _sizes(device):
        table, ids = Tensor((VOCABULARY, width), dtype), Tensor((1, tokens), "int64")
        rows = Tensor((1, tokens, width), dtype)
        yield OpCall(op="aten::embedding", inputs=(table, ids), outputs=(rows,))
        yield OpCall(
            op="aten::embedding_dense_backward",
            inputs=(rows, ids),
            outputs=(table,),
            phase="backward_weight",
        )


def _optimizer(device: str) -> Iterator[OpCall]:
    """Fused AdamW in float32 over lists of parameters of one size."""
    for count in (1, 16):
        for width in WIDTHS[device]:
            lists = [Tensor((width, width), "float32", group) for group in (1, 2, 3, 4) for _ in range(count)]
            yield OpCall(op="aten::_fused_adamw_", inputs=tuple(lists), phase="optimizer")


_FAMILIES: dict[str, Callable[[str], Iterator[OpCall]]] = {
    "gemm": _gemm,
    "attention": _attention,
    "norm": _norm,
    "elementwise": _elementwise,
    "softmax": _softmax,
    "embedding": _embedding,
    "optimizer": _optimizer,
}
FAMILIES: Sequence[str] = tuple(_FAMILIES)
"""Names of the sweeps."""
