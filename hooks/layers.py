"""Passes traced at several sizes become layers: prologue, kinds of block, epilogue, loss, with symbolic operators."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from llmprof.hooks.fit import DimFit
from llmprof.hooks.record import LOSS_SEGMENT, TracedOp
from llmprof.hooks.structure import Block
from llmprof.hooks.tracer import PassTrace
from llmprof.schema.operators import Tensor
from llmprof.schema.workload import Dim, OpSpec, TensorSpec


@dataclass(frozen=True, kw_only=True)
class RawLayer:
    """What one layer did in one traced pass, with sizes as integers."""

    ops: tuple[TracedOp, ...]
    saved: tuple[Tensor, ...]
    boundary: Tensor | None


@dataclass(frozen=True, kw_only=True)
class Skeleton:
    """Which visit stands for which layer.

    Attributes:
        kinds: visit index that represents each kind of block, by layer name.
        first: the block's FQN at the first visit of each kind, by layer name.
        order: layer name of every visit.
    """

    kinds: dict[str, int]
    first: dict[str, str]
    order: tuple[str, ...]


class FitError(ValueError):
    """Layers traced at several sizes, or as several blocks, are not what they should be; the text says where."""


def visit_layers(trace: PassTrace) -> list[RawLayer]:
    """One raw layer per block visit, module names relative to the block."""
    return [
        _collect(trace, {2 * k + 1} | ({2 * k + 2} if k + 1 < len(trace.visits) else set()), name)
        for k, name in enumerate(trace.visits)
    ]


def find_skeleton(trace: PassTrace, blocks: Sequence[Block]) -> Skeleton:
    """Group the visits into kinds: equal container, equal module, equal operators."""
    by_name = {b.name: b for b in blocks}
    keys: dict[object, str] = {}
    kinds: dict[str, int] = {}
    first: dict[str, str] = {}
    order = []
    for index, (visit, raw) in enumerate(zip(trace.visits, visit_layers(trace), strict=True)):
        block = by_name[visit]
        name = keys.setdefault((block.container, block.signature, raw.ops), f"block{len(keys)}")
        kinds[name] = index
        first.setdefault(name, visit)
        order.append(name)
    return Skeleton(kinds=kinds, first=first, order=tuple(order))


def raw_layers(trace: PassTrace, skeleton: Skeleton) -> dict[str, RawLayer]:
    """The layers of a pass by name; empty ones are left out.

    Raises:
        FitError: visits of one kind did different things (the skeleton is of another model).
    """
    visits = visit_layers(trace)
    if len(visits) != len(skeleton.order):
        raise FitError(f"{len(visits)} block visits instead of {len(skeleton.order)}")
    for name, visit in zip(skeleton.order, visits, strict=True):
        if visit.ops != visits[skeleton.kinds[name]].ops:
            raise FitError(f"blocks of kind {name} ran different operators")
    found = {"prologue": _collect(trace, {0}, "")}
    found |= {name: visits[index] for name, index in skeleton.kinds.items()}
    if visits:
        found["epilogue"] = _collect(trace, {2 * len(visits)}, "")
    found["loss"] = _collect(trace, {LOSS_SEGMENT}, "")
    return {name: raw for name, raw in found.items() if raw.ops or raw.saved or name == "prologue"}


def _collect(trace: PassTrace, segments: set[int], block: str) -> RawLayer:
    prefix = f"{block}."
    ops = tuple(
        op._replace(segment=0, module=op.module.removeprefix(prefix) if op.module != block else "")
        for op in trace.ops
        if op.segment in segments
    )
    saved = tuple(t for segment in sorted(segments) for t in trace.saved.get(segment, ()))
    boundary = next((trace.boundaries[s] for s in sorted(segments) if s in trace.boundaries), None)
    return RawLayer(ops=ops, saved=saved, boundary=boundary)


def fit_layer(
    name: str, raws: Sequence[RawLayer], fit: DimFit
) -> tuple[tuple[OpSpec, ...], tuple[TensorSpec, ...], TensorSpec | None]:
    """Symbolic operators, saved tensors and boundary of a layer traced at the points of `fit`.

    Raises:
        FitError: the operators differ between the points, or a dimension is no polynomial.
    """
    lengths = {len(raw.ops) for raw in raws}
    if len(lengths) > 1:
        raise FitError(f"layer {name} runs {sorted(lengths)} operators at different sizes")
    ops = []
    for same in zip(*(raw.ops for raw in raws), strict=True):
        calls = {(o.op, o.phase, o.module, o.attributes, o.collective, o.axis): None for o in same}
        if len(calls) > 1:
            (one, *_), (other, *_) = list(calls)[:2]
            raise FitError(f"layer {name} runs {one} at one size and {other} at another")
        where = f"{same[0].op} in layer {name}"
        ops.append(
            OpSpec(
                op=same[0].op,
                phase=same[0].phase,
                module=same[0].module,
                inputs=_fit_tensors(where, [o.inputs for o in same], fit),
                outputs=_fit_tensors(where, [o.outputs for o in same], fit),
                attributes=same[0].attributes,
                collective=same[0].collective,
                axis=same[0].axis,
            )
        )
    saved = _fit_tensors(f"saved tensors of layer {name}", [raw.saved for raw in raws], fit)
    boundaries = [(raw.boundary,) if raw.boundary else () for raw in raws]
    boundary = _fit_tensors(f"boundary of layer {name}", boundaries, fit)
    return merge_equal(ops), saved, (boundary[0] if boundary else None)


def merge_equal(ops: Sequence[OpSpec]) -> tuple[OpSpec, ...]:
    """Run-length encode consecutive equal operators."""
    merged: list[tuple[OpSpec, int]] = []
    for op in ops:
        if merged and merged[-1][0] == op:
            merged[-1] = (op, merged[-1][1] + 1)
        else:
            merged.append((op, 1))
    return tuple(
        op if count == 1 else OpSpec(**{f: getattr(op, f) for f in op.__struct_fields__} | {"count": count})
        for op, count in merged
    )


def _fit_tensors(where: str, lists: Sequence[Sequence[Tensor]], fit: DimFit) -> tuple[TensorSpec, ...]:
    if len({len(tensors) for tensors in lists}) > 1:
        raise FitError(f"{where}: the number of tensors depends on the size")
    specs = []
    for same in zip(*lists, strict=True):
        if len({(len(t.shape), t.dtype, t.group) for t in same}) > 1:
            raise FitError(f"{where}: rank or dtype depends on the size")
        dims: list[Dim] = []
        for values in zip(*(t.shape for t in same), strict=True):
            dim = fit.fit(values)
            if dim is None:
                raise FitError(
                    f"{where}: dimension {dict(zip(fit.points, values, strict=True))} is no polynomial"
                )
            dims.append(dim)
        specs.append(TensorSpec(tuple(dims), same[0].dtype, same[0].group))
    return tuple(specs)
