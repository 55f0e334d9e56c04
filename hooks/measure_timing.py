"""A rebuilt call -> its time: warm, over enough sets of operands that none lies in the last cache, median of many."""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import ceil
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from llmprof.hooks.measure_arguments import CannotRebuild, Rebuilt
from llmprof.hooks.measure_values import Values
from llmprof.hooks.private import quiet_kineto
from llmprof.schema.measurements import OpCall
from llmprof.schema.operators import size_bytes

LEAST_SAMPLES = 5
MOST_SAMPLES = 400
_SAMPLE_US = 60.0
"""Shorter calls are timed several at once: reading the clocks costs some microseconds."""
_MOST_CALLS = 64
_MOST_SETS = 64
_ASSUMED_CACHE_BYTES = 32 * 2**20
_MEMORY_SHARE = 0.25
"""Of the memory that is free, what operands may take."""


class Timing(NamedTuple):
    """Time of one call, microseconds.

    Attributes:
        median_us: what prices it: on a CPU with one thread the thread's CPU time, which other programs do not
            lengthen; with several threads wall time; on CUDA device time.
        wall_us, cpu_us: medians of both clocks (on CUDA: device and host time).
    """

    median_us: float
    iqr_us: float
    n: int
    wall_us: float
    cpu_us: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Effort:
    """How long one operator may take to measure.

    Attributes:
        seconds: aim of the whole, operands included; `deadline` is when it must not start another call.
        deadline: on the `clock`, seconds.
    """

    seconds: float
    deadline: float
    clock: Callable[[], float] = time.perf_counter


class OutOfTime(Exception):
    """The time that is left is too short for the fewest calls."""


class Stopwatch:
    """Times calls on one device.

    Args:
        device: "cpu" or "cuda".
    """

    def __init__(self, device: str) -> None:
        self.device = device
        self._values = Values(device)
        self._cache_bytes = cache_bytes(device)
        self._clock = _CudaClock() if device == "cuda" else _CpuClock()

    def time(self, rebuilt: Rebuilt, call: OpCall, effort: Effort) -> Timing:
        """Median time of a call.

        Raises:
            CannotRebuild: the operands do not fit in memory, or torch refuses to run it.
            OutOfTime: the deadline is too near.
        """
        start = effort.clock()
        sets = self._operands(rebuilt, call)
        with torch.no_grad():
            run = [_bound(rebuilt.run, *operands) for operands in sets]
            first_s = _warm(run, effort, self._clock)
            if effort.clock() + LEAST_SAMPLES * first_s > effort.deadline:
                raise OutOfTime
            num_calls = max(1, min(_MOST_CALLS, int(_SAMPLE_US / max(first_s * 1e6, 1.0))))
            samples = self._samples(run, num_calls, start + effort.seconds, effort)
        overhead_us = self._clock.overhead_us
        walls = [max(s[0] - overhead_us, 0.1 * s[0]) for s in samples]
        cpus = [max(s[1] - overhead_us, 0.1 * s[1]) for s in samples]
        low, middle, high = np.percentile(cpus if self._clock.by_cpu else walls, (25, 50, 75))
        return Timing(
            float(middle), float(high - low), len(samples), float(np.median(walls)), float(np.median(cpus))
        )

    def _samples(
        self, run: Sequence[Callable[[], Any]], num_calls: int, until: float, effort: Effort
    ) -> list[tuple[float, float]]:
        """(wall, CPU) microseconds of one call, each the mean over `num_calls` in a row with other operands."""
        samples: list[tuple[float, float]] = []
        at = 0
        was_on = gc.isenabled()
        gc.disable()
        try:
            while len(samples) < MOST_SAMPLES:
                now = effort.clock()
                if (now > until and len(samples) >= LEAST_SAMPLES) or (now > effort.deadline and samples):
                    break
                calls = [run[(at + i) % len(run)] for i in range(num_calls)]
                at += num_calls
                samples.append(self._clock.sample(calls))
        finally:
            if was_on:
                gc.enable()
        return samples

    def _operands(self, rebuilt: Rebuilt, call: OpCall) -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
        size = sum(size_bytes(t) for t in call.inputs)
        results = sum(size_bytes(t) for t in call.outputs) or size
        free = free_bytes(self.device)
        if size + 2 * results > free * (1 - _MEMORY_SHARE):
            raise CannotRebuild(f"it needs {(size + results) / 1e9:.1f} GB, and {free / 1e9:.1f} GB are free")
        wanted = min(_MOST_SETS, ceil(2 * self._cache_bytes / max(size + results, 1)))
        fitting = max(1, int(_MEMORY_SHARE * free / max(size, 1)))
        return [rebuilt.make(self._values) for _ in range(max(1, min(wanted, fitting)))]


def _bound(run: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Callable[[], Any]:
    return lambda: run(*args, **kwargs)


def _warm(run: Sequence[Callable[[], Any]], effort: Effort, clock: _CpuClock | _CudaClock) -> float:
    """Seconds of one warm call: the second, since the first may pick an algorithm or allocate."""
    seconds = clock.sample(run[:1])[0] * 1e-6
    if effort.clock() + seconds * LEAST_SAMPLES > effort.deadline:
        return seconds
    return min(clock.sample(run[-1:])[0] * 1e-6, seconds)


class _CpuClock:
    """Wall and CPU time of calls in this thread, or in all threads of the process when operators use several."""

    def __init__(self) -> None:
        self.by_cpu = torch.get_num_threads() == 1
        self._cpu_ns = time.thread_time_ns if self.by_cpu else time.process_time_ns
        self.overhead_us = 0.0
        self.overhead_us = self._python_us()

    def sample(self, calls: Sequence[Callable[[], Any]]) -> tuple[float, float]:
        """Mean (wall, CPU) microseconds of one of these calls."""
        cpu, start = self._cpu_ns(), time.perf_counter_ns()
        for call in calls:
            call()
        end, cpu_end = time.perf_counter_ns(), self._cpu_ns()
        return (end - start) * 1e-3 / len(calls), (cpu_end - cpu) * 1e-3 / len(calls)

    def _python_us(self, num_calls: int = 64, rounds: int = 20) -> float:
        """Microseconds that a call from Python costs beyond what the profiler, which timed the captured rows, sees."""
        ones = torch.ones(1)
        run = torch.ops.aten.add_.Tensor
        calls = [_bound(run, (ones, ones), {})] * num_calls
        with torch.no_grad():
            self.sample(calls)
            outside = float(np.median([self.sample(calls)[0] for _ in range(rounds)]))
            with (
                quiet_kineto(),
                torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler,
            ):
                self.sample(calls)
        inside = [e.time_range.elapsed_us() for e in profiler.events() or () if e.name == "aten::add_"]
        return max(0.0, outside - float(np.median(inside))) if inside else 0.0


class _CudaClock:
    """Device time of calls by events; a sleeping kernel before them lets the host run ahead, so launches do not show."""

    by_cpu = False
    overhead_us = 0.0
    _SLEEP_CYCLES = 2_000_000

    def sample(self, calls: Sequence[Callable[[], Any]]) -> tuple[float, float]:
        """Mean (device, host) microseconds of one of these calls."""
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda._sleep(self._SLEEP_CYCLES)
        start.record()
        begun = time.perf_counter_ns()
        for call in calls:
            call()
        host_us = (time.perf_counter_ns() - begun) * 1e-3
        end.record()
        end.synchronize()
        return start.elapsed_time(end) * 1e3 / len(calls), host_us / len(calls)


def cache_bytes(device: str) -> int:
    """Size of the last-level cache; an assumed one where the system does not say."""
    if device == "cuda":
        return int(torch.cuda.get_device_properties(torch.cuda.current_device()).L2_cache_size)
    sizes = []
    for file in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        try:
            text = file.read_text().strip()
            sizes.append(int(text.rstrip("KMG")) * 1024 ** " KMG".index(text[-1]))
        except (OSError, ValueError):
            continue
    return max(sizes, default=_ASSUMED_CACHE_BYTES)


def free_bytes(device: str) -> int:
    """Memory that is free now."""
    if device == "cuda":
        return int(torch.cuda.mem_get_info()[0])
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        found = {line.split(":")[0]: int(line.split()[1]) * 1024 for line in lines}
        return found["MemAvailable"]
    except (OSError, KeyError, ValueError, IndexError):
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
