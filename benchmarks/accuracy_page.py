"""Scores of `llmprof validate` become one Markdown page, each figure with its change against the last committed page."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from rich import box
from rich.console import Console
from rich.table import Table

Scores = Mapping[str, Any]


class Book(NamedTuple):
    """What one run of all modes gave.

    Attributes:
        command, date, commit: how, when and on what it was measured.
        modes: for each mode its `summary`, its `tables`, and files `refused` with the reason.
        seconds: of all modes together.
    """

    command: str
    date: str
    commit: str
    modes: list[dict[str, Any]]
    seconds: float = 0.0


class Column(NamedTuple):
    """A column of the page: heading, how to read it from the scores of a table, and how to print it."""

    heading: str
    read: Callable[[Scores], float | None]
    show: Callable[[float], str]


def percent(value: float) -> str:
    """A fraction as a percentage with three significant digits at most."""
    return f"{value * 100:.3g} %" if abs(value) < 9.995 else f"x{1 + value:.3g}"


def plain(value: float) -> str:
    """A number with two decimals."""
    return f"{value:.2f}"


def count(value: float) -> str:
    """A whole number."""
    return f"{value:.0f}"


def _key(name: str) -> Callable[[Scores], float | None]:
    return lambda scores: scores.get(name)


def _inside(outer: str, name: str) -> Callable[[Scores], float | None]:
    return lambda scores: (scores.get(outer) or {}).get(name)


_ERRORS = (
    Column("scored", _key("n"), count),
    Column("of", _key("rows"), count),
    Column("share", _key("scored_fraction"), percent),
    Column("median error", _key("median_ape"), percent),
    Column("p90", _key("p90_ape"), percent),
    Column("naive", _key("naive_median_ape"), percent),
    Column("second", _key("second_median_ape"), percent),
    Column("in 80 %", _key("coverage80"), percent),
    Column("interval score", _key("interval_score80"), plain),
    Column("width", _key("median_relative_width"), percent),
)
_ORDER = (
    Column("above 1 % MFU", _inside("without_below_1pct_mfu", "median_ape"), percent),
    Column("choice sets", _key("choice_sets"), count),
    Column("Spearman", _key("spearman"), plain),
    Column("regret", _key("top1_regret"), percent),
    Column("memory error", _key("memory_median_ape"), percent),
    Column("fit known", _inside("oom", "n"), count),
    Column("OOM right", _inside("oom", "accuracy"), percent),
    Column("false fit", _inside("oom", "false_fit_rate"), percent),
    Column("false OOM", _inside("oom", "false_oom_rate"), percent),
)
_STRATA = (
    Column("scored", _key("n"), count),
    Column("median error", _key("median_ape"), percent),
    Column("p90", _key("p90_ape"), percent),
    Column("in 80 %", _key("coverage80"), percent),
    Column("interval score", _key("interval_score80"), plain),
    Column("constant band", _key("band_score80"), plain),
    Column("constant efficiency", _key("naive_median_ape"), percent),
    Column("linear in work", _key("linear_median_ape"), percent),
    Column("spec roofline", _key("roofline_median_ape"), percent),
    Column("nearest row", _key("second_median_ape"), percent),
)


def render_page(book: Book, before: Mapping[str, Any] | None) -> str:
    """The page.

    Args:
        book: today's figures.
        before: the last committed book, or None.
    """
    return "\n".join(_lines(book, before)) + "\n"


def _lines(book: Book, before: Mapping[str, Any] | None) -> Iterator[str]:
    yield "# Accuracy on published measurements"
    yield ""
    yield f"`{book.command}`, {book.date}, commit {book.commit}, {book.seconds:.0f} s on two cores."
    yield ""
    yield _LEGEND
    for mode in book.modes:
        yield f"\n## {mode['mode'].capitalize()}\n"
        if mode.get("forecasts") and mode.get("seconds"):
            rate = mode["forecasts"] / mode["seconds"]
            yield f"{mode['forecasts']} forecasts, {rate:.0f} per second.\n"
        yield _grid(mode, _ERRORS)
        if any(_filled(column, mode) for column in _ORDER):
            yield _grid(mode, _ORDER)
        if mode.get("strata"):
            yield from _strata(mode["strata"])
        yield from _left_out(mode)
    yield "\n## Change\n"
    yield from _changes(book, before)


_LEGEND = """\
Errors are of the median forecast against the measured time: |forecast / measured - 1|. *Naive*: model FLOPs over GPUs x MFU x peak.
*Second*: naive x pipeline bubble + all-reduce. *In 80 %*: share of measurements between p10 and p90 (right: 80 %). *Interval score*
(Winkler) and *width* are relative to the measured time and to the forecast. *Regret*: how much slower the layout is that the forecast
would have booked than the best measured one. A value above 1000 % is written as a factor. *All* is the unweighted mean over tables."""


def _filled(column: Column, mode: Scores) -> bool:
    return any(column.read(t) is not None for t in mode["tables"])


def _grid(mode: Scores, columns: Sequence[Column]) -> str:
    """One row for each table with a value in one of the columns, and one for all."""
    shown = [c for c in columns if _filled(c, mode)]
    table = Table(box=box.MARKDOWN)
    table.add_column("table", no_wrap=True)
    for column in shown:
        table.add_column(column.heading, justify="right", no_wrap=True)
    for scores in (*mode["tables"], {**mode["summary"], "table": "**all**"}):
        if any(c.read(scores) is not None for c in shown):
            table.add_row(str(scores["table"]), *(_cell(c, scores) for c in shown))
    return _text(table)


def _strata(strata: Scores) -> Iterator[str]:
    """Operators by table, device and family; the last line is the unweighted mean over them."""
    yield (
        f"By device and family, at least 30 scored rows; better than every simple rule in {strata['mean']['beats']} of "
        f"{strata['mean']['n']}:\n"
    )
    table = Table(box=box.MARKDOWN)
    for heading in ("table", "device, family"):
        table.add_column(heading, no_wrap=True)
    for column in _STRATA:
        table.add_column(column.heading, justify="right", no_wrap=True)
    for row in (*strata["rows"], {**strata["mean"], "table": "**all**", "key": ""}):
        table.add_row(row["table"], row["key"], *(_cell(c, row) for c in _STRATA))
    yield _text(table)


def _cell(column: Column, scores: Scores) -> str:
    value = column.read(scores)
    return "" if value is None else column.show(value)


def _text(table: Table) -> str:
    out = io.StringIO()
    Console(file=out, width=400, color_system=None).print(table)
    return "\n".join(line.strip() for line in out.getvalue().splitlines() if line.strip()) + "\n"


def _left_out(mode: Scores) -> Iterator[str]:
    """Reasons for which rows are not scored, the most frequent first, and files that are no tables."""
    for scores in mode["tables"]:
        reasons = sorted((scores.get("skipped") or {}).items(), key=lambda item: -item[1])
        if reasons:
            listed = "; ".join(f"{number} {reason}" for reason, number in reasons)
            yield f"- {scores['table']}, not scored: {listed}"
    for name, reason in (mode.get("refused") or {}).items():
        yield f"- {name}: {reason}"


_WATCHED = (
    "median_ape",
    "p90_ape",
    "coverage80",
    "interval_score80",
    "spearman",
    "top1_regret",
    "memory_median_ape",
)
_LEAST_CHANGE = 0.0005


def _changes(book: Book, before: Mapping[str, Any] | None) -> Iterator[str]:
    """What differs from the last committed book, in its own order; changes below a rounding are left out."""
    if before is None:
        yield "No earlier page."
        return
    table = Table(box=box.MARKDOWN)
    for heading in ("mode", "table", "figure", before["commit"], "now"):
        table.add_column(heading, no_wrap=True)
    earlier = {
        m["mode"]: {t["table"]: t for t in (*m["tables"], {**m["summary"], "table": "all"})}
        for m in before["modes"]
    }
    for mode in book.modes:
        for scores in (*mode["tables"], {**mode["summary"], "table": "all"}):
            old = earlier.get(mode["mode"], {}).get(scores["table"], {})
            for name in ("n", *_WATCHED):
                a, b = old.get(name), scores.get(name)
                if a != b and (a is None or b is None or abs(a - b) >= _LEAST_CHANGE):
                    cells = ("" if v is None else f"{v:.4g}" for v in (a, b))
                    table.add_row(mode["mode"], str(scores["table"]), name, *cells)
    yield _text(table) if table.row_count else f"None since {before['commit']}."
