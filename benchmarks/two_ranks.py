"""Forecasts four two-rank layouts from a one-rank capture, then trains them for real and compares.

python benchmarks/two_ranks.py            all cases, about seven minutes on two cores
python benchmarks/two_ranks.py --quick    one case, about a minute
python benchmarks/two_ranks.py --json     the last line is one JSON object with every row
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from rich.console import Console

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import llmprof
from benchmarks.cases import CASES, LAYOUTS, Case, build_step, layout_string
from benchmarks.collectives import sweep_collectives
from benchmarks.ranks import RankGroup, receive, set_up_rank, start_ranks
from benchmarks.scores import Row, Single, make_row, summarize, table
from llmprof.schema.catalogue import load_cluster
from llmprof.schema.profile import CollectiveRow, Profile

STEPS_PER_TURN = 3
CAPTURE_STEPS = 22


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the benchmark; the exit code is 0 whatever the scores are."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    parser.add_argument("--quick", action="store_true", help="the first case alone, few repeats")
    parser.add_argument("--repeats", type=int, default=0, help="turns of each layout (default 6, quick 3)")
    args = parser.parse_args(argv)
    console = Console(stderr=args.json)
    repeats = args.repeats or (3 if args.quick else 6)
    console.print("pricing gloo between two ranks, in situ ...")
    prices = sweep_collectives(quick=args.quick)
    rows: list[Row] = []
    drift: dict[str, float] = {}
    for case in CASES[:1] if args.quick else CASES:
        console.print(
            f"[bold]{case.name}[/bold]: capture on one rank, then {repeats} turns of each layout ..."
        )
        case_rows, drift[case.name] = run_case(case, prices, repeats=repeats)
        rows.extend(case_rows)
    summary = summarize(rows, drift)
    console.print(table(rows))
    console.print(_closing_line(summary))
    if args.json:
        print(msgspec.json.encode(summary).decode())
    return 0


def run_case(case: Case, prices: tuple[CollectiveRow, ...], *, repeats: int) -> tuple[list[Row], float]:
    """Captures, forecasts, then measures; returns the rows and the drift of the one-rank step since the capture."""
    profile = capture(case, prices)
    forecasts = {name: forecast(profile, case, name) for name in ("single", *LAYOUTS)}
    durations = measure(case, repeats=repeats)
    single = Single(float(np.median(durations["single"])), forecasts["single"]["step_time_s"]["p50"])
    rows = [
        make_row((case.name, name), durations[name], forecast=forecasts[name], single=single)
        for name in ("single", *LAYOUTS)
    ]
    captured = [
        row.duration_us / 1e6 for row in profile.steps if row.kind == "train" and not row.instrumented
    ]
    return rows, single.measured_s / float(np.median(captured))


def capture(case: Case, prices: tuple[CollectiveRow, ...]) -> Profile:
    """The Profile of a one-rank, one-thread run of the case, with the measured prices of gloo beside it."""
    with tempfile.TemporaryDirectory() as directory:
        ((process, pipe),) = start_ranks(_capture_rank, 1, case, directory)
        run = receive(process, pipe)
        process.join(timeout=60)
        profile = llmprof.load_profile(run)
    return msgspec.structs.replace(profile, collectives=(*profile.collectives, *prices))


def _capture_rank(rank: int, world: int, port: int, pipe: Connection, case: Case, directory: str) -> None:
    set_up_rank(rank, world, port)
    model, optimizer, step = build_step("single", case)
    with llmprof.session(logdir=directory) as session:
        for _ in range(CAPTURE_STEPS):
            step()
            session.step(tokens=case.tokens)
    pipe.send(directory)
    del model, optimizer


def forecast(profile: Profile, case: Case, name: str) -> dict[str, Any]:
    """The forecast of a layout on this machine, as `llmprof forecast --json` prints it."""
    layout = llmprof.Layout.parse(layout_string(name, case))
    cluster = load_cluster("local", profile=profile)
    predicted = llmprof.predict(profile, layout, cluster, global_batch=case.batch)
    assert predicted.manifest.forecast is not None
    return predicted.manifest.forecast


def measure(case: Case, *, repeats: int) -> dict[str, list[float]]:
    """Step times in seconds of one rank and of every layout; turns are interleaved, so that drift meets all."""
    groups: list[RankGroup] = []
    try:
        for name in ("single", *LAYOUTS):
            groups.append(RankGroup(name, case))
        for turn in range(repeats):
            for group in groups if turn % 2 == 0 else reversed(groups):
                group.run(STEPS_PER_TURN)
    finally:
        for group in groups:
            group.close()
    return {group.name: group.durations_s for group in groups}


def _closing_line(summary: dict[str, Any]) -> str:
    return (
        f"n {summary['n']}  median error {summary['median_ape']:.1%} (naive {summary['naive_median_ape']:.1%}, "
        f"second baseline {summary['second_median_ape']:.1%}), of ratios to one rank "
        f"{summary['median_ratio_error']:.1%}; measured within p10..p90: {summary['coverage80']:.0%}; "
        f"layout order {'right' if summary['order_correct'] else 'not right'}"
    )


if __name__ == "__main__":
    sys.exit(main())
