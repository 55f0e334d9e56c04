"""An operator of a traced eager step, given as shapes of its inputs and its output, becomes its calls."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import prod

from llmprof.judge import op_calls
from llmprof.judge.cells import Reject, Row, text
from llmprof.judge.op_calls import OpCall, Product
from llmprof.judge.op_shapes import Traced
from llmprof.schema.operators import Tensor

TracedAdapter = Callable[[Row, Traced, bool, str], list[OpCall]]
"""(row, shapes, whether it is the backward, dtype) -> calls."""

_TABLE_ROWS = {
    "word_embeddings": 30522, "token_type_embeddings": 2, "wte": 50257, "embed_tokens": 50272,
}  # fmt: skip
"""Rows of the tables that a trace does not show, by module: vocabularies of the published models."""
_POSITIONS = ("wpe", "position_embeddings")
"""Modules whose table has a row for each position of the sequence."""


def _linear(row: Row, shapes: Traced, backward: bool, dtype: str) -> list[OpCall]:
    if not shapes.inputs:
        return []
    x, out = shapes.inputs[0], shapes.output
    size = Product(prod(x[:-1]), out[-1], x[-1])
    return op_calls.gradients(size, dtype) if backward else [op_calls.product(size, dtype)]


def _pointwise(name: str, *, backward: str = "", mask: int | None = None, out: str = "") -> TracedAdapter:
    """Reads its tensors, writes one of `out`; the operand number `mask` has one byte for each element.

    Args:
        backward: what the backward reads beside the mask: "saved" is the gradient and a saved tensor, "gradient" the
            gradient alone, "" that there is none.
    """

    def calls(row: Row, shapes: Traced, is_backward: bool, dtype: str) -> list[OpCall]:
        dtypes = ["bool" if i == mask else dtype for i in range(len(shapes.inputs))]
        operands = tuple(Tensor(s, d) for s, d in zip(shapes.inputs, dtypes, strict=True))
        result = Tensor(shapes.output, dtype)
        if not is_backward:
            return [OpCall(f"aten::{name}", operands, (result._replace(dtype=out or dtype),))]
        read = (result, result) if backward == "saved" else (result,)
        masks = tuple(t for t in operands if t.dtype == "bool")
        return [OpCall(f"aten::{name}_backward", (*masks, *read), (result,))] if backward else []

    return calls


def _mul(row: Row, shapes: Traced, backward: bool, dtype: str) -> list[OpCall]:
    """The backward multiplies the gradient by each operand that is a tensor, for the other one."""
    operands = tuple(Tensor(s, dtype) for s in shapes.inputs)
    result = Tensor(shapes.output, dtype)
    if not backward:
        return [OpCall("aten::mul", operands, (result,))]
    others = operands if len(operands) > 1 else ()
    return [OpCall("aten::mul", (result, other), (result,)) for other in others] or [
        OpCall("aten::mul", (result,), (result,))
    ]


def _dropout(row: Row, shapes: Traced, backward: bool, dtype: str) -> list[OpCall]:
    x, mask = Tensor(shapes.output, dtype), Tensor(shapes.output, "bool")
    if backward:
        return [OpCall("aten::native_dropout_backward", (x, mask), (x,))]
    return [OpCall("aten::native_dropout", (x,), (x, mask))]


def _embedding(row: Row, shapes: Traced, backward: bool, dtype: str) -> list[OpCall]:
    if not shapes.inputs:
        return []
    ids, width = shapes.inputs[0], shapes.output[-1]
    module = text(row, "notes").partition("; ")[2].partition(";")[0].removeprefix("module:")
    if len(shapes.inputs) > 1:
        rows = shapes.inputs[1][0]
    elif module in _POSITIONS:
        rows = ids[-1]
    elif module in _TABLE_ROWS:
        rows = _TABLE_ROWS[module]
    else:
        raise Reject("rows of the embedding table are not stated")
    return [op_calls.embedding(Tensor((rows, width), dtype), ids, backward=backward)]


def _fill(row: Row, shapes: Traced, backward: bool, dtype: str) -> list[OpCall]:
    return [OpCall("aten::fill_", (), (Tensor(shapes.output, dtype),))]


def _view(row: Row, shapes: Traced, backward: bool, dtype: str) -> list[OpCall]:
    return [OpCall("aten::view", tuple(Tensor(s, dtype) for s in shapes.inputs), ())]


_LINEARS = (
    "dense", "query", "key", "value", "decoder", "seq_relationship", "lm_head", "q_proj", "k_proj", "v_proj", "out_proj",
    "fc1", "fc2",
)  # fmt: skip
TRACED: Mapping[str, TracedAdapter] = {
    **{f"module:{name}": _linear for name in _LINEARS},
    "module:activation": _pointwise("tanh", backward="saved"),
    "module:activation_fn": _pointwise("relu", backward="saved"),
    "add": _pointwise("add"),
    "sub": _pointwise("sub"),
    "mul": _mul,
    "truediv": _pointwise("div", backward="gradient"),
    "pow": _pointwise("pow", backward="saved"),
    "gelu": _pointwise("gelu", backward="saved"),
    "tanh": _pointwise("tanh", backward="saved"),
    "max": _pointwise("maximum", backward="saved"),
    "lt": _pointwise("lt", out="bool"),
    "where": _pointwise("where", backward="gradient", mask=0),
    "masked_fill": _pointwise("masked_fill", mask=1),
    "masked_fill_": _pointwise("masked_fill", mask=1),
    "softmax": _pointwise("_softmax", backward="saved"),
    "layernorm": _pointwise("native_layer_norm", backward="saved"),
    "dropout": _dropout,
    "embedding": _embedding,
    "contiguous": _pointwise("clone"),
    "to": _pointwise("_to_copy"),
    "bool": _pointwise("_to_copy", out="bool"),
    "long": _pointwise("_to_copy", out="int64"),
    "cumsum": _pointwise("cumsum"),
    "full": _fill,
    "ones": _fill,
    "arange": _fill,
    "tensor": _fill,
    "reshape": _pointwise("clone"),
    "getitem": _view,
    "split": _view,
}
"""How an operator of a trace is read. Modules are linear layers, whose weights the shapes do not list, or activations."""
