"""A Comparison in, rich renderables for an 80-column terminal out; nothing is computed here."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.text import Text

from llmprof.report.compare import Comparison, Part
from llmprof.report.text import heading, plain_table, warning_lines
from llmprof.report.units import bytes_text, count_text, percent_text, time_text


def comparison_table(comparison: Comparison) -> RenderableType:
    """The comparison for a terminal."""
    times = comparison.step_time_us
    summary = plain_table()
    summary.add_column("", no_wrap=True, ratio=1)
    for name in ("a", "b", "error"):
        summary.add_column(name, justify="right", no_wrap=True)
    summary.add_row(
        "step time",
        time_text(times["a"]),
        time_text(times["b"]),
        Text(percent_text(comparison.step_time_ape), style="bold"),
    )
    rates, peaks = comparison.tokens_per_s, comparison.peak_memory_bytes
    summary.add_row("tokens/s", count_text(rates["a"]), count_text(rates["b"]), "")
    memory_error = "" if comparison.memory_ape is None else percent_text(comparison.memory_ape)
    summary.add_row("peak memory", bytes_text(peaks["a"]), bytes_text(peaks["b"]), memory_error)
    return Group(
        Text.assemble(("a  ", "bold"), comparison.a),
        Text.assemble(("b  ", "bold"), comparison.b),
        warning_lines(comparison.warnings),
        Text(),
        summary,
        Text(f"error relative to {comparison.reference}", style="dim"),
        heading("By phase"),
        part_table(comparison.parts),
        *([heading("By operator family"), part_table(comparison.families)] if comparison.families else []),
    )


def part_table(parts: tuple[Part, ...]) -> RenderableType:
    """Parts that take time in either profile, with their share of the error."""
    table = plain_table()
    table.add_column("part", no_wrap=True, ratio=1)
    for name in ("a", "b", "a - b", "share of error"):
        table.add_column(name, justify="right", no_wrap=True)
    for part in parts:
        if not part.a and not part.b:
            continue
        difference = "" if part.a is None or part.b is None else _signed_time(part.a - part.b)
        share = "" if part.error_share is None else percent_text(part.error_share)
        name = part.part.replace("_", " ")
        table.add_row(name, time_text(part.a), time_text(part.b), difference, share)
    return table


def _signed_time(duration_us: float) -> str:
    return ("+" if duration_us > 0 else "") + time_text(duration_us)
