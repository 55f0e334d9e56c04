"""The text that nccl-tests and rccl-tests print becomes rows of collectives, with the group of each test."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from math import isfinite
from typing import NamedTuple

from llmprof.errors import TableError
from llmprof.schema.profile import CollectiveRow, SourceRow

KINDS = {
    "all_reduce": "all_reduce",
    "all_gather": "all_gather",
    "reduce_scatter": "reduce_scatter",
    "alltoall": "all_to_all",
    "all_to_all": "all_to_all",
    "broadcast": "broadcast",
    "sendrecv": "send",
}
"""Kind by the name of the test's program."""
_DTYPES = {
    "float": "float32", "half": "float16", "bfloat16": "bfloat16", "double": "float64", "int8": "int8",
    "uint8": "uint8", "int32": "int32", "int64": "int64", "f8e4m3": "float8", "f8e5m2": "float8",
}  # fmt: skip
_NAME = re.compile(rf"\b({'|'.join(KINDS)})_perf")
_RANK = re.compile(r"#\s+Rank\s+(\d+)\b.*?\bon\s+(\S+)\s+device\s+(\d+)\s+\[[^\]]*\]\s*(.*\S)?")
_HEADER = re.compile(r"#\s*nThread\b")
_NUMBER = r"[-+\d.eE]+|N/A|inf|nan"
_ROW = re.compile(
    rf"\s*(?P<size>\d+)\s+(?P<count>\d+)\s+(?P<dtype>[a-z]\w*)\s+(?P<redop>[a-z]\w*)\s+(?P<root>-?\d+)"
    rf"\s+(?P<out>{_NUMBER})\s+(?P<alg>{_NUMBER})\s+(?P<bus>{_NUMBER})\s+\S+"
    rf"(?:\s+(?P<inside>{_NUMBER})\s+(?:{_NUMBER})\s+(?:{_NUMBER})\s+\S+)?\s*$"
)
_PREFIX = re.compile(r"^\[\S+\](?:<std(?:out|err)>)?:?\s?")
_TOLERANCE = 0.02


class Member(NamedTuple):
    """One rank of a test."""

    host: str
    device: int
    device_name: str


@dataclass(kw_only=True)
class _Test:
    """One run of a test program: what its lines have said so far."""

    kind: str = ""
    members: dict[int, Member] = field(default_factory=dict)
    rows: list[re.Match[str]] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True, slots=True)
class CollectiveLog:
    """What a log holds.

    Attributes:
        device_name: of all its ranks.
        rows: one for each size; of all-reduce the in-place time, which is what torch calls, else out of place.
        left_out: why lines were not taken, with their number.
    """

    device_name: str
    devices_per_node: int
    rows: tuple[CollectiveRow, ...]
    left_out: dict[str, int]


def read_test_log(text: str, *, kind: str = "", fallback: str = "") -> CollectiveLog:
    """Read a log.

    Args:
        text: of one or more tests behind each other; other lines are passed over.
        kind: of all tests; "" to find it in the log: the program's name, else what its columns show.
        fallback: kind of tests whose log names none.

    Raises:
        TableError: it holds no test, its ranks ran on several kinds of devices, or a test's kind is not known.
    """
    tests = [test for test in _tests(text.splitlines()) if test.rows]
    if not tests:
        raise TableError(
            "the log has no line of results",
            hint="expected what all_reduce_perf and its like print: size, count, type, redop, root, time, ...",
        )
    missing = next((test for test in tests if not test.members), None)
    if missing is not None:
        raise TableError(
            "the log does not list its ranks, so the size of the group is not known",
            hint="keep the lines '# Rank 0 ... on HOST device 0 ...', which the tests print first",
        )
    names = Counter(member.device_name for test in tests for member in test.members.values())
    if len(names) > 1:
        found = " and ".join(sorted(names))
        raise TableError(f"the log has ranks on {found}", hint="give logs of one kind of device")
    left_out: Counter[str] = Counter()
    rows = [row for test in tests for row in _rows(test, kind or test.kind or fallback, left_out)]
    if not rows:
        reasons = "; ".join(f"{n} {reason}" for reason, n in left_out.items())
        raise TableError(f"no line of the log can be used: {reasons}", hint="give the log of another run")
    per_node = max(_per_node(test) for test in tests)
    return CollectiveLog(
        device_name=next(iter(names)), devices_per_node=per_node, rows=tuple(rows), left_out=dict(left_out)
    )


def source_of(log: CollectiveLog, *, device: str, software: str) -> SourceRow:
    """What measured a log.

    Args:
        device: "cuda" or "rocm".
        software: such as "nccl-tests".
    """
    return SourceRow(
        rank=0, hostname="", device=device, device_name=log.device_name, device_count=log.devices_per_node,
        threads=1, memory_bytes=None, backend=log.rows[0].backend, clock="mean of back-to-back calls",
        software=software,
    )  # fmt: skip


def _tests(lines: Iterable[str]) -> Iterator[_Test]:
    """Tests in order. A header, or ranks behind results, begin the next one."""
    test = _Test()
    named = ""
    for raw in lines:
        line = _PREFIX.sub("", raw)
        name = _NAME.search(line)
        if name:
            named = KINDS[name.group(1)]
        rank, row = _RANK.match(line.lstrip()), _ROW.match(line)
        if test.rows and (rank or _HEADER.match(line.lstrip())):
            yield test
            test = _Test()
        if rank:
            test.members[int(rank.group(1))] = Member(rank.group(2), int(rank.group(3)), rank.group(4) or "")
        elif row:
            test.rows.append(row)
        test.kind = test.kind or named
        if test.rows:
            named = ""
    yield test


def _rows(test: _Test, kind: str, left_out: Counter[str]) -> Iterator[CollectiveRow]:
    size = len(test.members)
    if size < 2:
        left_out["of a single rank"] += len(test.rows)
        return
    found = kind or _kind_of(test.rows, size)
    amd = "amd" in next(iter(test.members.values())).device_name.lower()
    for row in test.rows:
        inside = row["inside"] if found == "all_reduce" else None
        time_us = _number(inside) or _number(row["out"]) or 0.0
        if time_us <= 0 or int(row["size"]) <= 0:
            left_out["without a time or a size"] += 1
            continue
        yield CollectiveRow(
            rank=0,
            kind=found,
            axis="",
            group_size=2 if found == "send" else size,
            size_bytes=int(row["size"]),
            dtype=_DTYPES.get(row["dtype"], row["dtype"]),
            backend="rccl" if amd else "nccl",
            count=0.0,
            time_us=time_us,
            time_iqr_us=0.0,
            time_n=1,
            exposed_us=0.0,
            in_situ=False,
            span=_span(test),
        )


def _number(text: str | None) -> float | None:
    try:
        value = float(text) if text else None
    except ValueError:
        return None
    return value if value is not None and isfinite(value) else None


def _kind_of(rows: list[re.Match[str]], size: int) -> str:
    """The kind by the ratio of bus to algorithm bandwidth, the reduction and the root.

    Raises:
        TableError: several kinds look like that.
    """
    ratios = [
        bus / alg for row in rows if (alg := _number(row["alg"])) and (bus := _number(row["bus"])) and alg > 1
    ]
    reduces, rooted = rows[0]["redop"] != "none", int(rows[0]["root"]) >= 0
    ratio = sorted(ratios)[len(ratios) // 2] if ratios else 0.0
    share = (size - 1) / size

    def near(expected: float) -> bool:
        return abs(ratio / expected - 1) < _TOLERANCE

    if reduces and not rooted and near(2 * share):
        return "all_reduce"
    if reduces and not rooted and near(share):
        return "reduce_scatter"
    if not reduces and rooted and near(1.0):
        return "broadcast"
    if not reduces and not rooted and near(1.0):
        return "send"
    raise TableError(
        f"the log names no test, and its bus bandwidth is {ratio:.3f} of the algorithm's: that tells no kind",
        hint=f"say which one it is with --kind: {', '.join(sorted(set(KINDS.values())))}",
    )


def _per_node(test: _Test) -> int:
    """Devices of a node as far as the ranks show: the largest index in use."""
    return 1 + max(member.device for member in test.members.values())


def _span(test: _Test) -> int:
    """Devices over which the group spreads: its nodes, whole but for one that it fills in part."""
    hosts = len({member.host for member in test.members.values()})
    return len(test.members) if hosts == 1 else hosts * max(_per_node(test), -(-len(test.members) // hosts))
