"""What ran how often: owners of time, evidence and collectives, summed up only when they are asked for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol, TypeVar

Parts = dict[str, float]
"""Nominal seconds by part of the breakdown, or by kind of evidence."""


class Call(NamedTuple):
    """One kind of collective call: over which group, spread over how many devices, with which message."""

    kind: str
    axis: str
    group_size: int
    span: int
    size_bytes: int


Calls = dict[Call, float]
"""How often each kind of collective is called."""
Key = TypeVar("Key")


def add_into(total: dict[Key, float], values: Mapping[Key, float], times: float = 1.0) -> None:
    """Add `values`, `times` over, into `total`, key by key."""
    for key, value in values.items():
        total[key] = total.get(key, 0.0) + times * value


class Work(Protocol):
    """A piece of work that was priced.

    Attributes:
        parts: owners of its nominal time on the main stream.
        evidence: its nominal seconds by kind of evidence.
        calls: its collectives.
    """

    @property
    def parts(self) -> Parts: ...
    @property
    def evidence(self) -> Parts: ...
    @property
    def calls(self) -> Calls: ...


@dataclass(frozen=True, slots=True)
class FlatLedger:
    """An account without nested ones, each piece of work once; the attributes are those of Ledger."""

    own: Parts
    owned: list[tuple[Work, float]]
    beside: list[tuple[Work, float]]

    def parts(self) -> Parts:
        """Owners of the main stream's nominal time; they sum to it."""
        total = dict(self.own)
        for work, times in self.owned:
            add_into(total, work.parts, times)
        return total

    def evidence(self) -> Parts:
        """Nominal seconds of all work, hidden or not, by kind of evidence."""
        total: Parts = {}
        for work, times in self.owned + self.beside:
            add_into(total, work.evidence, times)
        return total

    def calls(self) -> Calls:
        """All collectives."""
        total: Calls = {}
        for work, times in self.owned + self.beside:
            add_into(total, work.calls, times)
        return total


@dataclass(slots=True)
class Ledger:
    """An account of work.

    Attributes:
        own: seconds by owner that no piece of work carries, such as waits.
        owned: work on the main stream, whose time its parts own, and how often; accounts may be nested.
        beside: work that runs beside the main stream: it counts as evidence and calls, but owns no time.
    """

    own: Parts = field(default_factory=dict)
    owned: list[tuple[Work | Ledger, float]] = field(default_factory=list)
    beside: list[tuple[Work, float]] = field(default_factory=list)

    def add(self, work: Work | Ledger, times: float = 1.0) -> None:
        """Work on the main stream, `times` over."""
        self.owned.append((work, times))

    def give(self, part: str, seconds: float) -> None:
        """Time of the main stream that belongs to a part."""
        self.own[part] = self.own.get(part, 0.0) + seconds

    def mark(self) -> tuple[Parts, int, int]:
        """Where the account stands, for `since`."""
        return dict(self.own), len(self.owned), len(self.beside)

    def since(self, mark: tuple[Parts, int, int]) -> Ledger:
        """What was added after a mark."""
        own, owned, beside = mark
        more = {part: seconds - own.get(part, 0.0) for part, seconds in self.own.items()}
        return Ledger(more, self.owned[owned:], self.beside[beside:])

    def parts(self) -> Parts:
        """Owners of the main stream's nominal time; they sum to it."""
        return self.flat().parts()

    def flat(self) -> FlatLedger:
        """The nested accounts as one, equal pieces of work once."""
        own: Parts = {}
        owned: dict[int, tuple[Work, float]] = {}
        beside: dict[int, tuple[Work, float]] = {}
        self._collect(1.0, own, owned, beside)
        return FlatLedger(own, list(owned.values()), list(beside.values()))

    def _collect(
        self,
        times: float,
        own: Parts,
        owned: dict[int, tuple[Work, float]],
        beside: dict[int, tuple[Work, float]],
    ) -> None:
        add_into(own, self.own, times)
        for work, count in self.owned:
            if isinstance(work, Ledger):
                work._collect(times * count, own, owned, beside)
            else:
                _count(owned, work, times * count)
        for work, count in self.beside:
            _count(beside, work, times * count)


def _count(found: dict[int, tuple[Work, float]], work: Work, times: float) -> None:
    before = found.get(id(work))
    found[id(work)] = (work, times + (before[1] if before else 0.0))
