"""Prices gloo between two ranks in situ, with compute between the calls, as rows of a Profile."""

from __future__ import annotations

import time
from collections.abc import Callable
from multiprocessing.connection import Connection

import numpy as np
import torch
import torch.distributed as dist

from benchmarks.ranks import receive, set_up_rank, start_ranks
from llmprof.schema.profile import CollectiveRow

SIZES_BYTES = tuple(1024 * 4**power for power in range(9))  # 1 KiB to 64 MiB
KINDS = ("all_reduce", "all_gather", "reduce_scatter", "send")


def sweep_collectives(*, quick: bool = False) -> tuple[CollectiveRow, ...]:
    """Measures each kind and size between two fresh gloo ranks.

    A call is timed after a few milliseconds of compute, because that is how a training step meets it: the ranks
    arrive at different times and the threads of gloo have to wake up. Both ranks leave a collective together, so
    the mean over ranks of (arrival to end) is what it adds to the step.
    """
    ranks = start_ranks(_measure, 2, quick)
    rows: tuple[CollectiveRow, ...] = receive(*ranks[0])
    for process, _ in ranks:
        process.join(timeout=20)
    return rows


def _measure(rank: int, world: int, port: int, pipe: Connection, quick: bool) -> None:
    set_up_rank(rank, world, port)
    rows: list[CollectiveRow] = []
    for kind in KINDS:
        for size_bytes in SIZES_BYTES:
            calls = _num_calls(size_bytes, quick=quick)
            times_us = _time_calls(_call(kind, size_bytes, rank), calls)
            rows.extend(_rows(kind, size_bytes, times_us))
    pipe.send(tuple(rows))
    dist.barrier()
    dist.destroy_process_group()


def _num_calls(size_bytes: int, *, quick: bool) -> int:
    calls = 40 if size_bytes <= 2**20 else 12
    return calls // 3 if quick else calls


def _call(kind: str, size_bytes: int, rank: int) -> Callable[[], object]:
    """A call of one collective; for gathering and scattering, `size_bytes` is the whole buffer."""
    whole = torch.ones(size_bytes // 4)
    half = torch.ones(size_bytes // 8)
    if kind == "all_reduce":
        return lambda: dist.all_reduce(whole)
    if kind == "all_gather":
        gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)  # renamed in torch 2.13
        return lambda: gather(whole, half)
    if kind == "reduce_scatter":
        scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)
        return lambda: scatter(half, whole)
    return (lambda: dist.send(whole, 1)) if rank == 0 else (lambda: dist.recv(whole, 0))


def _time_calls(call: Callable[[], object], num_calls: int) -> np.ndarray:
    """Times in microseconds, (ranks, calls), gathered on every rank; the first three calls are left out."""
    left, right, memory = torch.randn(512, 512), torch.randn(512, 512), torch.randn(2**21)
    times_us = []
    dist.barrier()
    for _ in range(num_calls + 3):
        for _ in range(2):
            left @ right
        memory.add_(1)
        start = time.perf_counter()
        call()
        times_us.append((time.perf_counter() - start) * 1e6)
    mine = torch.tensor(times_us[3:], dtype=torch.float64)
    gathered = [torch.empty_like(mine) for _ in range(2)]
    dist.all_gather(gathered, mine)
    return torch.stack(gathered).numpy()


def _rows(kind: str, size_bytes: int, times_us: np.ndarray) -> list[CollectiveRow]:
    sides = {"send": times_us[0], "recv": times_us[1]} if kind == "send" else {kind: times_us.mean(axis=0)}
    rows = []
    for name, times in sides.items():
        low, median, high = np.percentile(times, (25, 50, 75))
        rows.append(
            CollectiveRow(
                rank=0,
                kind=name,
                axis="",
                group_size=2,
                size_bytes=size_bytes,
                dtype="float32",
                backend="gloo",
                module="",
                count=0.0,
                time_us=float(median),
                time_iqr_us=float(high - low),
                time_n=len(times),
                exposed_us=0.0,
                in_situ=True,
            )
        )
    return rows
