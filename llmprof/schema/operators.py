"""Operator families, FLOPs and bytes: from an operator's name and tensor shapes to what it does. No torch.

A new family is one row in `_FAMILIES`; FLOP formulas are in `llmprof.schema.flop_formulas`.
"""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase
from functools import lru_cache
from math import prod
from typing import NamedTuple

from llmprof.schema.flop_formulas import flop_formula


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
    "matmul": ("mm", "addmm", "linear", "addmv", "mv", "dot", "vdot", "_scaled_mm", "_int_mm", "_addmm_activation"),
    "batched_matmul": ("bmm", "baddbmm", "addbmm", "_grouped_mm", "_scaled_grouped_mm"),
    "attention": (
        "scaled_dot_product_*", "_scaled_dot_product_*", "_flash_attention_*", "_efficient_attention_*",
        "_cudnn_attention_*", "_flash_attn_*", "flash_attn*",
    ),
    "convolution": ("*convolution*", "conv1d", "conv2d", "conv3d", "conv_transpose*", "slow_conv*", "_slow_conv*"),
    "normalization": ("*layer_norm*", "*batch_norm*", "*group_norm*", "*rms_norm*", "*instance_norm*"),
    "softmax_loss": ("*softmax*", "nll_loss*", "*cross_entropy*", "mse_loss*", "*l1_loss*", "kl_div*", "huber_loss*"),
    "embedding": (
        "embedding*", "_embedding_bag*", "index*", "_index_put_impl", "_unsafe_index*", "gather", "scatter*",
        "masked_scatter*", "masked_select",
    ),
    "optimizer": ("_fused_adam*", "_fused_sgd*", "_fused_adagrad*", "_foreach_*", "_amp_foreach_*"),
    "reduction": (
        "sum", "mean", "amax", "amin", "max", "min", "argmax", "argmin", "norm", "linalg_vector_norm", "cumsum",
        "cumprod", "any", "all", "prod", "var", "std", "var_mean", "std_mean", "logsumexp", "logcumsumexp", "topk",
        "sort", "argsort", "nansum", "count_nonzero",
    ),
    "copy": (
        "copy", "clone", "contiguous", "_to_copy", "to", "_to_cpu", "cat", "stack", "split_with_sizes_copy",
        "chunk_cat", "_chunk_cat", "repeat", "repeat_interleave", "roll", "constant_pad_nd", "select_backward",
        "slice_backward", "diagonal_backward", "unfold_backward", "tril", "triu", "all_gather_copy_in", "*_copy",
    ),
    "random": (
        "normal", "uniform", "bernoulli", "exponential", "multinomial", "native_dropout", "dropout", "randperm",
        "random", "rand", "randn", "randint", "rand_like", "randn_like", "randint_like",
    ),
    "fill": (
        "zero", "fill", "zeros", "ones", "full", "zeros_like", "ones_like", "full_like", "arange", "new_zeros",
        "new_ones", "new_full", "linspace", "scalar_tensor",
    ),
    "view": (
        "view", "_unsafe_view", "t", "transpose", "expand", "slice", "select", "unsqueeze", "squeeze", "detach",
        "permute", "as_strided", "alias", "split", "split_with_sizes", "unbind", "chunk", "reshape", "_reshape_alias",
        "unflatten", "flatten", "view_as", "expand_as", "lift_fresh", "wait_tensor", "resize", "set", "view_as_real",
        "view_as_complex", "narrow", "unfold", "result_type", "resolve_conj", "resolve_neg", "_conj", "diagonal",
        "movedim", "broadcast_to", "tensor_split", "unsafe_split", "unsafe_chunk", "swapaxes", "numpy_T", "item",
        "_local_scalar_dense", "is_nonzero", "is_same_size", "sym_size", "data", "requires_grad", "retain_grad",
    ),
    "allocation": ("empty", "empty_like", "empty_strided", "empty_permuted", "new_empty", "new_empty_strided"),
}  # fmt: skip
"""Bare names by family, without the trailing underscore of in-place forms; `*` matches anything.

Exact names win over patterns, patterns are tried in this order, and "X_backward" belongs to X's family.
"""
_EXACT = {name: family for family, names in _FAMILIES.items() for name in names if "*" not in name}
_PATTERNS = tuple((name, family) for family, names in _FAMILIES.items() for name in names if "*" in name)
_NAMESPACE_FAMILIES = {"fsdp": "copy", "profiler": "view", "fused": "elementwise"}
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


@lru_cache(maxsize=4096)
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


@lru_cache(maxsize=4096)
def family(op: str) -> str:
    """Family of an operator; "elementwise" when nothing more special is known of an aten operator, else "other"."""
    namespace, name = split_name(op)
    if collective_kind(op):
        return "collective"
    bare = name.rstrip("_") or name
    for candidate in (name, bare, bare.removesuffix("_backward")):
        if candidate in _EXACT:
            return _EXACT[candidate]
    for pattern, found in _PATTERNS:
        if fnmatchcase(bare, pattern):
            return found
    if namespace in _NAMESPACE_FAMILIES:
        return _NAMESPACE_FAMILIES[namespace]
    return "elementwise" if namespace in ("aten", "prims") else "other"


def is_free(op: str) -> bool:
    """True for operators that move no data (views and allocations): they cost host time only."""
    return family(op) in ("view", "allocation")


def size_bytes(tensor: Tensor) -> int:
    """Bytes of a dense tensor."""
    return prod(tensor.shape) * ITEM_BYTES.get(tensor.dtype, 4)


def bytes_moved(op: str, inputs: Sequence[Tensor], outputs: Sequence[Tensor] = ()) -> int:
    """Bytes read plus written once each; 0 for views and allocations.

    An embedding and the negative log-likelihood read only the rows that their index selects. When the outputs are
    not known they are guessed: m x n for a matmul, the gathered rows of an embedding, the first
    list of a foreach operator, every list but the gradients of a fused optimizer, nothing of weight for a reduction,
    else the largest input (the broadcast result of an elementwise operator).
    """
    kind = family(op)
    if kind in ("view", "allocation"):
        return 0
    name = split_name(op)[1]
    if name in ("nll_loss_forward", "nll_loss2d_forward") and len(inputs) >= 2:
        scores, target = inputs[0], inputs[1]
        return size_bytes(target) + prod(target.shape) * ITEM_BYTES.get(scores.dtype, 4)
    if name == "embedding" and len(inputs) >= 2:
        table, index = inputs[0], inputs[1]
        rows = prod(index.shape) * (table.shape[-1] if table.shape else 1) * ITEM_BYTES.get(table.dtype, 4)
        return size_bytes(index) + 2 * rows
    read = 0 if kind == "fill" else sum(size_bytes(t) for t in inputs)
    if outputs:
        return read + sum(size_bytes(t) for t in outputs)
    return read + _guessed_output_bytes(kind, name, inputs)


def _guessed_output_bytes(kind: str, name: str, inputs: Sequence[Tensor]) -> int:
    if not inputs or kind == "reduction":
        return 0
    if name in ("mm", "bmm", "addmm", "baddbmm", "linear") and len(inputs) >= 2:
        a, b = inputs[1:3] if name in ("addmm", "baddbmm") and len(inputs) > 2 else inputs[:2]
        columns = (b.shape[-2] if name == "linear" else b.shape[-1]) if len(b.shape) > 1 else 1
        return prod(a.shape[:-1]) * columns * ITEM_BYTES.get(a.dtype, 4)
    if kind == "optimizer":
        first, gradients = inputs[0].group, 2
        if name.startswith("_fused_"):
            return sum(size_bytes(t) for t in inputs if t.group and t.group != gradients)
        return sum(size_bytes(t) for t in inputs if t.group == first)
    return max(size_bytes(t) for t in inputs)


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
    formula = flop_formula(split_name(op)[1])
    if formula is None:
        return 0
    try:
        return formula([t.shape for t in inputs], [t.shape for t in outputs], attributes)
    except (IndexError, ValueError):
        return 0


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
            if group:
                raise ValueError(f"a list opens inside a list in {text!r}")
            groups += 1
            group = groups
        tensors.append(Tensor(tuple(int(n) for n in part.strip("[]").split("x")), dtype, group))
        if part.endswith("]"):
            if not group:
                raise ValueError(f"a list closes that is not open in {text!r}")
            group = 0
    if group:
        raise ValueError(f"a list is not closed in {text!r}")
    return tuple(tensors)
