"""A table of published runs becomes scored rows and the figures of its calibration groups."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from llmprof.extrapolate.calibration import CLASSES
from llmprof.judge.aggregate import score_rows
from llmprof.judge.cells import Reject
from llmprof.judge.forecasts import Group, GroupResult, Progress, forecast_groups
from llmprof.judge.groups import calibration_group, choice_set, split_group
from llmprof.judge.outcomes import Outcome
from llmprof.judge.result import TableScores
from llmprof.judge.runs import Case, is_countable, read_case
from llmprof.judge.scores import HARD_STATE_SHARE, ScoredRow
from llmprof.judge.table import Table, row_ids
from llmprof.schema.priors import load_priors

CALIBRATES = "calibrates its group"
"""Reason of a row that is not scored because it was fitted."""


def score_runs(
    tables: Sequence[Table], *, calibrated: int = 0, jobs: int = 2, progress: Progress | None = None
) -> list[TableScores]:
    """Score tables of runs.

    Args:
        tables: of kind "runs".
        calibrated: rows that calibrate each group; 0 for cold.
        jobs: processes.
        progress: told of rows as they are forecast.
    """
    read = [_read(table) for table in tables]
    groups = [list(_groups(cases, calibrated)) for cases in read]
    found = iter(forecast_groups([g for of_table in groups for g in of_table], jobs=jobs, progress=progress))
    return [
        _table(table, cases, [(group, next(found)) for group in of_table])
        for table, cases, of_table in zip(tables, read, groups, strict=True)
    ]


def _read(table: Table) -> dict[str, Case | Reject]:
    """Rows by their name."""
    found: dict[str, Case | Reject] = {}
    for key, row in zip(row_ids(table.rows), table.rows, strict=True):
        case = read_case(row)
        found[key] = case if isinstance(case, Reject) else replace(case, row_id=key)
    return found


def _groups(cases: Mapping[str, Case | Reject], calibrated: int) -> Iterator[Group]:
    members: dict[str, dict[str, Case]] = defaultdict(dict)
    for key, case in cases.items():
        if isinstance(case, Case):
            members[calibration_group(case.columns)][key] = case
    for name, rows in members.items():
        gpus = {k: c.alternatives[0].layout.gpus for k, c in rows.items() if c.step_time_s is not None}
        chosen = split_group(gpus, calibrated)
        yield Group(
            key=name,
            calibrating=tuple(rows[key] for key in chosen),
            scored=tuple(case for key, case in rows.items() if key not in chosen),
        )


def _table(
    table: Table, cases: Mapping[str, Case | Reject], results: Sequence[tuple[Group, GroupResult]]
) -> TableScores:
    rows: dict[str, ScoredRow] = {}
    groups = []
    for group, result in results:
        rows |= {case.row_id: _calibrating(case, group.key) for case in group.calibrating}
        scored = [
            _scored(case, o, group.key, result.mfu)
            for case, o in zip(group.scored, result.outcomes, strict=True)
        ]
        rows |= {row.row_id: row for row in scored}
        groups.append(_group_object(table.name, group, result, scored))
    ordered = [
        _left_out(key, case, cells) if isinstance(case, Reject) else rows[case.row_id]
        for (key, case), cells in zip(cases.items(), table.rows, strict=True)
    ]
    return TableScores(
        name=table.name,
        kind=table.kind,
        columns=table.columns,
        rows=ordered,
        groups=groups,
        countable=sum(map(is_countable, table.rows)),
        fitted=sum(len(group.calibrating) for group, _ in results),
        forecasts=sum(o.readings for _, result in results for o in result.outcomes),
        defects=_defects(cases, results),
        extra={
            "calibration_groups": len(results),
            "cold_groups": sum(result.calibration is None for _, result in results),
            "assumptions": dict(_assumptions(cases).most_common()),
        },
    )


def _assumptions(cases: Mapping[str, Case | Reject]) -> Counter[str]:
    """What rows were read as beyond what they say, with the number of rows."""
    read = [case for case in cases.values() if isinstance(case, Case)]
    counts = Counter(note for case in read for note in case.notes)
    counts.update("several readings: cells are empty" for case in read if len(case.alternatives) > 1)
    return counts


def _defects(
    cases: Mapping[str, Case | Reject], results: Sequence[tuple[Group, GroupResult]]
) -> dict[str, int]:
    """Reasons that are our own fault: techniques that are not modelled."""
    found: dict[str, int] = defaultdict(int)
    for case in cases.values():
        if isinstance(case, Reject) and case.defect:
            found[case.reason] += 1
    for _, result in results:
        for outcome in result.outcomes:
            if outcome.problem:
                found[_refused(outcome)] += 1
    return dict(found)


def _refused(outcome: Outcome) -> str:
    said = outcome.problem
    return said if said.startswith("not supported yet") else f"not supported yet: {said}"


def _left_out(key: str, case: Reject, cells: dict[str, str]) -> ScoredRow:
    return ScoredRow(row_id=key, reason=case.reason, columns=cells)


def _calibrating(case: Case, group: str) -> ScoredRow:
    return ScoredRow(
        row_id=case.row_id, measured=case.step_time_s, reason=CALIBRATES, group=group, columns=case.columns
    )


def _scored(case: Case, outcome: Outcome, group: str, mfu: float) -> ScoredRow:
    if outcome.time_s is None:
        return ScoredRow(
            row_id=case.row_id,
            measured=case.step_time_s,
            reason=_refused(outcome),
            group=group,
            columns=case.columns,
        )
    naive, second = outcome.baselines(mfu)
    measured = case.step_time_s
    return ScoredRow(
        row_id=case.row_id,
        measured=measured,
        predicted_p10=outcome.time_s.p10,
        predicted_p50=outcome.time_s.p50,
        predicted_p90=outcome.time_s.p90,
        naive=naive,
        second=second,
        reason="" if measured is not None else "no time (memory only)",
        group=group,
        choice_set=choice_set(case.columns),
        mfu=load_priors().mfu * outcome.naive_s / measured if measured else None,
        memory_measured=case.memory.size_bytes if case.memory else None,
        memory_predicted=outcome.like_measured_bytes,
        oom=case.out_of_memory,
        oom_probability=outcome.oom_probability,
        hard=outcome.state_bytes < HARD_STATE_SHARE * outcome.capacity_bytes,
        columns=case.columns | {"layout": outcome.layout, "cluster": outcome.cluster},
        breakdown=outcome.breakdown_s,
    )


def _group_object(table: str, group: Group, result: GroupResult, rows: list[ScoredRow]) -> dict[str, Any]:
    """Scores of a calibration group, and what calibration found."""
    calibration = result.calibration
    shifts = None if calibration is None else np.exp(calibration.shifts)
    return {
        "key": group.key,
        "table": table,
        "mode": "cold" if calibration is None else f"calibrated {len(group.calibrating)}",
        **score_rows(rows),
        "calibration": None
        if shifts is None
        else {n: float(s) for n, s in zip(CLASSES, shifts, strict=True)},
        "mfu": result.mfu,
    }
