"""How well a second measurement, in a process of its own, agrees with the stored one, and whether the budget is kept.

python benchmarks/measure.py                     60 s for each of two processes
python benchmarks/measure.py --budget 20 --sweep gemm,norm
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from llmprof.schema.measurements import CallKey, read_measurements
from llmprof.schema.profile import OperatorRow


def main() -> int:
    """Measure twice, print the differences by family."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--budget", type=float, default=60.0, help="seconds of each process")
    parser.add_argument("--sweep", default="all", help="families, as for llmprof measure")
    args = parser.parse_args()
    console = Console(highlight=False)
    with tempfile.TemporaryDirectory() as folder:
        runs = [_measure(Path(folder) / f"{i}.jsonl", args.sweep, args.budget) for i in range(2)]
        tables = [_rows(Path(folder) / f"{i}.jsonl") for i in range(2)]
    for i, run in enumerate(runs):
        late = run["spent_s"] / args.budget - 1
        console.print(
            f"process {i + 1}: {len(run['measured'])} operators, {run['spent_s']:.1f} s of {args.budget:g} s ({late:+.1%})"
        )
    console.print(_differences(*tables))
    return 0


def _measure(table: Path, sweep: str, budget_s: float) -> dict[str, Any]:
    command = [sys.executable, "-m", "llmprof", "measure", "--sweep", sweep, "-o", str(table), "--json"]
    done = subprocess.run(
        [*command, "--budget", f"{budget_s:g}s"], check=True, capture_output=True, text=True
    )
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def _rows(table: Path) -> dict[CallKey, OperatorRow]:
    rows = read_measurements(table).operators
    return {CallKey(r.op, r.shapes, r.dtype, r.attributes): r for r in rows}


def _differences(first: Mapping[CallKey, OperatorRow], second: Mapping[CallKey, OperatorRow]) -> Table:
    """|second / first - 1| by family; operators that both processes had the time for."""
    both = [key for key in first if key in second]
    table = Table("family", "operators", "median", "p90", title="second measurement against the first")
    families = {key: first[key].family for key in both}
    for name in (*sorted(set(families.values())), "all"):
        errors = [
            abs(second[key].time_us / first[key].time_us - 1)
            for key in both
            if name in ("all", families[key])
        ]
        if errors:
            middle, high = np.quantile(errors, (0.5, 0.9))
            table.add_row(name, str(len(errors)), f"{middle:.1%}", f"{high:.1%}")
    return table


if __name__ == "__main__":
    sys.exit(main())
