"""Turns a Profile and its forecasts into an event file that the LLMPROF tab reads, without torch or TensorFlow."""

from __future__ import annotations

import json
import os
import re
import socket
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from tensorboard.compat.proto import event_pb2, summary_pb2, tensor_pb2, tensor_shape_pb2, types_pb2
from tensorboard.summary.writer.record_writer import RecordWriter

from llmprof.errors import RequestError, RunError
from llmprof.schema.profile import Profile
from llmprof.tensorboard import PLUGIN_NAME
from llmprof.tensorboard.data import Report, add_forecasts, build_report, decode_report, encode_report
from llmprof.tensorboard.runs import find_run_directories

TAG = "llmprof/report"
SUFFIX = ".report.llmprof"
"""A new capture into the same directory removes event files whose name ends in ".llmprof"."""

_UNSAFE = re.compile(r"[^A-Za-z0-9._=,+-]+")


def write_report(
    logdir: str | Path, *, run: str, profile: Profile, forecasts: Sequence[Profile] = ()
) -> Path:
    """Write what the tab shows for one run.

    Args:
        logdir: the directory given to `tensorboard --logdir`.
        run: name of the run, a directory below it ("demo", "sweep/a"); "." is the log directory itself. A capture that
            lies in or below the log directory keeps its own directory, and so its own name, instead.
        profile: the captured run.
        forecasts: predicted Profiles made from it, in the order in which they are shown. Those written earlier for
            the same capture stay.

    Returns:
        The event file.

    Raises:
        RequestError: the name leads out of the log directory, or the report is too large.
    """
    report = build_report(profile, forecasts)
    directory = _own_directory(Path(logdir), report) or run_directory(logdir, run)
    earlier = newest_report(directory)
    if earlier is not None and _capture(earlier) == _capture(report):
        report = add_forecasts(report, earlier.get("forecasts") or ())
    return _write(directory, report)


def _capture(report: Report) -> tuple[object, ...]:
    facts = report.get("run")
    return (
        tuple(facts.get(key) for key in ("name", "created", "world_size")) if isinstance(facts, dict) else ()
    )


def _own_directory(logdir: Path, report: Report) -> Path | None:
    """The run directory that the report is about, None when it does not lie below the log directory."""
    for directory in find_run_directories(logdir).values():
        for file in sorted(directory.glob("rank-*/manifest.json"))[:1]:
            try:
                facts = json.loads(file.read_bytes())
            except (OSError, ValueError):
                continue
            if report["run"]["created"] and _capture({"run": facts}) == _capture(report):
                return directory
    return None


def newest_report(directory: Path) -> Report | None:
    """The report written last into a run's directory, None when there is none that can be read."""
    files = sorted(directory.glob(f"events.out.tfevents.*{SUFFIX}"), reverse=True)
    if not files:
        return None
    from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

    for file in files:
        for event in EventFileLoader(str(file)).Load():
            for value in event.summary.value:
                if value.tag == TAG and value.tensor.string_val:
                    try:
                        return decode_report(value.tensor.string_val[0])
                    except RunError:
                        return None
    return None


def write_summary(logdir: str | Path, *, run: str, report: Report) -> Path:
    """Write a report as one tensor summary, atomically; the newest report of a run is the one shown.

    Raises:
        RequestError: the name leads out of the log directory, or the report is too large.
    """
    return _write(run_directory(logdir, run), report)


def _write(directory: Path, report: Report) -> Path:
    event = event_pb2.Event(wall_time=time.time(), step=0, summary=_summary(encode_report(report)))
    version = event_pb2.Event(wall_time=event.wall_time, file_version="brain.Event:2")
    directory.mkdir(parents=True, exist_ok=True)
    host = _UNSAFE.sub("-", socket.gethostname())
    seconds, nanoseconds = divmod(time.time_ns(), 10**9)
    file = directory / f"events.out.tfevents.{seconds}.{nanoseconds:09d}.{host}.{os.getpid()}{SUFFIX}"
    handle, temporary = tempfile.mkstemp(dir=directory, prefix=".llmprof.")
    try:
        with os.fdopen(handle, "wb") as out:
            records = RecordWriter(out)
            records.write(version.SerializeToString())
            records.write(event.SerializeToString())
        os.chmod(temporary, 0o644)
        os.replace(temporary, file)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
    return file


def run_directory(logdir: str | Path, run: str) -> Path:
    """The directory of a run below the log directory; unusual characters in its name become "-".

    Raises:
        RequestError: the name is empty, absolute or leads out of the log directory.
    """
    parts = Path(run).parts
    if not run.strip() or Path(run).is_absolute() or ".." in parts:
        raise RequestError(
            f"the run name {run!r} does not name a directory below {logdir}", hint='for example "demo"'
        )
    return Path(logdir).joinpath(*(_UNSAFE.sub("-", part) for part in parts))


def _summary(data: bytes) -> summary_pb2.Summary:
    metadata = summary_pb2.SummaryMetadata(
        display_name="llmprof report",
        plugin_data=summary_pb2.SummaryMetadata.PluginData(plugin_name=PLUGIN_NAME),
        data_class=summary_pb2.DATA_CLASS_TENSOR,
    )
    tensor = tensor_pb2.TensorProto(
        dtype=types_pb2.DT_STRING, tensor_shape=tensor_shape_pb2.TensorShapeProto(), string_val=[data]
    )
    return summary_pb2.Summary(value=[summary_pb2.Summary.Value(tag=TAG, metadata=metadata, tensor=tensor)])
