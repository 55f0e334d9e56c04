"""Turns a Profile and its forecasts into an event file that the LLMPROF tab reads, without torch or TensorFlow."""

from __future__ import annotations

import os
import re
import socket
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from tensorboard.compat.proto import event_pb2, summary_pb2, tensor_pb2, tensor_shape_pb2, types_pb2
from tensorboard.summary.writer.record_writer import RecordWriter

from llmprof.errors import RequestError
from llmprof.schema.profile import Profile
from llmprof.tensorboard.data import Report, build_report, encode_report
from llmprof.tensorboard.plugin import PLUGIN_NAME

TAG = "llmprof/report"
_UNSAFE = re.compile(r"[^A-Za-z0-9._=,+-]+")


def write_report(
    logdir: str | Path, *, run: str, profile: Profile, forecasts: Sequence[Profile] = ()
) -> Path:
    """Write what the tab shows for one run.

    Args:
        logdir: the directory given to `tensorboard --logdir`.
        run: name of the run, a directory below it ("demo", "sweep/a"); "." is the log directory itself.
        profile: the captured run.
        forecasts: predicted Profiles made from it, in the order in which they are shown.

    Returns:
        The event file.

    Raises:
        RequestError: the name leads out of the log directory, or the report is too large.
    """
    return write_summary(logdir, run=run, report=build_report(profile, forecasts))


def write_summary(logdir: str | Path, *, run: str, report: Report) -> Path:
    """Write a report as one tensor summary, atomically; the newest report of a run is the one shown.

    Raises:
        RequestError: the name leads out of the log directory, or the report is too large.
    """
    directory = run_directory(logdir, run)
    event = event_pb2.Event(wall_time=time.time(), step=0, summary=_summary(encode_report(report)))
    version = event_pb2.Event(wall_time=event.wall_time, file_version="brain.Event:2")
    directory.mkdir(parents=True, exist_ok=True)
    host = _UNSAFE.sub("-", socket.gethostname())
    stamp = time.time_ns()
    file = directory / f"events.out.tfevents.{stamp // 10**9}.{host}.{os.getpid()}.{stamp % 10**9}.llmprof"
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
