"""What was typed in, checked values out: the requests that commands about forecasts share."""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from llmprof.errors import LayoutError, RunError
from llmprof.schema.layout import Layout, divisors

if TYPE_CHECKING:
    from llmprof.schema.profile import Profile

_SUFFIXES = {"k": 1e3, "m": 1e6, "b": 1e9, "g": 1e9, "t": 1e12}


def load_run(path: str) -> Profile:
    """Read a run; a directory that only holds runs is refused with the name of the newest.

    Raises:
        RunError: it cannot be read.
    """
    from llmprof.schema.store import load_profile

    try:
        return load_profile(path)
    except RunError as error:
        inside = sorted(
            {rank.parent for rank in Path(path).glob("*/rank-*")}, key=lambda p: p.stat().st_mtime
        )
        if inside and not any(Path(path).glob("rank-*")):
            raise RunError(error.message, hint=f"it holds runs, the newest is {inside[-1]}") from error
        raise


def parse_layouts(texts: list[str], *, gpus: int | None) -> list[Layout]:
    """Layouts as typed, each once.

    Args:
        texts: layout strings.
        gpus: the number of devices that each must make up, None when that is free.

    Raises:
        LayoutError: a layout does not parse, or its degrees do not multiply out.
    """
    layouts = list(dict.fromkeys(Layout.parse(text) for text in texts))
    if gpus is not None:
        for layout in layouts:
            check_gpus(layout, gpus)
    return layouts


def check_gpus(layout: Layout, gpus: int) -> None:
    """Check that the degrees of a layout multiply to the number of devices.

    Raises:
        LayoutError: with the product written out and the degree to change.
    """
    if layout.gpus == gpus:
        return
    degrees = {axis: getattr(layout, axis) for axis in ("dp", "tp", "pp", "cp")}
    product = " x ".join(f"{axis} {n}" for axis, n in degrees.items() if n > 1 or axis == "dp")
    raise LayoutError(
        f"{product} = {layout.gpus}, but {gpus} GPUs were asked", hint=_suggestion(layout, gpus)
    )


def _suggestion(layout: Layout, gpus: int) -> str:
    per_replica = layout.gpus // layout.dp
    if gpus % per_replica == 0:
        dp = gpus // per_replica
        try:
            replace(layout, dp=dp)
        except LayoutError as error:
            return f"set dp={dp} (and mind that {error.message})"
        return f"set dp={dp}"
    rest, parts = gpus, []
    for axis in ("tp", "pp", "cp"):
        degree = divisors(rest, at_most=getattr(layout, axis))[-1]
        rest //= degree
        parts += [f"{axis}={degree}"] if degree > 1 else []
    return f"{gpus} is not a multiple of {layout.gpus // layout.dp}; for example {','.join([f'dp={rest}', *parts])}"


def positive_int(text: str) -> int:
    """Argument type: a whole number of 1 or more."""
    try:
        value = int(text)
    except ValueError:
        value = 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of 1 or more")
    return value


def number_of_tokens(text: str) -> float:
    """Argument type: a positive number with an optional suffix, such as 300B or 1.5e12."""
    factor = _SUFFIXES.get(text[-1:].lower(), 1.0)
    try:
        value = float(text[:-1] if factor != 1.0 else text) * factor
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of tokens, such as 300B or 1.5e12")
    return value


_SECONDS = {"s": 1.0, "m": 60.0, "h": 3600.0}


def duration_s(text: str) -> float:
    """Argument type: a positive time in seconds, or with s, m or h behind it, such as 90s or 5m."""
    factor = _SECONDS.get(text[-1:].lower(), 0.0)
    try:
        value = float(text[:-1]) * factor if factor else float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a time, such as 90s, 5m or 1h")
    return value
