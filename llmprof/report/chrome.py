"""A Profile in, a timeline in the Chrome trace event format out, for Perfetto and chrome://tracing."""

from __future__ import annotations

import gzip
import os
import tempfile
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from llmprof.errors import RequestError
from llmprof.schema.profile import Profile, SpanRow

_ROW_FIELDS = {
    "operators": ("op", "module", "family", "shapes", "dtype", "flops", "bytes"),
    "collectives": ("kind", "axis", "group_size", "size_bytes", "backend"),
}


def chrome_trace(profile: Profile) -> dict[str, Any]:
    """The representative step as trace events: a process for each rank, a thread for each stream.

    Raises:
        RequestError: the profile has no spans.
    """
    if not profile.spans:
        raise RequestError(
            "the run has no timeline: it ended before a window was profiled",
            hint="capture at least one profiled step, or forecast with --save",
        )
    tables = {table: _by_rank(getattr(profile, table)) for table in _ROW_FIELDS}
    streams: dict[int, dict[str, int]] = {}
    events = []
    for span in profile.spans:
        threads = streams.setdefault(span.rank, {})
        thread = threads.setdefault(span.stream, len(threads))
        events.append(
            {
                "ph": "X",
                "name": span.name,
                "cat": span.phase,
                "pid": span.rank,
                "tid": thread,
                "ts": span.start_us,
                "dur": span.duration_us,
                "args": _arguments(tables, span),
            }
        )
    manifest = profile.manifest
    return {
        "traceEvents": [*_names(profile, streams), *events],
        "displayTimeUnit": "ms",
        "otherData": {
            "producer": f"llmprof {manifest.llmprof_version}".strip(),
            "kind": manifest.kind,
            "name": manifest.name,
            "layout": manifest.layout,
            "cluster": manifest.cluster,
        },
    }


def write_chrome_trace(profile: Profile, file: Path) -> int:
    """Write the timeline, compressed when the name ends in ".gz"; returns the number of bytes written.

    Raises:
        RequestError: the profile has no spans.
    """
    data = msgspec.json.encode(chrome_trace(profile))
    if file.suffix == ".gz":
        data = gzip.compress(data, compresslevel=6, mtime=0)
    write_atomically(file, data)
    return len(data)


def write_atomically(file: Path, data: bytes) -> None:
    """Write a file that is either complete or not there."""
    file.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=file.parent, prefix=f".{file.name}.")
    try:
        with os.fdopen(handle, "wb") as out:
            out.write(data)
        os.chmod(temporary, 0o644)
        os.replace(temporary, file)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def _names(profile: Profile, streams: dict[int, dict[str, int]]) -> list[dict[str, Any]]:
    """Metadata events that name and order processes and threads."""
    stages = {c.rank: c for c in profile.manifest.rank_classes}
    names = []
    for rank, threads in sorted(streams.items()):
        rank_class = stages.get(rank)
        text = f"rank {rank}"
        if rank_class is not None and rank_class.count > 1:
            text += f" (stands for {rank_class.count}, stage {rank_class.stage})"
        names.append({"ph": "M", "name": "process_name", "pid": rank, "args": {"name": text}})
        names.append({"ph": "M", "name": "process_sort_index", "pid": rank, "args": {"sort_index": rank}})
        for stream, thread in threads.items():
            names.append(
                {"ph": "M", "name": "thread_name", "pid": rank, "tid": thread, "args": {"name": stream}}
            )
    return names


def _by_rank(rows: Sequence[Any]) -> dict[int, list[Any]]:
    """Rows of each rank in their order: `SpanRow.row` counts within its own rank."""
    found: dict[int, list[Any]] = defaultdict(list)
    for row in rows:
        found[row.rank].append(row)
    return found


def _arguments(tables: Mapping[str, Mapping[int, list[Any]]], span: SpanRow) -> dict[str, Any]:
    """What is known of the operator or collective behind a span."""
    rows = tables.get(span.table, {}).get(span.rank, [])
    if not 0 <= span.row < len(rows):
        return {}
    values = {name: getattr(rows[span.row], name) for name in _ROW_FIELDS[span.table]}
    return {name: value for name, value in values.items() if value not in ("", 0)}
