"""How fast layouts are forecast once their shapes are priced, beside a plain loop of this machine in the same run.

    python benchmarks/forecast_speed.py

Typical layouts have up to 8 stages and 64 microbatches. The reference decoder stands for any workload; nothing is measured.
The loop adds 1,000,000 numbers in Python: a machine that is twice as slow takes twice as long for both.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from statistics import median

from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.timing import median_s
from llmprof.extrapolate.forecast import Forecaster
from llmprof.schema.catalogue import load_cluster
from llmprof.schema.layout import Layout
from llmprof.schema.model import read_model
from llmprof.schema.profile import unmeasured
from llmprof.schema.reference import reference_workload

MODEL = "llama:layers=64,hidden=4096,heads=32,kv_heads=8,ffn=14336,vocab=128256,seq=4096"
CLUSTER = "8xH100-SXM"
ROUNDS = 5


def main() -> int:
    """Print the table."""
    forecaster = make_forecaster()
    loop_s = seconds(plain_loop)
    table = Table("what", "time", "in a second", "plain loops", title=f"forecasts of {CLUSTER}, CPU time")
    typical = typical_layouts()
    each_s = seconds(lambda: run(forecaster, typical)) / len(typical)
    rows = [(f"typical layouts, {len(typical)} of them", each_s)]
    for name, text in (
        ("1F1B, pp=8, 64 microbatches", "dp=4,zero=1,tp=8,sp=1,pp=8,accum=64"),
        ("the same with dp=512", "dp=512,zero=1,tp=8,sp=1,pp=8,accum=64"),
        (
            "interleaved, pp=16, vpp=4, 256 microbatches",
            "dp=4,zero=1,tp=8,sp=1,pp=16,vpp=4,schedule=interleaved,accum=256",
        ),
    ):
        rows.append((name, seconds(partial(run, forecaster, [Layout.parse(text)]))))
    for name, time_s in rows:
        table.add_row(name, f"{time_s * 1e3:.2f} ms", f"{1 / time_s:,.0f}", f"{time_s / loop_s:.3f}")
    cold_s = cold_command_s()
    table.add_row(
        "llmprof forecast as a program, cold", f"{cold_s * 1e3:.0f} ms", "", f"{cold_s / loop_s:.2f}"
    )
    Console(highlight=False).print(table)
    return 0


def make_forecaster() -> Forecaster:
    """Of the reference decoder on the cluster."""
    shape = read_model(MODEL).shape
    degrees = [(tp, sp) for tp in (1, 2, 4, 8) for sp in (False, True)]
    workload = reference_workload(shape, degrees=degrees)
    return Forecaster(unmeasured(workload), load_cluster(CLUSTER))


def typical_layouts() -> list[Layout]:
    """Data, sharded-data, tensor and pipeline parallel layouts of 8 to 512 GPUs."""
    texts = [
        f"dp=8,zero={zero},tp={tp},sp={int(tp > 1)},pp={pp},accum={accum}"
        for tp in (1, 2, 4, 8)
        for pp in (1, 2, 4, 8)
        for zero in ((0, 1, 2, 3) if pp == 1 else (0, 1))
        for accum in (8, 32, 64)
    ]
    return [Layout.parse(text) for text in texts]


def run(forecaster: Forecaster, layouts: Sequence[Layout]) -> None:
    """Simulate each."""
    for layout in layouts:
        forecaster.simulate(layout, global_batch=layout.dp * layout.accum)


def plain_loop() -> None:
    """A yardstick."""
    total = 0
    for i in range(1_000_000):
        total += i


def seconds(call: Callable[[], object]) -> float:
    """Median CPU time of one call, warm."""
    return median_s(call, repeats=ROUNDS, clock=time.process_time)


def cold_command_s() -> float:
    """CPU time of one forecast as a program of its own."""
    asked = ["forecast", "--model", MODEL, "--cluster", CLUSTER, "--layout", "dp=8,tp=8,sp=1", "--json"]
    code = (
        "import sys, time; from llmprof.cli import main; import io, contextlib\n"
        "with contextlib.redirect_stdout(io.StringIO()): main(sys.argv[1:])\n"
        "print(time.process_time())"
    )
    times = []
    for _ in range(ROUNDS):
        done = subprocess.run(
            [sys.executable, "-c", code, *asked], check=True, capture_output=True, text=True
        )
        times.append(float(done.stdout.split()[-1]))
    return median(times)


if __name__ == "__main__":
    sys.exit(main())
