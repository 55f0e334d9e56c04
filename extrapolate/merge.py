"""Projections that share their input become one matmul: query, key and value, or the gate and the up projection."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec

from llmprof.extrapolate.flow import Call, Value, kind_of
from llmprof.schema.workload import Dim, OpSpec, TensorSpec


@dataclass(kw_only=True, slots=True)
class Merges:
    """What becomes of a layer's matmuls, by index of the operator.

    Attributes:
        replaced: the one matmul in the place of several.
        dropped: those it stands for.
        group_of: number of the group of each merged forward matmul.
    """

    replaced: dict[int, OpSpec] = field(default_factory=dict)
    dropped: set[int] = field(default_factory=set)
    group_of: dict[int, int] = field(default_factory=dict)


def find_merges(ops: Sequence[OpSpec], calls: Sequence[Call]) -> Merges:
    """Groups of projections of one module that read one activation, with their matmuls in the backward pass.

    A group is left alone unless every member is a module of its own with one matmul a phase.
    """
    merges = Merges()
    by_module: dict[tuple[str, str], list[int]] = {}
    for index, op in enumerate(ops):
        if kind_of(op.op) == "matmul":
            by_module.setdefault((op.module, op.phase), []).append(index)
    groups: dict[tuple[Value, str, str], list[Call]] = {}
    for call in calls:
        if call.kind == "matmul" and len(call.reads) == 1 and call.op.outputs:
            key = (call.reads[0].value, call.op.module.rpartition(".")[0], call.op.op)
            groups.setdefault(key, []).append(call)
    for members in groups.values():
        if len(members) > 1:
            _merge([call.index for call in members], ops, by_module, merges)
    return merges


def _merge(
    forward: list[int], ops: Sequence[OpSpec], by_module: dict[tuple[str, str], list[int]], merges: Merges
) -> None:
    modules = [ops[index].module for index in forward]
    widths = [ops[index].outputs[0].dims[-1] for index in forward]
    if len(set(modules)) < len(modules) or not all(isinstance(width, int) for width in widths):
        return
    found: list[tuple[list[int], OpSpec]] = []
    for phase in ("forward", "backward_input", "backward_weight"):
        each = [by_module.get((module, phase), []) for module in modules]
        if all(not indices for indices in each):
            continue
        if any(len(indices) != 1 or ops[indices[0]].count != 1 for indices in each):
            return
        indices = [index for (index,) in each]
        joined = _join([ops[index] for index in indices], widths)
        if joined is None:
            return
        found.append((indices, joined))
    for indices, joined in found:
        merges.replaced[indices[0]] = joined
        merges.dropped.update(indices[1:])
    merges.group_of.update(dict.fromkeys(forward, forward[0]))


def _join(members: Sequence[OpSpec], widths: Sequence[Dim]) -> OpSpec | None:
    """One matmul over the joined outputs of the projections; None when it is not clear which dimension that is."""
    first = members[0]
    if any(m.op != first.op or len(m.inputs) != len(first.inputs) for m in members):
        return None
    inputs, total = list(first.inputs), sum(w for w in widths if isinstance(w, int))
    places = _joined_dims(members, widths)
    if places is None:
        return None
    for tensor, dim in places:
        if tensor >= 0:
            inputs[tensor] = _with_dim(inputs[tensor], dim, total)
    output = next((dim for tensor, dim in places if tensor < 0), None)
    outputs = first.outputs
    if output is not None:
        outputs = (_with_dim(outputs[0], output, total), *outputs[1:])
    return msgspec.structs.replace(first, inputs=tuple(inputs), outputs=outputs)


_OUTPUT = -1
_PLACES = (
    ((1, 1), (_OUTPUT, -1)),  # (t, k) x (k, n) -> (t, n): the forward, or the gradient of a transposed weight
    ((0, 0), (_OUTPUT, 0)),  # (n, t) x (t, k) -> (n, k): the gradient of the weight
    ((0, 1), (1, 0)),  # (t, n) x (n, k) -> (t, k): the gradient of the input
)
_BIASED_PLACES = ((0, 0), (2, 1), (_OUTPUT, -1))
_LINEAR_PLACES = ((1, 0), (_OUTPUT, -1))


def _joined_dims(members: Sequence[OpSpec], widths: Sequence[Dim]) -> tuple[tuple[int, int], ...] | None:
    """Where the width of the projection is: pairs of an input (or the output) and a dimension of it."""
    first = members[0]
    name = first.op.rpartition("::")[2]
    if name == "addmm":
        return _BIASED_PLACES if first.phase == "forward" else None
    if name == "linear":
        return (*_LINEAR_PLACES, (2, 0)) if len(first.inputs) == 3 else _LINEAR_PLACES
    if name != "mm":
        return None
    for places in _PLACES if first.phase != "backward_input" else _PLACES[::-1]:
        if all(_dim(m, place) == w for m, w in zip(members, widths, strict=True) for place in places):
            return places
    return None


def _dim(op: OpSpec, place: tuple[int, int]) -> Dim:
    tensor, dim = place
    dims = op.outputs[0].dims if tensor < 0 else op.inputs[tensor].dims
    return dims[dim]


def _with_dim(spec: TensorSpec, dim: int, size: int) -> TensorSpec:
    dims = list(spec.dims)
    dims[dim] = size
    return TensorSpec(tuple(dims), spec.dtype, spec.group)
