"""Tensor parallelism of the reference decoder: where its activations are gathered, reduced and looked up.

The scheme of "Megatron-LM" (column- then row-parallel projections, vocabulary split over ranks) and of "Reducing
Activation Recomputation in Large Transformer Models" (sequence parallelism between them), written with torch's
functional collectives.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

SEQUENCE_DIM = 1
_ops = torch.ops._c10d_functional


@dataclass(frozen=True, kw_only=True)
class Rank:
    """One tensor-parallel rank.

    Attributes:
        tp: ranks in the group.
        sp: what lies between the parallel regions is sharded over the sequence.
        group: name of the process group.
        index: which rank it is.
    """

    tp: int = 1
    sp: bool = False
    group: str = ""
    index: int = 0


def column_input(x: Tensor, rank: Rank) -> Tensor:
    """What column-parallel projections read: the activation as it is, or gathered over the sequence."""
    return x if rank.tp == 1 else _call(_ColumnInput, x, rank)


def row_output(x: Tensor, rank: Rank) -> Tensor:
    """Partial sums of row-parallel projections, reduced; each rank gets all, or its part of the sequence."""
    return x if rank.tp == 1 else _call(_RowOutput, x, rank)


def lookup(tokens: Tensor, table: Tensor, rank: Rank) -> Tensor:
    """Rows of a table that is sharded by rows; tokens of other ranks give zeros, which the reduction fills."""
    if rank.tp == 1:
        return functional.embedding(tokens, table)
    local, outside = _local_ids(tokens, table.shape[0], rank)
    found = functional.embedding(local, table).masked_fill(outside.unsqueeze(-1), 0)
    return row_output(found, rank)


def vocabulary_loss(logits: Tensor, target: Tensor, rank: Rank) -> Tensor:
    """Cross-entropy of each token (t,) over logits (t, v / tp) sharded by columns: three reductions of one number a token."""
    return _call(_VocabularyLoss, logits, target, rank)


def _call(function: Any, *args: Any) -> Tensor:
    out: Tensor = function.apply(*args)
    return out


def _local_ids(tokens: Tensor, rows: int, rank: Rank) -> tuple[Tensor, Tensor]:
    first = rank.index * rows
    outside = torch.logical_or(tokens < first, tokens >= first + rows)
    return (tokens - first).masked_fill(outside, 0), outside


def _all_reduce(x: Tensor, rank: Rank, operation: str = "sum") -> Tensor:
    out: Tensor = _ops.wait_tensor(_ops.all_reduce(x.contiguous(), operation, rank.group))
    return out


def _all_gather(x: Tensor, rank: Rank) -> Tensor:
    gathered = _ops.wait_tensor(_ops.all_gather_into_tensor(x.contiguous(), rank.tp, rank.group))
    return torch.cat(gathered.chunk(rank.tp), dim=SEQUENCE_DIM)


def _reduce_scatter(x: Tensor, rank: Rank) -> Tensor:
    stacked = torch.cat(x.chunk(rank.tp, dim=SEQUENCE_DIM))
    out: Tensor = _ops.wait_tensor(_ops.reduce_scatter_tensor(stacked, "sum", rank.tp, rank.group))
    return out


class _ColumnInput(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, rank: Rank) -> Tensor:
        ctx.rank = rank
        return _all_gather(x, rank) if rank.sp else x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return (_reduce_scatter if ctx.rank.sp else _all_reduce)(grad, ctx.rank), None


class _RowOutput(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, rank: Rank) -> Tensor:
        ctx.rank = rank
        return (_reduce_scatter if rank.sp else _all_reduce)(x, rank)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _all_gather(grad, ctx.rank) if ctx.rank.sp else grad, None


class _VocabularyLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, target: Tensor, rank: Rank) -> Tensor:
        local, outside = _local_ids(target, logits.shape[-1], rank)
        peak = _all_reduce(logits.amax(-1), rank, "max")
        shifted = logits.sub(peak.unsqueeze(-1))
        own = shifted.gather(-1, local.unsqueeze(-1)).squeeze(-1).masked_fill(outside, 0)
        own = _all_reduce(own, rank)
        shares = shifted.exp_()
        total = _all_reduce(shares.sum(-1), rank)
        shares.div_(total.unsqueeze(-1))
        ctx.save_for_backward(shares, local, outside)
        return total.log() - own

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        shares, local, outside = ctx.saved_tensors
        hit = torch.logical_not(outside).to(shares.dtype).unsqueeze(-1)
        result = shares.scatter_add(-1, local.unsqueeze(-1), -hit)
        return result.mul_(grad.unsqueeze(-1)), None, None
