"""The object of `llmprof validate` in, tables for an 80-column terminal out; nothing is scored here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from llmprof.report.text import Elided, bullet, heading, plain_table
from llmprof.report.units import seconds_text, three_digits, time_text

Scores = Mapping[str, Any]
WANTED_FRACTION = 0.95
_MOST_REASONS = 8
_MOST_VALUES = 40
_ORDER_HEADING = heading(
    "Order and memory",
    "in percent; order: Spearman's correlation, 1 is best",
)


def validation_text(result: Scores) -> RenderableType:
    """The report: one line for each table, then what was left out, errors by column, and the worst rows."""
    parts: list[RenderableType] = [Text()]
    parts += [bullet(" !", line, style="yellow") for line in result["warnings"]]
    parts += [_title(result), _error_table(result)]
    if any(t.get("choice_sets") or t.get("oom") or t.get("memory_n") for t in result["tables"]):
        parts += [_ORDER_HEADING, _order_table(result["tables"])]
    if result.get("strata"):
        parts += _strata(result["strata"])
    parts += _left_out(result)
    if len(result["tables"]) == 1:
        parts += _assumed(result["tables"][0])
    if result["by"]:
        parts += [
            heading(
                f"By {result['by']['column']}", "errors in percent; bias is the median of forecast / measured"
            ),
            _by_table(result["by"]["values"]),
        ]
    if result["worst"]:
        parts.append(heading("Farthest off", "predicted / measured, and where the predicted time goes"))
        parts += [part for row in result["worst"] for part in _worst_row(row)]
    parts += [Text(), _speed(result)]
    return Group(*parts)


def _title(result: Scores) -> RenderableType:
    return heading("Errors", f"{result['mode']}; |forecast / measured - 1| in percent")


def _error_table(result: Scores) -> RenderableType:
    table = _named_table("scored", "share", "median", "p90", "naive", "second", "in 80", "width")
    for scores in result["tables"]:
        table.add_row(Elided(scores["table"]), *_errors(scores))
        if scores.get("small_strata") and scores.get("without_small_strata"):
            for name, part in (
                ("  larger strata", "without_small_strata"),
                ("  small strata", "small_strata"),
            ):
                table.add_row(name, *_errors({**scores[part], "scored_fraction": None}))
    if len(result["tables"]) > 1:
        summary = {**result["summary"], "scored_fraction": result["scored_fraction"]}
        table.add_row(Text("mean over tables", style="bold"), *_errors(summary))
    empty = [f"{t['table']}: no row can be scored" for t in result["tables"] if not t["n"]]
    return Group(table, *(bullet("  -", line, style="yellow") for line in empty))


def _named_table(*headings: str) -> Table:
    """A table of figures behind a name."""
    table = plain_table()
    table.padding = (0, 0, 0, 2)
    table.add_column("table", ratio=1, no_wrap=True)
    for name in headings:
        table.add_column(name, justify="right", no_wrap=True)
    return table


def _errors(scores: Scores) -> list[RenderableType]:
    names = (
        "median_ape",
        "p90_ape",
        "naive_median_ape",
        "second_median_ape",
        "coverage80",
        "median_relative_width",
    )
    return [Text(str(scores["n"])), _share(scores), *(_percent(scores[name]) for name in names)]


def _share(scores: Scores) -> Text:
    """Share of the usable rows that is scored; yellow where it is too low."""
    share = scores["scored_fraction"]
    if share is None:
        return Text("")
    return Text(f"{100 * share:.0f}", style="" if share >= WANTED_FRACTION else "yellow")


def _percent(value: float | None) -> Text:
    """A share in percent, as a factor above ten times."""
    if value is None:
        return Text("")
    return Text(f"{100 * value:.1f}" if value < 9.995 else f"x{three_digits(1 + value)}")


def _order_table(tables: Sequence[Scores]) -> RenderableType:
    table = _named_table("sets", "order", "regret", "memory", "known", "right", "bad fit", "bad oom")
    for scores in tables:
        if not (scores.get("choice_sets") or scores.get("oom") or scores.get("memory_n")):
            continue
        oom = scores.get("oom") or {}
        for name, found in ((scores["table"], oom), ("  hard rows", oom.get("hard") or {})):
            whole = found is oom
            if not whole and not found.get("n"):
                continue
            rank = scores["spearman"] if whole else None
            table.add_row(
                Elided(name),
                str(scores["choice_sets"] or "") if whole else "",
                "" if rank is None else f"{rank:.2f}",
                *(_percent(scores[key] if whole else None) for key in ("top1_regret", "memory_median_ape")),
                str(found.get("n") or ""),
                *(_percent(found.get(key)) for key in ("accuracy", "false_fit_rate", "false_oom_rate")),
            )
    return table


def _strata(strata: Scores) -> list[RenderableType]:
    """One line for each table, device and family, with what simple rules do; yellow where one of them is better."""
    table = _named_table("scored", "median", "p90", "in 80", "const", "linear", "spec", "nearest")
    names = (
        "median_ape", "p90_ape", "coverage80", "naive_median_ape", "linear_median_ape", "roofline_median_ape",
        "second_median_ape",
    )  # fmt: skip
    place = ""
    for row in strata["rows"]:
        device, _, family = row["key"].rpartition(" ")
        if place != (place := f"{device}  {row['table']}"):
            table.add_row(Text(place, style="dim"))
        figures = (_percent(row[name]) for name in names)
        table.add_row(f"  {family}", str(row["n"]), *figures, style="" if row["beats"] else "yellow")
    mean = strata["mean"]
    table.add_row(Text("mean over strata", style="bold"), "", *(_percent(mean[name]) for name in names))
    said = f"  better than every rule in {mean['beats']} of {mean['n']}"
    note = "at least 30 rows; const: one efficiency, linear: in work, spec: the roofline"
    return [heading("By device and family", note), table, Text(said, style="dim")]


def _left_out(result: Scores) -> list[RenderableType]:
    """Reasons with counts, table by table; what is our own fault is yellow."""
    parts: list[RenderableType] = []
    for scores in result["tables"]:
        reasons = list(scores["skipped"].items())
        if reasons:
            parts.append(
                Text(f"  {scores['table']}: {sum(scores['skipped'].values())} of {scores['rows']} rows")
            )
        for reason, count in reasons[:_MOST_REASONS]:
            style = "yellow" if reason in scores["defects"] else "dim"
            parts.append(bullet(f"  {count:>6}", reason, style=style))
        rest = sum(count for _, count in reasons[_MOST_REASONS:])
        if rest:
            parts.append(bullet(f"  {rest:>6}", "for other reasons (--json lists all)", style="dim"))
    for name, reason in result["refused"].items():
        parts.append(bullet("  -", f"{name}: {reason}", style="dim"))
    return [heading("Not scored", "yellow: what llmprof does not model"), *parts] if parts else []


def _assumed(scores: Scores) -> list[RenderableType]:
    """How rows were read beyond what they say."""
    found = list(scores.get("assumptions", {}).items())
    if not found:
        return []
    lines = [bullet(f"  {count:>6}", line, style="dim") for line, count in found[:_MOST_REASONS]]
    cold = scores["cold_groups"]
    if 0 < cold < scores["calibration_groups"]:
        lines.append(bullet(f"  {cold:>6}", "groups with too few rows were forecast cold", style="dim"))
    return [heading("How rows were read", "number of rows"), *lines]


def _by_table(values: Sequence[Scores]) -> RenderableType:
    table = _named_table("scored", "median", "p90", "bias", "naive", "second")
    for found in values[:_MOST_VALUES]:
        table.add_row(
            Elided(str(found["value"]) or "(empty)"),
            str(found["n"]),
            _percent(found["median_ape"]),
            _percent(found["p90_ape"]),
            f"x{three_digits(found['median_ratio'])}",
            _percent(found["naive_median_ape"]),
            _percent(found["second_median_ape"]),
        )
    if len(values) > _MOST_VALUES:
        table.add_row(f"and {len(values) - _MOST_VALUES} more values", *[""] * 6)
    return table


def _worst_row(row: Scores) -> list[RenderableType]:
    cells = ", ".join(str(value) for value in row["columns"].values())
    line = Table.grid(padding=(0, 1))
    line.add_column(justify="right", min_width=7)
    line.add_column(overflow="fold")
    line.add_row(f"x{three_digits(row['ratio'])}", Text.assemble((row["row_id"], "bold"), f"  {cells}"))
    time = time_text if "op" in row["columns"] else seconds_text
    interval = row["predicted"]
    said = f"measured {time(row['measured'])}, forecast {time(interval['p50'])}"
    if interval["p10"] is not None and interval["p90"] is not None:
        said += f" ({time(interval['p10'])} .. {time(interval['p90'])})"
    if row["naive"] is not None:
        said += f", naive {time(row['naive'])}"
    parts = sorted(row["breakdown"].items(), key=lambda item: -item[1])
    line.add_row("", Text(said))
    if parts:
        line.add_row("", Text(", ".join(f"{name} {time(value)}" for name, value in parts), style="dim"))
    return [line]


def _speed(result: Scores) -> RenderableType:
    rate = result["forecasts_per_s"]
    said = f"  {result['forecasts']:,} forecasts in {seconds_text(result['seconds'])}"
    return Text(f"{said}, {rate:,.0f} a second" if rate else said, style="dim")
