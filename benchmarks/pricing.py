"""Prices of shapes that were left out, against their measured times, and how fast shapes are priced.

    python benchmarks/pricing.py            measures products and attention on this CPU, about a minute
    python benchmarks/pricing.py --shapes 24

Each measured shape is left out in turn and priced from the others, as a forecast prices a shape that was not captured.
Beside it: the median efficiency of the other shapes, and the nearest other shape scaled by its FLOPs.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from math import log
from pathlib import Path
from statistics import median

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.timing import median_s
from llmprof.extrapolate.compute import OperatorPrices
from llmprof.judge.op_calls import FLASH
from llmprof.schema.devices import find_device
from llmprof.schema.operators import Tensor, bytes_moved, family, flops, format_shapes
from llmprof.schema.profile import Manifest, OperatorRow, Profile

REPEATS = 7
SPEED_SHAPES = 50_000
DEVICE = "A100-SXM4-80GB"
"""Stands for any: prices of measured rows need nothing of it but its cache and its units."""


def main() -> int:
    """Measure, leave out, price, print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shapes", type=int, default=48, help="of each operator")
    count = parser.parse_args().shapes
    torch.set_num_threads(1)
    table = Table(title="One shape left out at a time; |price / measured - 1|")
    for heading in ("operator", "shapes", "median", "p90", "efficiency", "nearest", "in 80 %"):
        table.add_column(heading, justify="left" if heading == "operator" else "right")
    rows = {"product": measure_products(count), "attention": measure_attention(count)}
    for name, measured in rows.items():
        table.add_row(name, str(len(measured)), *left_out(measured))
    console = Console()
    console.print(table)
    console.print(speed(rows["product"]))
    return 0


def timed_s(run: Callable[[], object]) -> float:
    """Median time of one call, warm (seconds)."""
    return median_s(run, repeats=REPEATS, clock=time.perf_counter)


def measure_products(count: int) -> list[OperatorRow]:
    """Products of matrices with sides between 32 and 1024, some of them odd."""
    draw = np.random.default_rng(0)
    rows = []
    for _ in range(count):
        m, n, k = (int(size) for size in np.exp2(draw.uniform(5, 10, 3)).round())
        left, right = torch.randn(m, k), torch.randn(k, n)
        rows.append(_row("aten::mm", [(m, k), (k, n)], timed_s(partial(torch.mm, left, right))))
    return rows


def measure_attention(count: int) -> list[OperatorRow]:
    """Attention of 1 to 8 heads over 32 to 512 tokens."""
    draw = np.random.default_rng(1)
    rows = []
    for _ in range(count):
        heads, tokens, width = (
            int(draw.integers(1, 9)),
            int(2 ** draw.uniform(5, 9)),
            int(2 ** draw.integers(4, 8)),
        )
        q, k, v = (torch.randn(1, heads, tokens, width) for _ in range(3))
        time_s = timed_s(partial(torch.nn.functional.scaled_dot_product_attention, q, k, v))
        rows.append(_row(FLASH, [(1, heads, tokens, width)] * 3, time_s))
    return rows


def _row(op: str, shapes: Sequence[tuple[int, ...]], time_s: float) -> OperatorRow:
    inputs = tuple(Tensor(shape, "float32") for shape in shapes)
    return OperatorRow(
        rank=0,
        op=op,
        family=family(op),
        module="",
        phase="forward",
        shapes=format_shapes(inputs),
        dtype="float32",
        attributes="",
        device="cuda",
        count=1.0,
        time_us=time_s * 1e6,
        time_iqr_us=0.0,
        time_n=REPEATS,
        exclusive_us=time_s * 1e6,
        flops=flops(op, inputs, ()),
        bytes=bytes_moved(op, inputs),
    )


def _prices(rows: Sequence[OperatorRow]) -> OperatorPrices:
    profile = Profile(manifest=Manifest(name="shapes"), operators=tuple(rows))
    return OperatorPrices(profile, find_device(DEVICE), same_device=True)


def _inputs(row: OperatorRow) -> tuple[Tensor, ...]:
    return tuple(Tensor(tuple(map(int, shape.split("x"))), row.dtype) for shape in row.shapes.split(","))


def left_out(rows: Sequence[OperatorRow]) -> list[str]:
    """Errors of each row priced from the others, and of two simple rules."""
    errors: list[float] = []
    rule: list[float] = []
    nearest: list[float] = []
    inside = 0
    for row in rows:
        others = [other for other in rows if other.shapes != row.shapes]
        price = _prices(others).price(row.op, _inputs(row))
        errors.append(abs(price.time_s * 1e6 / row.time_us - 1))
        inside += abs(log(price.time_s * 1e6 / row.time_us)) <= 1.2816 * price.spread
        rule.append(abs(row.flops / median(o.flops / o.time_us for o in others) / row.time_us - 1))
        close = min(others, key=lambda o: abs(log(o.flops / row.flops)))
        nearest.append(abs(close.time_us * row.flops / close.flops / row.time_us - 1))
    shares = (
        median(errors),
        float(np.quantile(errors, 0.9)),
        median(rule),
        median(nearest),
        inside / len(rows),
    )
    return [f"{100 * share:.1f} %" for share in shares]


def speed(rows: Sequence[OperatorRow]) -> str:
    """How many shapes are priced in a second: one by one, and all in one go."""
    draw = np.random.default_rng(2)
    sizes = np.exp2(draw.uniform(5, 12, (SPEED_SHAPES, 3))).round().astype(int).tolist()
    calls = [
        ("aten::mm", (Tensor((m, k), "float32"), Tensor((k, n), "float32")), (), frozenset[str]())
        for m, n, k in sizes
    ]
    few = calls[: SPEED_SHAPES // 50]
    one, many = _prices(rows), _prices(rows)
    for prices in (one, many):
        prices.price(*calls[-1])  # fits the form
    started = time.perf_counter()
    for call in few:
        one.price(*call)
    single_s = (time.perf_counter() - started) / len(few)
    started = time.perf_counter()
    many.prepare(calls)
    together_s = (time.perf_counter() - started) / len(calls)
    return (
        f"{1 / single_s:,.0f} prices a second one by one, {1 / together_s:,.0f} in one go "
        f"(x{single_s / together_s:.1f}), from {len(rows)} measured shapes"
    )


if __name__ == "__main__":
    sys.exit(main())
