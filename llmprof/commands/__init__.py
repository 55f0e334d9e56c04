"""One file per command of the command line; each prints, none computes.

A command module has SUMMARY (one line), `add_arguments(parser)` and `execute(args) -> exit code`. It is imported
only when it is named, and imports what is heavy inside `execute`.
"""

from __future__ import annotations

COMMANDS = (
    "run",
    "show",
    "forecast",
    "search",
    "measure",
    "compare",
    "validate",
    "import",
    "export",
    "doctor",
)
"""Names of the commands, in the order of the help text; each is a module of this package."""
