"""Rules that a Cluster must keep, each refused in one line with its numbers; and keys in foreign units."""

from __future__ import annotations

import itertools

from llmprof.errors import ClusterError
from llmprof.schema.cluster import Cluster, Device, LinkLevel

KINDS = ("cuda", "rocm", "cpu")
LEAST, MOST = 1.0, 1e21
"""What a number of a device or the bandwidth of a link is between, in bytes, FLOP/s, W and Hz."""
MAX_LATENCY_S, MAX_OVERSUBSCRIPTION = 10.0, 1e6
_UNITS = "numbers are plain bytes, bytes/s, FLOP/s, W and Hz"
_PER_NODE_WORDS = (
    "per_node",
    "pernode",
    "node_bandwidth",
    "bidirectional",
    "aggregate",
    "gbps",
    "gb_per_s",
    "gbit",
)


def refuse_foreign_units(raw: object, path: str) -> None:
    """Refuse keys that say per node, bits or both directions: every number is bytes, per device, one direction."""
    if isinstance(raw, dict):
        for key, value in raw.items():
            if key == "sources":
                continue
            if any(word in str(key).lower() for word in _PER_NODE_WORDS) and key != "devices_per_node":
                raise ClusterError(
                    f"{path} has the key {key!r}, but every bandwidth is bytes/s per device, one direction",
                    hint="per node: divide by devices_per_node; Gbit/s: x 1.25e8; both directions: divide by 2",
                )
            refuse_foreign_units(value, path)
    elif isinstance(raw, list):
        for value in raw:
            refuse_foreign_units(value, path)


def check_cluster(cluster: Cluster) -> None:
    """Check that the numbers of a cluster agree with each other.

    Raises:
        ClusterError: a number is not positive, or two of them contradict each other.
    """
    where = f"cluster {cluster.name!r}"
    _check_device(cluster.device, where)
    if cluster.devices_per_node < 1:
        raise ClusterError(f"{where}: devices_per_node={cluster.devices_per_node} is not 1 or more")
    if cluster.max_devices is not None and cluster.max_devices < 1:
        raise ClusterError(f"{where}: max_devices={cluster.max_devices} is not 1 or more")
    if not cluster.links:
        raise ClusterError(f"{where} has no link level", hint="one level with span 0 is the least")
    for link in cluster.links:
        _check_link(link, where)
    names = [link.name for link in cluster.links]
    if len(set(names)) < len(names):
        raise ClusterError(
            f"{where}: its link levels are named {', '.join(names)}, but each needs a name of its own",
            hint="prices and sources of a level are found by its name",
        )
    _check_spans(cluster, where)
    for key in ("failures_per_device_day", "host_memory_bytes"):
        value = getattr(cluster, key)
        if value is not None and not 0 <= value <= MOST:
            raise ClusterError(f"{where}: {key}={value:g} is not between 0 and {MOST:g}")
    if cluster.price is not None and cluster.price.per_device_hour <= 0:
        raise ClusterError(f"{where}: price.per_device_hour={cluster.price.per_device_hour} is not positive")


def _check_spans(cluster: Cluster, where: str) -> None:
    spans = [link.span for link in cluster.links]
    inner = spans[:-1]
    if spans[-1] != 0 or 0 in inner or inner != sorted(set(inner)):
        raise ClusterError(
            f"{where}: spans of the link levels are {spans}, but they must grow and end with 0",
            hint="innermost first, such as 8 for a node, then 0 for the whole cluster",
        )
    bandwidths = [link.bandwidth_bytes_per_s / link.oversubscription for link in cluster.links]
    if any(outer > level for level, outer in itertools.pairwise(bandwidths)):
        raise ClusterError(
            f"{where}: an outer link level is faster per device than an inner one "
            f"({', '.join(f'{b / 1e9:g}' for b in bandwidths)} GB/s)",
            hint="bandwidth is per device and one direction: divide a node's by devices_per_node",
        )


def _check_device(device: Device, where: str) -> None:
    if not device.peak_flops:
        raise ClusterError(
            f"{where}: device {device.name!r} has no peak_flops", hint='such as {"bfloat16": 9.89e14}'
        )
    positive: dict[str, float | None] = {f"peak_flops.{k}": v for k, v in device.peak_flops.items()}
    for key in (
        "memory_bytes",
        "usable_memory_bytes",
        "bandwidth_bytes_per_s",
        "host_link_bytes_per_s",
        "power_w",
        "spec_clock_hz",
        "sustained_clock_hz",
    ):
        positive[key] = getattr(device, key)
    for key, value in positive.items():
        if value is not None and not value > 0:
            raise ClusterError(
                f"{where}: device.{key}={value} is not positive", hint="leave out what is not known"
            )
        if value is not None and not LEAST <= value <= MOST:
            raise ClusterError(
                f"{where}: device.{key}={value:g} is not between {LEAST:g} and {MOST:g}", hint=_UNITS
            )
    if device.kind not in KINDS:
        raise ClusterError(f"{where}: device.kind={device.kind!r} is not one of {', '.join(KINDS)}")
    if device.idle_power_w is not None and not 0 <= device.idle_power_w <= MOST:
        raise ClusterError(f"{where}: device.idle_power_w={device.idle_power_w:g} is not 0 or more")
    if device.usable_memory_bytes > device.memory_bytes:
        raise ClusterError(
            f"{where}: usable_memory_bytes={device.usable_memory_bytes} is more than "
            f"memory_bytes={device.memory_bytes}",
            hint="usable memory is what is left after driver and context",
        )


def _check_link(link: LinkLevel, where: str) -> None:
    if not link.bandwidth_bytes_per_s > 0:
        raise ClusterError(
            f"{where}: link {link.name!r} has bandwidth {link.bandwidth_bytes_per_s}, not positive"
        )
    if not LEAST <= link.bandwidth_bytes_per_s <= MOST:
        raise ClusterError(
            f"{where}: link {link.name!r} has bandwidth {link.bandwidth_bytes_per_s:g}, "
            f"not between {LEAST:g} and {MOST:g}",
            hint=_UNITS,
        )
    if link.latency_s > MAX_LATENCY_S:
        raise ClusterError(
            f"{where}: link {link.name!r} has latency_s={link.latency_s:g}, more than {MAX_LATENCY_S:g}",
            hint="latency is in seconds",
        )
    if link.oversubscription > MAX_OVERSUBSCRIPTION:
        raise ClusterError(
            f"{where}: link {link.name!r} has oversubscription {link.oversubscription:g}, "
            f"more than {MAX_OVERSUBSCRIPTION:g}"
        )
    if link.latency_s < 0 or link.span < 0:
        raise ClusterError(f"{where}: link {link.name!r} has a negative latency_s or span")
    if link.oversubscription < 1:
        raise ClusterError(
            f"{where}: link {link.name!r} has oversubscription {link.oversubscription}, less than 1",
            hint="1 is non-blocking; 4 means that a quarter of the bandwidth is left when all send",
        )
