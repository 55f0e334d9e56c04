"""Measured operators and collectives as a file that grows by a line for each: beside a run, or alone as a device table.

The first line says what measured; each further line holds one row of a Profile. A process that is killed while it
writes leaves a readable file: a torn last line is no line.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from typing import IO, NamedTuple

import msgspec

from llmprof.errors import TableError
from llmprof.schema.operators import Tensor, format_shapes, parse_shapes
from llmprof.schema.profile import CollectiveRow, OperatorRow, Profile, SourceRow

MEASUREMENTS_VERSION = 1
IN_RUN = "measured.jsonl"
"""Name of the file inside a run directory."""
MODULE = "measure"
"""Owner of an operator row that was measured on its own: no module ran it, and it is no part of the captured step."""
_MAX_BYTES = 200_000_000
_MAX_TEXT = 1_000_000


class CallKey(NamedTuple):
    """What tells measured operators apart."""

    op: str
    shapes: str
    dtype: str
    attributes: str


@dataclass(frozen=True, kw_only=True, slots=True)
class OpCall:
    """One call of an operator that can be measured.

    Attributes:
        inputs, outputs: tensors in the order of the operator's arguments and results; inputs without 0-dim ones.
        outputs: empty when they are not known.
        phase: where in a step it runs; says which operand of a matmul is a transposed view.
    """

    op: str
    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...] = ()
    attributes: frozenset[str] = frozenset()
    phase: str = "forward"

    @property
    def key(self) -> CallKey:
        """The key under which a measurement of it is found again."""
        dtype = (
            self.inputs[0].dtype if self.inputs else (self.outputs[0].dtype if self.outputs else "float32")
        )
        return CallKey(self.op, format_shapes(self.inputs), dtype, ",".join(sorted(self.attributes)))


@dataclass(frozen=True, kw_only=True, slots=True)
class Wanted:
    """A call whose time a forecast would like to know.

    Attributes:
        importance: share of the step's time times the spread of the present price.
        estimate_s: that price, seconds.
    """

    call: OpCall
    importance: float = 0.0
    estimate_s: float = 0.0


class Header(msgspec.Struct, frozen=True, kw_only=True):
    """First line of a file: its version, and what measured all of it."""

    llmprof_measurements: int = MEASUREMENTS_VERSION
    source: SourceRow


class _Line(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    operator: OperatorRow | None = None
    collective: CollectiveRow | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Measurements:
    """What a file holds; of rows with equal keys the last."""

    source: SourceRow
    operators: tuple[OperatorRow, ...] = ()
    collectives: tuple[CollectiveRow, ...] = ()

    def keys(self) -> frozenset[CallKey]:
        """Keys of the measured operators."""
        return frozenset(_key(row) for row in self.operators)


def read_measurements(path: str | Path) -> Measurements:
    """Read a file.

    Raises:
        TableError: it is missing, foreign, of a newer version, too large, or a line before the last is damaged.
    """
    file = Path(path)
    if not file.is_file():
        raise TableError(f"there is no table of measurements at {file}", hint="llmprof measure -o writes one")
    if file.stat().st_size > _MAX_BYTES:
        size = file.stat().st_size / 1e6
        raise TableError(f"{file} has {size:.0f} MB, more than {_MAX_BYTES / 1e6:.0f} MB", hint="is it ours?")
    lines = _whole_lines(file.read_bytes())
    header = _header(lines[0] if lines else b"", file)
    operators: dict[CallKey, OperatorRow] = {}
    collectives: dict[tuple[object, ...], CollectiveRow] = {}
    for number, text in enumerate(lines[1:], 2):
        line = _parse(text, file, number)
        if line.operator is not None:
            operators[_key(line.operator)] = line.operator
        if line.collective is not None:
            row = line.collective
            collectives[row.kind, row.axis, row.group_size, row.size_bytes, row.backend, row.in_situ] = row
    return Measurements(
        source=header.source, operators=tuple(operators.values()), collectives=tuple(collectives.values())
    )


def same_machine(one: SourceRow, other: SourceRow) -> bool:
    """True when times of one hold for the other: same device, and on a CPU as many threads."""
    threads = one.device != "cpu" or one.threads == other.threads
    return (one.device, one.device_name) == (other.device, other.device_name) and threads


def with_measurements(profile: Profile, found: Measurements) -> Profile:
    """A Profile that is priced by measurements too.

    Rows of the machine that the profile was measured on are added to its own; a table of another machine takes their
    place, since times of one device never price another.
    """
    own = profile.sources
    if own and same_machine(own[0], found.source):
        return msgspec.structs.replace(
            profile,
            operators=(*profile.operators, *found.operators),
            collectives=(*profile.collectives, *found.collectives),
        )
    return Profile(
        manifest=profile.manifest,
        workload=profile.workload,
        operators=found.operators,
        collectives=found.collectives,
        sources=(found.source,),
    )


def with_own_measurements(profile: Profile, directory: Path) -> Profile:
    """A Profile with what was measured for it afterwards; measurements of another machine are named and left out.

    Raises:
        TableError: see `read_measurements`.
    """
    file = directory / IN_RUN
    if not file.is_file():
        return profile
    found = read_measurements(file)
    if profile.sources and same_machine(profile.sources[0], found.source):
        return with_measurements(profile, found)
    warning = f"{file.name} was measured on {machine(found.source)}, not where the run was: it is not used"
    manifest = msgspec.structs.replace(profile.manifest, warnings=(*profile.manifest.warnings, warning))
    return msgspec.structs.replace(profile, manifest=manifest)


def machine(source: SourceRow) -> str:
    """A device in words, such as "AMD EPYC 7B13 (1 thread)"."""
    threads = f" ({source.threads} thread{'s' * (source.threads != 1)})" if source.device == "cpu" else ""
    return f"{source.device_name or source.device}{threads}"


class MeasurementWriter:
    """Appends rows to a file, each at once, so that a second call knows what is done.

    Args:
        path: the file; made when it does not exist.
        source: what measures.

    Raises:
        TableError: the file is not ours, or was measured by another machine.
    """

    def __init__(self, path: str | Path, source: SourceRow) -> None:
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        data = self.path.read_bytes() if self.path.is_file() else b""
        whole = sum(len(line) + 1 for line in _whole_lines(data))
        self.known = Measurements(source=source)
        if whole or data.strip():
            self.known = read_measurements(self.path)
            if not same_machine(self.known.source, source):
                raise TableError(
                    f"{self.path} was measured on {machine(self.known.source)}, and this is {machine(source)}",
                    hint="times of one device never price another: give another file with -o",
                )
        self._file: IO[bytes] = self.path.open("ab")
        self._file.truncate(whole)
        if not whole:
            self._append(Header(source=source))

    def operator(self, row: OperatorRow) -> None:
        """Store one operator."""
        self._append(_Line(operator=row))

    def collective(self, row: CollectiveRow) -> None:
        """Store one collective."""
        self._append(_Line(collective=row))

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _append(self, line: msgspec.Struct) -> None:
        self._file.write(msgspec.json.encode(line) + b"\n")
        self._file.flush()


def _whole_lines(data: bytes) -> list[bytes]:
    """Lines that end; what follows the last end was being written when the process died."""
    return data.split(b"\n")[:-1]


def _header(text: bytes, file: Path) -> Header:
    try:
        header = msgspec.json.decode(text, type=Header)
    except (msgspec.DecodeError, RecursionError) as error:
        raise TableError(
            f"{file} is no table of measurements: its first line does not say what measured it",
            hint="llmprof measure -o writes one",
        ) from error
    if header.llmprof_measurements > MEASUREMENTS_VERSION:
        raise TableError(
            f"{file} has version {header.llmprof_measurements}, this llmprof reads up to {MEASUREMENTS_VERSION}",
            hint="update llmprof",
        )
    return header


def _parse(text: bytes, file: Path, number: int) -> _Line:
    try:
        line = msgspec.json.decode(text, type=_Line)
    except (msgspec.DecodeError, RecursionError) as error:
        raise TableError(f"line {number} of {file} is damaged: {error}", hint="delete the line") from error
    for row in (line.operator, line.collective):
        problem = _problem(row) if row is not None else ""
        if problem:
            raise TableError(f"line {number} of {file}: {problem}", hint="delete the line")
    return line


def _problem(row: OperatorRow | CollectiveRow) -> str:
    """Why a row cannot have been measured, "" when it can."""
    numbers = (row.time_us, row.time_iqr_us, row.count)
    if not all(isfinite(n) and n >= 0 for n in numbers) or row.time_us <= 0:
        return f"a time of {row.time_us:g} us (IQR {row.time_iqr_us:g}, count {row.count:g}) cannot be"
    if isinstance(row, CollectiveRow):
        return "" if row.size_bytes >= 0 and row.group_size >= 0 else "a negative size cannot be"
    if min(row.flops, row.bytes) < 0:
        return "negative work cannot be"
    try:
        shapes = parse_shapes(row.shapes) if len(row.shapes) <= _MAX_TEXT else None
    except ValueError:
        shapes = None
    if shapes is None or any(size < 0 for tensor in shapes for size in tensor.shape):
        return f"{row.shapes[:80]!r} is no list of shapes"
    return ""


def _key(row: OperatorRow) -> CallKey:
    return CallKey(row.op, row.shapes, row.dtype, row.attributes)


def still_wanted(wanted: Iterable[Wanted], known: Measurements) -> tuple[Wanted, ...]:
    """Calls that were not measured yet, the most important first, each once."""
    done = set(known.keys())
    left: list[Wanted] = []
    for one in by_importance(wanted):
        if one.call.key not in done:
            done.add(one.call.key)
            left.append(one)
    return tuple(left)


def by_importance(wanted: Iterable[Wanted]) -> Sequence[Wanted]:
    """The most important first; of equally important ones those that cost less."""
    return sorted(wanted, key=lambda w: (-w.importance, w.estimate_s, w.call.key))
