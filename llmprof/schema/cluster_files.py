"""Cluster descriptions in JSON files: from a path to a checked Cluster, each file read once.

`"device"` is the name of a device of the catalogue, or a whole description.
"""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

import msgspec

from llmprof.errors import ClusterError
from llmprof.schema.cluster import Cluster
from llmprof.schema.cluster_rules import check_cluster, refuse_foreign_units
from llmprof.schema.devices import find_device

_DIRECTORY = Path(__file__).parent / "catalogue"
_FORM = "see the catalogue's files for the form"


@lru_cache(maxsize=1)
def shipped_clusters() -> dict[str, Cluster]:
    """The clusters of the catalogue by name, in alphabetical order; files with an underscore are other data."""
    files = [file for file in sorted(_DIRECTORY.glob("*.json")) if not file.name.startswith("_")]
    return {file.stem: read_cluster(file) for file in files}


def read_cluster(file: Path) -> Cluster:
    """The cluster that a file describes; a file that changed is read again.

    Raises:
        ClusterError: unreadable, not a description, or numbers that contradict each other.
    """
    try:
        if file.exists() and not file.is_file():
            raise OSError(0, "it is not a file")
        return _read(str(file), file.stat().st_mtime_ns)
    except OSError as error:
        raise ClusterError(
            f"the cluster file {file} cannot be read: {error.strerror}",
            hint="give the path of a .json file, or a name of the catalogue such as 8xH100-SXM",
        ) from error


@lru_cache(maxsize=128)
def _read(path: str, _modified_ns: int) -> Cluster:
    try:
        raw = msgspec.json.decode(Path(path).read_bytes())
    except (msgspec.DecodeError, RecursionError) as error:
        raise ClusterError(f"{path} is not JSON: {error}", hint=_FORM) from error
    refuse_foreign_units(raw, path)
    if isinstance(raw, dict) and isinstance(raw.get("device"), str):
        raw["device"] = msgspec.to_builtins(find_device(raw["device"]))
    try:
        cluster = msgspec.convert(raw, Cluster)
    except msgspec.ValidationError as error:
        raise ClusterError(f"{path} is not a cluster description: {error}", hint=_FORM) from error
    check_cluster(cluster)
    return cluster
