"""The catalogue of devices: from the name that a runtime, a table or a person uses to a Device with published numbers."""

from __future__ import annotations

import difflib
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import msgspec

from llmprof.errors import ClusterError
from llmprof.schema.cluster import Device

_DIRECTORY = Path(__file__).parent / "catalogue" / "devices"
_MOST_GUESSES = 3
_SHOWN_LETTERS = 80


class DeviceEntry(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One file of the catalogue.

    Attributes:
        device: the numbers, each with its source.
        usual_machine: the cluster of the catalogue that is taken where nothing else is stated; "" when none is usual.
        assumed_names: names that fit other devices too, with what is assumed when they are used.
        same_chip: devices with the same chip, nearest first, whose tables of operators price this one, too.
    """

    device: Device
    usual_machine: str = ""
    assumed_names: dict[str, str] = {}
    same_chip: tuple[str, ...] = ()


class _Index(NamedTuple):
    entries: tuple[DeviceEntry, ...]
    by_name: dict[str, tuple[DeviceEntry, str | None]]


def device_names() -> tuple[str, ...]:
    """Names of all devices of the catalogue."""
    return tuple(entry.device.name for entry in _index().entries)


def find_device(name: str) -> Device:
    """The device of the catalogue that has this name or alias; case and "_" for a space do not matter.

    Form factors are different devices: a name that leaves the form factor open is resolved by the catalogue, and
    `device_assumption` says how.

    Raises:
        ClusterError: unknown name; the hint has the closest ones.
    """
    return device_entry(name).device


def known_device(name: str) -> Device | None:
    """As `find_device`, with None for a device that is not in the catalogue."""
    found = known_entry(name)
    return found.device if found else None


def known_entry(name: str) -> DeviceEntry | None:
    """As `device_entry`, with None for a device that is not in the catalogue."""
    found = _index().by_name.get(normal_name(name))
    return found[0] if found else None


def device_assumption(name: str) -> str | None:
    """What was assumed to resolve an ambiguous name, such as the form factor of "A100-80GB"; None when nothing was."""
    found = _index().by_name.get(normal_name(name))
    return found[1] if found else None


def device_entry(name: str) -> DeviceEntry:
    """The catalogue's whole entry of a device; raises as `find_device` does."""
    found = known_entry(name)
    if found is None:
        raise _unknown(name)
    return found


def normal_name(name: str) -> str:
    """How names are compared: lower case, single spaces, "_" as a space."""
    return " ".join(name.lower().replace("_", " ").split())


@lru_cache(maxsize=1)
def _index() -> _Index:
    entries = tuple(
        msgspec.json.decode(file.read_bytes(), type=DeviceEntry) for file in sorted(_DIRECTORY.glob("*.json"))
    )
    by_name: dict[str, tuple[DeviceEntry, str | None]] = {}
    for entry in entries:
        for name, assumption in entry.assumed_names.items():
            by_name[normal_name(name)] = (entry, assumption)
    for entry in entries:
        for name in (entry.device.name, *entry.device.aliases):
            by_name[normal_name(name)] = (entry, None)
    return _Index(entries=entries, by_name=by_name)


def _unknown(name: str) -> ClusterError:
    index = _index()
    shown = " ".join(name.split())[:_SHOWN_LETTERS]
    close = difflib.get_close_matches(normal_name(shown), index.by_name, n=8, cutoff=0.5)
    guesses = list(dict.fromkeys(index.by_name[text][0].device.name for text in close))[:_MOST_GUESSES]
    if guesses:
        return ClusterError(f"unknown device {shown!r}", hint=f"did you mean {' or '.join(guesses)}?")
    return ClusterError(f"unknown device {shown!r}", hint=f"the catalogue has {', '.join(device_names())}")
