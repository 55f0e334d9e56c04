"""Polynomials in batch and sequence are exact or refused, never rounded."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmprof.hooks.fit import DimFit, choose_points
from llmprof.schema.workload import Poly, dim_at

POINTS = choose_points(4, 64, vary_seq=True, step=8)
coefficients = st.integers(0, 50)


def test_points_are_distinct_and_within_the_captured_length() -> None:
    assert POINTS == ((2, 64), (2, 32), (2, 48), (3, 64), (3, 32), (3, 48), (1, 16))
    assert choose_points(4, 1, vary_seq=False, step=8) == ((2, 1), (3, 1), (5, 1), (1, 1))


@given(st.tuples(*[coefficients] * 6))
def test_every_integer_polynomial_is_found_again(values: tuple[int, int, int, int, int, int]) -> None:
    poly = Poly(*values)
    dim = DimFit(POINTS).fit([poly.at(*p) for p in POINTS])
    assert dim is not None
    assert [dim_at(dim, b, s) for b in (1, 7, 11) for s in (8, 40, 4096)] == [
        poly.at(b, s) for b in (1, 7, 11) for s in (8, 40, 4096)
    ]


def test_constants_stay_integers() -> None:
    assert DimFit(POINTS).fit([7] * 7) == 7


@given(st.integers(1, 6), st.integers(1, 5))
def test_a_wrong_value_at_any_point_is_no_polynomial(place: int, error: int) -> None:
    values = [b * s for b, s in POINTS]
    values[place] += error
    found = DimFit(POINTS).fit(values)
    assert found is None or [dim_at(found, b, s) for b, s in POINTS] == values
    values = [b * s for b, s in POINTS]
    values[-1] += error  # the held-out point takes no part in the fit, so nothing can make up for it
    assert DimFit(POINTS).fit(values) is None


def test_sharded_sequence_is_divided_only_by_allowed_degrees() -> None:
    values = [s // 8 for _, s in POINTS]
    assert DimFit(POINTS, divisors=(1, 8)).fit(values) == Poly(cs=1, div=8)
    assert DimFit(POINTS, divisors=(1, 4)).fit(values) is None
    assert Poly(cs=1, div=8).at(1, 65) == 9  # the first rank holds the larger share


def test_batch_only_and_single_points() -> None:
    batches = choose_points(4, 1, vary_seq=False, step=1)
    assert DimFit(batches).fit([3 * b + 1 for b, _ in batches]) == Poly(c=1, cb=3)
    assert DimFit(batches).fit([b * b for b, _ in batches]) is None
    assert DimFit(((4, 64), (4, 64))).fit([5, 5]) == 5


def test_too_few_points_are_refused() -> None:
    with pytest.raises(ValueError, match="rank"):
        DimFit(((2, 8), (2, 8), (3, 16), (3, 24), (2, 8)))
