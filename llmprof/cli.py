"""The command line: arguments in, one command run, an exit code out.

Exit codes: 0 done, 2 the request or an input is wrong, 3 there is no answer, 1 our own fault, 130 interrupted.
"""

from __future__ import annotations

import argparse
import io
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import NoReturn

from llmprof import __version__
from llmprof.commands import COMMANDS
from llmprof.errors import LlmprofError, RequestError

DESCRIPTION = "Measure a short PyTorch training run, forecast the big one."
INTERNAL_ERROR, INTERRUPTED = 1, 130
_MAX_LINE = 1000
"""Characters of a message or hint; of longer ones, which quote what was typed or read, both ends are shown."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        argv: arguments without the program's name; those of the process when None.

    Returns:
        The exit code.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        return _run(arguments)
    except KeyboardInterrupt:
        print("llmprof: interrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        _silence_stdout()
        return 0


def _run(arguments: list[str]) -> int:
    as_json = _wants_json(arguments)
    try:
        code = _dispatch(arguments)
        sys.stdout.flush()
        return code
    except BrokenPipeError:
        raise
    except LlmprofError as error:
        _report(error.kind, error.message, error.hint, as_json=as_json)
        return error.exit_code
    except OSError as error:
        if error.filename is None:
            return _report_internal(error, as_json=as_json)
        message = f"cannot use {error.filename}: {error.strerror}"
        _report("file", message, "check the path and its permissions", as_json=as_json)
        return RequestError.exit_code
    except Exception as error:  # noqa: BLE001 - the last resort: whatever it is, the user gets one line
        return _report_internal(error, as_json=as_json)


def _dispatch(arguments: list[str]) -> int:
    name = arguments[0] if arguments else ""
    if name in COMMANDS:
        command = import_module(f"llmprof.commands.{name}")
        parser = Parser(prog=f"llmprof {name}", description=command.SUMMARY, allow_abbrev=False)
        command.add_arguments(parser)
        return _parse_and(command.execute, parser, arguments[1:])
    parser = _top_parser(full=name in ("", "-h", "--help"))
    return _parse_and(lambda _: 0, parser, arguments or ["--help"])


def _parse_and(
    execute: Callable[[argparse.Namespace], int], parser: argparse.ArgumentParser, arguments: list[str]
) -> int:
    try:
        parsed = parser.parse_args(arguments)
    except SystemExit as done:  # --help and --version have printed
        return int(done.code or 0)
    return execute(parsed)


def _top_parser(*, full: bool) -> Parser:
    """The parser for everything that does not name a command; `full` loads the commands' summaries."""
    lines = [f"  {name:<10} {_summary(name)}" for name in COMMANDS] if full else []
    parser = Parser(
        prog="llmprof",
        usage="llmprof COMMAND ...",
        description=DESCRIPTION,
        epilog="commands:\n" + "\n".join(lines) + "\n\n`llmprof COMMAND --help` tells the rest.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"llmprof {__version__}")
    parser.add_argument("command", choices=COMMANDS, metavar="COMMAND", help=argparse.SUPPRESS)
    return parser


def _summary(name: str) -> str:
    summary: str = import_module(f"llmprof.commands.{name}").SUMMARY
    return summary


class Parser(argparse.ArgumentParser):
    """An argument parser whose complaints are request errors, so that they look like all others."""

    def error(self, message: str) -> NoReturn:
        """Raise instead of printing the usage."""
        raise RequestError(message, hint=f"`{self.prog} --help` lists the options")


def _wants_json(arguments: list[str]) -> bool:
    """True when `--json` is one of our own options: what follows `--` belongs to a user's script."""
    own = arguments[: arguments.index("--")] if "--" in arguments else arguments
    return "--json" in own


def _report(kind: str, message: str, hint: str, *, as_json: bool) -> None:
    from llmprof.commands.output import console, print_json

    message, hint = _shortened(message), _shortened(hint)
    if as_json:
        print_json({"error": {"kind": kind, "message": message, "hint": hint}})
        return
    from rich.text import Text

    out = console(stderr=True)
    out.print(Text(f"llmprof: {_one_line(message)}", style="red"), soft_wrap=True)
    if hint:
        out.print(Text(f"hint: {_one_line(hint)}", style="dim"), soft_wrap=True)


def _report_internal(error: Exception, *, as_json: bool) -> int:
    message = f"internal error: {type(error).__name__}: {_one_line(str(error))}"
    if os.environ.get("LLMPROF_DEBUG", "") not in ("", "0"):
        traceback.print_exception(error)
    _report(
        "internal", message, "this is our fault; LLMPROF_DEBUG=1 shows where it happened", as_json=as_json
    )
    return INTERNAL_ERROR


def _shortened(text: str) -> str:
    if len(text) <= _MAX_LINE:
        return text
    half = _MAX_LINE // 2
    return f"{text[:half]} ... {text[-half:]}"


def _one_line(text: str) -> str:
    return " ".join(text.split())


def _silence_stdout() -> None:
    """The reader of our output has gone; keep the interpreter from complaining when it flushes at exit."""
    try:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except (OSError, ValueError):
        sys.stdout = io.StringIO()
