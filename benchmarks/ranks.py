"""Processes that stay alive and train a layout for a few steps whenever they are asked: measurements interleave."""

from __future__ import annotations

import gc
import math
import multiprocessing
import os
import random
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from statistics import fmean
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.cases import Case, build_step

REPLY_TIMEOUT_S = 300.0
WARMUP_STEPS = 2
PRIORITY_TRIES = 100


def set_up_rank(rank: int, world: int, port: int) -> None:
    """One thread, a fair share of the cores where the machine allows it, and a gloo group if world > 1."""
    prefer_this_process()
    torch.set_num_threads(1)
    if world > 1:
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
        dist.init_process_group("gloo", rank=rank, world_size=world)


def prefer_this_process() -> bool:
    """Moves this process to a session of its own at high priority, against noise from other programs.

    Returns:
        True when the machine allowed it (Linux with autogroup scheduling, as root).
    """
    with suppress(OSError):
        os.setsid()
    for _ in range(PRIORITY_TRIES):
        try:
            with open("/proc/self/autogroup", "w") as group:
                group.write("-20")
            os.nice(-20)
            return True
        except (
            BlockingIOError
        ):  # the kernel takes one such wish per tenth of a second, from all processes together
            time.sleep(0.05 + 0.1 * random.random())
        except OSError:
            break
    return False


def free_port() -> int:
    """A TCP port on the loopback interface that nobody uses now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def start_ranks(target: Callable[..., None], world: int, *args: Any) -> list[tuple[BaseProcess, Connection]]:
    """Starts `target(rank, world, port, pipe, *args)` in `world` fresh processes."""
    context = multiprocessing.get_context("spawn")
    port = free_port()
    ranks: list[tuple[BaseProcess, Connection]] = []
    for rank in range(world):
        here, there = context.Pipe()
        process = context.Process(target=target, args=(rank, world, port, there, *args), daemon=True)
        process.start()
        there.close()
        ranks.append((process, here))
    return ranks


def receive(process: BaseProcess, pipe: Connection) -> Any:
    """The next object from a rank.

    Raises:
        RuntimeError: the rank died or did not answer in time.
    """
    if not pipe.poll(REPLY_TIMEOUT_S):
        raise RuntimeError(f"rank {process.name} did not answer within {REPLY_TIMEOUT_S:.0f} s")
    try:
        return pipe.recv()
    except EOFError:
        raise RuntimeError(f"rank {process.name} ended with exit code {process.exitcode}") from None


def _serve(rank: int, world: int, port: int, pipe: Connection, name: str, case: Case) -> None:
    set_up_rank(rank, world, port)
    step = build_step(name, case)[2]
    pipe.send([step() for _ in range(WARMUP_STEPS)])
    while (num_steps := _next_request(pipe)) > 0:
        durations = []
        for index in range(num_steps + 1):
            start = time.perf_counter()
            step()
            if index:  # the first step after a pause pays for cold caches and for the ranks' different starts
                durations.append(time.perf_counter() - start)
        pipe.send(durations)
    del step
    gc.collect()  # torch itself may deadlock when DDP outlives the process group
    if world > 1:
        dist.destroy_process_group()


def _next_request(pipe: Connection) -> int:
    """Steps to train, 0 to end; a parent that is gone asks for none."""
    try:
        return int(pipe.recv())
    except EOFError:
        return 0


@dataclass
class RankGroup:
    """The ranks of one layout; `run` trains a few steps, between calls they sleep.

    Attributes:
        name: "single" or one of `benchmarks.cases.LAYOUTS`.
        durations_s: every step measured so far, in seconds, the slowest rank of each step.
        warmup_losses: losses of the warm-up steps, the mean over the ranks that have one.
    """

    name: str
    case: Case
    durations_s: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._ranks = start_ranks(_serve, 1 if self.name == "single" else 2, self.name, self.case)
        losses = [receive(process, pipe) for process, pipe in self._ranks]
        self.warmup_losses = [
            fmean(x for x in step if not math.isnan(x)) for step in zip(*losses, strict=True)
        ]

    @property
    def pids(self) -> list[int]:
        """Process ids of the ranks."""
        return [process.pid for process, _ in self._ranks if process.pid is not None]

    def run(self, num_steps: int) -> list[float]:
        """Trains `num_steps` steps and one before them that is not counted; returns and keeps their seconds."""
        for _, pipe in self._ranks:
            pipe.send(num_steps)
        answers = [receive(process, pipe) for process, pipe in self._ranks]
        durations_s = [max(step) for step in zip(*answers, strict=True)]
        self.durations_s.extend(durations_s)
        return durations_s

    def close(self) -> list[int | None]:
        """Ends the processes and returns their exit codes."""
        for _, pipe in self._ranks:
            with suppress(OSError):
                pipe.send(0)
        for process, _ in self._ranks:
            process.join(timeout=20)
            if process.is_alive():
                process.kill()
                process.join()
        return [process.exitcode for process, _ in self._ranks]
