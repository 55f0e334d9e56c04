"""`llmprof measure`: runs on this device the operators whose time a forecast lacks, or a sweep of usual ones."""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmprof.commands.request import duration_s, load_run, parse_layouts, positive_int
from llmprof.errors import RequestError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from llmprof.extrapolate.forecast import Simulation
    from llmprof.hooks.measure_run import Budget, Measured, Outcome, Skipped
    from llmprof.schema.layout import Layout
    from llmprof.schema.measurements import MeasurementWriter, Wanted
    from llmprof.schema.profile import Profile, SourceRow

SUMMARY = "time the operators that a forecast lacks, on this device"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("run", metavar="RUN", nargs="?", help="run directory whose forecasts lack prices")
    parser.add_argument(
        "--layout", action="append", metavar="L", help="forecast that shall be priced; give it several times"
    )
    parser.add_argument(
        "--cluster", default="local", metavar="NAME", help="what the forecast is for (default: local)"
    )
    parser.add_argument("--global-batch", type=positive_int, metavar="B", help="sequences per step")
    parser.add_argument("--seq", type=positive_int, metavar="S", help="tokens per sequence")
    parser.add_argument(
        "--sweep",
        metavar="FAMILIES",
        help="instead of RUN: usual shapes of gemm, attention, norm, elementwise, softmax, embedding, optimizer; or all",
    )
    parser.add_argument(
        "--collectives",
        action="store_true",
        help="collectives between the ranks of a launcher, such as torchrun, instead of operators",
    )
    parser.add_argument(
        "--budget",
        type=duration_s,
        metavar="T",
        help="time to spend, such as 90s or 5m (default: until done)",
    )
    parser.add_argument(
        "-o", "--output", metavar="TABLE", help="file to keep the times in (default: inside the run)"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def execute(args: argparse.Namespace) -> int:
    """Measure, store each time as soon as it is known, print what it changed."""
    started = time.perf_counter()
    _check(args)
    if args.collectives:
        return _execute_collectives(args)
    from llmprof.hooks.measure_run import Budget, present_device
    from llmprof.schema.measurements import MeasurementWriter, still_wanted

    device, source = present_device()
    budget = Budget(args.budget, started=started)
    if args.sweep:
        from llmprof.hooks.measure_sweep import sweep_calls

        wanted, subject = sweep_calls(args.sweep, device), None
        writer = MeasurementWriter(args.output, source)
    else:
        subject = _Subject(args, source)
        writer = MeasurementWriter(subject.path, source)
        wanted = subject.lacking(writer)
    left = still_wanted(wanted, writer.known)
    outcome = _measure(left, writer, budget, device)
    writer.close()
    result = _result(outcome, writer, budget, known=len({w.call.key for w in wanted}) - len(left))
    if subject is not None:
        result["forecasts"] = subject.changes(writer)
    _print(result, as_json=args.json)
    return 0


def _check(args: argparse.Namespace) -> None:
    """Refuse what contradicts itself, before torch is loaded."""
    from importlib.util import find_spec

    if find_spec("torch") is None:
        raise RequestError("measuring runs operators, and torch is not installed", hint="pip install torch")
    if args.collectives:
        _check_collectives(args)
        return
    if bool(args.run) == bool(args.sweep):
        asked = "both a run and --sweep were given" if args.run else "neither a run nor --sweep was given"
        raise RequestError(
            f"{asked}: what shall be measured?",
            hint="llmprof measure RUN --layout tp=2, or llmprof measure --sweep all -o TABLE",
        )
    if args.run and not args.layout:
        raise RequestError(
            "no layout was given: a run's own shapes are measured already", hint="give --layout"
        )
    if args.sweep and not args.output:
        raise RequestError("a sweep belongs to no run", hint="name a file for it with -o")


_LAUNCH = "torchrun --nproc-per-node 2 -m llmprof measure --collectives -o TABLE"


def _check_collectives(args: argparse.Namespace) -> None:
    if args.sweep or args.layout:
        other = "--sweep" if args.sweep else "--layout"
        raise RequestError(
            f"--collectives and {other} measure different things", hint="call it once for each"
        )
    if bool(args.run) == bool(args.output):
        raise RequestError("collectives are kept in a run or in a table: name one of them", hint=_LAUNCH)
    ranks = os.environ.get("WORLD_SIZE", "")
    if not ranks.isdigit() or int(ranks) < 2:
        raise RequestError(f"collectives need two ranks or more, and there are {ranks or 1}", hint=_LAUNCH)


def _execute_collectives(args: argparse.Namespace) -> int:
    """Measure between the ranks of the launcher; rank 0 keeps and prints."""
    started = time.perf_counter()
    from llmprof.hooks.measure_collectives import (
        ranks_of_launcher,
        sweep_collectives,
        usual_groups,
        usual_items,
    )
    from llmprof.hooks.measure_run import present_device
    from llmprof.schema.measurements import IN_RUN, MeasurementWriter, machine

    device, source = present_device()
    path = Path(args.output) if args.output else Path(args.run) / IN_RUN
    if args.run:
        _check_machine(load_run(args.run), source)
    # rank 0 opens the file before it meets the others: when that fails, the launcher ends them
    writer = MeasurementWriter(path, source) if os.environ.get("RANK", "0") == "0" else None
    rows = []
    with ranks_of_launcher(device) as (world, per_node):
        items = usual_items(usual_groups(world, per_node))
        left_s = args.budget and max(0.0, args.budget - (time.perf_counter() - started))
        for row in sweep_collectives(items, device=device, seconds=left_s):
            if writer is not None:
                writer.collective(row)
            rows.append(row)
    if writer is not None:
        writer.close()
        _print_collectives(
            {
                "device": machine(source),
                "stored_in": str(path),
                "ranks": world,
                "spent_s": time.perf_counter() - started,
                "collectives": rows,
                "remaining": len(items)
                - len({(r.kind, r.size_bytes, r.span) for r in rows if r.kind != "recv"}),
            },
            as_json=args.json,
        )
    return 0


def _check_machine(profile: Profile, source: SourceRow) -> None:
    """Times are kept in a run only where it was measured.

    Raises:
        RequestError: with both machines.
    """
    from llmprof.schema.measurements import machine, same_machine

    own = profile.sources[0] if profile.sources else None
    if own is None or not same_machine(own, source):
        where = machine(own) if own else "an unknown machine"
        raise RequestError(
            f"the run was measured on {where}, and this machine has {machine(source)}",
            hint="keep the times in a table of their own with -o, and forecast with --measured TABLE",
        )


class _Subject:
    """A run and the layouts whose prices are wanted.

    Args:
        args: of the command.
        source: what measures now.
    """

    def __init__(self, args: argparse.Namespace, source: SourceRow) -> None:
        from llmprof.extrapolate.compute import is_device
        from llmprof.schema.catalogue import load_cluster
        from llmprof.schema.measurements import IN_RUN, machine

        self.args = args
        self.layouts: list[Layout] = parse_layouts(args.layout, gpus=None)
        self.profile = load_run(args.run)
        self.cluster = load_cluster(args.cluster, profile=self.profile)
        self.path = Path(args.output) if args.output else Path(args.run) / IN_RUN
        here = machine(source)
        if not is_device(source, self.cluster.device):
            raise RequestError(
                f"the forecast is for {self.cluster.device.name}, and this machine has {here}",
                hint="times of one device never price another: measure on a machine that has one",
            )
        if not args.output:
            _check_machine(self.profile, source)

    def lacking(self, writer: MeasurementWriter) -> tuple[Wanted, ...]:
        """Operators without a measured time."""
        from llmprof.extrapolate.lacking import lacking_calls

        self._before = self._simulate(self._priced(writer))
        return lacking_calls(self._before)

    def changes(self, writer: MeasurementWriter) -> list[dict[str, Any]]:
        """The forecasts before and after."""
        after = self._simulate(self._priced(writer))
        return [
            {"layout": str(layout), "before": _step(old), "after": _step(new)}
            for layout, old, new in zip(self.layouts, self._before, after, strict=True)
        ]

    def _priced(self, writer: MeasurementWriter) -> Profile:
        from llmprof.schema.measurements import read_measurements, with_measurements

        return with_measurements(self.profile, read_measurements(writer.path))

    def _simulate(self, profile: Profile) -> list[Simulation]:
        from llmprof.extrapolate.forecast import Forecaster

        forecaster = Forecaster(profile, self.cluster)
        asked = {"global_batch": self.args.global_batch, "seq": self.args.seq}
        return [forecaster.simulate(layout, **asked) for layout in self.layouts]


def _step(simulation: Simulation) -> dict[str, float]:
    from llmprof.extrapolate.uncertainty import interval, widen

    assumed = simulation.evidence["assumed"]
    step = widen(interval(simulation.step_s), assumed)
    return {"p10": step.p10, "p50": step.p50, "p90": step.p90, "assumed_fraction": assumed}


def _measure(wanted: Sequence[Wanted], writer: MeasurementWriter, budget: Budget, device: str) -> Outcome:
    from llmprof.commands.output import console
    from llmprof.hooks.measure_run import Measured, measure_all, torch_instrument
    from llmprof.report.progress import progress_bar

    with progress_bar(console(stderr=True), "measuring", total=len(wanted)) as advance:

        def done(one: Measured | Skipped) -> None:
            if isinstance(one, Measured):
                writer.operator(one.row)
            if advance is not None:
                advance(1)

        return measure_all(wanted, torch_instrument(device), budget=budget, device=device, done=done)


def _result(outcome: Outcome, writer: MeasurementWriter, budget: Budget, *, known: int) -> dict[str, Any]:
    from llmprof.schema.measurements import machine

    return {
        "device": machine(writer.known.source),
        "stored_in": str(writer.path),
        "known_before": known,
        "spent_s": budget.spent_s,
        "measured": [_measured(one) for one in outcome.measured],
        "skipped": [{**_named(one), "reason": one.reason} for one in outcome.skipped],
        "remaining": [_named(one) for one in outcome.remaining],
    }


def _named(one: Any) -> dict[str, str]:
    return {**one.call.key._asdict(), "phase": one.call.phase}


def _measured(one: Measured) -> dict[str, Any]:
    before_us = one.wanted.estimate_s * 1e6 or None
    return {**_named(one), **one.timing._asdict(), "price_before_us": before_us}


def _print_collectives(result: dict[str, Any], *, as_json: bool) -> None:
    from llmprof.commands.output import console, print_json

    if as_json:
        print_json(result)
        return
    from llmprof.report.measure_text import collectives_text

    console().print(collectives_text(result))


def _print(result: dict[str, Any], *, as_json: bool) -> None:
    from llmprof.commands.output import console, print_json

    if as_json:
        print_json(result)
        return
    from llmprof.report.measure_text import measure_text

    console().print(measure_text(result))
