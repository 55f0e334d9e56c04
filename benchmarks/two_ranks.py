"""Forecasts four two-rank layouts from a one-rank capture, then trains them for real and compares.

python benchmarks/two_ranks.py            all cases, about eight minutes on two cores
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
from benchmarks.collectives import sweep_two_ranks
from benchmarks.quiet import ForeignLoad
from benchmarks.ranks import RankGroup, receive, set_up_rank, start_ranks
from benchmarks.scores import Row, Single, make_row, summarize, table
from llmprof.schema.catalogue import load_cluster
from llmprof.schema.profile import CollectiveRow, Profile

STEPS_PER_TURN = 3
CAPTURE_STEPS = 22
MAX_FOREIGN_SHARE = 0.05


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
    console.width = max(console.width, 120)
    repeats = args.repeats or (3 if args.quick else 6)
    console.print("pricing gloo between two ranks, in situ ...")
    prices = sweep_two_ranks(quick=args.quick)
    rows: list[Row] = []
    machine: dict[str, Any] = {}
    for case in CASES[:1] if args.quick else CASES:
        console.print(
            f"[bold]{case.name}[/bold]: capture on one rank, then {repeats} turns of each layout ..."
        )
        case_rows, machine[case.name] = run_case(case, prices, repeats=repeats)
        rows.extend(case_rows)
    summary = summarize(rows, machine)
    console.print(table(rows))
    console.print(_closing_line(summary))
    if args.json:
        print(msgspec.json.encode(summary).decode())
    return 0


def run_case(
    case: Case, prices: tuple[CollectiveRow, ...], *, repeats: int
) -> tuple[list[Row], dict[str, float]]:
    """Captures, forecasts, then measures; returns the rows and what the machine did meanwhile."""
    profile = capture(case, prices)
    forecasts = {name: forecast(profile, case, name) for name in ("single", *LAYOUTS)}
    durations, disturbed = measure(case, repeats=repeats)
    single = Single(float(np.median(durations["single"])), forecasts["single"]["step_time_s"]["p50"])
    rows = [
        make_row((case.name, name), durations[name], forecast=forecasts[name], single=single)
        for name in ("single", *LAYOUTS)
    ]
    captured = [
        row.duration_us / 1e6 for row in profile.steps if row.kind == "train" and not row.instrumented
    ]
    drift = single.measured_s / float(np.median(captured))
    return rows, {"drift": drift, "rounds_measured_again": disturbed}


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


def measure(case: Case, *, repeats: int) -> tuple[dict[str, list[float]], int]:
    """Step times in seconds of one rank and of every layout, and how many rounds were measured again.

    Turns are interleaved, so that drift of the machine meets all. A round in which other programs used more than
    MAX_FOREIGN_SHARE of the cores is measured again, at most `repeats` times.
    """
    groups: list[RankGroup] = []
    spare = repeats
    rounds: list[dict[str, list[float]]] = []
    try:
        for name in ("single", *LAYOUTS):
            groups.append(RankGroup(name, case))
        while len(rounds) < repeats:
            load = ForeignLoad(pid for group in groups for pid in group.pids)
            order = groups if len(rounds) % 2 == 0 else groups[::-1]
            times = {group.name: group.run(STEPS_PER_TURN) for group in order}
            if load.share() > MAX_FOREIGN_SHARE and spare > 0:
                spare -= 1
            else:
                rounds.append(times)
    finally:
        for group in groups:
            group.close()
    durations = {group.name: [t for times in rounds for t in times[group.name]] for group in groups}
    return durations, repeats - spare


def _closing_line(summary: dict[str, Any]) -> str:
    return (
        f"n {summary['n']}  median error {summary['median_ape']:.1%} (naive {summary['naive_median_ape']:.1%}, "
        f"second baseline {summary['second_median_ape']:.1%}), of ratios to one rank "
        f"{summary['median_ratio_error']:.1%}; measured within p10..p90: {summary['coverage80']:.0%}; "
        f"pairs of layouts in the right order: {summary['pairs_correct']} of {summary['pairs']}"
    )


if __name__ == "__main__":
    sys.exit(main())
