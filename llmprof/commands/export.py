"""`llmprof export RUN`: a run's timeline for other viewers."""

from __future__ import annotations

import argparse
from pathlib import Path

from llmprof.commands.request import load_run
from llmprof.errors import RequestError

SUMMARY = "the timeline of a run for Perfetto, or its raw traces for torch-tb-profiler"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("run", metavar="RUN", help="run directory, measured or saved by `forecast --save`")
    parser.add_argument(
        "--chrome", metavar="FILE", help="write the timeline as Chrome trace JSON (.gz: compressed)"
    )
    parser.add_argument(
        "--torch-tb", metavar="LOGDIR", help="write raw traces for the tab of torch-tb-profiler"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def execute(args: argparse.Namespace) -> int:
    """Write what was asked for and say where it is."""
    from llmprof.commands.output import console, print_json
    from llmprof.report.chrome import write_chrome_trace
    from llmprof.report.torch_tb import export_torch_tb
    from llmprof.report.units import bytes_text

    if not args.chrome and not args.torch_tb:
        raise RequestError(
            "nothing to export was named", hint="give --chrome FILE or --torch-tb LOGDIR, or both"
        )
    profile = load_run(args.run)
    written: list[Path] = []
    if args.chrome:
        write_chrome_trace(profile, Path(args.chrome))
        written.append(Path(args.chrome))
    if args.torch_tb:
        written += export_torch_tb(Path(args.run), profile, Path(args.torch_tb))
    if args.json:
        print_json({"files": [{"path": str(f), "size_bytes": f.stat().st_size} for f in written]})
        return 0
    out = console()
    for file in written:
        out.print(f"wrote {file} ({bytes_text(file.stat().st_size)})", soft_wrap=True)
    if args.chrome:
        out.print("open it at ui.perfetto.dev or chrome://tracing")
    return 0
