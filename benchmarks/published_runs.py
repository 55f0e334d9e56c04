"""Scores forecasts on published measurements and writes the figures, with their change, to benchmarks/RESULTS.md.

    python benchmarks/published_runs.py [DIR] [--calibrated 4] [--json]

DIR holds the tables (runs in `e2e`, operators in `ops`, collectives in `collectives`, see DIR/README.md). Every figure
comes from `llmprof validate`; this program chooses the modes and keeps the book.
"""

from __future__ import annotations

import argparse
import datetime
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.accuracy_page import Book, render_page

HERE = Path(__file__).resolve().parent
DEFAULT_TABLES = HERE.parent.parent / "shared" / "validation"
PAGE, FIGURES = HERE / "RESULTS.md", HERE / "results.json"
_KEPT = (
    "table", "kind", "n", "rows", "scored_fraction", "median_ape", "p90_ape", "coverage80", "interval_score80",
    "median_relative_width", "naive_median_ape", "second_median_ape", "spearman", "top1_regret", "choice_sets",
    "memory_median_ape", "oom", "without_below_1pct_mfu", "skipped",
)  # fmt: skip
"""What of a table's scores goes into the book."""


def main() -> int:
    """Run all modes, write the page and the book, print the page."""
    arguments = _parse()
    tables = Path(arguments.tables)
    if not tables.is_dir():
        print(f"no tables in {tables}: give the folder that holds e2e, ops and collectives", file=sys.stderr)
        return 2
    started = time.perf_counter()
    book = Book(
        command=f"python benchmarks/published_runs.py --calibrated {arguments.calibrated}",
        date=datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
        commit=_commit(),
        modes=[_run(mode, tables, jobs=arguments.jobs) for mode in _modes(arguments.calibrated)],
    )
    book = book._replace(seconds=time.perf_counter() - started)
    before = _committed_book()
    page = render_page(book, before)
    PAGE.write_text(page, encoding="utf-8")
    FIGURES.write_text(json.dumps(book._asdict(), indent=1, sort_keys=True) + "\n", encoding="utf-8")
    print(json.dumps(book._asdict()) if arguments.json else page)
    return 0


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("tables", nargs="?", default=DEFAULT_TABLES, metavar="DIR")
    parser.add_argument(
        "--calibrated", type=int, default=4, metavar="K", help="rows that calibrate each group"
    )
    parser.add_argument("--jobs", type=int, default=2, metavar="N", help="processes")
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    return parser.parse_args()


def _modes(calibrated: int) -> list[tuple[str, str, list[str]]]:
    """Name, folder and options of each run of `llmprof validate`."""
    return [
        ("runs, cold", "e2e", []),
        (f"runs, calibrated on {calibrated}", "e2e", ["--calibrated", str(calibrated)]),
        ("operators, cold", "ops", []),
        ("operators, 30 % fitted", "ops", ["--fit", "random:0.3"]),
        ("operators, smaller half fitted", "ops", ["--fit", "smaller:0.5"]),
        ("collectives, cold", "collectives", []),
        ("collectives, 30 % fitted", "collectives", ["--fit", "random:0.3"]),
        ("collectives, one node fitted", "collectives", ["--fit", "nodes:1"]),
    ]


def _run(mode: tuple[str, str, list[str]], tables: Path, *, jobs: int) -> dict[str, Any]:
    """One run of `llmprof validate` over the tables of a folder that are of a kind it scores."""
    name, folder, options = mode
    files = [f.name for f in sorted((tables / folder).glob("*.csv"))]
    print(f"{name}: {len(files)} tables", file=sys.stderr)
    command = [sys.executable, "-m", "llmprof", "validate", *files, *options, "--jobs", str(jobs), "--json"]
    done = subprocess.run(command, cwd=tables / folder, stdout=subprocess.PIPE, text=True, check=False)
    result = json.loads(done.stdout)
    if done.returncode:
        raise SystemExit(f"llmprof validate failed: {result['error']['message']}")
    return {
        "mode": name,
        "forecasts": result.get("forecasts"),
        "seconds": result.get("seconds"),
        "summary": {k: v for k, v in result["summary"].items() if k in _KEPT},
        "refused": result.get("refused", {}),
        "tables": [{k: t[k] for k in _KEPT if k in t} for t in result["tables"]],
        "strata": result.get("strata"),
    }


def _commit() -> str:
    """The short name of the commit that is measured, with a mark when files differ from it."""
    name = _git("rev-parse", "--short", "HEAD").strip()
    changed = [
        line
        for line in _git("status", "--porcelain", "--untracked-files=no").splitlines()
        if "benchmarks/" not in line
    ]
    return f"{name} with uncommitted changes" if changed else name


def _committed_book() -> dict[str, Any] | None:
    """The figures of the last committed page."""
    text = _git("show", f"HEAD:benchmarks/{FIGURES.name}")
    return json.loads(text) if text else None


def _git(*arguments: str) -> str:
    done = subprocess.run(
        ["git", *arguments],
        cwd=HERE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        check=False,
    )
    return done.stdout if done.returncode == 0 else ""


if __name__ == "__main__":
    sys.exit(main())
