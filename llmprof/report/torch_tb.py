"""Raw traces that a run kept in, a log directory for torch-tb-profiler's tab out; the originals stay as they are.

That tab reads every trace below its log directory and loads a directory once, so only some ranks are copied
(the first, the slowest, the fastest), and the directory appears when all of them are in it.
"""

from __future__ import annotations

import gzip
import re
import tempfile
import zlib
from collections import defaultdict
from pathlib import Path
from typing import Any

import msgspec

from llmprof.errors import RequestError, RunError
from llmprof.schema.profile import Profile

RAW_TRACE = "trace.json.gz"
"""Name of the raw trace in a rank's directory of a run."""
MAX_TRACE_BYTES = 300_000_000
"""Uncompressed size above which the tab's browser page stops working."""

_CATEGORIES = {"cuda_runtime": "Runtime", "cuda_driver": "Runtime"}
_NAMES = {"nccl:_all_gather_base": "nccl:all_gather", "nccl:_reduce_scatter_base": "nccl:reduce_scatter"}
_UNSAFE = re.compile(r"[^A-Za-z0-9_-]+")


def export_torch_tb(run: Path, profile: Profile, logdir: Path) -> list[Path]:
    """Copy a run's raw traces into a new directory below `logdir`, under names and categories that the tab knows.

    Args:
        run: the run directory.
        profile: what was loaded from it.
        logdir: the directory given to `tensorboard --logdir`.

    Returns:
        The files written.

    Raises:
        RequestError: the run kept no raw trace, the target exists, or a trace is too large for the tab.
        RunError: a raw trace is torn.
    """
    traces = {rank: run / f"rank-{rank:05d}" / RAW_TRACE for rank in _ranks_worth_showing(profile)}
    traces = {rank: file for rank, file in traces.items() if file.is_file()}
    if not traces:
        raise RequestError(
            f"{run} kept no raw trace (rank-*/{RAW_TRACE})",
            hint="capture with trace=True, or use --chrome for the timeline",
        )
    target = logdir / (_safe(profile.manifest.name or run.resolve().name))
    if target.exists():
        raise RequestError(
            f"{target} exists", hint="the tab reads a directory once: choose another log directory"
        )
    logdir.mkdir(parents=True, exist_ok=True)
    hosts = {row.rank: row.hostname for row in profile.sources}
    with tempfile.TemporaryDirectory(dir=logdir.resolve().parent, prefix=".llmprof-") as temporary:
        (Path(temporary) / "run").mkdir()
        written = []
        for rank, file in traces.items():
            name = f"{_safe(hosts.get(rank, 'host'))}_{rank:05d}.{file.stat().st_mtime_ns}.pt.trace.json.gz"
            (Path(temporary) / "run" / name).write_bytes(_for_the_tab(file))
            written.append(target / name)
        staged = Path(temporary) / "run"
        staged.chmod(0o755)
        staged.rename(target)
    return written


def _ranks_worth_showing(profile: Profile) -> list[int]:
    """The first rank, the slowest and the fastest by their mean step."""
    durations: dict[int, list[float]] = defaultdict(list)
    for row in profile.steps:
        durations[row.rank].append(row.duration_us)
    means = {rank: sum(values) / len(values) for rank, values in durations.items()}
    if not means:
        return [c.rank for c in profile.manifest.rank_classes][:1]
    return sorted({min(means), max(means, key=lambda r: means[r]), min(means, key=lambda r: means[r])})


def _for_the_tab(file: Path) -> bytes:
    trace = _read_trace(file)
    for event in trace["traceEvents"]:
        if isinstance(event, dict):
            event["cat"] = _CATEGORIES.get(event.get("cat", ""), event.get("cat", ""))
            event["name"] = _NAMES.get(event.get("name", ""), event.get("name", ""))
    return gzip.compress(msgspec.json.encode(trace), compresslevel=1, mtime=0)


def _read_trace(file: Path) -> dict[str, Any]:
    try:
        with gzip.open(file) as stream:
            data = stream.read(MAX_TRACE_BYTES + 1)
        if len(data) > MAX_TRACE_BYTES:
            raise RequestError(
                f"{file} has more than {MAX_TRACE_BYTES / 1e6:.0f} MB uncompressed, too much for the tab",
                hint="profile fewer steps, or use --chrome",
            )
        trace = msgspec.json.decode(data)
    except (OSError, EOFError, zlib.error, msgspec.DecodeError, RecursionError) as error:
        raise RunError(f"{file} is torn or is no trace: {error}", hint="capture the run again") from error
    if not isinstance(trace, dict) or not isinstance(trace.get("traceEvents"), list):
        raise RunError(f"{file} holds no trace events", hint="capture the run again")
    return trace


def _safe(name: str) -> str:
    return _UNSAFE.sub("-", name).strip("-") or "run"
