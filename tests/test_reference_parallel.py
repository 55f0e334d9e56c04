"""The reference decoder's tensor parallelism computes what one device does: losses and gradients on two gloo ranks."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional

from llmprof.hooks.reference_parallel import Rank, column_input, lookup, row_output, vocabulary_loss
from tests.two_ranks import run_two_ranks

VOCAB, HIDDEN, WIDE, BATCH, SEQ = 10, 6, 8, 2, 4


def step(weights: list[Tensor], rank: Rank) -> Tensor:
    """Loss of a lookup, two projections and a head."""
    table, up, down, head = weights
    tokens = torch.randint(0, VOCAB, (BATCH, SEQ), generator=torch.Generator().manual_seed(1))
    x = lookup(tokens, table, rank)
    wide = functional.gelu(functional.linear(column_input(x, rank), up))
    x = x + row_output(functional.linear(wide, down), rank)
    logits = functional.linear(column_input(x, rank), head).flatten(0, 1)
    if rank.tp == 1:
        return functional.cross_entropy(logits, tokens.flatten())
    return vocabulary_loss(logits, tokens.flatten(), rank).mean()


def differences(sp: bool) -> list[float]:
    """Largest difference of the loss and of each gradient between this rank's share and one device."""
    torch.manual_seed(0)
    shapes = ((VOCAB, HIDDEN), (WIDE, HIDDEN), (HIDDEN, WIDE), (VOCAB, HIDDEN))
    whole = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]
    index = dist.get_rank()
    parts = [w.detach().chunk(2, dim=1 if i == 2 else 0)[index].clone() for i, w in enumerate(whole)]
    mine = [part.requires_grad_() for part in parts]
    group = dist.distributed_c10d._get_default_group().group_name
    single = step(whole, Rank())
    shared = step(mine, Rank(tp=2, sp=sp, group=group, index=index))
    single.backward()
    shared.backward()
    found = [abs(float(single) - float(shared))]
    for i, (w, m) in enumerate(zip(whole, mine, strict=True)):
        assert w.grad is not None and m.grad is not None
        found.append(float((w.grad.chunk(2, dim=1 if i == 2 else 0)[index] - m.grad).abs().max()))
    worst = torch.tensor(found)
    dist.all_reduce(worst, dist.ReduceOp.MAX)
    return worst.tolist()


@pytest.mark.parametrize("sp", [False, True])
def test_two_ranks_compute_what_one_does(tmp_path: Path, sp: bool) -> None:
    assert max(run_two_ranks(differences, tmp_path, sp)) < 1e-6
