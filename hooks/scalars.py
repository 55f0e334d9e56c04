"""Writes each step as TensorBoard scalars beside the run, at once and without a thread."""

from __future__ import annotations

import os
import socket
import time
from pathlib import Path
from typing import Any

SUFFIX = ".llmprof"


class LiveScalars:
    """An event file in the run directory; every step is flushed, so a forked child inherits no buffered bytes.

    Args:
        directory: the run directory, which is also a TensorBoard run.
    """

    def __init__(self, directory: Path) -> None:
        from tensorboard.compat.proto import event_pb2, summary_pb2
        from tensorboard.summary.writer.record_writer import RecordWriter

        self._event: Any = event_pb2.Event
        self._summary: Any = summary_pb2.Summary
        directory.mkdir(parents=True, exist_ok=True)
        for old in directory.glob(f"events.out.tfevents.*{SUFFIX}"):
            old.unlink(missing_ok=True)
        name = f"events.out.tfevents.{int(time.time()):010d}.{socket.gethostname()}.{os.getpid()}.0{SUFFIX}"
        self._file: Any = (directory / name).open("wb")
        self._writer: Any = RecordWriter(self._file)
        self._write(self._event(wall_time=time.time(), file_version="brain.Event:2"))

    def write(self, step: int, values: dict[str, float | None]) -> None:
        """Write the values that are known, as "llmprof/NAME"."""
        known = [
            self._summary.Value(tag=f"llmprof/{name}", simple_value=value)
            for name, value in values.items()
            if value is not None
        ]
        if known and not self._file.closed:
            self._write(self._event(wall_time=time.time(), step=step, summary=self._summary(value=known)))

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _write(self, event: Any) -> None:
        self._writer.write(event.SerializeToString())
        self._file.flush()
