"""Numbers in, rich renderables for an 80-column terminal out; nothing is computed or printed here."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.measure import Measurement
from rich.segment import Segment
from rich.style import Style
from rich.table import Table
from rich.text import Text

from llmprof.report.breakdown import Breakdown, CollectiveLine
from llmprof.report.breakdown import Group as OperatorGroup
from llmprof.report.units import bytes_text, count_text, flops_text, percent_text, time_text
from llmprof.schema.profile import PHASES

PHASE_COLOURS = {
    "forward": "blue",
    "recompute": "bright_blue",
    "backward_input": "cyan",
    "backward_weight": "bright_cyan",
    "optimizer": "green",
    "communication": "magenta",
    "input": "yellow",
    "host": "red",
    "idle": "bright_black",
    "other": "white",
}


class Bar:
    """A horizontal bar as long as its share of the width it gets; plain ASCII where nothing else can be shown."""

    def __init__(self, share: float, *, colour: str = "default", width: int = 24) -> None:
        self.share = min(max(share, 0.0), 1.0)
        self.colour = colour
        self.width = width

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        eighths = round(self.share * self.width * 8)
        if options.ascii_only:
            text = "#" * max(round(eighths / 8), 1 if self.share > 0 else 0)
        else:
            text = "█" * (eighths // 8) + ("▏▎▍▌▋▊▉"[eighths % 8 - 1] if eighths % 8 else "")
        yield Segment(text or "", Style(color=None if self.colour == "default" else self.colour))
        yield Segment.line()


class Elided:
    """A name that loses its middle where it does not fit: both the start and the end of a name tell it apart."""

    def __init__(self, text: str) -> None:
        self.text = " ".join(text.split())

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        return Measurement(min(16, len(self.text)), len(self.text)).clamp(max_width=options.max_width)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        text, room = self.text, options.max_width
        if len(text) > room:
            gap = ".." if options.ascii_only else "…"
            kept = max(room - len(gap), 0)
            tail = kept * 2 // 3
            text = text[: kept - tail] + gap + text[len(text) - tail :]
        yield Segment(text)
        yield Segment.line()


def show_text(
    breakdown: Breakdown,
    groups: Sequence[OperatorGroup],
    layers: Sequence[OperatorGroup],
    *,
    by: str,
    top: int,
) -> RenderableType:
    """The report of `llmprof show`.

    Args:
        breakdown: the numbers.
        groups: operators grouped by `by`, the longest first.
        layers: operators grouped by layer, the longest first; left out when `by` is about modules already.
        by: heading of the first table.
        top: rows of each table.
    """
    parts: list[RenderableType] = [header(breakdown), warning_lines(breakdown.warnings)]
    if breakdown.phases:
        parts += [heading("Where the step goes"), phase_bars(breakdown), _attribution(breakdown)]
    if groups:
        parts += [heading(f"Top {_PLURAL[by]}", _of(top, groups)), operator_table(groups[:top], by=by)]
    if layers and by not in ("module", "layer"):
        parts += [heading("Top modules", _of(top, layers)), operator_table(layers[:top], by="layer")]
    if breakdown.collectives:
        shown = breakdown.collectives[:top]
        parts += [heading("Collectives", _of(top, breakdown.collectives)), collective_table(shown)]
    if breakdown.memory_bytes:
        parts += [heading("Memory", "per device, largest rank"), memory_table(breakdown.memory_bytes)]
    return Group(*parts)


_SHORT_PHASES = {"forward": "fwd", "backward": "bwd", "recompute": "rec", "optimizer": "opt"}
_COLUMN = {"op": "operator", "layer": "module"}
_PLURAL = {"op": "operators", "module": "modules", "layer": "modules", "family": "operator families"}


def header(breakdown: Breakdown) -> RenderableType:
    """Name, what it ran on, step time and throughput."""
    where = " ".join(filter(None, (breakdown.cluster, breakdown.device))) or "unknown device"
    title = Text.assemble((breakdown.name or "run", "bold"), f"  {breakdown.kind}", style="default")
    ranks = f"{breakdown.ranks} rank" + ("s" if breakdown.ranks != 1 else "")
    place = Text("  ".join(filter(None, (ranks, where, breakdown.layout, breakdown.precision))), style="dim")
    step = breakdown.step_time_us
    step_text = Text(time_text(step.median), style="bold")
    if step.iqr is not None:
        step_text.append(f"  IQR {time_text(step.iqr)}, median of {step.n} steps", style="dim")
    else:
        step_text.append("  forecast" if breakdown.kind == "predicted" else "  one step", style="dim")
    facts = Table.grid(padding=(0, 2))
    facts.add_row("Step time", step_text)
    facts.add_row("Throughput", Text(f"{count_text(breakdown.tokens_per_s)} tokens/s"))
    facts.add_row("MFU", _unless_known(breakdown.mfu, percent_text(breakdown.mfu), "peak FLOP/s not known"))
    peak = breakdown.peak_memory_bytes
    facts.add_row("Peak memory", _unless_known(peak, bytes_text(peak), "not measured on this device"))
    return Group(title, place, Text(), facts)


def phase_bars(breakdown: Breakdown) -> RenderableType:
    """One bar for each phase that took time; lengths are shares of the step."""
    table = Table.grid(padding=(0, 2))
    table.add_column(min_width=15)
    table.add_column(justify="right")
    table.add_column(justify="right")
    table.add_column()
    total = breakdown.step_time_us.median
    longest = max(breakdown.phases.values())
    for phase, value in breakdown.phases.items():
        if value > 0:
            bar = Bar(value / longest, colour=PHASE_COLOURS.get(phase, "white"), width=36)
            name = phase.replace("_", " ")
            table.add_row(f"  {name}", time_text(value), percent_text(value / total), bar)
    return table


def operator_table(groups: Sequence[OperatorGroup], *, by: str) -> RenderableType:
    """Operators, modules or families with their share of the step."""
    table = plain_table()
    table.add_column(_COLUMN.get(by, by), no_wrap=True, ratio=1)
    table.add_column("phase", no_wrap=True, style="dim")
    table.add_column("calls", justify="right", no_wrap=True)
    table.add_column("time/step", justify="right", no_wrap=True)
    table.add_column("share", justify="right", no_wrap=True)
    table.add_column("FLOPs", justify="right", no_wrap=True)
    for group in groups:
        table.add_row(
            Elided(group.key.removeprefix("aten::")),
            _phase_text(group.phases),
            count_text(group.count),
            time_text(group.exclusive_us),
            percent_text(group.share),
            flops_text(group.flops),
        )
    return table


def collective_table(lines: Sequence[CollectiveLine]) -> RenderableType:
    """Collectives with message size, own duration and the part that nothing hid."""
    table = plain_table()
    for name in ("collective", "axis"):
        table.add_column(name, no_wrap=True)
    for name in ("ranks", "message", "calls", "time/call", "exposed/step"):
        table.add_column(name, justify="right", no_wrap=True)
    for line in lines:
        table.add_row(
            line.kind,
            line.axis or "?",
            str(line.group_size or "?"),
            bytes_text(line.size_bytes),
            count_text(line.count),
            time_text(line.time_us),
            time_text(line.exposed_us),
        )
    return table


def memory_table(memory_bytes: Mapping[str, int]) -> RenderableType:
    """Bytes by category."""
    table = Table.grid(padding=(0, 2))
    table.add_column(min_width=15)
    table.add_column(justify="right")
    for category, size_bytes in memory_bytes.items():
        table.add_row(f"  {category.replace('_', ' ')}", bytes_text(size_bytes))
    return table


def warning_lines(warnings: Iterable[str]) -> RenderableType:
    """One paragraph for each warning, nothing when there are none."""
    lines = [bullet("!", warning, style="yellow") for warning in warnings]
    return Group(Text(), *lines) if lines else Group()


def bullet(mark: str, text: str, *, style: str) -> RenderableType:
    """A paragraph behind a mark, its further lines indented as far as the first."""
    row = Table.grid(padding=(0, 1))
    row.add_row(Text(mark, style=f"bold {style}"), Text(text, style=style))
    return row


def heading(title: str, note: str = "") -> RenderableType:
    """A bold line with an empty one above it, and a note beside it."""
    return Text.assemble("\n", (title, "bold"), (f"  {note}" if note else "", "dim"))


def checks_text(found: Mapping[str, Any]) -> RenderableType:
    """What `llmprof doctor` found: versions, then one line for each check and a hint where it failed."""
    versions = ", ".join(f"{name} {number or 'missing'}" for name, number in found["versions"].items())
    table = Table.grid(padding=(0, 2))
    for check in found["checks"]:
        mark = Text("ok", style="green") if check["ok"] else Text("--", style="yellow")
        detail = Text(check["detail"])
        if check["hint"]:
            detail.append(f"\n{check['hint']}", style="dim")
        table.add_row(mark, check["name"], detail)
    return Group(
        Text(f"python {found['python']} on {found['platform']}"), Text(versions, style="dim"), Text(), table
    )


def plain_table() -> Table:
    """A table without lines, as wide as the terminal."""
    return Table(box=None, expand=True, pad_edge=False, padding=(0, 1), header_style="dim")


def _of(top: int, rows: Sequence[object]) -> str:
    return f"{top} of {len(rows)}" if len(rows) > top else ""


def _phase_text(phases: Sequence[str]) -> str:
    """Phases in the order of the step: "forward", "backward", or "fwd+bwd" when there are several."""
    names = list(dict.fromkeys(p.partition("_")[0] for p in PHASES if p in phases))
    return names[0] if len(names) == 1 else "+".join(_SHORT_PHASES.get(name, name) for name in names)


def _attribution(breakdown: Breakdown) -> RenderableType:
    if breakdown.attributed_fraction is None:
        return Group()
    root = breakdown.root_fraction
    tail = "" if root is None else f", {percent_text(root)} ran in the root module"
    return Text(
        f"  {percent_text(breakdown.attributed_fraction)} of operator time is attributed{tail}", style="dim"
    )


def _unless_known(value: object, text: str, reason: str) -> Text:
    return Text(text) if value is not None else Text(reason, style="dim")
