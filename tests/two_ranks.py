"""Real runs on two gloo ranks for tests: each function runs in both processes and puts its result in a file."""

from __future__ import annotations

import gc
import json
import os
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import spawn


def free_port() -> int:
    """A TCP port that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def run_two_ranks(function: Callable[..., Any], folder: Path, *args: Any) -> Any:
    """Run `function(*args)` on two gloo ranks; what rank 0 returns comes back through JSON."""
    result = folder / "result.json"
    spawn(_rank, args=(free_port(), result, function, args), nprocs=2)
    return json.loads(result.read_text())


def _rank(rank: int, port: int, result: Path, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE="2")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=2)
    value = function(*args)
    dist.barrier()
    if rank == 0:
        result.write_text(json.dumps(value))
    gc.collect()  # torch itself may deadlock when DDP outlives the process group
    dist.destroy_process_group()
    sys.stdout.flush()
