"""`llmprof import`: measurements that other programs made become a table that prices forecasts."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmprof.errors import RequestError, TableError

if TYPE_CHECKING:
    from llmprof.schema.nccl_tests import CollectiveLog

SUMMARY = "turn logs of nccl-tests or rccl-tests into a table that prices forecasts"
_MOST_BYTES = 100_000_000


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    from llmprof.schema.nccl_tests import KINDS

    parser.add_argument(
        "--nccl-tests",
        metavar="LOG",
        action="append",
        required=True,
        help="what all_reduce_perf and its like printed; give it several times",
    )
    parser.add_argument(
        "--kind", choices=sorted(set(KINDS.values())), help="of tests whose log does not name them"
    )
    parser.add_argument(
        "-o", "--output", metavar="TABLE", required=True, help="file to write, for forecast --measured"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def execute(args: argparse.Namespace) -> int:
    """Read all logs, then write; a log that cannot be read leaves the table as it was."""
    from llmprof.commands.output import console, print_json
    from llmprof.schema.measurements import MeasurementWriter, machine
    from llmprof.schema.nccl_tests import source_of

    logs = {path: _read(path, args.kind or "") for path in dict.fromkeys(args.nccl_tests)}
    names = {log.device_name for log in logs.values()}
    if len(names) > 1:
        raise RequestError(
            f"the logs were measured on {' and '.join(sorted(names))}",
            hint="times of one device never price another: write a table for each",
        )
    first = next(iter(logs.values()))
    device = "rocm" if "amd" in first.device_name.lower() else "cuda"
    source = source_of(first, device=device, software="nccl-tests" if device == "cuda" else "rccl-tests")
    writer = MeasurementWriter(args.output, source)
    for log in logs.values():
        for row in log.rows:
            writer.collective(row)
    writer.close()
    result = {
        "table": args.output,
        "device": machine(source),
        "rows": sum(len(log.rows) for log in logs.values()),
        "groups": _groups(logs.values()),
        "left_out": {path: log.left_out for path, log in logs.items() if log.left_out},
    }
    if args.json:
        print_json(result)
        return 0
    out = console()
    groups = ", ".join(f"{g['kind']} over {g['group_size']} ({g['rows']})" for g in result["groups"])
    out.print(
        f"wrote {result['rows']} times on {result['device']} to {args.output}: {groups}", soft_wrap=True
    )
    for path, reasons in result["left_out"].items():
        for reason, count in reasons.items():
            out.print(f"left out of {path}: {count} lines {reason}", soft_wrap=True)
    return 0


def _read(path: str, kind: str) -> CollectiveLog:
    from llmprof.schema.nccl_tests import read_test_log

    file = Path(path)
    if not file.is_file():
        raise TableError(f"there is no log at {path}", hint="keep what all_reduce_perf prints in a file")
    if file.stat().st_size > _MOST_BYTES:
        size = file.stat().st_size / 1e6
        raise TableError(
            f"{path} has {size:.0f} MB, more than {_MOST_BYTES / 1e6:.0f} MB", hint="is it a log?"
        )
    try:
        return read_test_log(
            file.read_text(encoding="utf-8", errors="replace"), kind=kind, fallback=_named(file)
        )
    except TableError as error:
        raise TableError(f"{path}: {error.message}", hint=error.hint) from error


def _named(file: Path) -> str:
    """The kind in the name of a file such as alltoall_perf.log, "" when there is none."""
    from llmprof.schema.nccl_tests import KINDS

    found = [kind for name, kind in KINDS.items() if name in file.name.lower()]
    return found[0] if len(set(found)) == 1 else ""


def _groups(logs: Any) -> list[dict[str, Any]]:
    counts: dict[tuple[str, int, int], int] = {}
    for log in logs:
        for row in log.rows:
            key = (row.kind, row.group_size, row.span)
            counts[key] = counts.get(key, 0) + 1
    return [
        {"kind": kind, "group_size": size, "span": span, "rows": rows}
        for (kind, size, span), rows in sorted(counts.items())
    ]
