"""`llmprof compare A B`: was the forecast right, and which part of it was wrong."""

from __future__ import annotations

import argparse

from llmprof.commands.request import load_run

SUMMARY = "two runs or forecasts side by side, and which part makes the difference"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("a", metavar="A", help="run directory, measured or saved by `forecast --save`")
    parser.add_argument("b", metavar="B", help="the other one")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def execute(args: argparse.Namespace) -> int:
    """Print the comparison."""
    from llmprof.commands.output import console, print_json
    from llmprof.report.compare import compare

    comparison = compare(load_run(args.a), load_run(args.b))
    if args.json:
        print_json(comparison)
        return 0
    from llmprof.report.compare_text import comparison_table

    console().print(comparison_table(comparison))
    return 0
