"""Equal lists of tensors traced at several (batch, sequence) sizes become tensors with polynomial dimensions."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from fractions import Fraction
from math import lcm

from llmprof.schema.workload import Dim, Poly

Point = tuple[int, int]
"""A traced (batch, sequence length)."""


def _terms(point: Point) -> tuple[int, ...]:
    """The monomials 1, b, s, bs, ss, bss at a point."""
    b, s = point
    return (1, b, s, b * s, s * s, b * s * s)


class DimFit:
    """Exact polynomials through values at given points, checked at the last point, which takes no part in the fit.

    The basis is as rich as the points allow: all six monomials when both sizes vary, those of one size
    when the other is held.

    Args:
        points: distinct (batch, seq); the last one is held out.
        divisors: the only denominators allowed (1, and the degree over which a dimension is sharded).
    """

    def __init__(self, points: Sequence[Point], *, divisors: Sequence[int] = (1,)) -> None:
        self.points = tuple(points)
        self._divisors = tuple(divisors)
        self._basis, self._inverse = _invertible_basis(self.points[:-1])
        self._cache: dict[tuple[int, ...], Dim | None] = {}

    def fit(self, values: Sequence[int]) -> Dim | None:
        """The dimension with these values at the points, or None when no allowed polynomial has them."""
        key = tuple(values)
        if key not in self._cache:
            self._cache[key] = self._solve(key)
        return self._cache[key]

    def _solve(self, values: tuple[int, ...]) -> Dim | None:
        if len(set(values)) == 1:
            return values[0]
        coefficients = [Fraction(0)] * 6
        for row, monomial in zip(self._inverse, self._basis, strict=True):
            coefficients[monomial] = sum((c * v for c, v in zip(row, values, strict=False)), Fraction(0))
        div = lcm(*(c.denominator for c in coefficients))
        if all(allowed % div for allowed in self._divisors):
            return None
        c, cb, cs, cbs, css, cbss = (int(value * div) for value in coefficients)
        poly = Poly(c, cb, cs, cbs, css, cbss, div)
        return poly if [poly.at(*point) for point in self.points] == list(values) else None


def choose_points(batch: int, seq: int, *, vary_seq: bool, step: int) -> tuple[Point, ...]:
    """Sizes to trace at: six for the fit and one held out; three and one when only the batch varies.

    Lengths are at most the captured one where that leaves enough of them (buffers such as position tables
    end there), and multiples of `step`. The held-out batch is 1, where a dimension of size one may take other paths.

    Args:
        batch, seq: captured sizes.
        vary_seq: False when the inputs have no sequence dimension.
        step: lengths must be multiples of it.
    """
    if not vary_seq:
        return tuple((b, seq) for b in (2, 3, 5, 1))
    lengths = _lengths(seq, step)
    if len(lengths) < 3:
        lengths = [step, 2 * step, 3 * step, 4 * step]
    fitted = tuple(itertools.product((2, 3), lengths[:3]))
    held = (1, lengths[3] if len(lengths) > 3 else lengths[1])
    return (*fitted, held)


def _lengths(seq: int, step: int) -> list[int]:
    candidates = [seq, seq // 2, seq * 3 // 4, seq // 4, seq * 5 // 8, seq * 7 // 8, seq // 8]
    rounded = [n // step * step for n in candidates]
    return list(dict.fromkeys(n for n in rounded if n >= max(step, 2)))


def _invertible_basis(points: Sequence[Point]) -> tuple[tuple[int, ...], list[list[Fraction]]]:
    """Monomials that the points can tell apart, and the inverse of their values: coefficients = inverse x values."""
    batches, lengths = len({b for b, _ in points}), len({s for _, s in points})
    preferred = {True: (0, 1, 2, 3, 4, 5), False: (0, 1)}[batches > 1 and lengths > 2]
    if batches == 1:
        preferred = (0, 2, 4)[: max(1, min(3, lengths))]
    rows = [[Fraction(_terms(p)[m]) for m in preferred] for p in points]
    chosen = _independent_rows(rows, len(preferred))
    inverse = _inverse([rows[i] for i in chosen])
    full = [[Fraction(0)] * len(points) for _ in preferred]
    for i, coefficients in enumerate(inverse):
        for j, value in zip(chosen, coefficients, strict=True):
            full[i][j] = value
    return preferred, full


def _independent_rows(rows: list[list[Fraction]], rank: int) -> list[int]:
    chosen: list[int] = []
    reduced: list[list[Fraction]] = []
    for index, row in enumerate(rows):
        rest = list(row)
        for pivot in reduced:
            lead = next(i for i, v in enumerate(pivot) if v)
            factor = rest[lead] / pivot[lead]
            rest = [a - factor * b for a, b in zip(rest, pivot, strict=True)]
        if any(rest):
            chosen.append(index)
            reduced.append(rest)
        if len(chosen) == rank:
            return chosen
    raise ValueError(f"{len(rows)} points have rank {len(chosen)}, but {rank} coefficients are wanted")


def _inverse(matrix: list[list[Fraction]]) -> list[list[Fraction]]:
    """Gauss-Jordan over fractions."""
    n = len(matrix)
    work = [[*row, *(Fraction(int(i == j)) for j in range(n))] for i, row in enumerate(matrix)]
    for column in range(n):
        pivot = next(i for i in range(column, n) if work[i][column])
        work[column], work[pivot] = work[pivot], work[column]
        work[column] = [v / work[column][column] for v in work[column]]
        for i in range(n):
            if i != column and work[i][column]:
                factor = work[i][column]
                work[i] = [a - factor * b for a, b in zip(work[i], work[column], strict=True)]
    return [row[n:] for row in work]
