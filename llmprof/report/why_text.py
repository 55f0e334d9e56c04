"""The object of `--why` in, prices and the rows behind them for an 80-column terminal out; nothing is computed here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from llmprof.report.text import Elided, bullet, heading
from llmprof.report.units import bytes_text, count_text, flops_text, percent_text, range_text, time_text

KIND_COLOURS = {"measured": "green", "interpolated": "cyan", "assumed": "yellow"}


def why_text(why: Mapping[str, Any], *, top: int) -> RenderableType:
    """Prices of an operator's calls, those that take most of the step first.

    Args:
        why: what `--why` prints with `--json`.
        top: calls shown.
    """
    calls: Sequence[Mapping[str, Any]] = why["calls"]
    place = " ".join(filter(None, (f"on {why['device']}", why["layout"])))
    more = f", {top} of {len(calls)} shapes" if len(calls) > top else ""
    parts: list[RenderableType] = [heading(f"Why {why['asked']}", place + more)]
    for call in calls[:top]:
        parts += [Text(), *_call(call)]
    sources = dict.fromkeys(call["source"] for call in calls[:top] if call["source"])
    if sources:
        parts += [heading("Sources"), *(bullet(" -", source, style="dim") for source in sources)]
    return Group(*parts)


def _call(call: Mapping[str, Any]) -> list[RenderableType]:
    said = " ".join(filter(None, (call["op"], call["shapes"], call["dtype"], call["attributes"])))
    price = Text.assemble(
        (f"  {time_text(call['time_us'])}", "bold"),
        (f"  {range_text(call['p10_us'] * 1e-6, call['p90_us'] * 1e-6)}", "dim"),
        f"  spread {percent_text(call['spread'])}  ",
        (call["kind"], KIND_COLOURS.get(call["kind"], "white")),
        f" ({call['method']})" if call["method"] != call["kind"] else "",
    )
    return [
        Elided(said),
        price,
        Text(f"  {_facts(call)}", style="dim"),
        bullet(" -", str(call["basis"]), style="dim"),
        _neighbours(call["neighbours"], op=call["op"]),
    ]


def _facts(call: Mapping[str, Any]) -> str:
    count = call["count"]
    facts = [
        "not in the step" if count is None else f"{count_text(count)} calls a step",
        f"{flops_text(call['flops'])}FLOPs" if call["flops"] else "",
        bytes_text(call["bytes"]) if call["bytes"] else "",
        f"host {time_text(call['host_us'])} a call",
        f"scaled by {call['factor']:.3f}" if abs(call["factor"] - 1.0) > 5e-4 else "",
    ]
    return ", ".join(filter(None, facts))


def _neighbours(rows: Sequence[Mapping[str, Any]], *, op: str) -> RenderableType:
    if not rows:
        return Group()
    table = Table.grid(padding=(0, 2), expand=True)
    table.add_column(width=2)
    table.add_column(no_wrap=True, ratio=1)
    table.add_column(justify="right", no_wrap=True)
    table.add_column(justify="right", no_wrap=True)
    for row in rows:
        weight = f"weight {row['weight']:.3f}"
        table.add_row(
            "",
            Elided(row["name"].removeprefix(f"{op} ")),
            time_text(row["time_us"]),
            Text(weight, style="dim"),
        )
    return table
