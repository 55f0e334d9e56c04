"""Ranks of a process group -> times of collectives in situ: each kind, size and group, with compute between the calls."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist

from llmprof.schema.profile import CollectiveRow

KINDS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "send")
SIZES_BYTES = tuple(1024 * 4**power for power in range(10))
"""1 KiB to 256 MiB."""
WARM_CALLS, LEAST_CALLS, MOST_CALLS = 3, 5, 40
SECONDS = 0.5
"""Of one kind, size and group without a budget."""
MARGIN = 1.2
"""By what factor calls may outlast the first one."""
_COMPUTE = 512
"""Width of the two matmuls between calls, which take a few milliseconds on a CPU."""


class Group(NamedTuple):
    """Ranks that communicate, and over how many devices in rank order they spread."""

    ranks: tuple[int, ...]
    span: int


class Times(NamedTuple):
    """Seconds for one item: its share, and all that are left."""

    share: float
    left: float


class Item(NamedTuple):
    """One kind, size and group."""

    kind: str
    size_bytes: int
    group: Group


@contextmanager
def ranks_of_launcher(device: str) -> Iterator[tuple[int, int]]:
    """Joins the process group that a launcher such as torchrun describes; yields (ranks, ranks on one node)."""
    if device == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())
    dist.init_process_group("nccl" if device == "cuda" else "gloo")
    try:
        world = dist.get_world_size()
        yield world, int(os.environ.get("LOCAL_WORLD_SIZE", world))
    finally:
        dist.destroy_process_group()


def usual_groups(world: int, per_node: int) -> tuple[Group, ...]:
    """Neighbours, in twos up to all, and one rank of each node.

    Args:
        world: number of ranks; `per_node`: of these on one node.
    """
    sizes = [n for n in (2**p for p in range(1, world.bit_length())) if n <= world]
    sizes += [world] if world > 1 and world not in sizes else []
    groups = [Group(tuple(range(n)), n) for n in sizes]
    nodes = world // per_node if per_node else 1
    if nodes > 1 and per_node > 1:
        apart = tuple(range(0, nodes * per_node, per_node))
        groups.append(Group(apart, nodes * per_node))
    return tuple(groups)


def usual_items(groups: Sequence[Group]) -> list[Item]:
    """All kinds and sizes of all groups; small and large sizes alternate, so that any beginning covers the range."""
    order = sorted(SIZES_BYTES, key=lambda s: (SIZES_BYTES.index(s) % 3, s))
    return [Item(kind, size, group) for size in order for group in groups for kind in KINDS]


def sweep_collectives(
    items: Sequence[Item], *, device: str, seconds: float | None = None
) -> Iterator[CollectiveRow]:
    """Measure items in order; every rank of the default group must iterate, and all of them get the same rows.

    A call is timed after a few milliseconds of compute, because that is how a training step meets it: the ranks
    arrive at different times and the threads of the library have to wake up. Ranks leave a collective together, so
    the mean over ranks of (arrival to end) is what it adds to the step.

    Args:
        device: "cpu" or "cuda".
        seconds: for all of them; None for `SECONDS` each. Items for which the time does not suffice are left out.
    """
    started = time.perf_counter()
    handles = {g.ranks: dist.new_group(list(g.ranks)) for g in dict.fromkeys(i.group for i in items)}
    compute = _Compute(device)
    for number, item in enumerate(items):
        left = None if seconds is None else seconds - (time.perf_counter() - started)
        share = SECONDS if left is None else left / (len(items) - number)
        times = Times(_shared(share, device), _shared(float("inf") if left is None else left, device))
        times_us = _times_us(item, handles[item.group.ranks], compute, times)
        if times_us is not None:
            yield from _rows(item, times_us, dist.get_backend())


def _shared(value: float, device: str) -> float:
    """The value of rank 0 on all ranks, so that they decide alike."""
    tensor = torch.tensor([value], dtype=torch.float64, device=device)
    dist.broadcast(tensor, 0)
    return float(tensor)


class _Compute:
    """What a rank does between two calls."""

    def __init__(self, device: str) -> None:
        self.device = device
        self._square = torch.randn(_COMPUTE, _COMPUTE, device=device)
        self._memory = torch.randn(2**21, device=device)

    def __call__(self) -> None:
        for _ in range(2):
            self._square @ self._square
        self._memory.add_(1)

    def timed_us(self, call: Callable[[], object]) -> float:
        """Microseconds from the arrival of this rank to the end of the call."""
        self()
        if self.device == "cuda":
            torch.cuda.synchronize()
        start = time.perf_counter()
        call()
        if self.device == "cuda":
            torch.cuda.synchronize()
        return (time.perf_counter() - start) * 1e6


def _times_us(item: Item, handle: dist.ProcessGroup, compute: _Compute, seconds: Times) -> np.ndarray | None:
    """Times in microseconds, (ranks of the group, calls), on every rank; None where the time does not suffice."""
    if seconds.left <= 0:
        return None
    rank = dist.get_rank()
    inside = rank in item.group.ranks
    call = _call(item, handle, rank, compute.device) if inside else None
    first_s = _slowest_s(call, compute)
    if MARGIN * (WARM_CALLS + LEAST_CALLS) * first_s > seconds.left:
        return None
    warm_s = min(_slowest_s(call, compute) for _ in range(WARM_CALLS - 1))
    calls = int(np.clip(seconds.share / max(warm_s, 1e-6) / 2, LEAST_CALLS, MOST_CALLS))
    dist.barrier()
    mine = [compute.timed_us(call) for _ in range(calls)] if call else [0.0] * calls
    tensor = torch.tensor(mine, dtype=torch.float64, device=compute.device)
    gathered = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, tensor)
    return torch.stack([gathered[r] for r in item.group.ranks]).cpu().numpy()


def _slowest_s(call: Callable[[], object] | None, compute: _Compute) -> float:
    """Seconds of one call and what is before it, on the slowest rank; the same on all."""
    dist.barrier()
    start = time.perf_counter()
    if call is not None:
        compute.timed_us(call)
    known = torch.tensor([time.perf_counter() - start], dtype=torch.float64, device=compute.device)
    dist.all_reduce(known, dist.ReduceOp.MAX)
    return float(known)


def _call(item: Item, handle: dist.ProcessGroup, rank: int, device: str) -> Callable[[], object]:
    """A call of one collective; for gathering, scattering and exchanging, `size_bytes` is the whole buffer."""
    ranks = item.group.ranks
    part = max(1, item.size_bytes // 4 // len(ranks))
    whole = torch.ones(part * len(ranks), device=device)
    shard = torch.ones(part, device=device)
    if item.kind == "all_reduce":
        return lambda: dist.all_reduce(whole, group=handle)
    if item.kind == "all_gather":
        gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)  # renamed in torch 2.13
        return lambda: gather(whole, shard, group=handle)
    if item.kind == "reduce_scatter":
        scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)
        return lambda: scatter(shard, whole, group=handle)
    if item.kind == "all_to_all":
        other = torch.empty_like(whole)
        return lambda: dist.all_to_all_single(other, whole, group=handle)
    if item.kind == "broadcast":
        return lambda: dist.broadcast(whole, ranks[0], group=handle)
    if rank == ranks[0]:
        return lambda: dist.send(whole, ranks[-1], group=handle)
    return (lambda: dist.recv(whole, ranks[0], group=handle)) if rank == ranks[-1] else (lambda: None)


def _rows(item: Item, times_us: np.ndarray, backend: str) -> Iterator[CollectiveRow]:
    ends = {"send": times_us[0], "recv": times_us[-1]}
    for kind, times in (ends if item.kind == "send" else {item.kind: times_us.mean(axis=0)}).items():
        low, middle, high = np.percentile(times, (25, 50, 75))
        yield CollectiveRow(
            rank=0,
            kind=kind,
            axis="",
            group_size=2 if item.kind == "send" else len(item.group.ranks),
            size_bytes=item.size_bytes,
            dtype="float32",
            backend=backend,
            count=0.0,
            time_us=float(middle),
            time_iqr_us=float(high - low),
            time_n=len(times),
            exposed_us=0.0,
            in_situ=True,
            span=item.group.span,
        )
