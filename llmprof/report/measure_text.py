"""The object of `llmprof measure` in, text for an 80-column terminal out; nothing is measured here."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from llmprof.report.text import Elided, bullet, heading, plain_table
from llmprof.report.units import range_text, seconds_text, time_text

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
