"""Routed tokens weighted after their experts -> weighted before the experts' last matmul, as Megatron-Core does.

The result is the same, since that matmul is linear; the product is narrower, joins the activation's kernel, and the
result of the experts is not needed for the backward.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from llmprof.extrapolate.flow import bare_name, kind_of
from llmprof.schema.operators import family
from llmprof.schema.workload import LayerTrace, OpSpec, TensorSpec

_MATMUL = "_grouped_mm"


def with_early_weights(layer: LayerTrace) -> LayerTrace:
    """A layer whose experts weight their tokens before the last matmul; unchanged where none is found."""
    for last in range(len(layer.ops) - 1, -1, -1):
        op = layer.ops[last]
        if op.phase == "forward" and bare_name(op.op) == _MATMUL and op.count == 1:
            product = _product_of(layer.ops, last)
            return layer if product is None else _moved(layer, last, product)
    return layer


def _product_of(ops: Sequence[OpSpec], last: int) -> int | None:
    """Index of what multiplies the result of a matmul with one number for each row; None when more is done with it."""
    result = ops[last].outputs[0].dims
    for index in range(last + 1, len(ops)):
        op = ops[index]
        if bare_name(op.op) == "mul" and len(op.inputs) == 2 and op.inputs[0].dims == result:
            return index if op.inputs[1].dims == (result[0], 1) else None
        if kind_of(op.op) != "view" and any(t.dims == result for t in op.inputs):
            return None
    return None


def _moved(layer: LayerTrace, last: int, product: int) -> LayerTrace:
    matmul, weights = layer.ops[last], layer.ops[product].inputs[1]
    rows = TensorSpec(matmul.inputs[0].dims, layer.ops[product].outputs[0].dtype)
    early = msgspec.structs.replace(
        layer.ops[product], module=matmul.module, inputs=(rows, weights), outputs=(rows,)
    )
    between = layer.ops[last + 1 : product]
    ops = (*layer.ops[:last], *between, early, matmul, *layer.ops[product + 1 :])
    return msgspec.structs.replace(layer, ops=_with_narrow_gradient(ops, layer.ops[product], rows))


def _with_narrow_gradient(ops: tuple[OpSpec, ...], product: OpSpec, rows: TensorSpec) -> tuple[OpSpec, ...]:
    """Gradients of the product act on the narrower rows, too: elementwise ones in the module that weighted."""
    wide = product.outputs[0].dims

    def narrow(op: OpSpec) -> OpSpec:
        own = op.phase.startswith("backward") and op.module == product.module
        if not own or family(op.op) not in ("elementwise", "reduction"):
            return op
        return msgspec.structs.replace(
            op,
            inputs=tuple(rows if t.dims == wide else t for t in op.inputs),
            outputs=tuple(rows if t.dims == wide else t for t in op.outputs),
        )

    return tuple(map(narrow, ops))
