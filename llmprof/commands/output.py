"""Where commands print: one JSON object on stdout, or text through rich."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import msgspec

if TYPE_CHECKING:
    from rich.console import Console


def print_json(value: Any) -> None:
    """Print one object on stdout; what is not a finite number becomes null."""
    encoded = msgspec.json.encode(value)
    sys.stdout.write(msgspec.json.format(encoded, indent=2).decode() + "\n")
    sys.stdout.flush()


def console(*, stderr: bool = False) -> Console:
    """A console that writes plain text when its stream is no terminal."""
    from rich.console import Console

    return Console(stderr=stderr, highlight=False, emoji=False, markup=False)
