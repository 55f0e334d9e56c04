"""Layers in order -> what each virtual stage of a pipeline holds."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from itertools import groupby, pairwise
from typing import Protocol

import numpy as np

from llmprof.errors import LayoutError
from llmprof.schema.workload import Workload

Names = tuple[tuple[str, int], ...]
"""Run-length list of layer names."""


class Layer(Protocol):
    """What a split depends on."""

    @property
    def kind(self) -> str:
        """Blocks can be divided among stages."""
        ...

    @property
    def matmul_flops(self) -> int:
        """Weight of the layer."""
        ...


def split_stages(workload: Workload, layers: Mapping[str, Layer], pp: int, vpp: int = 1) -> tuple[Names, ...]:
    """Layers of each virtual stage: equal numbers of blocks when they divide, else balanced by matmul FLOPs.

    What comes before the first block stays on the first stage, what comes after the last on the last.

    Raises:
        LayoutError: fewer blocks than virtual stages.
    """
    stages = pp * vpp
    order = [name for name, count in workload.sequence for _ in range(count)]
    if stages == 1:
        return (_run_length(order),)
    blocks = [i for i, name in enumerate(order) if layers[name].kind == "block"]
    if len(blocks) < stages:
        asked = f"pp={pp}" if vpp == 1 else f"pp={pp} x vpp={vpp}"
        raise LayoutError(
            f"{asked} needs at least {stages} blocks, but the model has {len(blocks)}",
            hint=f"set {'pp' if vpp == 1 else 'pp x vpp'}={max(1, len(blocks))} or less",
        )
    if len(blocks) % stages == 0:
        size = len(blocks) // stages
        cuts = [blocks[size * i] for i in range(1, stages)]
    else:
        weight = {name: layers[name].matmul_flops for name in set(order)}
        cuts = _balanced_cuts(tuple(weight[name] for name in order), tuple(blocks), stages)
    edges = [0, *cuts, len(order)]
    return tuple(_run_length(order[a:b]) for a, b in pairwise(edges))


@lru_cache(maxsize=1024)
def _balanced_cuts(weights: tuple[int, ...], blocks: tuple[int, ...], stages: int) -> list[int]:
    """Cut positions (each at a block) that minimise the heaviest stage; exact, by dynamic programming."""
    total = np.concatenate([[0], np.cumsum(np.array(weights, dtype=float))])
    starts = [0, *blocks[1:], len(weights)]
    at = total[starts]
    size = len(starts)
    # heaviest[j]: of the stages before start j; between[i, j]: weight of a stage from start i to start j
    heaviest = np.where(np.arange(size) > 0, at, np.inf)
    between = np.where(np.triu(np.ones((size, size), dtype=bool), 1), at[None, :] - at[:, None], np.inf)
    chosen = []
    for _ in range(2, stages + 1):
        worst = np.maximum(heaviest[:, None], between)
        chosen.append(worst.argmin(axis=0))
        heaviest = worst.min(axis=0)
    cuts: list[int] = []
    j = len(starts) - 1
    for first in reversed(chosen):
        j = int(first[j])
        cuts.append(starts[j])
    return cuts[::-1]


def _run_length(names: list[str]) -> Names:
    return tuple((name, len(list(group))) for name, group in groupby(names))
