"""Forecast objects in, cards and a comparison for an 80-column terminal out; nothing is forecast here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from llmprof.report.ranking import (
    Forecast,
    best_forecast,
    intervals_overlap,
    rank_forecasts,
    seconds_per_sequence,
)
from llmprof.report.text import Bar, bullet, heading, plain_table
from llmprof.report.units import (
    UNKNOWN,
    bytes_text,
    count_text,
    energy_text,
    percent_text,
    range_text,
    seconds_text,
    three_digits,
)
from llmprof.schema.cluster import Cluster

DAY_S = 86400.0
MOSTLY_ASSUMED = 0.5
SPEC_SHEET = "spec-sheet estimate"
BREAKDOWN_COLOURS = {
    "compute": "blue",
    "recompute": "bright_blue",
    "tp": "magenta",
    "cp": "magenta",
    "ep": "magenta",
    "dp": "magenta",
    "pp": "magenta",
    "bubble": "bright_black",
    "optimizer": "green",
    "host": "red",
    "input": "yellow",
    "straggler": "white",
}
_BREAKDOWN_NAMES = {
    "tp": "tp exposed",
    "cp": "cp exposed",
    "ep": "ep exposed",
    "dp": "dp exposed",
    "pp": "pp exposed",
    "bubble": "pipeline bubble",
    "straggler": "stragglers",
}
_REQUEST_COLUMNS = (("gpus", "GPUs"), ("global_batch", "batch"))
_VERDICT_COLOURS = {"fits": "green", "tight": "yellow", "oom": "bold red"}


def forecast_card(forecast: Forecast, cluster: Cluster, *, with_assumptions: bool = True) -> RenderableType:
    """One forecast: headline, what is beside it, where the time goes, what it rests on.

    Args:
        forecast: the object of `llmprof forecast --json`.
        cluster: where it runs; its device's capacity is shown beside the memory.
        with_assumptions: False where `assumptions_text` follows for several forecasts together.
    """
    place = (
        f"  on {forecast['gpus']} x {cluster.device.name}, global batch {forecast['global_batch']} sequences"
    )
    parts: list[RenderableType] = [Text()]
    if (forecast["assumed_fraction"] or 0.0) > MOSTLY_ASSUMED:
        share = percent_text(forecast["assumed_fraction"])
        parts.append(
            Text.assemble(
                (SPEC_SHEET, "bold yellow"), (f": {share} of the time has assumed prices", "yellow")
            )
        )
    parts += [
        Text.assemble((str(forecast["layout"]), "bold"), (place, "dim")),
        Text(),
        _headline(forecast, cluster),
        heading("Where the step goes", "slowest rank of the slowest stage"),
        breakdown_bars(forecast),
        Text(),
        _price_kinds(forecast),
    ]
    if with_assumptions:
        parts.append(assumptions_text([forecast]))
    return Group(*parts)


def assumptions_text(forecasts: Sequence[Forecast]) -> RenderableType:
    """What all forecasts take for granted, then what only some do, each sentence once."""
    holders: dict[str, list[str]] = {}
    for forecast in forecasts:
        for sentence in forecast["assumptions"]:
            if not sentence.startswith(SPEC_SHEET):
                holders.setdefault(sentence, []).append(str(forecast["layout"]))
    shared = [sentence for sentence, layouts in holders.items() if len(layouts) == len(forecasts)]
    parts: list[RenderableType] = [
        heading("What it rests on"),
        *(bullet(" -", sentence, style="dim") for sentence in shared),
    ]
    for forecast in forecasts:
        own = [s for s, layouts in holders.items() if s not in shared and str(forecast["layout"]) in layouts]
        if own:
            parts += [
                Text(f"  only {forecast['layout']}"),
                *(bullet(" -", sentence, style="dim") for sentence in own),
            ]
    return Group(*parts)


def breakdown_bars(forecast: Forecast) -> RenderableType:
    """One bar for each part of the step that takes time."""
    parts = {name: float(value) for name, value in forecast["breakdown_s"].items() if value > 0}
    total = float(forecast["step_time_s"]["p50"]) or 1.0
    table = Table.grid(padding=(0, 2))
    table.add_column(min_width=15)
    table.add_column(justify="right")
    table.add_column(justify="right")
    table.add_column()
    for name, value in parts.items():
        bar = Bar(value / max(parts.values()), colour=BREAKDOWN_COLOURS.get(name, "white"), width=36)
        label = _BREAKDOWN_NAMES.get(name, name.replace("_", " "))
        table.add_row(f"  {label}", seconds_text(value), percent_text(value / total), bar)
    return table


def comparison_text(forecasts: Sequence[Forecast]) -> RenderableType:
    """The forecasts in one table, those that fit first, and which one to book."""
    ranked = rank_forecasts(forecasts)
    differing = [(key, name) for key, name in _REQUEST_COLUMNS if len({f[key] for f in ranked}) > 1]
    table = plain_table()
    table.add_column("layout", ratio=1, overflow="fold")
    for name in (*(name for _, name in differing), "step p50", "p10 .. p90", "MFU", "memory"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("", no_wrap=True)
    for forecast in ranked:
        step = forecast["step_time_s"]
        verdict = str(forecast["verdict"])
        table.add_row(
            str(forecast["layout"]).replace(",", ", "),
            *(str(forecast[key]) for key, _ in differing),
            seconds_text(step["p50"]),
            range_text(step["p10"], step["p90"]).strip("[]"),
            percent_text(forecast["mfu"]) if forecast["mfu"] is not None else "?",
            bytes_text(forecast["peak_memory_bytes"]["p90"]),
            Text(verdict, style=_VERDICT_COLOURS.get(verdict, "")),
        )
    return Group(
        heading("Side by side", "by time per sequence; memory is the p90"), table, Text(), _advice(ranked)
    )


def _advice(ranked: Sequence[Forecast]) -> RenderableType:
    best = best_forecast(ranked)
    if best is None:
        return Text(
            "None of these fits into memory: raise tp, pp or zero, or use recompute=full.", style="bold red"
        )
    text = Text.assemble("Book this one: ", (str(best["layout"]), "bold green"))
    others = [f for f in ranked if f is not best and f["verdict"] != "oom"]
    if others:
        gain = seconds_per_sequence(others[0]) / seconds_per_sequence(best)
        text.append(f", {three_digits(100 * (gain - 1))} % faster per sequence than the next.")
        if intervals_overlap(best, others[0]):
            text.append(" Their intervals overlap: the order is not certain.", style="yellow")
    if len({f["gpus"] for f in ranked}) > 1:
        fitting = [f for f in ranked if f["verdict"] != "oom"]
        thrifty = min(fitting, key=lambda f: f["gpus"] * seconds_per_sequence(f))
        text.append(f"\nLeast GPU time per sequence: {thrifty['layout']}, on {thrifty['gpus']} GPUs.")
    return text


def _headline(forecast: Forecast, cluster: Cluster) -> RenderableType:
    step, rate, memory = forecast["step_time_s"], forecast["tokens_per_s"], forecast["peak_memory_bytes"]
    facts = Table.grid(padding=(0, 2))
    facts.add_row("Step time", _with_range(seconds_text(step["p50"]), range_text(step["p10"], step["p90"])))
    rate_range = f"[{count_text(rate['p10'])} .. {count_text(rate['p90'])}]"
    facts.add_row(
        "Throughput", Text.assemble(f"{count_text(rate['p50'])} tokens/s", (f"  {rate_range}", "dim"))
    )
    facts.add_row("MFU", percent_text(forecast["mfu"]) if forecast["mfu"] is not None else UNKNOWN)
    verdict = str(forecast["verdict"])
    facts.add_row(
        "Memory",
        Text.assemble(
            (verdict, _VERDICT_COLOURS.get(verdict, "")),
            f": {bytes_text(memory['p50'])} of {bytes_text(cluster.device.usable_memory_bytes)} usable",
            (f" (p90 {bytes_text(memory['p90'])}, OOM {percent_text(forecast['oom_probability'])})", "dim"),
        ),
    )
    if forecast.get("run") is not None:
        facts.add_row(f"{count_text(forecast['run']['tokens'])} tokens", _whole_run(forecast["run"]))
    if forecast["cost"] is not None:
        cost = forecast["cost"]
        text = f"{three_digits(cost['per_step'])} {cost['currency']} a step"
        if cost["per_1e9_tokens"] is not None:
            text += f", {three_digits(cost['per_1e9_tokens'])} {cost['currency']} per 1e9 tokens"
        facts.add_row("Price", text)
    if forecast["energy_j_per_step"] is not None:
        facts.add_row("Energy", f"{energy_text(forecast['energy_j_per_step']['p50'])} a step, at most")
    facts.add_row("Beside it", _baselines(forecast))
    return facts


def _whole_run(run: Mapping[str, Any]) -> Text:
    days = run["days"]
    text = _with_range(
        seconds_text(days["p50"] * DAY_S), range_text(days["p10"] * DAY_S, days["p90"] * DAY_S)
    )
    if run["cost"] is not None:
        text.append(f"  {count_text(run['cost']['total'])} {run['cost']['currency']}")
    return text.append("  failures not counted", style="dim")


def _baselines(forecast: Forecast) -> Text:
    names = (("naive", "naive"), ("second_baseline", "with bubble and all-reduce"), ("bound", "bound"))
    known = [(name, forecast[f"{key}_step_time_s"]) for key, name in names]
    return Text(
        ", ".join(f"{name} {seconds_text(value)}" for name, value in known if value is not None), style="dim"
    )


def _price_kinds(forecast: Forecast) -> RenderableType:
    kinds = ("measured", "interpolated", "assumed")
    shares = ", ".join(f"{kind} {percent_text(forecast[f'{kind}_fraction'])}" for kind in kinds)
    if forecast.get("table_fraction"):
        shares += f" (published tables: {percent_text(forecast['table_fraction'])} of all)"
    return Text(f"  priced from: {shares}", style="dim")


def _with_range(value: str, interval: str) -> Text:
    return Text.assemble((value, "bold"), (f"  {interval}", "dim"))
