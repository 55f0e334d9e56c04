"""A table of measured runs becomes the calibration of forecasts for the device they ran on."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from llmprof.errors import RequestError
from llmprof.extrapolate.calibration import Calibration
from llmprof.judge.cells import Reject, Row
from llmprof.judge.outcomes import Bench
from llmprof.judge.runs import Case, read_case
from llmprof.judge.table import read_table
from llmprof.schema.cluster import Device

MOST_REASONS = 3
"""Reasons that an error lists; the rest are counted together."""


def calibration_from(path: str | Path, device: Device) -> Calibration:
    """Calibrate on all usable rows of a table, as `validate --calibrated` does on the first of each group.

    Args:
        path: table of runs.
        device: that is forecast; rows of other devices say nothing of it.

    Raises:
        TableError: the file cannot be read.
        RequestError: it holds no runs, or none that can calibrate a forecast for the device.
    """
    name = Path(path).name
    table = read_table(path)
    if table.kind != "runs":
        raise RequestError(
            f"{name} is a table of {table.kind}, but forecasts are calibrated on measured training runs",
            hint="give a table with columns such as gpu, n_gpus, layers, hidden and step_time_s",
        )
    cases, left_out = usable_cases(table.rows, device)
    found = Bench(cases).calibrate(cases, source=name) if cases else None
    if found is None:
        left_out["cannot be forecast"] += len(cases)
        raise RequestError(
            f"no row of {name} can calibrate a forecast for {device.name}: {_counted(left_out)}",
            hint=f"give rows with a measured step_time_s on gpu {device.name}",
        )
    return found


def usable_cases(rows: Sequence[Row], device: Device) -> tuple[list[Case], Counter[str]]:
    """Rows with a time on the device, and how many others there are by reason."""
    cases: list[Case] = []
    left_out: Counter[str] = Counter()
    for row in rows:
        case = read_case(row)
        if isinstance(case, Reject):
            left_out[case.reason] += 1
        elif case.step_time_s is None:
            left_out["no time"] += 1
        elif case.alternatives[0].cluster.device.name != device.name:
            left_out[f"ran on {case.alternatives[0].cluster.device.name}"] += 1
        else:
            cases.append(case)
    return cases, left_out


def _counted(reasons: Counter[str]) -> str:
    listed = +reasons
    if not listed:
        return "it has no rows"
    named = listed.most_common(MOST_REASONS)
    texts = [f"{reason} ({count})" for reason, count in named]
    rest = listed.total() - sum(count for _, count in named)
    return ", ".join([*texts, f"other reasons ({rest})"] if rest else texts)
