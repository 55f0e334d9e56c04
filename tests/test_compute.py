"""Operator prices: exact rows, interpolation, roofline, and what may not price another device."""

from __future__ import annotations

from math import log
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmprof.errors import ClusterError
from llmprof.extrapolate.compute import OperatorPrices, is_same_device
from llmprof.extrapolate.curves import STRANGER_SPREAD, Roofline, fit_roofline
from llmprof.extrapolate.measured import step_drift
from llmprof.extrapolate.peaks import peak_flops
from llmprof.schema.catalogue import load_cluster
from llmprof.schema.cluster import Device
from llmprof.schema.operators import Tensor, bytes_moved, family, flops, format_shapes
from llmprof.schema.priors import load_priors
from llmprof.schema.profile import HostRow, Manifest, OperatorRow, Profile, SourceRow, StepRow

F32 = "float32"
CPU = Device(
    name="A CPU (1 thread)",
    kind="cpu",
    aliases=("A CPU",),
    peak_flops={F32: 50e9},
    memory_bytes=10**10,
    usable_memory_bytes=9 * 10**9,
    bandwidth_bytes_per_s=10e9,
)
SOURCE = SourceRow(
    rank=0, hostname="h", device="cpu", device_name="A CPU", device_count=1, threads=1,
    memory_bytes=10**10, backend="gloo", clock="", software="",
)  # fmt: skip


def t(*shape: int, dtype: str = F32) -> Tensor:
    return Tensor(shape, dtype)


def row(op: str, inputs: tuple[Tensor, ...], time_us: float, **changes: Any) -> OperatorRow:
    values: dict[str, Any] = {
        "rank": 0,
        "op": op,
        "family": family(op),
        "module": "",
        "phase": "forward",
        "shapes": format_shapes(inputs),
        "dtype": inputs[0].dtype if inputs else F32,
        "device": "cpu",
        "count": 1.0,
        "time_us": time_us,
        "time_iqr_us": 0.0,
        "time_n": 5,
        "exclusive_us": time_us,
        "flops": flops(op, inputs),
        "bytes": bytes_moved(op, inputs),
    }
    return OperatorRow(**(values | changes))


def prices(*rows: OperatorRow, same_device: bool = True, host: tuple[HostRow, ...] = ()) -> OperatorPrices:
    profile = Profile(manifest=Manifest(), operators=rows, sources=(SOURCE,), host=host)
    return OperatorPrices(profile, CPU, same_device=same_device)


def mm_inputs(m: int, k: int, n: int) -> tuple[Tensor, Tensor]:
    return t(m, k), t(k, n)


def test_a_measured_shape_is_its_row() -> None:
    inputs = mm_inputs(64, 32, 16)
    found = prices(row("aten::mm", inputs, 120.0, time_iqr_us=13.49)).price("aten::mm", inputs)
    assert found.time_s == pytest.approx(120e-6)
    assert found.kind == "measured"
    assert found.family == "matmul"
    # an IQR of 13.49 us is a standard deviation of 10 us; the median of 5 calls, and 2 % of drift
    assert found.spread == pytest.approx(((1.2533 * 10 / 120) ** 2 / 5 + 0.02**2) ** 0.5)
    assert found.neighbours == ("aten::mm 64x32,32x16 float32",)


def test_rows_of_other_modules_are_averaged_by_count() -> None:
    inputs = mm_inputs(64, 32, 16)
    found = prices(
        row("aten::mm", inputs, 100.0, count=3, module="a"),
        row("aten::mm", inputs, 200.0, count=1, module="b"),
    ).price("aten::mm", inputs)
    assert found.time_s == pytest.approx((3 * 100 + 200) / 4 * 1e-6)
    # they disagree by ln(100/125) and ln(200/125); the mean of two is known half as badly
    apart = (log(100 / 125) ** 2 + log(200 / 125) ** 2) / 4
    assert found.spread == pytest.approx((apart + 0.02**2) ** 0.5)


def test_a_call_that_waited_for_the_machine_is_pulled_in() -> None:
    inputs = mm_inputs(64, 32, 16)
    rows = [row("aten::mm", inputs, us, module=str(us)) for us in (100.0, 101.0, 102.0, 5000.0)]
    found = prices(*rows).price("aten::mm", inputs)
    assert found.time_s == pytest.approx((100 + 101 + 102 + 3 * 101) / 4 * 1e-6)


def test_a_family_is_as_good_as_its_worst_strangers() -> None:
    """Each operator is exact for itself, but they differ by a factor 4: another one is known no better."""
    rows = [
        row(op, (t(n), t(n)), n * speed)
        for op, speed in (("aten::mul", 0.001), ("aten::sub", 0.004))
        for n in (1000, 2000, 4000)
    ]
    table = prices(*rows)
    assert table.price("aten::mul", (t(3000), t(3000))).spread < 0.1
    assert table.price("aten::maximum", (t(3000), t(3000))).spread == pytest.approx(1.2)


def test_drift_of_the_steps_is_shared_by_every_measured_price() -> None:
    steps = tuple(
        StepRow(rank=0, step=i, start_us=0, duration_us=us)
        for i, us in enumerate((90.0, 90.0, 100.0, 110.0, 110.0))
    )
    profile = Profile(manifest=Manifest(), steps=steps)
    # the quartiles are 90 and 110: an IQR of 20 % is a standard deviation of 20 / 1.349 %
    assert step_drift(profile) == pytest.approx(0.2 / 1.349)
    assert step_drift(Profile(manifest=Manifest(), steps=steps[:3])) == 0.02


def test_attributes_and_dtype_are_part_of_the_key() -> None:
    query = (t(1, 2, 8, 4),) * 3
    op = "aten::_scaled_dot_product_flash_attention_for_cpu"
    table = prices(row(op, query, 50.0, attributes="causal"))
    assert table.price(op, query, attributes=frozenset({"causal"})).kind == "measured"
    assert table.price(op, query).kind == "interpolated"
    half = tuple(x._replace(dtype="bfloat16") for x in query)
    assert table.price(op, half, attributes=frozenset({"causal"})).kind == "assumed"


def test_in_place_form_stands_in_for_out_of_place() -> None:
    inputs = (t(10), t(10))
    table = prices(row("aten::add_", inputs, 5.0))
    assert table.price("aten::add", inputs).time_s == pytest.approx(5e-6)
    assert table.price("aten::add_", inputs).kind == "measured"


def test_interpolation_keeps_a_constant_efficiency() -> None:
    """10 GFLOP/s at every measured size is about 10 GFLOP/s between and outside them."""
    rows = [row("aten::mm", mm_inputs(n, n, n), 2 * n**3 / 10e9 * 1e6) for n in (64, 128, 256)]
    table = prices(*rows)
    for n in (100, 200, 512):
        found = table.price("aten::mm", mm_inputs(n, n, n))
        assert found.kind == "interpolated"
        assert found.time_s == pytest.approx(2 * n**3 / 10e9, rel=0.15)
    assert (
        table.price("aten::mm", mm_inputs(1024, 1024, 1024)).spread
        > table.price("aten::mm", mm_inputs(200, 200, 200)).spread
    )


def test_sizes_beyond_the_measured_ones_follow_the_fitted_roofline() -> None:
    """Small matmuls are mostly floor: 20 us + flops at 10 GFLOP/s. A flat efficiency would be off by a third at 512 times the work."""

    def time_s(n: int) -> float:
        return 20e-6 + 2 * n**3 / 10e9

    rows = [row("aten::mm", mm_inputs(n, n, n), time_s(n) * 1e6) for n in (12, 16, 24, 32, 40, 48, 64)]
    found = prices(*rows).price("aten::mm", mm_inputs(512, 512, 512))
    assert found.time_s == pytest.approx(time_s(512), rel=0.1)
    flat_efficiency = time_s(64) * 8**3
    assert flat_efficiency > 1.3 * time_s(512)


def test_roofline_fit_finds_floor_and_both_rates() -> None:
    flops = np.array([1e3, 1e6, 1e9, 1e10, 1e3, 1e3, 1e3])
    moved = np.array([1e2, 1e3, 1e4, 1e5, 1e8, 1e9, 1e2])
    truth = Roofline(1e-5, 1e10, 1e9)
    found = fit_roofline(flops, moved, truth.at(flops, moved), by_flops=True)
    assert found.floor_s == pytest.approx(1e-5, rel=0.05)
    assert found.flops_per_s == pytest.approx(1e10, rel=0.05)
    assert found.bytes_per_s == pytest.approx(1e9, rel=0.05)


def test_interpolation_lies_between_its_neighbours_efficiencies() -> None:
    rows = [
        row("aten::mm", mm_inputs(64, 64, 64), 2 * 64**3 / 5e9 * 1e6),
        row("aten::mm", mm_inputs(256, 256, 256), 2 * 256**3 / 20e9 * 1e6),
    ]
    found = prices(*rows).price("aten::mm", mm_inputs(128, 128, 128))
    assert 5e9 < 2 * 128**3 / found.time_s < 20e9


def test_another_operator_of_the_family_is_the_next_best() -> None:
    table = prices(row("aten::mul", (t(1000), t(1000)), 12.0))
    found = table.price("aten::add", (t(2000), t(2000)))
    assert found.kind == "interpolated"
    assert found.time_s == pytest.approx(24e-6)
    assert found.spread == pytest.approx(STRANGER_SPREAD + 0.08), "one octave outside, and another operator"


def test_nothing_is_shorter_than_the_shortest_measured_operator() -> None:
    table = prices(row("aten::mul", (t(1000000), t(1000000)), 1000.0), row("aten::neg", (t(4),), 9.5))
    assert table.price("aten::mul", (t(2), t(2))).time_s == pytest.approx(9.5e-6)


def test_spread_of_interpolation_is_the_leave_one_out_error() -> None:
    even = [row("aten::mm", mm_inputs(n, n, n), 2 * n**3 / 10e9 * 1e6) for n in (64, 96, 128, 192)]
    uneven = [row("aten::mm", mm_inputs(n, n, n), 2 * n**3 / 10e9 * 1e6 * f) for n, f in
              ((64, 1.0), (96, 2.0), (128, 1.0), (192, 2.0))]  # fmt: skip
    inputs = mm_inputs(100, 100, 100)
    assert prices(*even).price("aten::mm", inputs).spread < 0.1
    assert 0.2 < prices(*uneven).price("aten::mm", inputs).spread < 1.0


def test_roofline_by_hand() -> None:
    """Nothing measured: floor + the slower of 2mnk / (e peak) and bytes / (e bandwidth)."""
    priors = load_priors()
    device = load_cluster("8xH100-SXM").device
    table = OperatorPrices(Profile(manifest=Manifest()), device, same_device=False, tables=False)
    n = 8192
    inputs = t(n, n, dtype="bfloat16"), t(n, n, dtype="bfloat16")
    found = table.price("aten::mm", inputs, (t(n, n, dtype="bfloat16"),))
    assert found.kind == "assumed" and found.neighbours == ()
    assert found.time_s == pytest.approx(3e-6 + 2 * n**3 / (0.77 * 989.4e12))
    copy = table.price("aten::copy_", (t(n, n),), (t(n, n),))
    prior = priors.family("copy")
    assert copy.time_s == pytest.approx(3e-6 + 2 * 4 * n * n / (prior.bandwidth_efficiency * 3.35e12))
    thin = table.price("aten::mm", (t(1, n, dtype="bfloat16"), t(n, n, dtype="bfloat16")))
    assert thin.time_s > 3e-6 + 2 * n * n / (0.77 * 989.4e12) * 10, "a thin matmul is bound by memory"


def test_rows_of_another_device_are_never_used() -> None:
    inputs = mm_inputs(64, 32, 16)
    measured = row("aten::mm", inputs, 120.0)
    elsewhere = prices(measured, same_device=False).price("aten::mm", inputs)
    nowhere = prices(same_device=False).price("aten::mm", inputs)
    assert elsewhere == nowhere
    assert elsewhere.kind == "assumed"


def test_views_take_host_time_only() -> None:
    gap = HostRow(rank=0, name="dispatch_us_per_operator", value=4.0, iqr=1.0, n=100)
    view = row("aten::view", (t(4, 4),), 2.0)
    found = prices(view, host=(gap,)).price("aten::view", (t(100, 100),))
    assert found.time_s == 0.0
    assert found.host_s == pytest.approx(6e-6)
    assert found.kind == "measured"
    unseen = prices(view, host=(gap,)).price("aten::transpose", (t(100, 100),))
    assert unseen.host_s == pytest.approx(6e-6)
    gpu = OperatorPrices(Profile(manifest=Manifest()), load_cluster("8xH200").device, same_device=False)
    assert gpu.price("aten::view", (t(4),)).host_s == pytest.approx(2e-6)
    assert gpu.price("aten::mul", (t(4),)).host_s == pytest.approx(load_priors().launch_us * 1e-6)


def test_a_gpu_is_launched_in_the_measured_host_time_of_the_operator() -> None:
    device = load_cluster("8xH200").device
    rows = (
        row("aten::mul", (t(4),), 5.0, host_us=6.0, count=3),
        row("aten::view", (t(4),), 1.0, host_us=2.0),
    )
    profile = Profile(manifest=Manifest(), operators=rows)
    table = OperatorPrices(profile, device, same_device=True)
    assert table.price("aten::mul", (t(4),)).host_s == pytest.approx(6e-6)
    assert table.price("aten::view", (t(4),)).host_s == pytest.approx(2e-6)
    assert table.price("aten::add", (t(4),)).host_s == pytest.approx(5e-6), "the mean over all calls"
    elsewhere = OperatorPrices(profile, device, same_device=False)
    assert elsewhere.price("aten::mul", (t(4),)).host_s == pytest.approx(load_priors().launch_us * 1e-6)


def test_host_time_is_measured_on_the_same_device_only() -> None:
    gaps = tuple(
        HostRow(rank=r, name="dispatch_us_per_operator", value=v, iqr=0.0, n=1)
        for r, v in ((0, 4.0), (1, 6.0))
    )
    assert prices(host=gaps).host_us() == pytest.approx(5.0)
    assert prices(host=gaps).host_kind() == "measured"
    elsewhere = prices(host=gaps, same_device=False)
    assert elsewhere.host_kind() == "assumed"
    assert any("host time" in line for line in elsewhere.assumptions())


def test_an_operator_without_shapes_is_not_called_measured() -> None:
    found = prices(row("aten::zeros", (), 3.0)).price("aten::zeros", (), (t(10, 10),))
    assert found.kind == "interpolated"
    assert found.time_s == pytest.approx(3e-6)


def test_same_device_needs_kind_and_name() -> None:
    profile = Profile(manifest=Manifest(), sources=(SOURCE,))
    assert is_same_device(profile, CPU)
    assert not is_same_device(profile, load_cluster("8xH200").device)
    assert not is_same_device(Profile(manifest=Manifest()), CPU)


def test_peak_of_an_unlisted_dtype() -> None:
    a100 = load_cluster("8xA100-80GB").device
    assert peak_flops(a100, "float8") == 312e12
    assert peak_flops(a100, "int64") == a100.peak_flops["float32"]
    nothing = Device(
        name="x", kind="cpu", peak_flops={}, memory_bytes=1, usable_memory_bytes=1, bandwidth_bytes_per_s=1
    )
    with pytest.raises(ClusterError, match="lists no peak"):
        peak_flops(nothing, "float32")


sizes = st.integers(1, 2048)


@settings(deadline=None)
@given(
    st.lists(st.tuples(sizes, sizes, sizes, st.floats(0.5, 1e6)), min_size=1, max_size=12),
    sizes,
    sizes,
    sizes,
)
def test_any_rows_give_a_finite_positive_price(
    measured: list[tuple[int, int, int, float]], m: int, k: int, n: int
) -> None:
    table = prices(*(row("aten::mm", mm_inputs(a, b, c), time) for a, b, c, time in measured))
    found = table.price("aten::mm", mm_inputs(m, k, n))
    floor = min(time for *_, time in measured) * 1e-6
    assert 0 < found.spread < 2
    assert floor * (1 - 1e-9) <= found.time_s < 1e6


def test_shapes_of_a_hostile_run_are_passed_over() -> None:
    texts = ("x", "1x", "[2x3", "4x4", "", "-1x3,3x2", f"{10**30}x2,2x2", f"2x2,2x{10**18}")
    good = [row("aten::mm", mm_inputs(n, n, n), 5.0 + n) for n in (12, 16, 24, 32, 40, 48, 64)]
    bad = [msgspec.structs.replace(good[0], shapes=text) for text in texts]
    found = prices(*good, *bad).price("aten::mm", mm_inputs(50, 50, 50))
    assert found.kind == "interpolated" and 0 < found.time_s < 1 and found.spread <= 1.2
    alone = prices(*bad).price("aten::mm", mm_inputs(50, 50, 50))
    assert 0 < alone.time_s < 1


@pytest.mark.parametrize(
    "cells",
    [
        {"time_us": 1e300},
        {"time_us": float("inf")},
        {"time_us": float("nan")},
        {"time_us": 1e-300},
        {"flops": 10**400},
        {"flops": -5},
        {"bytes": 10**30},
    ],
)
def test_measurements_that_cannot_be_are_passed_over(cells: dict[str, Any]) -> None:
    good = [row("aten::mm", mm_inputs(n, n, n), 5.0 + n) for n in (12, 16, 24, 32, 40, 48, 64)]
    bad = [msgspec.structs.replace(one, **cells) for one in good]
    asked = mm_inputs(50, 50, 50)
    assert prices(*good[:-1], bad[-1]).price("aten::mm", asked) == prices(*good[:-1]).price("aten::mm", asked)
    assert prices(*bad).price("aten::mm", asked).kind == "assumed"
