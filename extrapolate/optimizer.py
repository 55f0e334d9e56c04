"""Optimizer operators of a layer as they are on one rank: sharded over data parallelism, grouped on GPUs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from llmprof.extrapolate.work import LayerWork, Op, Shape, Shards
from llmprof.schema.operators import Tensor, family, split_name


def optimizer_ops(layer: LayerWork, ops: Sequence[Op], *, shards: Shards, grouped: bool) -> tuple[Op, ...]:
    """Operators of an optimizer step on one rank.

    Args:
        layer: whose parameters they update.
        shards: ranks that share the state; dim 0 of every tensor is divided by their number, rounded up.
        grouped: one launch over a list of tensors instead of one per tensor, as torch does by default on CUDA.
    """
    local = tuple(_shard(op, shards, layer.expert_shapes) for op in ops)
    return _group(local) if grouped else local


def _shard(op: Op, shards: Shards, experts: frozenset[Shape]) -> Op:
    if shards == (1, 1):
        return op

    def one(tensor: Tensor) -> Tensor:
        if tensor.shape in experts:
            return _shard_experts(tensor, shards.experts)
        return _shard_dim(tensor, 0, shards.common) if tensor.shape else tensor

    return replace(op, inputs=tuple(map(one, op.inputs)), outputs=tuple(map(one, op.outputs)))


def _shard_dim(tensor: Tensor, dim: int, shard: int) -> Tensor:
    shape = list(tensor.shape)
    shape[dim] = -(-shape[dim] // shard)
    return tensor._replace(shape=tuple(shape))


def _shard_experts(tensor: Tensor, shard: int) -> Tensor:
    """Fewer experts than ranks are divided along their next dimension."""
    return _shard_dim(tensor, 0 if tensor.shape[0] % shard == 0 or len(tensor.shape) == 1 else 1, shard)


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
