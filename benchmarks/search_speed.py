"""How fast a whole space is searched: layouts in a second, what was pruned, beside simulating every layout.

    python benchmarks/search_speed.py

Both searches are of models by their sizes, on one core. "simulate all" is what the same space would take without
bounds, from a random sample of it that is simulated in the same run.
"""

from __future__ import annotations

import argparse
import random
import resource
import sys
import time
from pathlib import Path
from statistics import mean

import msgspec
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from llmprof.errors import LlmprofError
from llmprof.extrapolate.bound import Bounds
from llmprof.extrapolate.forecast import Forecaster
from llmprof.extrapolate.implementation import apply_implementation
from llmprof.extrapolate.search import Wish, search
from llmprof.extrapolate.space import Space
from llmprof.schema.catalogue import load_cluster
from llmprof.schema.model import read_model
from llmprof.schema.profile import unmeasured
from llmprof.schema.reference import reference_workload

CASES = {
    "70B dense, 16,384 GPUs": (
        "llama:layers=80,hidden=8192,ffn=28672,heads=64,kv_heads=8,vocab=128256,seq=8192", 16_384, 16_384,
    ),
    "47B with 8 experts, 2,048 GPUs": (
        "mixtral:layers=32,hidden=4096,ffn=14336,heads=32,kv_heads=8,vocab=32000,seq=4096,experts=8,topk=2",
        2_048, 8_192,
    ),
}  # fmt: skip
SAMPLE = 150


def main() -> int:
    """Print the table, and one object as the last line with --json."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    args = parser.parse_args()
    rows = [measure(name, *case) for name, case in CASES.items()]
    if args.json:
        print(msgspec.json.encode({"rows": rows}).decode())
        return 0
    table = Table(title="whole searches, ten best wanted, one core")
    for name in ("", *(str(row["space"]) for row in rows)):
        table.add_column(name, justify="right" if name else "left")
    for quantity in list(rows[0])[1:]:
        table.add_row(quantity, *(shown(row[quantity]) for row in rows))
    Console(highlight=False).print(table)
    return 0


def shown(value: object) -> str:
    """A number with few digits."""
    if isinstance(value, float):
        return f"{value:,.4g}"
    return f"{value:,}" if isinstance(value, int) else str(value)


def measure(name: str, model: str, gpus: int, batch: int) -> dict[str, object]:
    """One space searched whole, and a sample of it simulated."""
    forecaster = make_forecaster(model)
    workload = forecaster.profile.workload
    assert workload is not None
    started = time.perf_counter()
    layouts = list(Space.of(workload, forecaster.cluster, seq=workload.seq).layouts(gpus, batch))
    listed_s = time.perf_counter() - started
    started = time.perf_counter()
    found = search(forecaster, layouts, Wish())
    search_s = time.perf_counter() - started
    nominal = forecaster.with_draws(0)
    times, tightness = [], []
    bounds = Bounds(nominal)
    for layout in random.Random(0).sample(layouts, SAMPLE):
        try:
            begun = time.perf_counter()
            step_s = float(nominal.simulate(layout, global_batch=batch).step_s[0])
            times.append(time.perf_counter() - begun)
            tightness.append(bounds.bound_s(layout) / step_s)
        except LlmprofError:
            continue
    return {
        "space": name,
        "layouts": len(layouts),
        "listing s": listed_s,
        "search s": search_s,
        "a second": len(layouts) / search_s,
        "pruned": f"{found.pruned / len(layouts):.1%}",
        "too large": found.too_large,
        "simulated": found.simulated,
        "proven": str(found.proven),
        "simulate all s": mean(times) * len(layouts),
        "bound / exact": mean(tightness),
        "peak RSS GB": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6,
    }


def make_forecaster(model: str) -> Forecaster:
    """Of a model by its sizes, tensor parallel up to a node."""
    degrees = [(tp, sp) for tp in (1, 2, 4, 8) for sp in (False, True) if tp > 1 or not sp]
    workload = apply_implementation(reference_workload(read_model(model).shape, degrees=degrees), "megatron")
    return Forecaster(unmeasured(workload), load_cluster("8xH100-SXM"))


if __name__ == "__main__":
    sys.exit(main())
