"""What a stored row does not say of an operator's arguments -> the values to try, by rule; the results decide among them.

A row holds tensor shapes alone. Plain arguments are tried in the order given here until the operator gives the
recorded results; what has no rule makes the operator one that cannot be measured.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations
from typing import Any, NamedTuple

import torch

from llmprof.schema.measurements import OpCall
from llmprof.schema.operators import Tensor, family, split_name

_MOST_DIMS = 5


class Argument(NamedTuple):
    """One argument of an operator's schema, by its types' public names."""

    name: str
    kind: str
    length: int | None
    has_default: bool
    default: Any
    keyword: bool

    @classmethod
    def of(cls, argument: Any) -> Argument:
        """From an entry of `OpOverload._schema.arguments`."""
        kind = str(argument.real_type)
        has_default = bool(argument.has_default_value())
        default = argument.default_value if has_default else None
        return cls(argument.name, kind, argument.N, has_default, default, bool(argument.kwarg_only))

    @property
    def optional(self) -> bool:
        """True when None will do."""
        return self.kind.startswith("Optional[")

    @property
    def bare(self) -> str:
        """The kind without "Optional"."""
        return self.kind.removeprefix("Optional[").removesuffix("]") if self.optional else self.kind

    @property
    def holds_tensors(self) -> bool:
        """True for a tensor and for a list of tensors."""
        return "Tensor" in self.kind


class NoRule(Exception):
    """An argument has no value by any rule; the message names it."""


_FLOATS = {
    "eps": 1e-5,
    "p": 0.1,
    "dropout_p": 0.0,
    "momentum": 0.9,
    "lr": 1e-3,
    "beta1": 0.9,
    "beta2": 0.999,
    "weight_decay": 0.01,
    "negative_slope": 0.01,
    "scale": 1.0,
}
_INTEGERS = {
    "ignore_index": -100,
    "padding_idx": -1,
    "index": 0,
    "start": 0,
    "step": 1,
    "diagonal": 0,
    "groups": 1,
}
_NUMBERS = {"exponent": 2, "weight": 0.1, "min": 0.0, "max": 2.0}
"""Numbers that are not 1; a linear interpolation by more than a half takes another formula, a square has a kernel of its own."""
SCALAR_FIRST = ("pow", "lerp", "_foreach_pow", "_foreach_lerp", "clamp")
"""Operators whose missing second tensor is a plain number, not a 0-dim tensor."""
_TRUE = ("train", "training", "unbiased", "accumulate", "wrap")
_TRIED_ANYWAY = ("keepdim", "dim", "dtype", "reduction")
"""Arguments whose default is only the first guess."""
_SIZES = ("size", "sizes", "input_sizes", "self_sizes", "output_size")


def plain_options(argument: Argument, call: OpCall) -> Sequence[Any]:
    """Values to try for an argument that holds no tensor.

    Raises:
        NoRule: there is none.
    """
    name, kind = argument.name, argument.bare
    default = [argument.default] if argument.has_default else []
    if name == "is_causal":
        return ["causal" in call.attributes]
    if argument.has_default and name not in _TRIED_ANYWAY:
        return default
    first, last = default, [None] if argument.optional and not default else []
    if kind == "ScalarType":
        return _unique([*first, *_dtypes(call), *last])
    if kind == "bool":
        return [False, True] if name == "keepdim" else [name in _TRUE]
    if kind == "int":
        return _unique([*first, *_integers(name, call), *last])
    if kind == "float" and name in _FLOATS:
        return [_FLOATS[name]]
    if kind in ("number", "Scalar"):
        return [_number(name, call)]
    if kind == "List[int]":
        return _unique([*first, *_lists(argument, call), *last])
    if kind == "List[bool]":
        return [[True] * (argument.length or 3)]
    if argument.optional:
        return [None]
    raise NoRule(f"no rule gives its argument {name!r}")


def _dtypes(call: OpCall) -> list[torch.dtype]:
    names = [t.dtype for t in (*call.outputs[:1], *call.inputs[:1])]
    return [found for found in (as_dtype(n) for n in names) if found is not None]


def as_dtype(name: str) -> torch.dtype | None:
    """torch.float32 for "float32", None for what torch does not have."""
    found = getattr(torch, name, None)
    return found if isinstance(found, torch.dtype) else None


def _integers(name: str, call: OpCall) -> list[int]:
    rank = len(call.inputs[0].shape) if call.inputs else 0
    sizes = list(call.outputs[0].shape) if call.outputs else []
    if name == "dim":
        return list(range(-1, -rank - 1, -1)) or [0]
    if name == "reduction":
        return [1, 0]
    if name in ("num_weights", "bins"):
        if not sizes:
            raise NoRule(f"its argument {name!r} is the size of a result that is not recorded")
        return [sizes[0]]
    if name in ("end", "length", "k"):
        return _unique([*reversed(call.inputs[0].shape if call.inputs else ()), *reversed(sizes)])
    if name in _INTEGERS:
        return [_INTEGERS[name]]
    raise NoRule(f"no rule gives its argument {name!r}")


def _number(name: str, call: OpCall) -> float:
    whole = bool(call.inputs) and not _is_float(call.inputs[0])
    value = _NUMBERS.get(name, 1)
    if name == "exponent" and call.phase.startswith("backward"):
        value = 1  # the derivative of a square
    return int(value) or 1 if whole else float(value)


def _lists(argument: Argument, call: OpCall) -> list[list[int]]:
    name = argument.name
    shape = list(call.inputs[0].shape) if call.inputs else []
    result = [list(call.outputs[0].shape)] if call.outputs else []
    if name in _SIZES:
        return [*result, shape]
    if name == "dim":
        dims = range(len(shape))
        return [
            list(c)
            for n in range(1, min(len(shape), _MOST_DIMS) + 1)
            for c in reversed([*combinations(dims, n)])
        ]
    if name == "normalized_shape":
        return [shape[-n:] for n in range(1, len(shape) + 1)]
    if name == "repeats" and result:
        padded = [1] * (len(result[0]) - len(shape)) + shape
        return [[wide // max(narrow, 1) for wide, narrow in zip(result[0], padded, strict=False)]]
    spatial = max(len(shape) - 2, 1)
    if name in ("stride", "dilation"):
        return [[n] * spatial for n in ((1, 2) if name == "stride" else (1,))]
    if name in ("padding", "output_padding"):
        kernel = max(call.inputs[1].shape[2:], default=1) if len(call.inputs) > 1 else 1
        return [[n] * spatial for n in ((0, kernel // 2, kernel - 1) if name == "padding" else (0,))]
    raise NoRule(f"no rule gives its argument {name!r}")


_INDEX = {
    "embedding": ("indices", "weight", 0),
    "nll_loss_forward": ("target", "self", -1),
    "nll_loss_backward": ("target", "self", -1),
}
"""Operators with an index: (its argument, the tensor that it points into, along which dimension)."""
_INDEX_ALONG_DIM = (
    "gather",
    "scatter",
    "scatter_add",
    "index_select",
    "index_add",
    "index_copy",
    "index_fill",
)
_NEEDS_VALUES = ("embedding", "softmax_loss")


def index_limit(call: OpCall, name: str, arguments: dict[str, Any]) -> int | None:
    """How many values an index may have; 0 when the argument is no index.

    Args:
        name: of a tensor argument.
        arguments: of the whole call, tensors as `Tensor`.

    Returns:
        None when it is an integer that must mean something, and no rule says what.
    """
    op = split_name(call.op)[1].rstrip("_")
    tensor = arguments[name]
    if op in _INDEX and name == _INDEX[op][0]:
        _, target, dim = _INDEX[op]
        return int(arguments[target].shape[dim])
    if op == "embedding_dense_backward" and name == "indices":
        return int(arguments["num_weights"])
    if op in _INDEX_ALONG_DIM and name == "index":
        return int(arguments["self"].shape[arguments["dim"]])
    if isinstance(tensor, Tensor) and _is_integer(tensor) and family(call.op) in _NEEDS_VALUES:
        return None
    return 0


def transposed(call: OpCall, name: str) -> bool:
    """Whether an operand is a view whose last two dimensions (of heads: the second and third) are swapped.

    Rows do not say so. A linear layer multiplies by its transposed weight, its weight's gradient reads the
    transposed gradient; `clone` runs to make a transposed tensor contiguous.
    """
    op = split_name(call.op)[1]
    if op in ("mm", "addmm"):
        if call.phase == "forward":
            return name == "mat2"
        return call.phase == "backward_weight" and name in ("self", "mat1") and op == "mm"
    return op == "clone" and name == "self"


def _is_float(tensor: Tensor) -> bool:
    return tensor.dtype.startswith(("float", "bfloat", "complex"))


def _is_integer(tensor: Tensor) -> bool:
    return tensor.dtype.startswith(("int", "uint"))


def _unique(values: Sequence[Any]) -> list[Any]:
    found: list[Any] = []
    for value in values:
        if value not in found:
            found.append(value)
    return found
