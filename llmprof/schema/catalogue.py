"""The catalogue of machines: from a name, a JSON file or a Profile to a Cluster whose every number names its source.

Machines lie in `catalogue/*.json`, devices in `catalogue/devices/*.json`; "local" is built from what a Profile
measured, and "4xL40S" is a node of that many devices with the links that are usual for them.
"""

from __future__ import annotations

import difflib
import re
from pathlib import Path

from llmprof.errors import ClusterError
from llmprof.schema.cluster import Cluster
from llmprof.schema.cluster_files import read_cluster, shipped_clusters
from llmprof.schema.devices import known_device
from llmprof.schema.fabric import build_cluster, usual_machine
from llmprof.schema.local import local_cluster
from llmprof.schema.profile import Profile

LOCAL = "local"


def catalogue_names() -> tuple[str, ...]:
    """Names that `load_cluster` knows, "local" first."""
    return (LOCAL, *shipped_clusters())


def load_cluster(name_or_path: str | Path, *, profile: Profile | None = None) -> Cluster:
    """A cluster of the catalogue, of a JSON file, or the machine a Profile was measured on.

    Args:
        name_or_path: a catalogue name (any case), a number and a device ("4xL40S"), the path of a JSON file in the
            form of `Cluster`, or "local".
        profile: what "local" is built from.

    Raises:
        ClusterError: unknown name, unreadable or inconsistent file, or "local" without a measured profile.
    """
    text = str(name_or_path)
    if text.lower() == LOCAL:
        if profile is None:
            raise ClusterError(
                "the cluster 'local' is built from a measured run, and none was given",
                hint="give a run, or a cluster of the catalogue such as 8xH100-SXM",
            )
        return local_cluster(profile, known=_machine_of(profile))
    for name, cluster in shipped_clusters().items():
        if name.lower() == text.lower():
            return cluster
    file = Path(text)
    if file.suffix == ".json" or file.is_file():
        return read_cluster(file)
    return _node_of(text)


def _machine_of(profile: Profile) -> Cluster | None:
    """The usual machine of the device that a run was measured on, None when the catalogue does not have it."""
    source = profile.sources[0] if profile.sources else None
    device = known_device(source.device_name) if source is not None else None
    if source is None or device is None:
        return None
    usual = usual_machine(device)
    if source.device_count <= usual.devices_per_node:
        return usual
    return build_cluster(device, devices_per_node=source.device_count)


def _node_of(text: str) -> Cluster:
    """A node by the number of its devices and their name, such as "4xL40S"."""
    parts = re.fullmatch(r"(\d{1,6})x(.+)", text.strip(), flags=re.IGNORECASE)
    device = known_device(parts[2]) if parts else None
    if parts is None or device is None:
        raise _unknown(text)
    return build_cluster(device, devices_per_node=int(parts[1]))


def _unknown(text: str) -> ClusterError:
    names = catalogue_names()
    lowered = {n.lower(): n for n in names}
    close = difflib.get_close_matches(text.lower(), lowered, n=1, cutoff=0.4)
    guess = f"did you mean {lowered[close[0]]}? " if close else ""
    return ClusterError(
        f"unknown cluster {text!r}",
        hint=f"{guess}known: {', '.join(names)}, a node such as 4xL40S, or the path of a .json file",
    )
