"""Cluster: devices, links and prices. Units: decimal bytes, one direction, per GPU, in every key."""

from __future__ import annotations

import msgspec


class Device(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One accelerator (or one CPU rank).

    Attributes:
        name: catalogue key, such as "H100-SXM5-80GB"; form factors are different devices.
        kind: "cuda", "rocm" or "cpu".
        aliases: names under which a runtime reports it, matched case-insensitively.
        peak_flops: dense FLOP/s by dtype ("bfloat16", "float32", "tfloat32", "float8", ...), without sparsity.
        memory_bytes: spec capacity; `usable_memory_bytes` after driver and context.
        bandwidth_bytes_per_s: memory bandwidth.
        host_link_bytes_per_s: device to host, one direction.
        power_w: board power limit.
        compute_units: streaming multiprocessors (CUDA) or compute units (ROCm); None when not known.
        cache_bytes: last-level cache on the device; None when not known.
        older_kernels_share: of `peak_flops` at most what attention kernels written for the generation before can use,
            which lack its own matmul instructions; None for all of it.
        spec_clock_hz, sustained_clock_hz: the clock of `peak_flops` and what is held under load; None when not known.
        sources: where each number is published, by key.
    """

    name: str
    kind: str
    aliases: tuple[str, ...] = ()
    peak_flops: dict[str, float]
    memory_bytes: int
    usable_memory_bytes: int
    bandwidth_bytes_per_s: float
    host_link_bytes_per_s: float | None = None
    power_w: float | None = None
    idle_power_w: float | None = None
    compute_units: int | None = None
    cache_bytes: int | None = None
    older_kernels_share: float | None = None
    spec_clock_hz: float | None = None
    sustained_clock_hz: float | None = None
    sources: dict[str, str] = {}


class LinkLevel(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One level of the network, innermost first.

    Attributes:
        name: "nvlink", "infiniband", "ethernet", "shared-memory", ...
        span: number of devices that are connected at this level (8 in a node); 0 means the whole cluster.
        bandwidth_bytes_per_s: per GPU, one direction.
        latency_s: one-way, per message, software included.
        oversubscription: 1.0 when non-blocking.
    """

    name: str
    span: int
    bandwidth_bytes_per_s: float
    latency_s: float
    oversubscription: float = 1.0


class Price(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Price of one device for one hour, with the date and the source of the quotation."""

    currency: str
    per_device_hour: float
    date: str
    source: str


class Cluster(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A kind of machine that can be booked in any number of nodes.

    Attributes:
        name: catalogue key, such as "8xH100-SXM".
        device: what it is made of.
        devices_per_node: devices in one node.
        links: levels, innermost first; the last has span 0.
        max_devices: devices that exist, None when any number can be booked.
        price: None when not known.
        failures_per_device_day: interruptions per device and day, None when not known.
        host_memory_bytes: of one node.
        backend: collective library ("nccl", "gloo", "rccl").
        sources: where each number is published, by key.
    """

    name: str
    device: Device
    devices_per_node: int
    links: tuple[LinkLevel, ...]
    max_devices: int | None = None
    price: Price | None = None
    failures_per_device_day: float | None = None
    host_memory_bytes: int | None = None
    backend: str = "nccl"
    sources: dict[str, str] = {}

    def level(self, span: int) -> LinkLevel:
        """The innermost link level that connects `span` neighbouring devices."""
        for link in self.links:
            if link.span == 0 or link.span >= span:
                return link
        return self.links[-1]
