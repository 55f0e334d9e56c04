"""The catalogue of machines: from a name, a JSON file or a Profile to a Cluster whose every number names its source.

Shipped descriptions lie in `catalogue/*.json`; "local" is built from what a Profile measured.
"""

from __future__ import annotations

import difflib
import itertools
from functools import lru_cache
from pathlib import Path

import msgspec

from llmprof.errors import ClusterError
from llmprof.schema.cluster import Cluster, Device, LinkLevel
from llmprof.schema.local import local_cluster
from llmprof.schema.profile import Profile

LOCAL = "local"
KINDS = ("cuda", "rocm", "cpu")
LEAST, MOST = 1.0, 1e21
"""What a number of a device or the bandwidth of a link is between, in bytes, FLOP/s, W and Hz."""
MAX_LATENCY_S, MAX_OVERSUBSCRIPTION = 10.0, 1e6
_UNITS = "numbers are plain bytes, bytes/s, FLOP/s, W and Hz"
_DIRECTORY = Path(__file__).parent / "catalogue"
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


def catalogue_names() -> tuple[str, ...]:
    """Names that `load_cluster` knows, "local" first."""
    return (LOCAL, *(file.stem for file in _files()))


def load_cluster(name_or_path: str | Path, *, profile: Profile | None = None) -> Cluster:
    """A cluster of the catalogue, of a JSON file, or the machine a Profile was measured on.

    Args:
        name_or_path: a catalogue name (any case), the path of a JSON file in the form of `Cluster`, or "local".
        profile: what "local" is built from.

    Raises:
        ClusterError: unknown name, unreadable or inconsistent file, or "local" without a measured profile.
    """
    text = str(name_or_path)
    if text.lower() == LOCAL:
        if profile is None:
            raise ClusterError(
                "the cluster 'local' is built from a measured run, and none was given",
                hint=f"give a run, or one of {', '.join(catalogue_names()[1:])}",
            )
        return local_cluster(profile, catalogue=_shipped())
    for name in catalogue_names()[1:]:
        if name.lower() == text.lower():
            return _read(_DIRECTORY / f"{name}.json")
    file = Path(text)
    if file.suffix == ".json" or file.is_file():
        return _read(file)
    raise _unknown(text)


def find_device(runtime_name: str) -> Device | None:
    """The catalogue's device that a runtime reports under this name, or None. Form factors are different devices."""
    wanted = runtime_name.strip().lower()
    for cluster in _shipped():
        names = (cluster.device.name, *cluster.device.aliases)
        if wanted in (n.lower() for n in names):
            return cluster.device
    return None


@lru_cache(maxsize=1)
def _shipped() -> tuple[Cluster, ...]:
    return tuple(_read(file) for file in _files())


def _files() -> list[Path]:
    """Shipped clusters; names with an underscore are other data."""
    return [file for file in sorted(_DIRECTORY.glob("*.json")) if not file.name.startswith("_")]


def _unknown(text: str) -> ClusterError:
    names = catalogue_names()
    lowered = {n.lower(): n for n in names}
    close = difflib.get_close_matches(text.lower(), lowered, n=1, cutoff=0.4)
    guess = f"did you mean {lowered[close[0]]}? " if close else ""
    return ClusterError(
        f"unknown cluster {text!r}",
        hint=f"{guess}known: {', '.join(names)}, or the path of a .json file",
    )


@lru_cache(maxsize=32)
def _read_cached(path: str, _modified_ns: int) -> Cluster:
    data = Path(path).read_bytes()
    try:
        raw = msgspec.json.decode(data)
    except (msgspec.DecodeError, RecursionError) as error:
        raise ClusterError(
            f"{path} is not JSON: {error}", hint="see the catalogue's files for the form"
        ) from error
    _refuse_foreign_units(raw, path)
    try:
        cluster = msgspec.convert(raw, Cluster)
    except msgspec.ValidationError as error:
        raise ClusterError(
            f"{path} is not a cluster description: {error}", hint="see the catalogue's files for the form"
        ) from error
    check_cluster(cluster)
    return cluster


def _read(file: Path) -> Cluster:
    try:
        if file.exists() and not file.is_file():
            raise OSError(0, "it is not a file")
        modified = file.stat().st_mtime_ns
        return _read_cached(str(file), modified)
    except OSError as error:
        raise ClusterError(
            f"the cluster file {file} cannot be read: {error.strerror}",
            hint=f"give one of {', '.join(catalogue_names())}, or the path of a .json file",
        ) from error


def _refuse_foreign_units(raw: object, path: str) -> None:
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
            _refuse_foreign_units(value, path)
    elif isinstance(raw, list):
        for value in raw:
            _refuse_foreign_units(value, path)


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
