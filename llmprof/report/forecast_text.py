"""Forecast objects in, cards and a comparison for an 80-column terminal out; nothing is forecast here."""

from __future__ import annotations

from collections.abc import Sequence

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
from llmprof.report.text import Bar, heading, plain_table
from llmprof.report.units import (
    UNKNOWN,
    bytes_text,
    count_text,
    percent_text,
    range_text,
    seconds_text,
    three_digits,
)
from llmprof.schema.cluster import Cluster

MOSTLY_ASSUMED = 0.5
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
_VERDICT_COLOURS = {"fits": "green", "tight": "yellow", "oom": "bold red"}


def forecast_card(forecast: Forecast, cluster: Cluster, *, tokens: float | None = None) -> RenderableType:
    """One forecast: headline, what is beside it, where the time goes, what it rests on.

    Args:
        forecast: the object of `llmprof forecast --json`.
        cluster: where it runs; its device's capacity is shown beside the memory.
        tokens: tokens of the whole run, for its duration and price.
    """
    gpus = int(forecast["gpus"])
    place = f"  on {gpus} x {cluster.device.name}, global batch {forecast['global_batch']} sequences"
    parts: list[RenderableType] = [Text()]
    if (forecast["assumed_fraction"] or 0.0) > MOSTLY_ASSUMED:
        parts.append(
            Text.assemble(
                ("spec-sheet estimate", "bold yellow"),
                (f": {percent_text(forecast['assumed_fraction'])} of the time has assumed prices", "yellow"),
            )
        )
    parts += [
        Text.assemble((str(forecast["layout"]), "bold"), (place, "dim")),
        Text(),
        _headline(forecast, cluster, tokens),
        heading("Where the step goes", "slowest rank of the slowest stage"),
        breakdown_bars(forecast),
        heading("What it rests on"),
        _price_kinds(forecast),
        *(_assumption(text) for text in forecast["assumptions"]),
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
    table = plain_table()
    table.add_column("layout", overflow="fold", ratio=1)
    for name in ("GPUs", "batch", "step p50", "p10 .. p90", "MFU", "memory p90"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("", no_wrap=True)
    for forecast in ranked:
        step = forecast["step_time_s"]
        verdict = str(forecast["verdict"])
        table.add_row(
            str(forecast["layout"]),
            str(forecast["gpus"]),
            str(forecast["global_batch"]),
            seconds_text(step["p50"]),
            range_text(step["p10"], step["p90"]),
            percent_text(forecast["mfu"]) if forecast["mfu"] is not None else "?",
            bytes_text(forecast["peak_memory_bytes"]["p90"]),
            Text(verdict, style=_VERDICT_COLOURS.get(verdict, "")),
        )
    return Group(heading("Side by side", "by time per sequence"), table, Text(), _advice(ranked))


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
        text.append(f", {three_digits(100 * (gain - 1))} % faster than the next.")
        if intervals_overlap(best, others[0]):
            text.append(" Their intervals overlap: the order is not certain.", style="yellow")
    if len({f["gpus"] for f in ranked}) > 1:
        text.append(" The layouts use different numbers of GPUs.", style="yellow")
    return text


def _headline(forecast: Forecast, cluster: Cluster, tokens: float | None) -> RenderableType:
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
            f": {bytes_text(memory['p50'])} (p90 {bytes_text(memory['p90'])}) of "
            f"{bytes_text(cluster.device.usable_memory_bytes)} usable",
            (f"  OOM probability {percent_text(forecast['oom_probability'])}", "dim"),
        ),
    )
    if tokens is not None:
        facts.add_row(f"{count_text(tokens)} tokens", _whole_run(forecast, tokens))
    if forecast["cost"] is not None:
        cost = forecast["cost"]
        per_step, per_billion = three_digits(cost["per_step"]), three_digits(cost["per_1e9_tokens"])
        facts.add_row(
            "Price", f"{per_step} {cost['currency']} a step, {per_billion} {cost['currency']} per 1e9 tokens"
        )
    if forecast["energy_j_per_step"] is not None:
        facts.add_row("Energy", f"{three_digits(forecast['energy_j_per_step']['p50'] / 1e3)} kJ a step")
    facts.add_row("Beside it", _baselines(forecast))
    return facts


def _whole_run(forecast: Forecast, tokens: float) -> Text:
    rate = forecast["tokens_per_s"]
    if not rate["p50"]:
        return Text(UNKNOWN)
    text = _with_range(
        seconds_text(tokens / rate["p50"]), range_text(tokens / rate["p90"], tokens / rate["p10"])
    )
    if forecast["cost"] is not None:
        total = forecast["cost"]["per_1e9_tokens"] * tokens / 1e9
        text.append(f"  {count_text(total)} {forecast['cost']['currency']}")
    return text


def _baselines(forecast: Forecast) -> Text:
    names = (("naive", "naive"), ("second_baseline", "with bubble and all-reduce"), ("bound", "upper bound"))
    known = [(name, forecast[f"{key}_step_time_s"]) for key, name in names]
    return Text(
        ", ".join(f"{name} {seconds_text(value)}" for name, value in known if value is not None), style="dim"
    )


def _price_kinds(forecast: Forecast) -> RenderableType:
    kinds = ("measured", "interpolated", "assumed")
    shares = ", ".join(f"{kind} {percent_text(forecast[f'{kind}_fraction'])}" for kind in kinds)
    return Text(f"  prices of the time: {shares}")


def _assumption(text: str) -> RenderableType:
    row = Table.grid(padding=(0, 1))
    row.add_row(Text(" -", style="dim"), Text(text, style="dim"))
    return row


def _with_range(value: str, interval: str) -> Text:
    return Text.assemble((value, "bold"), (f"  {interval}", "dim"))
