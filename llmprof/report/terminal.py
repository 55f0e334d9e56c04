"""A rich console whose text cannot command the terminal: names come from files that others wrote."""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

KEPT = "\n\t"
"""Control characters that only lay out text."""


class SafeConsole(Console):
    """Prints what was rendered without control and direction characters; colours and cursor moves of rich stay."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """As rich does it, each text without what a terminal would obey."""
        for segment in super().render(renderable, options):
            if segment.control or segment.text.isprintable():
                yield segment
            else:
                yield segment._replace(text=harmless(segment.text))


def harmless(text: str) -> str:
    """Text without control characters (Unicode Cc, but for KEPT) and invisible format characters (Cf).

    They have no width, so that tables keep their columns.
    """
    return "".join(c for c in text if c in KEPT or unicodedata.category(c) not in ("Cc", "Cf"))
