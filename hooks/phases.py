"""From a backward operator's shapes and the parameters' shapes to the half of the backward pass it belongs to."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from llmprof.schema.operators import split_name

_FIRST_FACTOR = {"mm": 0, "_scaled_mm": 0, "bmm": 0, "addmm": 1, "baddbmm": 1}
"""Index of the left factor among the tensor inputs, by bare operator name."""

_WEIGHT_GRADIENTS = ("embedding_dense_backward", "embedding_backward", "linear_backward_weight")


def matmul_result_shape(op: str, input_shapes: Sequence[Sequence[int]]) -> tuple[int, ...] | None:
    """Shape of a matmul's result from its inputs' shapes, or None when it is not a matmul or they do not fit."""
    _, name = split_name(op)
    first = _FIRST_FACTOR.get(name)
    if first is None or len(input_shapes) < first + 2:
        return None
    left, right = tuple(input_shapes[first]), tuple(input_shapes[first + 1])
    if len(left) != len(right) or len(left) < 2:
        return None
    return (*left[:-1], right[-1])


def is_weight_gradient(
    op: str,
    input_shapes: Sequence[Sequence[int]],
    parameter_shapes: Collection[Sequence[int]],
    *,
    transposed: bool | None = None,
) -> bool:
    """True when an operator of the backward pass computes the gradient of a parameter.

    That is a matmul whose result has the shape of a parameter or of its transpose, or an operator that can
    only produce a parameter's gradient (that of an embedding's table).

    Args:
        op: full operator name, such as "aten::mm".
        input_shapes: local shapes of its tensor inputs, 0-dim ones left out.
        parameter_shapes: shapes of the parameters that may be meant: those of the module that owns the
            operator (local shapes when sharded inside the matmul), or of the whole model.
        transposed: the left factor is a transposed view, when known. It decides where shapes cannot: with as
            many tokens as output features both gradients are products of equally shaped matrices, and the
            weight's is grad_output^T x input.
    """
    _, name = split_name(op)
    if name in _WEIGHT_GRADIENTS:
        return True
    result = matmul_result_shape(op, input_shapes)
    if result is None:
        return False
    result = _without_batch(result)
    shapes = {tuple(shape) for shape in parameter_shapes}
    if not shapes & {result, _transpose(result)}:
        return False
    factors = [_without_batch(tuple(shape)) for shape in input_shapes[_FIRST_FACTOR[name] :][:2]]
    ambiguous = any(shapes & {factor, _transpose(factor)} for factor in factors)
    return transposed if ambiguous and transposed is not None else True


def _without_batch(shape: tuple[int, ...]) -> tuple[int, ...]:
    """(1, m, n) -> (m, n): einsum runs a product of matrices as a batch of one."""
    return shape[1:] if len(shape) == 3 and shape[0] == 1 else shape


def _transpose(shape: tuple[int, ...]) -> tuple[int, ...]:
    return (*shape[:-2], shape[-1], shape[-2])
