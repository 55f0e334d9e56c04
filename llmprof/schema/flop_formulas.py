"""FLOP formulas: from the bare name and shapes of an operator to floating-point operations (a multiply-add is 2).

A new formula is one small function registered by name; a name that ends in `*` is a prefix.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from math import prod

Shapes = Sequence[tuple[int, ...]]
FlopFormula = Callable[[Shapes, Shapes, frozenset[str]], int]
"""(input shapes, output shapes, attributes) -> FLOPs; may raise IndexError or ValueError on unexpected shapes."""

_FORMULAS: dict[str, FlopFormula] = {}


@lru_cache(maxsize=4096)
def flop_formula(name: str) -> FlopFormula | None:
    """The formula of a bare operator name; in-place forms share it; None for operators without a matmul."""
    name = name.removesuffix("_")
    if name in _FORMULAS:
        return _FORMULAS[name]
    prefixes = (key for key in _FORMULAS if key.endswith("*") and name.startswith(key[:-1]))
    best = max(prefixes, key=len, default="")
    return _FORMULAS.get(best)


def _formula(*names: str) -> Callable[[FlopFormula], FlopFormula]:
    def register(function: FlopFormula) -> FlopFormula:
        for name in names:
            _FORMULAS[name] = function
        return function

    return register


@_formula("mm", "_scaled_mm", "_int_mm")
def _mm(inputs: Shapes, outputs: Shapes, attributes: frozenset[str]) -> int:
    # (m, k) x (k, n)
    (m, k), (_, n) = inputs[0], inputs[1]
    return 2 * m * k * n


@_formula("addmm", "_addmm_activation")
def _addmm(inputs: Shapes, outputs: Shapes, attributes: frozenset[str]) -> int:
    return _mm(inputs[1:], outputs, attributes)


@_formula("mv")
def _mv(inputs: Shapes, outputs: Shapes, attributes: frozenset[str]) -> int:
    # (m, k) x (k,)
    m, k = inputs[0]
    return 2 * m * k


@_formula("addmv")
def _addmv(inputs: Shapes, outputs: Shapes, attributes: frozenset[str]) -> int:
    return _mv(inputs[1:], outputs, attributes)


@_formula("dot", "vdot")
def _dot(inputs: Shapes, outputs: Shapes, attributes: frozenset[str]) -> int:
    return 2 * prod(inputs[0])


@_formula("linear")
def _linear(inputs: Shapes, outputs: Shapes, attributes: frozenset[str]) -> int:
    # (..., k) x (n, k)
    n, k = inputs[1]
    return 2 * prod(inputs[0][:-1]) * k * n


@_formula("bmm")
def _bmm(inputs: Shapes, outputs: Shapes, attributes: frozenset[str]) -> int:
    # (b, m, k) x (b, k, n)
    (b, m, k), (_, _, n) = inputs[0], inputs[1]
    return 2 * b * m * k * n


@_formula("baddbmm", "addbmm")
def _baddbmm(inputs: Shapes, outputs: Shapes, attributes: frozenset[str]) -> int:
    return _bmm(inputs[1:], outputs, attributes)


@_formula("_grouped_mm", "_scaled_grouped_mm")
def _grouped_mm(inputs: Shapes, outputs: Shapes, attributes: frozenset[str]) -> int:
    # tokens (t, k) x experts (e, k, n): each token meets one expert; (m, t) x (t, n) is the weight gradient
    a, b = inputs[0], inputs[1]
    if len(a) == 3 and len(b) == 3:
        return _bmm(inputs, outputs, attributes)
    return 2 * prod(a[-2:]) * b[-1]


def _attention(
    query: tuple[int, ...], key: tuple[int, ...], value: tuple[int, ...], attributes: frozenset[str]
) -> int:
    # query (b, h, s_q, d), key (b, h_kv, s_k, d), value (b, h_kv, s_k, d_v): two matmuls of 2 b h s_q s_k d each
    b, h, s_q, d = query
    s_k, d_v = key[2], value[3]
    full = 2 * b * h * s_q * s_k * (d + d_v)
    return full // 2 if "causal" in attributes else full


def _heads_second(shapes: Shapes) -> list[tuple[int, ...]]:
    """(b, s, h, d) as the kernels of flash and memory-efficient attention take it -> (b, h, s, d)."""
    return [(b, h, s, d) for b, s, h, d in shapes]


@_formula("scaled_dot_product_attention", "_scaled_dot_product_*")
def _attention_forward(inputs: Shapes, outputs: Shapes, attributes: frozenset[str]) -> int:
    return _attention(inputs[0], inputs[1], inputs[2], attributes)


@_formula("_flash_attention_forward", "_efficient_attention_forward", "_flash_attn_forward")
def _attention_kernel_forward(inputs: Shapes, outputs: Shapes, attributes: frozenset[str]) -> int:
    return _attention_forward(_heads_second(inputs[:3]), outputs, attributes)


@_formula(
    "_scaled_dot_product_flash_attention_for_cpu_backward",
    "_scaled_dot_product_flash_attention_backward",
    "_scaled_dot_product_efficient_attention_backward",
    "_scaled_dot_product_cudnn_attention_backward",
    "_scaled_dot_product_fused_attention_overrideable_backward",
)
def _attention_backward(inputs: Shapes, outputs: Shapes, attributes: frozenset[str]) -> int:
    # inputs are (grad_out, query, key, value, ...); five matmuls where the forward has two (scores are recomputed)
    return _attention(inputs[1], inputs[2], inputs[3], attributes) * 5 // 2


@_formula("_flash_attention_backward", "_efficient_attention_backward", "_flash_attn_backward")
def _attention_kernel_backward(inputs: Shapes, outputs: Shapes, attributes: frozenset[str]) -> int:
    return _attention_backward(_heads_second(inputs[:4]), outputs, attributes)


@_formula("convolution", "_convolution", "mkldnn_convolution", "cudnn_convolution")
def _convolution(inputs: Shapes, outputs: Shapes, attributes: frozenset[str]) -> int:
    # weight (c_out, c_in / groups, *kernel), output (b, c_out, *spatial)
    weight, output = inputs[1], outputs[0]
    return 2 * prod(output) * prod(weight[1:])


@_formula("convolution_backward")
def _convolution_backward(inputs: Shapes, outputs: Shapes, attributes: frozenset[str]) -> int:
    # inputs (grad_output, input, weight): one pass for the input's gradient, one for the weight's
    grad_output, weight = inputs[0], inputs[2]
    return 2 * 2 * prod(grad_output) * prod(weight[1:])
