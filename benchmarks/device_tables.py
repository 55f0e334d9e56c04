"""Published measurements of operators become the device tables that ship with the package.

    python benchmarks/device_tables.py ../shared/validation/ops

Of each operator, rows are chosen that lie far from each other in the logarithms of their sizes; all others are priced from
them, and the errors stand in the file. Where a source has few rows, all are kept, and each fifth is priced from the rest.
"""

from __future__ import annotations

import argparse
import csv
import json
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from llmprof.errors import LlmprofError
from llmprof.extrapolate.compute import OperatorPrices
from llmprof.extrapolate.features import call_sizes
from llmprof.extrapolate.table import HALF
from llmprof.judge.cells import Reject
from llmprof.judge.op_calls import OpCall
from llmprof.judge.op_rows import read_calls
from llmprof.schema.devices import find_device
from llmprof.schema.operators import bytes_moved, family, flops, format_shapes
from llmprof.schema.profile import Manifest, OperatorRow, Profile

DIRECTORY = Path(__file__).resolve().parent.parent / "llmprof" / "schema" / "catalogue" / "tables"
SOURCES = {
    "aiconfigurator_gemm": "Apache-2.0",
    "aiconfigurator_attention": "Apache-2.0",
    "simumax_gemm": "Apache-2.0",
    "simumax_attention": "Apache-2.0",
    "estimate_train_time_ops": "MIT",
    "neusight_ops": "MIT",
    "vidur_compute": "MIT",
}
"""Tables whose licence permits to pass figures on, best first: of two sources of one operator, dtype (16 bits are 16 bits)
and attributes on a device, the first is taken. `neusight_train_ops` is left out: it holds parts of training steps on which forecasts are judged."""
OPERATORS = (
    "gemm", "bmm", "attention", "layernorm", "softmax", "gelu", "relu", "tanh", "add", "mul", "residual_add",
)  # fmt: skip
"""Rows of these are one call of an operator that training runs; kernels of inference libraries alone are left out."""
MOST_ROWS = 320
FEWEST_ROWS = 20
SHORTEST_US = 5.0
"""Shorter times are mostly the launch, or the clock's resolution."""
FOLDS = 5
MOST_CHECKED = 1500
NOTE = (
    "Kernel times of single operators as their sources publish them; inputs and clocks are the sources'. "
    "Written by benchmarks/device_tables.py."
)


class Row(NamedTuple):
    """One published time of one call, and the table it is from."""

    call: OpCall
    time_us: float
    source: str
    repository: str

    @property
    def dtype(self) -> str:
        """Of the first input."""
        return self.call.inputs[0].dtype


class Key(NamedTuple):
    """What rows of one part share; "bfloat16" stands for float16, too."""

    device: str
    op: str
    dtype: str
    attributes: str


def main() -> int:
    """Read the tables, choose rows, check them, write one file for each device."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("tables", type=Path, metavar="DIR", help="folder with the CSV files of operators")
    folder = parser.parse_args().tables
    parts: dict[Key, list[Row]] = {}
    for name in SOURCES:
        found: dict[Key, list[Row]] = defaultdict(list)
        for device, row in read_rows(folder / f"{name}.csv"):
            attributes = ",".join(sorted(row.call.attributes))
            found[Key(device, row.call.op, row.dtype, attributes)].append(row)
        for key, rows in found.items():
            if len(merge_equal(rows)) >= FEWEST_ROWS:
                parts.setdefault(key, rows)
    DIRECTORY.mkdir(exist_ok=True)
    for device in sorted({key.device for key in parts}):
        made = [make_part(key, rows) for key, rows in sorted(parts.items()) if key.device == device]
        write(device, made)
    return 0


def read_rows(path: Path) -> Iterator[tuple[str, Row]]:
    """Device and row of each published time of a single call."""
    with path.open(encoding="utf-8", newline="") as file:
        for cells in csv.DictReader(file):
            if cells["op"] not in OPERATORS or float(cells["time_us"] or 0) < SHORTEST_US:
                continue
            try:
                calls = read_calls(cells)
                device = find_device(cells["gpu"]).name
            except (Reject, LlmprofError):
                continue
            if len(calls) == 1:
                repository = cells["source_ref"].partition(":")[0]
                yield device, Row(one_half(calls[0]), float(cells["time_us"]), path.stem, repository)


def one_half(call: OpCall) -> OpCall:
    """The call with 16-bit tensors under one name."""
    inputs, outputs = (
        tuple(t._replace(dtype="bfloat16") if t.dtype in HALF else t for t in tensors)
        for tensors in (call.inputs, call.outputs)
    )
    return call._replace(inputs=inputs, outputs=outputs)


def make_part(key: Key, rows: Sequence[Row]) -> dict[str, Any]:
    """Rows of one operator, chosen and checked."""
    unique = merge_equal(rows)
    chosen = choose(unique, MOST_ROWS)
    kept = set(chosen)
    others = [i for i in range(len(unique)) if i not in kept]
    table = [unique[i] for i in chosen]
    left_out = check(key, table, [unique[i] for i in others])
    print(
        f"{key.device:16} {key.op:55} {key.dtype:9} {len(rows):5} published, {len(table):4} kept, left out: "
        f"median {left_out['median']:.1%}, p90 {left_out['p90']:.1%}"
    )
    source = {"repository": rows[0].repository, "licence": SOURCES[rows[0].source], "published": len(rows)}
    return {
        "op": key.op,
        "dtype": key.dtype,
        "attributes": key.attributes,
        "source": source,
        "left_out": left_out,
        "shapes": [format_shapes(row.call.inputs) for row in table],
        "time_us": [float(f"{row.time_us:.5g}") for row in table],
    }


def merge_equal(rows: Sequence[Row]) -> list[Row]:
    """Rows of one call become one with their median time."""
    groups: dict[tuple[object, ...], list[Row]] = defaultdict(list)
    for row in rows:
        groups[row.call.inputs, row.call.attributes].append(row)
    return [
        members[0]._replace(time_us=float(np.median([row.time_us for row in members])))
        for members in groups.values()
    ]


def choose(rows: Sequence[Row], count: int) -> list[int]:
    """Indices of rows that are far from each other: the first is the middle one, each further one the farthest from all before."""
    sizes = [call_sizes(family(row.call.op), row.call.op, row.call.inputs).logs for row in rows]
    points = np.array(sizes)
    distance = np.square(points - np.median(points, axis=0)).sum(axis=1)
    chosen = [int(np.argmin(distance))]
    nearest = np.square(points - points[chosen[0]]).sum(axis=1)
    while len(chosen) < min(count, len(rows)):
        chosen.append(int(np.argmax(nearest)))
        nearest = np.minimum(nearest, np.square(points - points[chosen[-1]]).sum(axis=1))
    return sorted(chosen)


def check(key: Key, table: Sequence[Row], others: Sequence[Row]) -> dict[str, Any]:
    """Errors of the rows left out, priced from the table; where there are few, of each fifth of the table."""
    if len(others) >= FEWEST_ROWS:
        step = -(-len(others) // MOST_CHECKED)
        errors = list(errors_of(key, table, others[::step]))
        how = "published rows that the table leaves out"
    else:
        order = np.random.default_rng(0).permutation(len(table))
        errors = []
        for fold in range(FOLDS):
            asked = [table[i] for i in order[fold::FOLDS]]
            given = [table[i] for n, i in enumerate(order) if n % FOLDS != fold]
            errors += errors_of(key, given, asked)
        how = "each fifth of the table's rows from the others"
    median, p90 = (round(float(np.quantile(errors, q)), 4) for q in (0.5, 0.9))
    return {"rows": len(errors), "median": median, "p90": p90, "how": how}


def errors_of(key: Key, given: Sequence[Row], asked: Sequence[Row]) -> Iterator[float]:
    """|price / measured - 1| of some rows, priced from others."""
    profile = Profile(manifest=Manifest(name=key.op), operators=tuple(map(operator_row, given)))
    prices = OperatorPrices(profile, find_device(key.device), same_device=True, tables=False)
    prices.prepare((r.call.op, r.call.inputs, r.call.outputs, r.call.attributes) for r in asked)
    for row in asked:
        call = row.call
        price = prices.nearby(call.op, call.inputs, call.outputs, call.attributes)
        yield abs(price.time_s * 1e6 / row.time_us - 1)


def operator_row(row: Row) -> OperatorRow:
    """A published row as a capture would write it."""
    call = row.call
    return OperatorRow(
        rank=0, op=call.op, family=family(call.op), module="", phase="other", shapes=format_shapes(call.inputs),
        dtype=row.dtype, attributes=",".join(sorted(call.attributes)), device="cuda", count=1.0, time_us=row.time_us,
        time_iqr_us=0.0, time_n=1, exclusive_us=row.time_us, flops=flops(call.op, call.inputs, (), call.attributes),
        bytes=bytes_moved(call.op, call.inputs),
    )  # fmt: skip


def write(device: str, parts: Sequence[dict[str, Any]]) -> None:
    """One line for each part."""
    head = json.dumps({"device": device, "note": NOTE})[:-1]
    lines = ",\n".join(json.dumps(part, separators=(",", ":")) for part in parts)
    (DIRECTORY / f"{device}.json").write_text(f'{head}, "parts": [\n{lines}\n]}}\n', encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
