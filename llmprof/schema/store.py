"""Saves and loads runs: a JSON manifest and `.npz` columns without pickle, written atomically, versioned.

A run is a directory:

    RUN/rank-00000/manifest.json   Manifest of one rank class
    RUN/rank-00000/tables.npz      one array per column, named "table.column"
    RUN/rank-00000/journal.jsonl   one StepRow a line while the run is going: a killed run stays readable
    RUN/workload.json              the Workload, when it was traced
"""

from __future__ import annotations

import io
import os
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import IO, Any, cast

import msgspec
import numpy as np

from llmprof.errors import RunError, WorkloadError
from llmprof.schema.columns import columns_to_rows, read_npz, rows_to_columns
from llmprof.schema.limits import check_workload
from llmprof.schema.profile import FORMAT_VERSION, TABLES, Manifest, Profile, RankClass, StepRow
from llmprof.schema.workload import WORKLOAD_VERSION, Workload

_MANIFEST, _TABLES, _JOURNAL, _WORKLOAD = "manifest.json", "tables.npz", "journal.jsonl", "workload.json"
_MAX_JSON_BYTES = 500_000_000


def load_profile(path: str | Path) -> Profile:
    """Read a run directory and merge its ranks.

    A run whose process was killed loads from its journal with `manifest.status == "partial"`.

    Raises:
        RunError: there is no such directory, it holds no run, a file is torn, or it is of a newer version.
    """
    root = Path(path)
    if not root.exists():
        raise RunError(f"there is no run at {root}", hint="give the directory that a capture wrote")
    if not root.is_dir():
        raise RunError(
            f"{root} is a file, not a run directory", hint="give the directory that a capture wrote"
        )
    ranks = sorted(p for p in root.glob("rank-*") if p.is_dir())
    if not ranks:
        raise RunError(
            f"{root} holds no run (no rank-* directory)", hint="give the directory that a capture wrote"
        )
    parts = [_load_rank(rank) for rank in ranks]
    workload = load_workload(root / _WORKLOAD) if (root / _WORKLOAD).exists() else None
    return merge_ranks(parts, workload=workload)


def merge_ranks(parts: Iterable[Profile], *, workload: Workload | None = None) -> Profile:
    """One Profile from the Profiles of its ranks: tables are concatenated, the first manifest leads.

    The run is "partial" when a rank is partial or is missing.
    """
    profiles = list(parts)
    first = profiles[0].manifest
    manifests = [p.manifest for p in profiles]
    warnings = tuple(dict.fromkeys(w for m in manifests for w in m.warnings))
    classes = tuple(c for m in manifests for c in m.rank_classes)
    complete = (
        all(m.status == "complete" for m in manifests) and sum(c.count for c in classes) >= first.world_size
    )
    fractions = [m.attributed_fraction for m in manifests if m.attributed_fraction is not None]
    roots = [m.root_fraction for m in manifests if m.root_fraction is not None]
    manifest = msgspec.structs.replace(
        first,
        status="complete" if complete else "partial",
        rank_classes=classes,
        warnings=warnings,
        attributed_fraction=min(fractions, default=None),
        root_fraction=max(roots, default=None),
    )
    tables: dict[str, Any] = {
        name: tuple(row for p in profiles for row in getattr(p, name)) for name in TABLES
    }
    return Profile(manifest=manifest, workload=workload, **tables)


def save_profile(profile: Profile, path: str | Path) -> None:
    """Write a Profile as a run directory, one subdirectory for each rank class, each file atomically."""
    root = Path(path)
    classes = profile.manifest.rank_classes or (RankClass(rank=0, count=profile.manifest.world_size),)
    for rank_class in classes:
        manifest = msgspec.structs.replace(profile.manifest, rank_classes=(rank_class,))
        tables: dict[str, Any] = {
            name: tuple(row for row in getattr(profile, name) if row.rank == rank_class.rank)
            for name in TABLES
        }
        RunWriter(root, rank_class.rank).write_rank(Profile(manifest=manifest, **tables))
    if profile.workload is not None:
        save_workload(profile.workload, root / _WORKLOAD)


def load_workload(path: str | Path) -> Workload:
    """Read a workload file.

    Raises:
        WorkloadError: it is missing, torn, foreign, or of a newer version.
    """
    file = Path(path)
    if not file.is_file():
        raise WorkloadError(f"there is no workload at {file}", hint="capture a run first")
    data = _read_limited(file)
    try:
        workload = msgspec.json.decode(data, type=Workload)
    except (msgspec.DecodeError, RecursionError) as error:
        raise WorkloadError(
            f"{file} is torn or is not a workload: {error}", hint="capture the run again"
        ) from error
    if workload.version > WORKLOAD_VERSION:
        raise WorkloadError(
            f"{file} has format version {workload.version}, this llmprof reads up to {WORKLOAD_VERSION}",
            hint="update llmprof",
        )
    check_workload(workload, str(file))
    return workload


def save_workload(workload: Workload, path: str | Path) -> None:
    """Write a workload file atomically."""
    _write_atomically(Path(path), msgspec.json.encode(workload))


class RunWriter:
    """Writes one rank's part of a run.

    Args:
        path: the run directory; made when it does not exist.
        rank: global rank.
    """

    def __init__(self, path: str | Path, rank: int) -> None:
        self.root = Path(path)
        self.directory = self.root / f"rank-{rank:05d}"
        self.directory.mkdir(parents=True, exist_ok=True)
        self._journal: IO[bytes] | None = None

    def begin(self, manifest: Manifest) -> None:
        """Write a manifest with status "partial" and forget what an earlier run left in this directory."""
        for name in (_JOURNAL, _TABLES):
            (self.directory / name).unlink(missing_ok=True)
        self._write_manifest(msgspec.structs.replace(manifest, status="partial"))

    def journal(self, row: StepRow) -> None:
        """Append one step and flush, so that a killed process leaves it readable."""
        if self._journal is None:
            self._journal = (self.directory / _JOURNAL).open("ab")
        self._journal.write(msgspec.json.encode(row) + b"\n")
        self._journal.flush()

    def write_rank(self, profile: Profile) -> None:
        """Write the tables, then the manifest that makes them valid; the journal is then of no more use."""
        columns = {}
        for name in TABLES:
            columns.update(rows_to_columns(name, getattr(profile, name)))
        buffer = io.BytesIO()
        np.savez_compressed(buffer, **cast(dict[str, Any], columns))
        _write_atomically(self.directory / _TABLES, buffer.getvalue())
        self._write_manifest(profile.manifest)
        if profile.manifest.status == "complete":
            self.close()
            (self.directory / _JOURNAL).unlink(missing_ok=True)

    def write_workload(self, workload: Workload) -> None:
        """Write the run's workload (rank 0 does this)."""
        save_workload(workload, self.root / _WORKLOAD)

    def close(self) -> None:
        """Close the journal."""
        if self._journal is not None:
            self._journal.close()
            self._journal = None

    def _write_manifest(self, manifest: Manifest) -> None:
        _write_atomically(
            self.directory / _MANIFEST, msgspec.json.format(msgspec.json.encode(manifest), indent=1)
        )


def _load_rank(directory: Path) -> Profile:
    manifest = _load_manifest(directory)
    tables: dict[str, Any] = {}
    if (directory / _TABLES).is_file():
        with (directory / _TABLES).open("rb") as file:
            columns = read_npz(file, name=str(directory / _TABLES))
        tables = {name: columns_to_rows(name, columns) for name in TABLES}
    elif manifest.status == "complete":
        raise RunError(f"{directory / _TABLES} is missing", hint="capture the run again")
    if manifest.status != "complete":
        tables["steps"] = _merge_steps(tables.get("steps", ()), _read_journal(directory / _JOURNAL))
    return Profile(manifest=manifest, **tables)


def _load_manifest(directory: Path) -> Manifest:
    file = directory / _MANIFEST
    if not file.is_file():
        raise RunError(f"{file} is missing", hint="the run ended before its first step, or this is not a run")
    data = _read_limited(file)
    try:
        manifest = msgspec.json.decode(data, type=Manifest)
    except (msgspec.DecodeError, RecursionError) as error:
        raise RunError(f"{file} is torn or is not ours: {error}", hint="capture the run again") from error
    if manifest.version > FORMAT_VERSION:
        raise RunError(
            f"{file} has format version {manifest.version}, this llmprof reads up to {FORMAT_VERSION}",
            hint="update llmprof",
        )
    return manifest


def _read_journal(file: Path) -> tuple[StepRow, ...]:
    """Steps of a journal; a torn last line (the process was killed while writing) ends the reading."""
    rows: list[StepRow] = []
    if not file.is_file():
        return ()
    for line in _read_limited(file).splitlines():
        try:
            rows.append(msgspec.json.decode(line, type=StepRow))
        except msgspec.DecodeError:
            break
    return tuple(rows)


def _merge_steps(stored: tuple[StepRow, ...], journal: tuple[StepRow, ...]) -> tuple[StepRow, ...]:
    known = {row.step for row in stored}
    return tuple(sorted([*stored, *(r for r in journal if r.step not in known)], key=lambda r: r.step))


def _read_limited(file: Path) -> bytes:
    size = file.stat().st_size
    if size > _MAX_JSON_BYTES:
        raise RunError(
            f"{file} has {size / 1e9:.1f} GB, more than {_MAX_JSON_BYTES / 1e9:.1f} GB", hint="is it ours?"
        )
    return file.read_bytes()


def _write_atomically(file: Path, data: bytes) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=file.parent, prefix=f".{file.name}.")
    try:
        with os.fdopen(handle, "wb") as out:
            out.write(data)
            out.flush()
            os.fsync(out.fileno())
        os.chmod(temporary, 0o644)
        os.replace(temporary, file)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
