"""Optimizer operators of a layer as they are on one rank: sharded over data parallelism, grouped on GPUs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from llmprof.extrapolate.work import LayerWork, Op
from llmprof.schema.operators import Tensor, family, split_name


def optimizer_ops(ops: Sequence[Op], *, shard: int, grouped: bool) -> tuple[Op, ...]:
    """Operators of an optimizer step on one rank.

    Args:
        shard: ranks that share the state; dim 0 of every tensor is divided by it, rounded up.
        grouped: one launch over a list of tensors instead of one per tensor, as torch does by default on CUDA.
    """
    local = tuple(_shard(op, shard) for op in ops)
    return _group(local) if grouped else local


def _shard(op: Op, shard: int) -> Op:
    if shard == 1:
        return op
    return replace(
        op,
        inputs=tuple(_shard_tensor(t, shard) for t in op.inputs),
        outputs=tuple(_shard_tensor(t, shard) for t in op.outputs),
    )


def _shard_tensor(tensor: Tensor, shard: int) -> Tensor:
    if not tensor.shape:
        return tensor
    return tensor._replace(shape=(-(-tensor.shape[0] // shard), *tensor.shape[1:]))


def _group(ops: Sequence[Op]) -> tuple[Op, ...]:
    """Single-tensor operators of one name as one list operator; what is a list already stays."""
    lists: dict[str, list[Op]] = {}
    kept: list[Op] = []
    for op in ops:
        if (
            any(t.group for t in op.inputs)
            or op.family in ("view", "allocation", "optimizer")
            or op.collective
        ):
            kept.append(op)
        else:
            lists.setdefault(op.op, []).append(op)
    return (*kept, *(_one_list(name, members) for name, members in lists.items()))


def _one_list(name: str, members: Sequence[Op]) -> Op:
    grouped = f"aten::_foreach_{split_name(name)[1].lstrip('_')}"
    repeated = [m for m in members for _ in range(m.count)]
    return replace(
        members[0],
        op=grouped,
        family=family(grouped),
        count=1,
        inputs=tuple(t._replace(group=1) for m in repeated for t in m.inputs),
        outputs=tuple(t._replace(group=1) for m in repeated for t in m.outputs),
    )


def fallback_ops(layer: LayerWork, state_slots: int) -> tuple[Op, ...]:
    """One fused update over the layer's parameters, where no optimizer operator was traced."""
    tensors = tuple(
        Tensor(p.shape, p.dtype, slot + 1)
        for slot in range(2 + state_slots)
        for p in layer.own_parameters
        if p.trainable
    )
    if not tensors:
        return ()
    return (
        Op(
            op="aten::_fused_adamw_",
            phase="optimizer",
            module="",
            inputs=tensors,
            outputs=tuple(t for t in tensors if t.group != 2),
            count=1,
            attributes=frozenset(),
            collective="",
            axis="",
            family="optimizer",
        ),
    )
