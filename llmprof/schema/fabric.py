"""From a device and what is known about its links to a Cluster; the rest comes from the device's usual machine."""

from __future__ import annotations

import itertools
from typing import NamedTuple

import msgspec

from llmprof.errors import ClusterError
from llmprof.schema.cluster import Cluster, Device, LinkLevel
from llmprof.schema.cluster_files import shipped_clusters
from llmprof.schema.cluster_rules import check_cluster
from llmprof.schema.devices import device_assumption, device_entry, known_device

ASSUMED_NETWORK_BYTES_PER_S = 1.25e9
ASSUMED_HOST_LINK_BYTES_PER_S = 1.6e10
ASSUMED_LATENCY_S = {"nvlink": 1.9e-6, "xgmi": 1.9e-6, "pcie": 2.5e-6, "ethernet": 2e-5, "efa": 1e-5}
_NETWORK_LATENCY_S = 4e-6
_SCALE_UP_WORDS = {
    "nvlink": "nvlink",
    "nvswitch": "nvlink",
    "xgmi": "xgmi",
    "infinity": "xgmi",
    "pci": "pcie",
}
_SCALE_OUT_WORDS = {
    "infiniband": "infiniband",
    "hdr": "infiniband",
    "ndr": "infiniband",
    "efa": "efa",
    "slingshot": "slingshot",
    "roce": "roce",
    "rdma": "rdma",
    "ethernet": "ethernet",
}
"""Words by which free text names a link, the first that occurs, and the name of the level."""


class Links(NamedTuple):
    """What is stated about the links of a machine; None and "" are not stated.

    Attributes:
        devices_per_node: devices in one node.
        intra_bytes_per_s, inter_bytes_per_s: inside a node and between nodes, per device, one direction.
        intra_name, inter_name: free text, such as "NVLink4/NVSwitch", "pairwise NVLink bridge", "none (one node)".
    """

    devices_per_node: int | None = None
    intra_bytes_per_s: float | None = None
    inter_bytes_per_s: float | None = None
    intra_name: str = ""
    inter_name: str = ""


class _Note(NamedTuple):
    """An assumption, and the smallest job that it matters to."""

    least_gpus: int
    text: str


def build_cluster(
    device: Device | str,
    *,
    devices_per_node: int | None = None,
    intra_bytes_per_s: float | None = None,
    inter_bytes_per_s: float | None = None,
    intra_name: str = "",
    inter_name: str = "",
) -> Cluster:
    """A cluster of one kind of device, with the links that are stated and those of its usual machine for the rest.

    Args:
        device: a Device, or a name that `find_device` knows.
        devices_per_node, intra_bytes_per_s, inter_bytes_per_s, intra_name, inter_name: see `Links`.

    Raises:
        ClusterError: an unknown device, or numbers that are not positive or contradict each other.
    """
    stated = Links(devices_per_node, intra_bytes_per_s, inter_bytes_per_s, intra_name, inter_name)
    return _build(device, stated)[0]


def fabric_assumptions(device: Device | str, links: Links, *, gpus: int | None = None) -> tuple[str, ...]:
    """What `build_cluster(device, **links._asdict())` assumes, one phrase for each.

    Args:
        device: as there.
        links: what is stated.
        gpus: size of the job; what only matters to a larger one is not mentioned.
    """
    notes = [note.text for note in _build(device, links)[1] if gpus is None or gpus >= note.least_gpus]
    resolved = device_assumption(device) if isinstance(device, str) else None
    return (resolved, *notes) if resolved else tuple(notes)


def usual_machine(device: Device | str) -> Cluster:
    """The machine that is taken for a device when nothing else is stated.

    A device without a usual machine is one card in a workstation with an assumed 10 Gbit/s network.

    Raises:
        ClusterError: unknown name.
    """
    if isinstance(device, str) or known_device(device.name) == device:
        entry = device_entry(device if isinstance(device, str) else device.name)
        if entry.usual_machine:
            return shipped_clusters()[entry.usual_machine]
        device = entry.device
    return Cluster(
        name=f"1x{device.name}",
        device=device,
        devices_per_node=1,
        links=(_link("ethernet", 0, ASSUMED_NETWORK_BYTES_PER_S),),
        backend="rccl" if device.kind == "rocm" else "nccl",
        sources={
            "links.ethernet.bandwidth_bytes_per_s": "assumed: 10 Gbit/s",
            "links.ethernet.latency_s": "assumed",
        },
    )


def _build(device: Device | str, stated: Links) -> tuple[Cluster, list[_Note]]:
    base = _closest_machine(usual_machine(device), stated.devices_per_node)
    num = base.devices_per_node if stated.devices_per_node is None else stated.devices_per_node
    if num < 1:
        raise ClusterError(f"devices per node = {num} is not 1 or more")
    notes: list[_Note] = []
    if stated.devices_per_node is None:
        notes.append(_Note(2, f"devices per node not stated: {num} of the usual machine {base.name} assumed"))
    inner = _scale_up(base, num, stated, notes)
    closed = stated.inter_name.strip().lower().startswith("none")
    links = _closed(inner, base) if closed else _joined(inner, base, stated, notes)
    if links == base.links and num == base.devices_per_node and not closed:
        return base, notes
    cluster = msgspec.structs.replace(
        base,
        name=f"{num}x{base.device.name}",
        devices_per_node=num,
        links=links,
        max_devices=num if closed else base.max_devices,
        price=None,
        host_memory_bytes=base.host_memory_bytes if num == base.devices_per_node else None,
        sources=_sources(base, links, stated),
    )
    check_cluster(cluster)
    return cluster, notes


def _closest_machine(usual: Cluster, devices_per_node: int | None) -> Cluster:
    """The usual machine, or another of the catalogue with the same device and the stated number in a node."""
    if devices_per_node in (None, usual.devices_per_node):
        return usual
    for cluster in shipped_clusters().values():
        if cluster.device == usual.device and cluster.devices_per_node == devices_per_node:
            return cluster
    return usual


def _scale_up(base: Cluster, num: int, stated: Links, notes: list[_Note]) -> tuple[LinkLevel, ...]:
    """Levels inside a node, or inside the larger domain of a rack; empty for one device in a node."""
    levels = base.links[:-1]
    rack = levels[-1].span if levels and levels[-1].span > base.devices_per_node else 0
    span = max(num, rack)
    if span == 1:
        return ()
    name = _named(stated.intra_name, _SCALE_UP_WORDS) or (levels[-1].name if levels else "pcie")
    if stated.intra_bytes_per_s is not None:
        return (_link(name, span, stated.intra_bytes_per_s, like=levels),)
    found = _usual_levels(base, levels, span, stated.intra_name, name)
    rates = ", ".join(f"{level.name} {level.bandwidth_bytes_per_s / 1e9:g} GB/s" for level in found)
    notes.append(_Note(2, f"bandwidth inside a node not stated: {rates} of {base.name} assumed"))
    return found


def _usual_levels(
    base: Cluster, levels: tuple[LinkLevel, ...], span: int, text: str, name: str
) -> tuple[LinkLevel, ...]:
    """Levels of `span` devices by what is usual: pairs that a bridge joins, the host link, or those of the machine."""
    host = _link(
        "pcie", span, base.device.host_link_bytes_per_s or ASSUMED_HOST_LINK_BYTES_PER_S, like=levels
    )
    if "pair" in text.lower() and levels and levels[0].name != host.name:
        bridge = msgspec.structs.replace(levels[0], span=2)
        return (bridge, host) if span > 2 else (bridge,)
    if not levels or (name == "pcie" and levels[-1].name != "pcie"):
        return (host,)
    if span == 2 and len(levels) > 1:
        return levels[:1]
    return (*levels[:-1], msgspec.structs.replace(levels[-1], span=span))


def _joined(
    inner: tuple[LinkLevel, ...], base: Cluster, stated: Links, notes: list[_Note]
) -> tuple[LinkLevel, ...]:
    """Inner levels and the network; an assumed bandwidth gives way where it contradicts a stated one."""
    usual = base.links[-1]
    name = _named(stated.inter_name, _SCALE_OUT_WORDS) or usual.name
    bandwidth = stated.inter_bytes_per_s
    least_gpus = (inner[-1].span if inner else 1) + 1
    slowest = min((level.bandwidth_bytes_per_s for level in inner), default=None)
    if bandwidth is None:
        bandwidth = usual.bandwidth_bytes_per_s
        if slowest is not None and stated.intra_bytes_per_s is not None:
            bandwidth = min(bandwidth, slowest) if slowest > 0 else bandwidth
        notes.append(
            _Note(
                least_gpus,
                f"bandwidth between nodes not stated: {bandwidth / 1e9:g} GB/s per device assumed, "
                f"{base.name} has {usual.bandwidth_bytes_per_s / 1e9:g}",
            )
        )
    elif slowest is not None and stated.intra_bytes_per_s is None and bandwidth > slowest:
        inner = tuple(
            msgspec.structs.replace(level, bandwidth_bytes_per_s=max(level.bandwidth_bytes_per_s, bandwidth))
            for level in inner
        )
        notes.append(
            _Note(2, f"bandwidth inside a node raised to the {bandwidth / 1e9:g} GB/s stated between nodes")
        )
    same = name == usual.name and bandwidth == usual.bandwidth_bytes_per_s
    return (*inner, usual if same else _link(name, 0, bandwidth, like=base.links))


def _closed(inner: tuple[LinkLevel, ...], base: Cluster) -> tuple[LinkLevel, ...]:
    """One node that is connected to no other."""
    if not inner:
        return base.links[-1:]
    return (*inner[:-1], msgspec.structs.replace(inner[-1], span=0))


def _link(
    name: str, span: int, bandwidth_bytes_per_s: float, *, like: tuple[LinkLevel, ...] = ()
) -> LinkLevel:
    """A level with the latency of a known one of the same name, else an assumed one."""
    latency_s = next(
        (level.latency_s for level in like if level.name == name),
        ASSUMED_LATENCY_S.get(name, _NETWORK_LATENCY_S),
    )
    return LinkLevel(
        name=name, span=span, bandwidth_bytes_per_s=float(bandwidth_bytes_per_s), latency_s=latency_s
    )


def _named(text: str, words: dict[str, str]) -> str:
    lowered = text.lower()
    return next((name for word, name in words.items() if word in lowered), "")


def _sources(base: Cluster, links: tuple[LinkLevel, ...], stated: Links) -> dict[str, str]:
    """Sources of a changed machine: the base's for what it shares with it, "stated" or "assumed" for the rest."""
    sources = {key: text for key, text in base.sources.items() if not key.startswith("links.")}
    usual = {level.name: level for level in base.links}
    for link, key in itertools.product(links, ("bandwidth_bytes_per_s", "latency_s")):
        name = f"links.{link.name}.{key}"
        value = getattr(link, key)
        if link.name in usual and value == getattr(usual[link.name], key):
            sources[name] = base.sources.get(name, "assumed")
        else:
            sources[name] = (
                "stated" if value in (stated.intra_bytes_per_s, stated.inter_bytes_per_s) else "assumed"
            )
    return sources
