"""Turns a log directory into named runs and their reports: event files first, else the run directories themselves."""

from __future__ import annotations

import os
import threading
import time
from collections import OrderedDict
from pathlib import Path
from typing import Any

from llmprof.errors import RunError
from llmprof.schema.store import load_profile
from llmprof.tensorboard import PLUGIN_NAME
from llmprof.tensorboard.data import Report, build_report, decode_report

_MAX_DEPTH = 6
_MAX_DIRECTORIES = 20_000
_FRESH_S = 5.0
_CACHED_REPORTS = 8
_RESERVOIR = 10


class RunSource:
    """Runs below one log directory.

    Args:
        logdir: as given to TensorBoard; "" or a remote address has no run directories.
        data_provider: TensorBoard's reader of event files, or None.
    """

    def __init__(self, logdir: str, data_provider: Any) -> None:
        self._root = Path(logdir) if logdir else None
        self._data_provider = data_provider
        self._lock = threading.Lock()
        self._directories: dict[str, Path] = {}
        self._looked_at = float("-inf")
        self._reports: OrderedDict[tuple[Path, int], Report] = OrderedDict()

    def directories(self) -> dict[str, Path]:
        """Run directories by name; looked for again when the last answer is older than some seconds."""
        with self._lock:
            if time.monotonic() - self._looked_at > _FRESH_S:
                self._directories = find_run_directories(self._root) if self._root else {}
                self._looked_at = time.monotonic()
            return self._directories

    def list_runs(self, context: Any, experiment_id: str) -> list[dict[str, Any]]:
        """Name, source and time of each run, the newest first."""
        summaries = self._summaries(context, experiment_id)
        directories = self.directories()
        runs = []
        for name in {*summaries, *directories}:
            changed = _changed_ns(directories[name]) / 1e9 if name in directories else float("-inf")
            written = summaries[name][1] if name in summaries else float("-inf")
            source = "summary" if written >= changed else "directory"
            runs.append({"name": name, "source": source, "updated": max(written, changed)})
        return sorted(runs, key=lambda run: (-float(str(run["updated"])), str(run["name"])))

    def report(self, name: str, context: Any, experiment_id: str) -> Report:
        """The report of a run: what is newer of its event file and its run directory.

        Raises:
            RunError: there is no such run, or it cannot be read.
        """
        runs = {str(run["name"]): run for run in self.list_runs(context, experiment_id)}
        if name not in runs:
            raise RunError(
                f"there is no run {name[:200]!r} in this log directory", hint="choose one from the list"
            )
        if runs[name]["source"] == "directory":
            return self._directory_report(self.directories()[name])
        return self._summary_report(name, context, experiment_id)

    def _summaries(self, context: Any, experiment_id: str) -> dict[str, tuple[str, float]]:
        """Tag and wall time of the report of each run in the event files."""
        if self._data_provider is None:
            return {}
        found = self._data_provider.list_tensors(
            context, experiment_id=experiment_id, plugin_name=PLUGIN_NAME
        )
        return {
            run: max(((tag, series.max_wall_time) for tag, series in tags.items()), key=lambda pair: pair[1])
            for run, tags in found.items()
            if tags
        }

    def _summary_report(self, name: str, context: Any, experiment_id: str) -> Report:
        from tensorboard.data.provider import RunTagFilter

        tag, _ = self._summaries(context, experiment_id)[name]
        data = self._data_provider.read_tensors(
            context,
            experiment_id=experiment_id,
            plugin_name=PLUGIN_NAME,
            downsample=_RESERVOIR,
            run_tag_filter=RunTagFilter(runs=[name], tags=[tag]),
        )
        points = data.get(name, {}).get(tag, [])
        if not points:
            raise RunError("the event file holds no report any more", hint="reload")
        newest = max(points, key=lambda point: point.wall_time)
        value = newest.numpy.item()
        return decode_report(value if isinstance(value, bytes) else str(value).encode())

    def _directory_report(self, directory: Path) -> Report:
        key = (directory, _changed_ns(directory))
        with self._lock:
            if key in self._reports:
                self._reports.move_to_end(key)
                return self._reports[key]
        report = build_report(load_profile(directory))
        with self._lock:
            self._reports[key] = report
            while len(self._reports) > _CACHED_REPORTS:
                self._reports.popitem(last=False)
        return report


def find_run_directories(root: Path) -> dict[str, Path]:
    """Directories at or below `root` that hold `rank-*/manifest.json`, by their path below it ("." is the root).

    At most six levels and 20,000 directories are looked at; links are followed, each directory once.
    """
    found: dict[str, Path] = {}
    seen: set[tuple[int, int]] = set()
    level = [root]
    for _ in range(_MAX_DEPTH + 1):
        below: list[Path] = []
        for directory in level:
            children = _subdirectories(directory, seen)
            if any(
                (child / "manifest.json").is_file() for child in children if child.name.startswith("rank-")
            ):
                found[directory.relative_to(root).as_posix()] = directory
            below.extend(child for child in children if not child.name.startswith((".", "rank-")))
        if len(seen) > _MAX_DIRECTORIES:
            break
        level = below
    return found


def _subdirectories(directory: Path, seen: set[tuple[int, int]]) -> list[Path]:
    """Subdirectories in order, none when this directory cannot be read or was looked at before."""
    try:
        status = directory.stat()
        if (status.st_dev, status.st_ino) in seen:
            return []
        seen.add((status.st_dev, status.st_ino))
        with os.scandir(directory) as entries:
            return sorted(Path(entry.path) for entry in entries if entry.is_dir())
    except OSError:
        return []


def _changed_ns(directory: Path) -> int:
    """When a run directory was last written, 0 when that is not known."""
    times = []
    for rank in _subdirectories(directory, set()):
        if not rank.name.startswith("rank-"):
            continue
        for file in ("manifest.json", "tables.npz", "journal.jsonl"):
            try:
                times.append((rank / file).stat().st_mtime_ns)
            except OSError:
                continue
    return max(times, default=0)
