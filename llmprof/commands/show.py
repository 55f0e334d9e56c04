"""`llmprof show RUN`: where the step of a run goes."""

from __future__ import annotations

import argparse

from llmprof.commands.request import load_run, positive_int
from llmprof.commands.why import HELP, print_why, why_run

SUMMARY = "where the step of a run goes: phases, operators, modules, collectives, memory"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("run", metavar="RUN", help="run directory that a capture or `forecast --save` wrote")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument(
        "--top", type=positive_int, metavar="N", help="rows of each table (default 10; all with --json)"
    )
    parser.add_argument(
        "--by", choices=("op", "module", "layer", "family"), default="op", help="what to add operators up by"
    )
    parser.add_argument("--depth", type=positive_int, metavar="D", help="levels of module names to keep")
    parser.add_argument(
        "--rank", type=int, metavar="R", help="this rank alone (default: the mean over ranks)"
    )
    parser.add_argument("--why", metavar="OP", help=HELP)


def execute(args: argparse.Namespace) -> int:
    """Print the report."""
    from llmprof.report.breakdown import break_down, group_operators

    profile = load_run(args.run)
    if args.why is not None:
        print_why([why_run(profile, args.why)], as_json=args.json, top=args.top)
        return 0
    breakdown = break_down(profile, rank=args.rank)
    groups = group_operators(breakdown, by=args.by, depth=args.depth)
    layers = group_operators(breakdown, by="layer", depth=args.depth)
    if args.json:
        from msgspec import to_builtins

        from llmprof.commands.output import print_json

        report = to_builtins(breakdown)
        report["operators"] = report["operators"][: args.top]
        print_json({**report, "groups": groups[: args.top]})
        return 0
    from llmprof.commands.output import console
    from llmprof.report.text import show_text

    console().print(show_text(breakdown, groups, layers, by=args.by, top=args.top or 10))
    return 0
