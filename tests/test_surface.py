"""Prices of shapes that were not measured: sizes of a call, the fitted form, corrections from nearby, and all of it together."""

from __future__ import annotations

from math import log, log2

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmprof.extrapolate.curves import Work
from llmprof.extrapolate.features import Sizes, call_sizes, fill_features, row_features, tile_waste
from llmprof.extrapolate.kriging import Kriging, _surprise
from llmprof.extrapolate.saturation import Rows, fit_saturation
from llmprof.extrapolate.surface import Call, Surface, Timed
from llmprof.schema.devices import find_device
from llmprof.schema.operators import Tensor


def tensors(*shapes: tuple[int, ...]) -> tuple[Tensor, ...]:
    return tuple(Tensor(shape, "bfloat16") for shape in shapes)


@pytest.mark.parametrize(
    ("op", "family", "inputs", "kind", "sizes"),
    [
        ("aten::mm", "matmul", tensors((64, 128), (128, 32)), "product", (1, 64, 32, 128)),
        ("aten::addmm", "matmul", tensors((32,), (64, 128), (128, 32)), "product", (1, 64, 32, 128)),
        ("aten::linear", "matmul", tensors((2, 8, 128), (32, 128)), "product", (1, 16, 32, 128)),
        ("aten::bmm", "batched_matmul", tensors((6, 64, 128), (6, 128, 32)), "product", (6, 64, 32, 128)),
        ("aten::flash", "attention", tensors((2, 8, 256, 64), (2, 2, 512, 64)), "attention", (16, 4, 256, 512, 64)),
        ("aten::flash_backward", "attention", tensors(*[(2, 8, 256, 64)] * 5), "attention", (16, 16, 256, 256, 64)),
        ("aten::layer_norm", "normalization", tensors((4, 8, 256), (256,)), "other", (32, 256, 1, 256)),
        ("aten::relu", "elementwise", tensors((4, 256)), "other", (4, 256, 1, 1)),
        ("aten::sum", "reduction", (), "other", (1, 1, 1, 1)),
    ],
)  # fmt: skip
def test_sizes_of_a_call(
    op: str, family: str, inputs: tuple[Tensor, ...], kind: str, sizes: tuple[int, ...]
) -> None:
    found = call_sizes(family, op, inputs)
    assert found.kind == kind
    assert found.logs == pytest.approx([log2(size) for size in sizes])


def test_a_list_of_tensors_counts_elements_and_members() -> None:
    lists = tuple(Tensor((n,), "float32", group) for group in (1, 2) for n in (1000, 24))
    assert call_sizes("optimizer", "aten::_fused_adamw_", lists).logs == pytest.approx([10.0, 1.0, 0.0, 0.0])


def test_products_fill_compute_units_in_waves() -> None:
    # 1024 x 1024 in tiles of 128 x 128 is 64 tiles, of 256 x 128 32, of 64 x 64 256; on 60 units that are 2, 1 and 5 waves
    (row,) = fill_features(np.log2([[1, 1024, 1024, 96]]), 60)
    assert row[:3] == pytest.approx([3.5, 3.5, 2.5])  # 2^7 and more, 2^7 and more, 96 = 3 x 2^5
    assert row[3:] == pytest.approx([log2(120 / 64), log2(60 / 32), log2(300 / 256)])
    assert fill_features(np.log2([[1, 1024, 1024, 96]]), None).shape == (1, 3)


def test_rows_fill_vectors_and_powers_of_two() -> None:
    columns = np.log2([1024, 768, 33, 4095, 16384])
    found = row_features(np.stack([np.full(5, 12.0), columns], axis=1), alone=np.array([True] * 4 + [False]))
    assert found[:, 0].tolist() == [0, 0, 0, 4, 0]
    assert found[:, 1].tolist() == [1.5, 1.5, 0, 0, 0]
    assert found[:, 2] == pytest.approx([0, 2 * log2(1024 / 768), 2 * log2(64 / 33), 0, 0])


def made_up(count: int, seed: int = 0) -> tuple[Rows, np.ndarray]:
    """Products with a floor of 5 us, 100 TFLOP/s, 1 TB/s, half of the rate at m = 64."""
    logs = np.random.default_rng(seed).uniform(5, 13, (count, 3))
    m, n, k = np.exp2(logs).T
    rows = Rows(
        logs=logs, flops=2 * m * n * k, bytes=2 * (m * k + k * n), cached=np.zeros(count), waste=np.zeros(count),
        tensors=np.ones(count),
    )  # fmt: skip
    compute, memory = rows.flops / 1e14 * (1 + 64 / m), rows.bytes / 1e12
    return rows, 5e-6 + (compute**4 + memory**4) ** 0.25


def test_the_form_is_found_again_and_holds_for_larger_sizes() -> None:
    rows, times_s = made_up(200)
    form = fit_saturation(rows, times_s, by_flops=True)
    np.testing.assert_allclose(form.seconds(rows), times_s, rtol=0.05)
    larger = Rows(
        logs=np.array([[15.0, 15.0, 15.0]]),
        flops=np.array([2.0**46]),
        bytes=np.array([2.0**32]),
        cached=np.zeros(1),
        waste=np.zeros(1),
        tensors=np.ones(1),
    )
    assert form.seconds(larger)[0] == pytest.approx(2.0**46 / 1e14 * (1 + 64 / 2**15), rel=0.05)


def test_traffic_beyond_the_cache_is_slower() -> None:
    bytes_ = np.geomspace(1e6, 1e9, 60)
    cached = 1 / (1 + np.square(bytes_ / 40e6))
    rows = Rows(
        logs=np.zeros((60, 1)), flops=np.ones(60), bytes=bytes_, cached=cached, waste=np.zeros(60), tensors=np.ones(60),
    )  # fmt: skip
    times_s = 2e-6 + bytes_ / 1e12 * (1 - (1 - 1 / 1.5) * cached)
    form = fit_saturation(rows, times_s, by_flops=False)
    np.testing.assert_allclose(form.seconds(rows), times_s, rtol=0.02)
    assert np.exp(form.parameters[3]) == pytest.approx(1.5, rel=0.15)


def test_kriging_meets_its_rows_returns_to_the_middle_and_knows_less_far_away() -> None:
    points = np.linspace(0, 8, 33)[:, None]
    values = 0.2 * np.sin(points[:, 0])
    found = Kriging(points, values)
    np.testing.assert_allclose(found.look(points).values, values, atol=0.03)
    assert found.look(np.array([[4.1]])).values[0] == pytest.approx(0.2 * np.sin(4.1), abs=0.03)
    look = found.look(np.array([[4.01], [500.0]]))
    assert look.values[1] == pytest.approx(np.median(values), abs=1e-6)
    assert look.spreads[0] < 0.25 * look.spreads[1]
    assert points[look.nearest[0, :2], 0].tolist() == [4.0, 4.25]


def test_an_exact_covariance_by_hand() -> None:
    # two rows: with covariance a of each with itself, e with the other, the weights solve (a + noise) w1 + e w2 = y1, ...
    found = Kriging(np.array([[0.0], [1.0]]), np.array([-0.1, 0.1]))
    (length,), smooth, rough, noise = found._choice
    distance = 1 / found._unit[0] / length
    e = smooth * np.exp(-0.5 * distance**2) + rough * np.exp(-2 * distance)
    weight = 0.1 / (smooth + rough + noise - e)
    assert found.look(np.array([[1.0]])).values[0] == pytest.approx(weight * (smooth + rough - e), rel=1e-4)


def test_slope_of_the_likelihood_is_its_difference() -> None:
    rng = np.random.default_rng(1)
    points, values = rng.normal(size=(20, 3)), rng.normal(size=20) * 0.1
    place = np.array([0.5, 1.0, 0.2, -3.0, -4.0, -6.0])
    _, slope = _surprise(points, values, place)
    for i, step in enumerate(1e-5 * np.eye(len(place))):
        ahead, behind = (_surprise(points, values, place + s)[0] for s in (step, -step))
        assert slope[i] == pytest.approx((ahead - behind) / 2e-5, rel=1e-4, abs=1e-6)


def test_most_of_made_up_rows_lie_in_their_intervals() -> None:
    """80 % intervals of rows left out of noisy ones hold about 80 % of them."""
    rng = np.random.default_rng(2)
    points = rng.uniform(0, 6, (300, 2))
    values = 0.3 * np.sin(points[:, 0]) + 0.05 * rng.normal(size=300)
    look = Kriging(points[:150], values[:150]).look(points[150:])
    inside = np.abs(look.values - values[150:]) <= 1.2816 * look.spreads
    assert 0.7 < inside.mean() < 0.9


def test_tiles_waste_what_the_last_wave_leaves_idle() -> None:
    # 10 x 10 tiles of 128 x 128 are one full wave of 100 units, one more row starts a second one
    full, over = tile_waste(np.log2([[1, 1280, 1280, 64], [1, 1281, 1280, 64]]), 100)
    assert full <= 0.0
    assert over > full + log(1.2)
    assert tile_waste(np.log2([[1, 1281, 1280, 64]]), None).tolist() == [0.0]


def surface(count: int = 60) -> tuple[Surface, Rows, np.ndarray, list[Call]]:
    rows, times_s = made_up(count)
    calls = [
        Call(Sizes("product", (0.0, *logs)), frozenset(), Work(int(f), int(b)))
        for logs, f, b in zip(rows.logs, rows.flops, rows.bytes, strict=True)
    ]
    timed = [
        Timed(call, float(t), f"row {i}") for i, (call, t) in enumerate(zip(calls, times_s, strict=True))
    ]
    return Surface(timed, by_flops=True, device=find_device("A100-SXM4-80GB")), rows, times_s, calls


def test_rows_are_met_and_name_themselves() -> None:
    found, _, times_s, calls = surface()
    together = found.estimates(calls)
    alone = found.estimate(calls[3])  # one product of matrices or many: the last bit may differ
    assert together[3].time_s == pytest.approx(alone.time_s, rel=1e-12)
    assert together[3].spread == pytest.approx(alone.spread, rel=1e-9) and together[3].rows == alone.rows
    np.testing.assert_allclose([e.time_s for e in together], times_s, rtol=0.1)
    assert together[3].rows[0] == "row 3"


def test_far_outside_the_rows_the_spread_grows() -> None:
    found, _, _, calls = surface()
    huge = Call(Sizes("product", (0.0, 20.0, 20.0, 20.0)), frozenset(), Work(2**61, 2**42))
    assert found.estimate(huge).spread > 2 * found.estimate(calls[0]).spread


def test_equal_sizes_leave_the_form_alone() -> None:
    call = Call(Sizes("other", (4.0, 4.0, 0.0, 0.0)), frozenset(), Work(0, 1024))
    found = Surface([Timed(call, t, "row") for t in (1e-6, 2e-6, 3e-6)], by_flops=False)
    assert found.estimate(call).time_s == pytest.approx(2e-6, rel=0.15)


@settings(deadline=None, max_examples=25)
@given(
    rows=st.lists(
        st.tuples(st.floats(0, 16), st.floats(0, 16), st.sampled_from(["", "causal"]), st.floats(1e-7, 10.0)),
        min_size=1,
        max_size=20,
    ),
    asked=st.tuples(st.floats(0, 24), st.floats(0, 24)),
)
def test_any_rows_give_finite_times(
    rows: list[tuple[float, float, str, float]], asked: tuple[float, float]
) -> None:
    def call(a: float, b: float, said: str = "") -> Call:
        attributes = frozenset({said} if said else ())
        return Call(Sizes("other", (a, b, 0.0, 0.0)), attributes, Work(0, int(2 ** (a + b))))

    found = Surface([Timed(call(a, b, said), t, "row") for a, b, said, t in rows], by_flops=False)
    price = found.estimate(call(*asked))
    assert 0 < price.time_s < np.inf and 0.005 <= price.spread <= 1.2
