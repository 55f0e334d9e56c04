"""Tables of any kind and what was asked become scored tables, in the order of the tables."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from llmprof.judge.collectives import score_collectives
from llmprof.judge.forecasts import Progress
from llmprof.judge.operators import score_operators
from llmprof.judge.result import TableScores
from llmprof.judge.run_scores import score_runs
from llmprof.judge.splits import Fit
from llmprof.judge.table import Table


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """How tables are scored.

    Attributes:
        calibrated: rows that calibrate each group of runs; 0 for cold.
        fit: what of operators and collectives is fitted; None for cold.
        jobs: processes.
    """

    calibrated: int = 0
    fit: Fit | None = None
    jobs: int = 2

    def describe(self, kinds: Collection[str]) -> str:
        """The mode of tables of these kinds: "cold", "calibrated 4", "fit random:0.3", or two of them."""
        modes = []
        if "runs" in kinds:
            modes.append(f"calibrated {self.calibrated}" if self.calibrated else "cold")
        if set(kinds) - {"runs"}:
            modes.append(f"fit {self.fit}" if self.fit else "cold")
        return ", ".join(dict.fromkeys(modes))

    def ignored(self, kinds: Collection[str]) -> list[str]:
        """One line for each option that concerns none of the tables."""
        lines = []
        if self.fit and "runs" in kinds:
            lines.append(
                "--fit is for operators and collectives: ignored for tables of runs (see --calibrated)"
            )
        if self.calibrated and set(kinds) - {"runs"}:
            lines.append(
                "--calibrated is for tables of runs: ignored for operators and collectives (see --fit)"
            )
        return lines


def judge_tables(
    tables: Sequence[Table], request: Request, *, progress: Progress | None = None
) -> list[TableScores]:
    """Score all tables.

    Args:
        progress: told of rows of runs as they are forecast.
    """
    runs = iter(
        score_runs(
            [t for t in tables if t.kind == "runs"],
            calibrated=request.calibrated,
            jobs=request.jobs,
            progress=progress,
        )
    )
    return [
        next(runs) if table.kind == "runs" else _PRICED[table.kind](table, request.fit) for table in tables
    ]


_PRICED: dict[str, Callable[[Table, Fit | None], TableScores]] = {
    "operators": lambda table, fit: score_operators(table, fit=fit),
    "collectives": lambda table, fit: score_collectives(table, fit=fit),
}
