"""Where commands print: one JSON object on stdout, or text through rich."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, TextIO

import msgspec

if TYPE_CHECKING:
    from rich.console import Console


def print_json(value: Any) -> None:
    """Print one object on stdout; what is not a finite number becomes null."""
    encoded = msgspec.json.encode(value)
    sys.stdout.write(msgspec.json.format(encoded, indent=2).decode() + "\n")
    sys.stdout.flush()


def console(*, stderr: bool = False) -> Console:
    """A console on stdout or stderr; it writes plain text when that is no terminal."""
    from rich.console import Console

    _never_fail_to_encode(sys.stderr if stderr else sys.stdout)
    return Console(stderr=stderr, highlight=False, emoji=False, markup=False)


def _never_fail_to_encode(stream: TextIO | None) -> None:
    """A terminal that cannot show a character gets a question mark, not an exception."""
    reconfigure = getattr(stream, "reconfigure", None)
    if reconfigure is not None:
        reconfigure(errors="replace")
