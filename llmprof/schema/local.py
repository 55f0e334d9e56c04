"""The machine a Profile was measured on, as a Cluster: best measured rates, and named assumptions for the rest."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import msgspec

from llmprof.errors import ClusterError
from llmprof.schema.cluster import Cluster, Device, LinkLevel
from llmprof.schema.operators import ITEM_BYTES, MATMUL_FAMILIES
from llmprof.schema.profile import OperatorRow, Profile, SourceRow

ASSUMED_CPU_FLOPS_PER_THREAD = 2.0e10
ASSUMED_CPU_BANDWIDTH_BYTES_PER_S = 5.0e9
ASSUMED_CPU_MEMORY_BYTES = 8_000_000_000
ASSUMED_CPU_USABLE_FRACTION = 0.9
ASSUMED_GLOO_BANDWIDTH_BYTES_PER_S = 1.5e9
ASSUMED_GLOO_LATENCY_S = 1.0e-4
_BANDWIDTH_FAMILIES = ("copy", "elementwise", "optimizer", "fill")
_STREAMED_BYTES = 4_000_000
"""Smaller operands fit in a cache and say nothing about memory bandwidth."""
_LARGEST_SHARE = 0.5
"""Bandwidth is read off operators that move at least this share of what the largest one moves."""


def local_cluster(profile: Profile, *, known: Cluster | None = None) -> Cluster:
    """The cluster of a measured run.

    Args:
        profile: a measured profile.
        known: the catalogue's machine with this GPU, which keeps its specification; None when there is none.

    Raises:
        ClusterError: the profile says nothing about the machine.
    """
    if not profile.sources:
        raise ClusterError(
            "the run does not say what it was measured on, so 'local' is not known",
            hint="capture a run, or name a cluster of the catalogue",
        )
    source = profile.sources[0]
    if source.device == "cpu":
        return _cpu_cluster(profile, source)
    if known is not None:
        return msgspec.structs.replace(
            known, name="local", devices_per_node=min(known.devices_per_node, max(1, source.device_count))
        )
    return _unlisted_gpu_cluster(profile, source)


def _cpu_cluster(profile: Profile, source: SourceRow) -> Cluster:
    sources: dict[str, str] = {}
    threads = max(1, source.threads)
    peak = _best_rate(profile.operators, MATMUL_FAMILIES, lambda row: row.flops)
    sources["peak_flops"] = _origin(peak, "fastest measured matmul")
    bandwidth = _bandwidth(profile.operators)
    sources["bandwidth_bytes_per_s"] = _origin(
        bandwidth, "fastest of the largest measured copies and elementwise operators"
    )
    memory = source.memory_bytes or ASSUMED_CPU_MEMORY_BYTES
    sources["memory_bytes"] = "measured" if source.memory_bytes else "assumed"
    sources["usable_memory_bytes"] = f"assumed: {ASSUMED_CPU_USABLE_FRACTION:g} of memory_bytes"
    device = Device(
        name=f"{source.device_name or 'CPU'} ({threads} thread{'s' if threads > 1 else ''})",
        kind="cpu",
        aliases=(source.device_name,) if source.device_name else (),
        peak_flops=_cpu_peaks(profile, peak or ASSUMED_CPU_FLOPS_PER_THREAD * threads),
        memory_bytes=memory,
        usable_memory_bytes=int(memory * ASSUMED_CPU_USABLE_FRACTION),
        bandwidth_bytes_per_s=bandwidth or ASSUMED_CPU_BANDWIDTH_BYTES_PER_S,
        sources=sources,
    )
    link, link_sources = _shared_memory_link(profile)
    return Cluster(
        name="local",
        device=device,
        devices_per_node=max(1, source.device_count),
        links=(link,),
        backend="gloo",
        sources=link_sources,
    )


def _cpu_peaks(profile: Profile, peak: float) -> dict[str, float]:
    """Peaks by dtype: those measured, and float32 in any case."""
    peaks = {"float32": peak}
    for dtype in {r.dtype for r in profile.operators if r.dtype in ITEM_BYTES}:
        best = fastest_matmul_flops_per_s(profile.operators, dtype)
        if best:
            peaks[dtype] = best
    return peaks


def _unlisted_gpu_cluster(profile: Profile, source: SourceRow) -> Cluster:
    peak = _best_rate(profile.operators, MATMUL_FAMILIES, lambda row: row.flops)
    bandwidth = _bandwidth(profile.operators)
    if not (peak and bandwidth and source.memory_bytes):
        raise ClusterError(
            f"{source.device_name!r} is not in the catalogue, and the run did not measure its rates and memory",
            hint="describe it in a .json file and give its path",
        )
    link = LinkLevel(name="unknown", span=0, bandwidth_bytes_per_s=1.0e10, latency_s=1.0e-5)
    return Cluster(
        name="local",
        device=Device(
            name=source.device_name,
            kind=source.device,
            aliases=(source.device_name,),
            peak_flops={profile.manifest.precision: peak, "float32": peak},
            memory_bytes=source.memory_bytes,
            usable_memory_bytes=int(source.memory_bytes * 0.98),
            bandwidth_bytes_per_s=bandwidth,
            sources={
                "peak_flops": "fastest measured matmul",
                "bandwidth_bytes_per_s": "fastest of the largest measured copies and elementwise operators",
                "memory_bytes": "measured",
                "usable_memory_bytes": "assumed: 0.98 of memory_bytes",
            },
        ),
        devices_per_node=max(1, source.device_count),
        links=(link,),
        backend=source.backend or "nccl",
        sources={"links.unknown": "assumed: 10 GB/s, 10 us"},
    )


def _shared_memory_link(profile: Profile) -> tuple[LinkLevel, dict[str, str]]:
    """The link between processes of one host: from measured all-reduces, else assumed.

    A ring all-reduce of S bytes over n ranks moves 2 (n-1)/n S each way through every rank.
    """
    rows = [r for r in profile.collectives if r.kind == "all_reduce" and r.group_size > 1 and r.time_us > 0]
    bandwidths = [
        2 * (r.group_size - 1) / r.group_size * r.size_bytes / (r.time_us * 1e-6)
        for r in rows
        if r.size_bytes >= 65_536  # smaller messages show the latency, not the rate
    ]
    latencies = [r.time_us * 1e-6 / (2 * (r.group_size - 1)) for r in rows if r.size_bytes <= 4096]
    link = LinkLevel(
        name="shared-memory",
        span=0,
        bandwidth_bytes_per_s=max(bandwidths, default=ASSUMED_GLOO_BANDWIDTH_BYTES_PER_S),
        latency_s=min(latencies, default=ASSUMED_GLOO_LATENCY_S),
    )
    return link, {
        "links.shared-memory.bandwidth_bytes_per_s": "fastest measured all-reduce of 64 KiB or more"
        if bandwidths
        else "assumed",
        "links.shared-memory.latency_s": "fastest measured all-reduce up to 4 KiB"
        if latencies
        else "assumed",
    }


def fastest_matmul_flops_per_s(rows: Iterable[OperatorRow], dtype: str) -> float | None:
    """FLOP/s of the fastest measured matmul of a dtype: what stands in for the peak of a device nobody published."""
    return _best_rate((r for r in rows if r.dtype == dtype), MATMUL_FAMILIES, lambda row: row.flops)


def _best_rate(
    rows: Iterable[OperatorRow], families: Sequence[str], work: Callable[[OperatorRow], int]
) -> float | None:
    """Largest work per second over the rows of some families, or None when none has a time."""
    rates = [
        work(r) / (r.time_us * 1e-6) for r in rows if r.family in families and r.time_us > 0 and work(r) > 0
    ]
    return max(rates, default=None)


def _bandwidth(rows: Sequence[OperatorRow]) -> float | None:
    """Bytes per second of the fastest among the largest operators that only move data; None without large ones."""
    moved = [r.bytes for r in rows if r.family in _BANDWIDTH_FAMILIES]
    least = max(_STREAMED_BYTES, _LARGEST_SHARE * max(moved, default=0))
    return _best_rate((r for r in rows if r.bytes >= least), _BANDWIDTH_FAMILIES, lambda row: row.bytes)


def _origin(value: float | None, measured: str) -> str:
    return measured if value else "assumed"
