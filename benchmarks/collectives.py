"""Prices gloo between two fresh ranks in situ, as `llmprof measure --collectives` does under a launcher."""

from __future__ import annotations

from multiprocessing.connection import Connection

import torch.distributed as dist

from benchmarks.ranks import receive, set_up_rank, start_ranks
from llmprof.hooks.measure_collectives import Group, Item, sweep_collectives
from llmprof.schema.profile import CollectiveRow

KINDS = ("all_reduce", "all_gather", "reduce_scatter", "send")
SIZES_BYTES = tuple(1024 * 4**power for power in range(9))
"""1 KiB to 64 MiB."""
SECONDS, QUICK_SECONDS = 40.0, 15.0


def sweep_two_ranks(*, quick: bool = False) -> tuple[CollectiveRow, ...]:
    """Rows of each kind and size between two gloo ranks."""
    ranks = start_ranks(_measure, 2, quick)
    rows: tuple[CollectiveRow, ...] = receive(*ranks[0])
    for process, _ in ranks:
        process.join(timeout=20)
    return rows


def _measure(rank: int, world: int, port: int, pipe: Connection, quick: bool) -> None:
    set_up_rank(rank, world, port)
    items = [Item(kind, size, Group((0, 1), 2)) for kind in KINDS for size in SIZES_BYTES]
    pipe.send(tuple(sweep_collectives(items, device="cpu", seconds=QUICK_SECONDS if quick else SECONDS)))
    dist.barrier()
    dist.destroy_process_group()
