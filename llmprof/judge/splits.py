"""Rows of an operator or collective table are split into those that are fitted and those that are scored."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Sequence
from hashlib import sha256
from math import isfinite
from typing import NamedTuple, TypeVar

from llmprof.errors import RequestError

KINDS = ("random", "smaller", "nodes")
FEWEST_IN_STRATUM = 20
"""Strata with fewer rows are reported apart."""
_Row = TypeVar("_Row")


class Fit(NamedTuple):
    """Which rows are fitted.

    Attributes:
        kind: "random" (a share of each stratum), "smaller" (the lower part by size) or "nodes" (at most so many nodes).
        amount: the share, or the number of nodes.
    """

    kind: str
    amount: float

    def __str__(self) -> str:
        """As it is typed."""
        return f"{self.kind}:{self.amount:g}"


class Split(NamedTuple):
    """Indices of rows: fitted, and scored."""

    fitted: tuple[int, ...]
    scored: tuple[int, ...]


def parse_fit(text: str) -> Fit:
    """Read "random:0.3", "smaller:0.5" or "nodes:1".

    Raises:
        RequestError: it is none of these.
    """
    kind, _, number = text.partition(":")
    try:
        amount = float(number)
    except ValueError:
        amount = float("nan")
    if kind not in KINDS:
        raise RequestError(
            f"--fit {text[:60]!r} is none of {', '.join(KINDS)}",
            hint="such as random:0.3, smaller:0.5, nodes:1",
        )
    if kind == "nodes" and not (isfinite(amount) and amount >= 1 and amount == int(amount)):
        raise RequestError(
            f"--fit {text[:60]!r} needs a whole number of nodes, 1 or more", hint="such as nodes:1"
        )
    if kind != "nodes" and not 0 < amount < 1:
        raise RequestError(f"--fit {text[:60]!r} needs a share between 0 and 1", hint=f"such as {kind}:0.3")
    return Fit(kind, amount)


def hash_order(row_id: str, seed: int) -> str:
    """What rows are sorted by for a random split: the same on every machine."""
    return sha256(f"{row_id}{seed}".encode()).hexdigest()


def split_rows(
    rows: Sequence[_Row],
    fit: Fit,
    *,
    stratum: Callable[[_Row], Hashable],
    row_id: Callable[[_Row], str],
    size: Callable[[_Row], float],
    nodes: Callable[[_Row], int] = lambda _: 1,
    seed: int = 0,
) -> Split:
    """Split rows inside each stratum.

    Args:
        size: FLOPs of a matmul, bytes of anything else.
        nodes: nodes that a collective spans.
        seed: of a random split; another for each repetition.
    """
    if fit.kind == "nodes":
        fitted = [i for i, row in enumerate(rows) if nodes(row) <= fit.amount]
    else:
        fitted = []
        for members in strata(rows, stratum).values():
            if fit.kind == "random":
                members = sorted(members, key=lambda i: hash_order(row_id(rows[i]), seed))
            else:
                members = sorted(members, key=lambda i: (size(rows[i]), row_id(rows[i])))
            fitted.extend(members[: round(fit.amount * len(members))])
    chosen = set(fitted)
    return Split(tuple(sorted(fitted)), tuple(i for i in range(len(rows)) if i not in chosen))


def strata(rows: Sequence[_Row], stratum: Callable[[_Row], Hashable]) -> dict[Hashable, list[int]]:
    """Indices of rows by stratum."""
    found: dict[Hashable, list[int]] = defaultdict(list)
    for i, row in enumerate(rows):
        found[stratum(row)].append(i)
    return dict(found)
