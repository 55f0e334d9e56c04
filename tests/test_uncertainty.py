"""Shared factors, intervals, and what a spec-sheet estimate may claim; cost and energy by hand."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmprof.extrapolate.economics import economics_assumptions, step_cost, step_energy_j
from llmprof.extrapolate.uncertainty import Factors, Interval, interval, widen
from llmprof.schema.catalogue import load_cluster
from llmprof.schema.cluster import Price


def test_nominal_is_one_and_the_spread_is_that_of_the_logarithm() -> None:
    factor = Factors(draws=20_000).factor("matmul", 0.3)
    assert factor.shape == (20_001,)
    assert factor[0] == 1.0
    logs = np.log(factor[1:])
    assert abs(float(logs.mean())) < 0.01
    assert float(logs.std()) == pytest.approx(0.3, rel=0.03)


def test_a_factor_depends_on_its_name_and_seed_alone() -> None:
    one, other = Factors(seed=7), Factors(seed=7)
    other.factor("attention", 0.5)
    assert np.array_equal(one.factor("matmul", 0.2), other.factor("matmul", 0.2))
    assert not np.array_equal(one.factor("matmul", 0.2), one.factor("attention", 0.2))
    assert not np.array_equal(one.factor("matmul", 0.2), Factors(seed=8).factor("matmul", 0.2))


def test_shared_errors_do_not_cancel_but_independent_ones_do() -> None:
    factors = Factors(draws=5000)
    shared = sum(factors.factor("matmul", 0.2) for _ in range(100)) / 100
    single = sum(factors.factor(f"op{i}", 0.2) for i in range(100)) / 100
    averaged = factors.independent("op", 0.2, 100)
    assert float(np.std(np.log(np.asarray(shared)[1:]))) == pytest.approx(0.2, rel=0.1)
    assert float(np.std(np.log(np.asarray(single)[1:]))) == pytest.approx(0.02, rel=0.2)
    assert float(np.std(np.log(averaged[1:]))) == pytest.approx(0.02, rel=0.1)


def test_two_names_are_uncorrelated() -> None:
    factors = Factors(draws=20_000)
    assert abs(np.corrcoef(factors.normal("a")[1:], factors.normal("b")[1:])[0, 1]) < 0.03


def test_interval_covers_80_percent_around_the_nominal() -> None:
    values = 10.0 * Factors(draws=50_000).factor("x", 0.2)
    found = interval(values)
    assert found.p50 == 10.0
    # the 90 % quantile of a standard normal is 1.2816
    assert found.p90 == pytest.approx(10 * np.exp(1.2816 * 0.2), rel=0.02)
    assert found.p10 == pytest.approx(10 * np.exp(-1.2816 * 0.2), rel=0.02)


def test_no_draws_is_a_point() -> None:
    assert interval(np.array([3.0])) == Interval(3.0, 3.0, 3.0)


@given(st.lists(st.floats(0.1, 1e6), min_size=1, max_size=50))
def test_interval_is_ordered(values: list[float]) -> None:
    found = interval(np.array(values))
    assert found.p10 <= found.p50 <= found.p90


def test_mostly_assumed_is_at_least_half_wider_either_way() -> None:
    narrow = Interval(9.5, 10.0, 10.5)
    assert widen(narrow, 0.5) == narrow
    wide = widen(narrow, 0.51)
    assert (wide.p10, wide.p50, wide.p90) == (10 / 1.5, 10.0, 15.0)
    wider = Interval(1.0, 10.0, 100.0)
    assert widen(wider, 1.0) == wider


def test_cost_by_hand() -> None:
    price = Price(currency="EUR", per_device_hour=3.6, date="2025-01", source="a list")
    cluster = msgspec.structs.replace(load_cluster("8xH100-SXM"), price=price)
    # 8 devices x 2 s x 3.6 / 3600 s = 0.016; a million tokens a step
    found: dict[str, Any] | None = step_cost(cluster, gpus=8, step_time_s=2.0, tokens_per_step=1e6)
    assert found is not None
    assert found["currency"] == "EUR"
    assert found["per_step"] == pytest.approx(0.016)
    assert found["per_1e9_tokens"] == pytest.approx(16.0)
    assert any("2025-01" in line for line in economics_assumptions(cluster))


def test_no_price_is_none() -> None:
    assert step_cost(load_cluster("8xB200"), gpus=8, step_time_s=1.0, tokens_per_step=1.0) is None


def test_energy_is_power_times_time() -> None:
    cluster = load_cluster("8xH100-SXM")
    found = step_energy_j(cluster, gpus=16, step_time_s=Interval(1.0, 2.0, 3.0))
    assert found == {"p10": 11_200.0, "p50": 22_400.0, "p90": 33_600.0}
    unknown = msgspec.structs.replace(cluster, device=msgspec.structs.replace(cluster.device, power_w=None))
    assert step_energy_j(unknown, gpus=16, step_time_s=Interval(1.0, 2.0, 3.0)) is None
