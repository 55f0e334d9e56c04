"""`llmprof search RUN`: which of all layouts to book on so many GPUs of a cluster."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Any

from llmprof.commands.request import duration_s, number_of_tokens, parse_layouts, positive_int
from llmprof.commands.subject import add_subject, load_subject, load_subject_at_degrees
from llmprof.commands.tables import add_tables, calibration_of, with_tables
from llmprof.commands.where import Condition, read_condition
from llmprof.errors import LayoutError, NoAnswerError, RequestError, RunError
from llmprof.schema.layout import Layout, divisors

if TYPE_CHECKING:
    from llmprof.extrapolate.forecast import Forecaster
    from llmprof.extrapolate.search import Found, Wish
    from llmprof.extrapolate.space import Space
    from llmprof.schema.profile import Profile

SUMMARY = "the fastest layouts on N GPUs of a cluster that fit, of all there are"
MOST_TP = 64
"""Largest tensor-parallel degree that is tried for a model given by its sizes."""
MOST_COUNTS = 20
DOUBLINGS = 4
"""How often the number of GPUs is doubled to find one on which something fits."""
NEAREST_S = 15.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    add_subject(parser)
    add = parser.add_argument
    add("--cluster", required=True, metavar="NAME", help="catalogue name, path of a .json file, or local")
    add("--gpus", required=True, type=gpu_counts, metavar="N[,N...]|A..B", help="A..B doubles from A up to B")
    add("--global-batch", type=positive_int, metavar="B", help="sequences per step (default: as captured)")
    add("--seq", type=positive_int, metavar="S", help="tokens per sequence (default: as captured)")
    add("--tokens", type=number_of_tokens, metavar="T", help="tokens of the whole run, such as 300B")
    add("--where", metavar="EXPR", help='only such layouts, for example "tp<=8 and pp>1"')
    add("--layouts", metavar="FILE", help="only the layouts of this file, one a line")
    add("--top", type=positive_int, default=10, metavar="K", help="how many are wanted (default: 10)")
    add(
        "--margin", type=share, default=0.0, metavar="F", help="share of the memory to keep free, such as 0.1"
    )
    add("--seconds", type=duration_s, metavar="T", help="stop then, with the best so far (such as 30s or 5m)")
    add("--knee", type=float, default=1.5, metavar="X", help="gain of twice the GPUs that is worth it (1.5)")
    add_tables(parser)
    add("--json", action="store_true", help="print one JSON object")


def gpu_counts(text: str) -> tuple[int, ...]:
    """Argument type: numbers of GPUs, ascending."""
    first, dots, last = text.partition("..")
    if dots:
        low, high = positive_int(first), positive_int(last)
        counts = {low << i for i in range(MOST_COUNTS) if low << i <= high}
    else:
        counts = {positive_int(part) for part in text.split(",")}
    if not counts or len(counts) > MOST_COUNTS:
        raise argparse.ArgumentTypeError(
            f"{text!r} are {len(counts)} numbers of GPUs, not 1 to {MOST_COUNTS}"
        )
    return tuple(sorted(counts))


def share(text: str) -> float:
    """Argument type: a number from 0 to below 1."""
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a share from 0 to below 1")
    return value


def execute(args: argparse.Namespace) -> int:
    """Print the ranked answer; 3 when nothing fits."""
    from llmprof.extrapolate.answer import answer
    from llmprof.extrapolate.forecast import Forecaster
    from llmprof.extrapolate.search import Wish
    from llmprof.extrapolate.space import Space

    start = monotonic()
    listed = _listed(args.layouts) if args.layouts else None
    holds = read_condition(args.where) if args.where else None
    profile, cluster = with_tables(_subject(args, listed), args)
    forecaster = Forecaster(profile, cluster, calibration=calibration_of(cluster, args))
    assert profile.workload is not None, "a forecaster refuses a profile without one"
    space = Space.of(profile.workload, cluster, seq=args.seq or profile.workload.seq)
    batch = _global_batch(args, profile)
    wish = Wish(top=args.top, margin=args.margin, seconds=args.seconds, seq=args.seq)
    layouts_of = partial(_layouts, space=space, batch=batch, listed=listed, holds=holds)
    searches = {gpus: _search(forecaster, list(layouts_of(gpus)), wish, gpus) for gpus in args.gpus}
    result = answer(forecaster, searches, seq=args.seq, tokens=args.tokens, knee=args.knee)
    result["seconds"] = monotonic() - start
    result["fits_on_gpus"] = None
    if not result["layouts"] and result["too_large"] and listed is None:
        result["fits_on_gpus"] = _nearest(forecaster, layouts_of, wish, max(args.gpus))
    _check_asked(result, args, batch)
    _print(result, cluster, args)
    return 0 if result["layouts"] else NoAnswerError.exit_code


def _listed(path: str) -> list[Layout]:
    """Layouts of a file, one a line; what follows a # is a comment.

    Raises:
        RunError: it cannot be read.
        LayoutError: a line is no layout.
    """
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise RunError(
            f"{path} cannot be read: {error}", hint="give a text file with one layout a line"
        ) from error
    texts = [text for line in lines if (text := line.partition("#")[0].strip())]
    return parse_layouts(texts, gpus=None)


def _subject(args: argparse.Namespace, listed: list[Layout] | None) -> Profile:
    """The subject, at all tensor-parallel degrees that its sizes and the numbers of GPUs allow."""
    if listed is not None:
        return load_subject(args, listed)
    degrees = {tp for gpus in args.gpus for tp in divisors(gpus, at_most=MOST_TP)}
    return load_subject_at_degrees(args, sorted(degrees))


def _global_batch(args: argparse.Namespace, profile: Profile) -> int:
    """Sequences of a step.

    Raises:
        RequestError: none was asked, and none was captured.
    """
    workload = profile.workload
    assert workload is not None
    if args.global_batch is not None:
        return int(args.global_batch)
    if workload.source == "reference":
        raise RequestError(
            "a model that was not captured has no global batch of its own", hint="give --global-batch"
        )
    return workload.dp * workload.batch * workload.accum


def _layouts(
    gpus: int, *, space: Space, batch: int, listed: list[Layout] | None, holds: Condition | None
) -> Iterator[Layout]:
    """Layouts that are asked for, with their final `accum`."""
    asked: Iterable[Layout] = space.layouts(gpus, batch) if listed is None else _filled(listed, gpus, batch)
    return (layout for layout in asked if holds is None or holds(layout))


def _filled(listed: list[Layout], gpus: int, batch: int) -> Iterator[Layout]:
    for layout in listed:
        per_pass = layout.dp * layout.mb
        if layout.gpus == gpus:
            fill = layout.accum == 1 and batch % per_pass == 0
            yield replace(layout, accum=batch // per_pass) if fill else layout


def _search(forecaster: Forecaster, layouts: list[Layout], wish: Wish, gpus: int) -> Found:
    """One number of GPUs; an interrupt ends it with the best so far."""
    from llmprof.commands.output import console
    from llmprof.extrapolate.search import Found, searching
    from llmprof.report.progress import progress_bar

    found, done = Found(), 0
    what = f"searching {len(layouts)} layouts of {gpus} GPUs"
    try:
        with progress_bar(console(stderr=True), what, total=len(layouts)) as advance:
            for dealt in searching(forecaster, layouts, wish, found):
                if advance is not None and dealt > done:
                    advance(dealt - done)
                    done = dealt
    except KeyboardInterrupt:
        pass
    return found


def _nearest(
    forecaster: Forecaster, layouts_of: Callable[[int], Iterator[Layout]], wish: Wish, gpus: int
) -> int | None:
    """The first doubled number of GPUs on which a layout fits; None when none does soon."""
    from llmprof.extrapolate.search import search

    quick = replace(wish, top=1, seconds=NEAREST_S)
    doubled = (gpus << doublings for doublings in range(1, DOUBLINGS + 1))
    return next((n for n in doubled if search(forecaster, layouts_of(n), quick).layouts), None)


def _check_asked(result: dict[str, Any], args: argparse.Namespace, batch: int) -> None:
    """Refuse an empty space.

    Raises:
        LayoutError: no layout was there to be considered.
    """
    if result["considered"]:
        return
    counts = ", ".join(map(str, args.gpus))
    also = "".join(
        f", {name} {value}" for name, value in (("--where", args.where), ("--layouts", args.layouts)) if value
    )
    raise LayoutError(
        f"no layout makes up {counts} GPUs and a global batch of {batch}{also}",
        hint="dp x tp x pp x cp = GPUs and dp x mb x accum = global batch: choose a batch with more divisors",
    )


def _print(result: dict[str, Any], cluster: Any, args: argparse.Namespace) -> None:
    from llmprof.commands.output import console, print_json

    if args.json:
        print_json(result)
        return
    from llmprof.report.search_text import search_text

    console().print(search_text(result, cluster))
