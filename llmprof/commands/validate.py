"""`llmprof validate TABLE...`: how far our forecasts are from published measurements."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmprof.commands.request import positive_int
from llmprof.errors import RequestError, TableError

if TYPE_CHECKING:
    from llmprof.judge.table import Table

SUMMARY = "how far forecasts are from published measurements"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument(
        "tables",
        metavar="TABLE",
        nargs="+",
        help="CSV files of training runs, operators or collectives; the columns tell which",
    )
    parser.add_argument(
        "--calibrated",
        type=positive_int,
        default=0,
        metavar="K",
        help="tables of runs: the K smallest runs of each software and GPU calibrate the rest (default: cold)",
    )
    parser.add_argument(
        "--fit",
        metavar="HOW",
        help="tables of operators and collectives: what is fitted, the rest is scored: random:0.3, smaller:0.5, nodes:1",
    )
    parser.add_argument(
        "--worst",
        type=positive_int,
        default=0,
        metavar="N",
        help="list the N worst rows and where their time goes",
    )
    parser.add_argument("--by", default="", metavar="COLUMN", help="errors by the values of a column")
    parser.add_argument("--jobs", type=positive_int, default=2, metavar="N", help="processes (default: 2)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def execute(args: argparse.Namespace) -> int:
    """Print the scores; a table without a usable row is no error."""
    from time import perf_counter

    from llmprof.judge.result import Asked, result_object
    from llmprof.judge.splits import parse_fit
    from llmprof.judge.validation import Request, judge_tables

    started = perf_counter()
    fit = parse_fit(args.fit) if args.fit else None
    tables, refused = _read_tables(args.tables)
    _check_column(args.by, tables)
    request = Request(calibrated=args.calibrated, fit=fit, jobs=args.jobs)
    with _progress(tables) as progress:
        scores = judge_tables(tables, request, progress=progress)
    result = result_object(
        scores,
        Asked(mode=request.describe({t.kind for t in tables}), worst=args.worst, by=args.by),
        seconds=perf_counter() - started,
        refused=refused,
        warnings=request.ignored({t.kind for t in tables}),
    )
    _print(result, as_json=args.json)
    return 0


def _read_tables(paths: list[str]) -> tuple[list[Table], dict[str, str]]:
    """Tables, and files that are none with the reason.

    Raises:
        TableError: a file is missing, or none is a table.
    """
    from llmprof.judge.table import read_table

    tables: list[Table] = []
    refused: dict[str, TableError] = {}
    for path in dict.fromkeys(paths):
        try:
            tables.append(read_table(path))
        except TableError as error:
            if not Path(path).is_file():
                raise
            refused[Path(path).name] = error
    if not tables:
        raise next(iter(refused.values()))
    return tables, {name: error.message for name, error in refused.items()}


def _check_column(column: str, tables: list[Table]) -> None:
    """Refuse a column that no table has, before anything is forecast."""
    known = dict.fromkeys(c for table in tables for c in table.columns)
    if column and column not in known:
        raise RequestError(f"no table has the column {column!r}", hint=f"the columns are {', '.join(known)}")


def _progress(tables: list[Table]) -> Any:
    from llmprof.commands.output import console
    from llmprof.report.progress import progress_bar

    return progress_bar(
        console(stderr=True), "forecasting", total=sum(len(t.rows) for t in tables if t.kind == "runs")
    )


def _print(result: dict[str, Any], *, as_json: bool) -> None:
    if as_json:
        from llmprof.commands.output import print_json

        print_json(result)
        return
    from llmprof.commands.output import console
    from llmprof.report.validate_text import validation_text

    console().print(validation_text(result))
