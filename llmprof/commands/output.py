"""Where commands print: one JSON object on stdout, or text through rich."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, TextIO

import msgspec

if TYPE_CHECKING:
    from rich.console import Console

_ESCAPED = {code: f"\\u{code:04x}" for code in range(0x7F, 0xA0)}
"""Characters that some terminals obey and JSON lets through as they are; those below are always escaped."""


def print_json(value: Any) -> None:
    """Print one object on stdout; what is not a finite number becomes null, what is not text a question mark."""
    try:
        encoded = msgspec.json.encode(value)
    except UnicodeEncodeError:  # a path of bytes that are not UTF-8
        encoded = msgspec.json.encode(_printable(msgspec.to_builtins(value)))
    sys.stdout.write(msgspec.json.format(encoded, indent=2).decode().translate(_ESCAPED) + "\n")
    sys.stdout.flush()


def _printable(value: Any) -> Any:
    if isinstance(value, str):
        return value.encode(errors="replace").decode()
    if isinstance(value, dict):
        return {_printable(key): _printable(part) for key, part in value.items()}
    return [_printable(part) for part in value] if isinstance(value, (list, tuple)) else value


def console(*, stderr: bool = False) -> Console:
    """A console on stdout or stderr; it writes plain text when that is no terminal."""
    from llmprof.report.terminal import SafeConsole

    _never_fail_to_encode(sys.stderr if stderr else sys.stdout)
    return SafeConsole(stderr=stderr, highlight=False, emoji=False, markup=False)


def _never_fail_to_encode(stream: TextIO | None) -> None:
    """A terminal that cannot show a character gets a question mark, not an exception."""
    reconfigure = getattr(stream, "reconfigure", None)
    if reconfigure is not None:
        reconfigure(errors="replace")
