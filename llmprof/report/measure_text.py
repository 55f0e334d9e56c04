"""The object of `llmprof measure` in, text for an 80-column terminal out; nothing is measured here."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from llmprof.report.text import Elided, bullet, heading, plain_table
from llmprof.report.units import bytes_text, range_text, seconds_text, time_text

_MOST_ROWS = 12
_MOST_REASONS = 6


def measure_text(result: Mapping[str, Any]) -> RenderableType:
    """What was measured, what was not and why, and the forecasts before and after."""
    measured, skipped, remaining = (result[key] for key in ("measured", "skipped", "remaining"))
    parts: list[RenderableType] = [Text(), _title(result)]
    if measured:
        note = f"{min(_MOST_ROWS, len(measured))} of {len(measured)}, those that matter most first"
        parts += [heading("Measured", note), _table(measured[:_MOST_ROWS])]
    if remaining:
        line = f"the time did not suffice for {len(remaining)} operators: call it again, it goes on from here"
        parts.append(bullet(" !", line, style="yellow"))
    parts += [bullet(" !", line, style="yellow") for line in _reasons(skipped)]
    if result.get("forecasts"):
        parts += [heading("Forecast", "step time, 80 % interval"), _forecasts(result["forecasts"])]
    return Group(*parts)


def collectives_text(result: Mapping[str, Any]) -> RenderableType:
    """Times of collectives: one line for each kind and group, small to large messages."""
    rows = result["collectives"]
    title = f"{len(rows)} times of collectives between {result['ranks']} ranks in {seconds_text(result['spent_s'])}"
    table = plain_table()
    for name in ("collective", "ranks", "over"):
        table.add_column(name, no_wrap=True, justify="left" if name == "collective" else "right")
    sizes = _spread_sizes(sorted({row.size_bytes for row in rows}))
    for size in sizes:
        table.add_column(bytes_text(size), no_wrap=True, justify="right")
    for kind, group, span in sorted({(r.kind, r.group_size, r.span) for r in rows}):
        times = {
            r.size_bytes: r.time_us for r in rows if (r.kind, r.group_size, r.span) == (kind, group, span)
        }
        cells = [time_text(times[size]) if size in times else "" for size in sizes]
        table.add_row(kind, str(group), str(span), *cells)
    parts: list[RenderableType] = [Text(), Text(title, style="bold")]
    parts.append(Text(f"{result['device']}, kept in {result['stored_in']}", style="dim"))
    if result["remaining"]:
        parts.append(bullet(" !", f"the time did not suffice for {result['remaining']} more", style="yellow"))
    return Group(*parts, Text(), table)


_MOST_SIZES = 4


def _spread_sizes(sizes: Sequence[int]) -> list[int]:
    """A few of them, the smallest and the largest among them."""
    if len(sizes) <= _MOST_SIZES:
        return list(sizes)
    return [sizes[round(i * (len(sizes) - 1) / (_MOST_SIZES - 1))] for i in range(_MOST_SIZES)]


def _title(result: Mapping[str, Any]) -> Text:
    known = result["known_before"]
    done = f"{len(result['measured'])} operators measured in {seconds_text(result['spent_s'])}"
    if not any((known, *(result[key] for key in ("measured", "skipped", "remaining")))):
        done = "every operator of these forecasts is measured already"
    before = f", {known} were known" if known else ""
    return Text.assemble(
        (done + before, "bold"), f"  {result['device']}\n", (f"kept in {result['stored_in']}", "dim")
    )


def _table(rows: Sequence[Mapping[str, Any]]) -> RenderableType:
    table = plain_table()
    table.add_column("operator", no_wrap=True, ratio=2)
    table.add_column("shapes", no_wrap=True, ratio=3)
    for name in ("time", "IQR", "priced before"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        before = row["price_before_us"]
        table.add_row(
            Elided(row["op"].removeprefix("aten::")),
            Elided(row["shapes"]),
            time_text(row["median_us"]),
            time_text(row["iqr_us"]),
            time_text(before) if before else "",
        )
    return table


def _reasons(skipped: Sequence[Mapping[str, Any]]) -> list[str]:
    """Why operators could not be measured, the most frequent reason first."""
    counts = Counter((row["op"], row["reason"]) for row in skipped)
    lines = [
        f"{op.removeprefix('aten::')} not measured ({n} shape{'s' * (n > 1)}): {reason}"
        for (op, reason), n in counts.most_common(_MOST_REASONS)
    ]
    rest = len(counts) - len(lines)
    return [*lines, f"and {rest} more: --json lists all"] if rest else lines


def _forecasts(forecasts: Sequence[Mapping[str, Any]]) -> RenderableType:
    table = plain_table()
    table.add_column("layout", no_wrap=True, ratio=1)
    for name in ("before", "", "after", ""):
        table.add_column(name, justify="right", no_wrap=True)
    for forecast in forecasts:
        cells: list[RenderableType] = [Elided(forecast["layout"])]
        for step in (forecast["before"], forecast["after"]):
            cells += [seconds_text(step["p50"]), range_text(step["p10"], step["p90"])]
        table.add_row(*cells)
    return table
