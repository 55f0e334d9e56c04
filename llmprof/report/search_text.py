"""The answer of a search in, a ranked table and what to book in plain words for an 80-column terminal out."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from llmprof.report.forecast_text import forecast_card
from llmprof.report.ranking import Forecast, seconds_per_sequence
from llmprof.report.text import bullet, heading, plain_table
from llmprof.report.units import bytes_text, count_text, percent_text, range_text, seconds_text
from llmprof.schema.cluster import Cluster

_MARKS = {"fits": "", "tight": " tight", "oom": " OOM"}
_SHOWN_REFUSALS = 3
_AS_FAST = 0.001
"""Share of a step below which two layouts are called equally fast."""


def search_text(result: Mapping[str, Any], cluster: Cluster) -> RenderableType:
    """The whole answer.

    Args:
        result: the object of `llmprof search --json`.
        cluster: where it runs.
    """
    if not result["layouts"]:
        return Group(Text(), *_nothing(result), _account(result))
    best = result["layouts"][0]
    parts: list[RenderableType] = [Text(), heading("Fastest layouts that fit", _kinds(best)), _table(result)]
    if len(result["scaling"]) > 1:
        parts += [Text(), heading("Best of each number of GPUs"), _scaling(result), _knee(result)]
    parts += [Text(), heading("Book"), *_advice(result), forecast_card(best, cluster), _account(result)]
    return Group(*parts)


def _kinds(best: Forecast) -> str:
    return f"{percent_text(best['assumed_fraction'])} of the first one's time has assumed prices"


def _table(result: Mapping[str, Any]) -> Table:
    table = plain_table()
    table.add_column("layout", overflow="fold", ratio=1)
    several = len(result["scaling"]) > 1
    for name in (*(["GPUs"] if several else []), "step", "10-90 %", "MFU", "memory", "best"):
        table.add_column(name, justify="right", no_wrap=True)
    for forecast in result["layouts"]:
        time = forecast["step_time_s"]
        table.add_row(
            Text(forecast["layout"] + ("  *" if forecast["pareto"] else "")),
            *([str(forecast["gpus"])] if several else []),
            seconds_text(time["p50"]),
            range_text(time["p10"], time["p90"]),
            percent_text(forecast["mfu"]),
            bytes_text(forecast["peak_memory_bytes"]["p50"]) + _MARKS[forecast["verdict"]],
            percent_text(forecast["probability_best"]),
        )
    table.caption = (
        "* no other is at least as good in time, GPU time and memory; best: share of draws it wins"
    )
    table.caption_justify = "left"
    return table


def _scaling(result: Mapping[str, Any]) -> Table:
    table = plain_table()
    for name in ("GPUs", "step", "tokens/s", "tokens/s/GPU", "days", "money"):
        table.add_column(name, justify="right")
    for row in result["scaling"]:
        run = row["run"]
        money = run and run["cost"]
        table.add_row(
            str(row["gpus"]),
            seconds_text(row["step_time_s"]),
            count_text(row["tokens_per_s"]),
            count_text(row["tokens_per_s_per_gpu"]),
            f"{run['days']['p50']:.1f}" if run else "-",
            f"{count_text(money['total'])} {money['currency']}" if money else "-",
        )
    return table


def _knee(result: Mapping[str, Any]) -> RenderableType:
    if result["knee_gpus"] is None:
        return bullet("-", "every step up is worth its GPUs", style="")
    return bullet("-", f"beyond {result['knee_gpus']} GPUs twice as many give too little (--knee)", style="")


def _advice(result: Mapping[str, Any]) -> Iterator[RenderableType]:
    best = result["layouts"][0]
    sure = "proven the fastest under these prices" if result["proven"] else "the fastest found so far"
    yield bullet("-", f"{best['layout']} on {best['gpus']} GPUs: {sure}", style="bold")
    chance = percent_text(result["probability_best"])
    yield bullet("-", f"among those shown it is the fastest in {chance} of draws of the prices", style="")
    if result["least_regret"] != best["layout"]:
        yield bullet("-", f"{result['least_regret']} loses least where prices are off", style="")
    others = [f for f in result["layouts"][1:] if f["gpus"] == best["gpus"]]
    if others:
        yield bullet("-", _difference(best, others[0]), style="")


def _difference(best: Forecast, second: Forecast) -> str:
    """Why the second is slower: the part that grows the most for a sequence."""
    slower = seconds_per_sequence(second) / seconds_per_sequence(best) - 1
    if slower < _AS_FAST:
        return f"{second['layout']} is as fast"
    grown = {
        part: second["breakdown_s"][part] / second["global_batch"] - value / best["global_batch"]
        for part, value in best["breakdown_s"].items()
    }
    part = max(grown, key=lambda key: grown[key])
    more_s = grown[part] * best["global_batch"]
    return f"the next, {second['layout']}, is {percent_text(slower)} slower: {seconds_text(more_s)} more {part} a step"


def _nothing(result: Mapping[str, Any]) -> Iterator[RenderableType]:
    yield heading("Nothing fits")
    tightest = result["tightest"]
    if tightest is not None:
        needs, has = tightest["peak_memory_bytes"], tightest["usable_memory_bytes"]
        yield bullet(
            "-",
            f"the least memory is that of {tightest['layout']}: {bytes_text(needs)} of {bytes_text(has)} usable",
            style="",
        )
    if result["fits_on_gpus"] is not None:
        yield bullet("-", f"on {result['fits_on_gpus']} GPUs a layout fits", style="bold")


def _account(result: Mapping[str, Any]) -> RenderableType:
    """What became of every layout."""
    counts = [
        ("considered", ""),
        ("pruned", "slower by their bound alone"),
        ("too_large", "too large for the memory"),
        ("refused", "refused"),
        ("simulated", "simulated"),
        ("left", "not reached"),
    ]
    text = ", ".join(
        f"{result[key]:,} {what or 'layouts considered'}" for key, what in counts if result[key] or not what
    )
    lines: list[RenderableType] = [Text(), Text(f"  {text}, in {result['seconds']:.1f} s", style="dim")]
    for reason, count in list(result["refusals"].items())[:_SHOWN_REFUSALS]:
        lines.append(Text(f"  refused {count:,}: {reason}", style="dim"))
    return Group(*lines)
