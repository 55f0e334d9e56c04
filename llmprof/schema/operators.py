"""Operator families, FLOPs and bytes: from an operator's name and tensor shapes to what it does. No torch.

A new family is one row in `_FAMILIES`; a new FLOP formula is one small function registered by name.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import NamedTuple


class Tensor(NamedTuple):
    """Shape and dtype of a tensor input or output; `group` > 0 marks members of one tensor list."""

    shape: tuple[int, ...]
    dtype: str
    group: int = 0


ITEM_BYTES = {
    "float64": 8,
    "float32": 4,
    "tfloat32": 4,
    "bfloat16": 2,
    "float16": 2,
    "float8": 1,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "complex64": 8,
    "complex128": 16,
    "int64": 8,
    "int32": 4,
    "int16": 2,
    "int8": 1,
    "uint8": 1,
    "bool": 1,
}

MATMUL_FAMILIES = ("matmul", "batched_matmul", "attention", "convolution")

_FAMILIES: dict[str, tuple[str, ...]] = {
    "matmul": ("mm", "addmm", "linear", "addmv", "mv", "dot", "_scaled_mm", "linear_backward"),
    "batched_matmul": ("bmm", "baddbmm", "_grouped_mm"),
    "attention": ("scaled_dot_product_", "_scaled_dot_product_", "_flash_attention", "_efficient_attention"),
    "convolution": ("convolution", "_convolution", "convolution_backward", "mkldnn_convolution", "cudnn_convolution"),
    "normalization": ("native_layer_norm", "native_batch_norm", "native_group_norm", "rms_norm", "_fused_rms_norm"),
    "softmax_loss": ("_log_softmax", "_softmax", "nll_loss", "cross_entropy", "mse_loss", "log_softmax"),
    "embedding": ("embedding", "index_select", "gather", "index_put", "index_add", "scatter"),
    "optimizer": ("_fused_adam", "_foreach_"),
    "reduction": ("sum", "mean", "amax", "max", "argmax", "norm", "linalg_vector_norm", "cumsum", "any", "all"),
    "copy": ("copy_", "clone", "contiguous", "_to_copy", "cat", "stack", "split_with_sizes_copy", "chunk_cat"),
    "random": ("normal_", "uniform_", "bernoulli_", "native_dropout", "dropout", "randperm", "random_"),
    "fill": ("zero_", "fill_", "zeros", "ones", "full", "zeros_like", "ones_like", "full_like", "arange"),
    "view": (
        "view", "_unsafe_view", "t", "transpose", "expand", "slice", "select", "unsqueeze", "squeeze", "detach",
        "detach_", "permute", "as_strided", "as_strided_", "alias", "split", "split_with_sizes", "unbind", "chunk",
        "reshape", "_reshape_alias", "unflatten", "flatten", "view_as", "expand_as", "lift_fresh", "wait_tensor",
        "resize_", "set_", "view_as_real", "view_as_complex", "narrow", "unfold", "result_type", "resolve_conj",
    ),
    "allocation": ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "new_zeros"),
}  # fmt: skip
_PREFIX_FAMILIES = {"attention", "optimizer", "normalization", "softmax_loss", "convolution"}
_EXACT = {name: family for family, names in _FAMILIES.items() for name in names}
_PREFIXES = tuple((name, family) for family in sorted(_PREFIX_FAMILIES) for name in _FAMILIES[family])
_COLLECTIVES = {
    "allreduce": "all_reduce",
    "all_reduce": "all_reduce",
    "allreduce_coalesced": "all_reduce",
    "all_reduce_coalesced": "all_reduce",
    "allgather": "all_gather",
    "_allgather_base": "all_gather",
    "all_gather_into_tensor": "all_gather",
    "all_gather_into_tensor_out": "all_gather",
    "allgather_into_tensor_coalesced": "all_gather",
    "reduce_scatter": "reduce_scatter",
    "_reduce_scatter_base": "reduce_scatter",
    "reduce_scatter_tensor": "reduce_scatter",
    "reduce_scatter_tensor_coalesced": "reduce_scatter",
    "alltoall": "all_to_all",
    "alltoall_base": "all_to_all",
    "all_to_all_single": "all_to_all",
    "broadcast": "broadcast",
    "barrier": "barrier",
    "gather": "gather",
    "scatter": "scatter",
    "reduce": "reduce",
    "send": "send",
    "recv": "recv",
    "recv_any_source": "recv",
}
_COLLECTIVE_NAMESPACES = ("c10d", "_c10d_functional", "c10d_functional", "_c10d_functional_autograd")


def split_name(op: str) -> tuple[str, str]:
    """Namespace and bare name: "aten::mm.out" -> ("aten", "mm")."""
    namespace, _, name = op.partition("::")
    return (namespace, name.split(".")[0]) if name else ("", op.split(".")[0])


def collective_kind(op: str) -> str:
    """Kind of a collective ("all_reduce", "all_gather", ...), or "" when the operator is none."""
    namespace, name = split_name(op)
    if namespace not in _COLLECTIVE_NAMESPACES:
        return ""
    return _COLLECTIVES.get(name) or _COLLECTIVES.get(name.rstrip("_"), "")


def family(op: str) -> str:
    """Family of an operator; "elementwise" when nothing more special is known of an aten operator, else "other"."""
    namespace, name = split_name(op)
    if collective_kind(op):
        return "collective"
    if name in _EXACT:
        return _EXACT[name]
    for prefix, found in _PREFIXES:
        if name.startswith(prefix):
            return found
    bare = name.removesuffix("_")
    if bare in _EXACT:
        return _EXACT[bare]
    if namespace == "fsdp":
        return "copy"
    return "elementwise" if namespace in ("aten", "prims") else "other"


def is_free(op: str) -> bool:
    """True for operators that move no data (views and allocations): they cost host time only."""
    return family(op) in ("view", "allocation")


def size_bytes(tensor: Tensor) -> int:
    """Bytes of a dense tensor."""
    return prod(tensor.shape) * ITEM_BYTES.get(tensor.dtype, 4)


def bytes_moved(op: str, inputs: Sequence[Tensor], outputs: Sequence[Tensor] = ()) -> int:
    """Bytes read plus written once each.

    When the outputs are not known, one output is assumed: m x n for a matmul, the weight-gather result for
    an embedding, else the largest input (the broadcast result of an elementwise operator).
    """
    if is_free(op):
        return 0
    _, name = split_name(op)
    if family(op) == "embedding" and name == "embedding" and len(inputs) >= 2:
        table, index = inputs[0], inputs[1]
        rows = prod(index.shape) * (table.shape[-1] if table.shape else 1) * ITEM_BYTES.get(table.dtype, 4)
        return size_bytes(index) + 2 * rows
    read = sum(size_bytes(t) for t in inputs)
    if outputs:
        return read + sum(size_bytes(t) for t in outputs)
    if name in ("mm", "bmm") and len(inputs) >= 2:
        a, b = inputs[0], inputs[1]
        return read + prod(a.shape[:-1]) * (b.shape[-1] if b.shape else 1) * ITEM_BYTES.get(a.dtype, 4)
    return read + max((size_bytes(t) for t in inputs), default=0)


FlopFormula = Callable[[Sequence[tuple[int, ...]], Sequence[tuple[int, ...]], frozenset[str]], int]
_FLOPS: dict[str, FlopFormula] = {}


def _formula(*names: str) -> Callable[[FlopFormula], FlopFormula]:
    def register(function: FlopFormula) -> FlopFormula:
        for name in names:
            _FLOPS[name] = function
        return function

    return register


def flops(
    op: str,
    inputs: Sequence[Tensor],
    outputs: Sequence[Tensor] = (),
    attributes: frozenset[str] = frozenset(),
) -> int:
    """Floating-point operations of one call (a multiply-add is 2); 0 for operators without a matmul.

    Args:
        op: full operator name.
        inputs, outputs: tensors; 0-dim ones may be left out. Outputs matter to convolutions only.
        attributes: "causal" halves attention.
    """
    _, name = split_name(op)
    formula = _FLOPS.get(name) or next(
        (f for prefix, f in _FLOPS.items() if prefix.endswith("*") and name.startswith(prefix[:-1])), None
    )
    if formula is None:
        return 0
    try:
        return formula([t.shape for t in inputs], [t.shape for t in outputs], attributes)
    except (IndexError, ValueError):
        return 0


@_formula("mm", "_scaled_mm")
def _mm(
    inputs: Sequence[tuple[int, ...]], outputs: Sequence[tuple[int, ...]], attributes: frozenset[str]
) -> int:
    # (m, k) x (k, n)
    (m, k), (_, n) = inputs[0], inputs[1]
    return 2 * m * k * n


@_formula("addmm")
def _addmm(
    inputs: Sequence[tuple[int, ...]], outputs: Sequence[tuple[int, ...]], attributes: frozenset[str]
) -> int:
    return _mm(inputs[1:], outputs, attributes)


@_formula("linear")
def _linear(
    inputs: Sequence[tuple[int, ...]], outputs: Sequence[tuple[int, ...]], attributes: frozenset[str]
) -> int:
    # (..., k) x (n, k)
    n, k = inputs[1]
    return 2 * prod(inputs[0][:-1]) * k * n


@_formula("bmm")
def _bmm(
    inputs: Sequence[tuple[int, ...]], outputs: Sequence[tuple[int, ...]], attributes: frozenset[str]
) -> int:
    # (b, m, k) x (b, k, n)
    (b, m, k), (_, _, n) = inputs[0], inputs[1]
    return 2 * b * m * k * n


@_formula("baddbmm")
def _baddbmm(
    inputs: Sequence[tuple[int, ...]], outputs: Sequence[tuple[int, ...]], attributes: frozenset[str]
) -> int:
    return _bmm(inputs[1:], outputs, attributes)


def _attention(
    query: tuple[int, ...], key: tuple[int, ...], value: tuple[int, ...], attributes: frozenset[str]
) -> int:
    # query (b, h, s_q, d), key (b, h_kv, s_k, d), value (b, h_kv, s_k, d_v): two matmuls of 2 b h s_q s_k d each
    b, h, s_q, d = query
    s_k, d_v = key[2], value[3]
    full = 2 * b * h * s_q * s_k * (d + d_v)
    return full // 2 if "causal" in attributes else full


@_formula(
    "scaled_dot_product_attention",
    "_scaled_dot_product_*",
    "_flash_attention_forward",
    "_efficient_attention_*",
)
def _attention_forward(
    inputs: Sequence[tuple[int, ...]], outputs: Sequence[tuple[int, ...]], attributes: frozenset[str]
) -> int:
    return _attention(inputs[0], inputs[1], inputs[2], attributes)


@_formula(
    "_scaled_dot_product_flash_attention_for_cpu_backward",
    "_scaled_dot_product_flash_attention_backward",
    "_scaled_dot_product_efficient_attention_backward",
    "_scaled_dot_product_cudnn_attention_backward",
    "_scaled_dot_product_fused_attention_overrideable_backward",
)
def _attention_backward(
    inputs: Sequence[tuple[int, ...]], outputs: Sequence[tuple[int, ...]], attributes: frozenset[str]
) -> int:
    # inputs are (grad_out, query, key, value, ...); five matmuls where the forward has two (scores are recomputed)
    return _attention(inputs[1], inputs[2], inputs[3], attributes) * 5 // 2


@_formula("convolution", "_convolution", "mkldnn_convolution", "cudnn_convolution")
def _convolution(
    inputs: Sequence[tuple[int, ...]], outputs: Sequence[tuple[int, ...]], attributes: frozenset[str]
) -> int:
    # weight (c_out, c_in / groups, *kernel), output (b, c_out, *spatial)
    weight, output = inputs[1], outputs[0]
    return 2 * prod(output) * prod(weight[1:])


@_formula("convolution_backward")
def _convolution_backward(
    inputs: Sequence[tuple[int, ...]], outputs: Sequence[tuple[int, ...]], attributes: frozenset[str]
) -> int:
    # inputs (grad_output, input, weight): one pass for the input's gradient, one for the weight's
    grad_output, weight = inputs[0], inputs[2]
    return 2 * 2 * prod(grad_output) * prod(weight[1:])


def format_shapes(tensors: Sequence[Tensor]) -> str:
    """Text key of tensor inputs: "64x128,128x256"; tensor lists in brackets; 0-dim tensors are left out.

    Example: `[Tensor((2, 3), "float32"), Tensor((4,), "float32", 1), Tensor((5,), "float32", 1)]` -> "2x3,[4,5]".
    """
    parts: list[str] = []
    open_group = 0
    for tensor in tensors:
        if tensor.group != open_group and open_group:
            parts[-1] += "]"
        if tensor.shape:
            text = "x".join(map(str, tensor.shape))
            parts.append(f"[{text}" if tensor.group and tensor.group != open_group else text)
            open_group = tensor.group
        elif tensor.group != open_group:
            open_group = 0
    if open_group:
        parts[-1] += "]"
    return ",".join(parts)


def parse_shapes(text: str, dtype: str = "float32") -> tuple[Tensor, ...]:
    """Inverse of `format_shapes`, all tensors of one dtype.

    Raises:
        ValueError: the text is not a shape key.
    """
    tensors: list[Tensor] = []
    group, groups = 0, 0
    for part in filter(None, text.split(",")):
        if part.startswith("["):
            groups += 1
            group = groups
        shape = tuple(int(n) for n in part.strip("[]").split("x"))
        tensors.append(Tensor(shape, dtype, group))
        if part.endswith("]"):
            group = 0
    return tuple(tensors)
