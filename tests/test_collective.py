"""Collective prices: measured curves, ring, tree and hierarchical algorithms, gloo's own ways."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmprof.extrapolate.collective import CollectivePrices
from llmprof.extrapolate.links import Route, flat_time_s, members_inside, transfer_s, wire_share
from llmprof.schema.catalogue import load_cluster
from llmprof.schema.cluster import Cluster, LinkLevel
from llmprof.schema.priors import LinkPrior, load_priors
from llmprof.schema.profile import CollectiveRow, Manifest, Profile

LINK = LinkLevel(name="wire", span=0, bandwidth_bytes_per_s=1e9, latency_s=1e-6)
PRIOR = LinkPrior(
    bandwidth_efficiency=0.5, ramp_bytes=0, base_latency_us=0, in_situ_us=0, spread=0.1, source="test"
)
KINDS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "send", "barrier")


def row(size_bytes: int, time_us: float, **changes: Any) -> CollectiveRow:
    values: dict[str, Any] = {
        "rank": 0,
        "kind": "all_reduce",
        "axis": "dp",
        "group_size": 2,
        "size_bytes": size_bytes,
        "dtype": "float32",
        "backend": "gloo",
        "count": 1.0,
        "time_us": time_us,
        "time_iqr_us": 0.0,
        "time_n": 3,
        "exposed_us": 0.0,
    }
    return CollectiveRow(**(values | changes))


def host_cluster() -> Cluster:
    link = LinkLevel(name="shared-memory", span=0, bandwidth_bytes_per_s=1e9, latency_s=1e-4)
    device = load_cluster("8xH200").device
    return Cluster(name="local", device=device, devices_per_node=2, links=(link,), backend="gloo")


def prices(*rows: CollectiveRow, same_device: bool = True, world: int = 2) -> CollectivePrices:
    profile = Profile(manifest=Manifest(world_size=world), collectives=rows)
    return CollectivePrices(profile, host_cluster(), same_device=same_device)


def catalogue(name: str = "8xH100-SXM") -> CollectivePrices:
    return CollectivePrices(Profile(manifest=Manifest()), load_cluster(name), same_device=False)


def test_ring_and_tree_by_hand() -> None:
    # large: 2 (n-1)/n S / (0.5 GB/s) + 6 steps; small: 2 log2(4) steps of the tree beat the ring's 6
    large = 100_000_000
    assert flat_time_s("all_reduce", large, 4, Route(LINK, PRIOR)) == pytest.approx(
        1.5 * large / 0.5e9 + 6e-6
    )
    assert flat_time_s("all_reduce", 8, 4, Route(LINK, PRIOR)) == pytest.approx(2 * 8 / 0.5e9 + 4e-6)
    assert flat_time_s("all_gather", large, 4, Route(LINK, PRIOR)) == pytest.approx(
        0.75 * large / 0.5e9 + 3e-6
    )
    assert flat_time_s("reduce_scatter", large, 4, Route(LINK, PRIOR)) == pytest.approx(
        0.75 * large / 0.5e9 + 3e-6
    )
    assert flat_time_s("broadcast", large, 4, Route(LINK, PRIOR)) == pytest.approx(large / 0.5e9 + 2e-6)
    assert flat_time_s("all_reduce", large, 1, Route(LINK, PRIOR)) == 0.0


def test_the_first_bytes_cost_twice_and_oversubscription_divides() -> None:
    ramp = LinkPrior(
        bandwidth_efficiency=1.0, ramp_bytes=1000, base_latency_us=0, in_situ_us=0, spread=0.1, source="test"
    )
    thin = LinkLevel(name="w", span=0, bandwidth_bytes_per_s=1e9, latency_s=0, oversubscription=4.0)
    assert transfer_s(500, Route(LINK, ramp)) == pytest.approx(1000 / 1e9)
    assert transfer_s(5000, Route(LINK, ramp)) == pytest.approx(6000 / 1e9)
    assert transfer_s(5000, Route(thin, ramp)) == pytest.approx(4 * 6000 / 1e9)


@pytest.mark.parametrize(
    ("group", "span", "level", "expected"),
    [(8, 8, 8, 8), (16, 64, 8, 2), (64, 64, 8, 8), (8, 64, 8, 1), (2, 16, 8, 1), (4, 8, 8, 4)],
)
def test_members_of_a_group_in_a_node(group: int, span: int, level: int, expected: int) -> None:
    assert members_inside(group, span, level) == expected


def test_levels_are_picked_by_span() -> None:
    table = catalogue()
    assert table.price("all_reduce", 10**8, 8, 8).family == "link:nvlink"
    assert table.price("all_reduce", 10**8, 8, 64).family == "link:infiniband"
    inside, across = table.price("all_reduce", 10**8, 8, 8), table.price("all_reduce", 10**8, 8, 64)
    assert across.time_s > 5 * inside.time_s
    assert inside.kind == across.kind == "assumed"


def test_hierarchical_all_reduce_by_hand() -> None:
    """64 GPUs in 8 nodes: reduce-scatter and all-gather inside, 1/8 of the message on each rail."""
    priors = load_priors()
    nvlink, fabric = load_cluster("8xH100-SXM").links
    inner, outer = priors.link("nccl", "nvlink"), priors.link("nccl", "infiniband")
    size = 800_000_000
    within = 2 * (7 * 1.9e-6 + transfer_s(7 / 8 * size, Route(nvlink, inner)))
    across = 14 * 4e-6 + transfer_s(2 * 7 / 8 * size / 8, Route(fabric, outer))
    expected = outer.base_latency_us * 1e-6 + within + across
    assert catalogue().price("all_reduce", size, 64, 64).time_s == pytest.approx(expected)
    flat = flat_time_s("all_reduce", size, 64, Route(fabric, outer))
    assert expected < flat


def test_all_to_all_sends_only_what_leaves_over_the_fabric() -> None:
    table = catalogue()
    fabric = load_cluster("8xH100-SXM").links[1]
    outer = load_priors().link("nccl", "infiniband")
    size = 100_000_000
    found = table.price("all_to_all", size, 16, 16).time_s
    assert found == pytest.approx(
        outer.base_latency_us * 1e-6 + transfer_s(size / 2, Route(fabric, outer)) + 4 * 4e-6
    )


def test_a_group_of_one_is_free() -> None:
    assert catalogue().price("all_reduce", 10**9, 1, 1).time_s == 0.0


def test_measured_curve_is_exact_at_its_sizes_and_logarithmic_between() -> None:
    table = prices(row(1000, 100.0), row(100_000, 1000.0))
    assert table.price("all_reduce", 1000, 2, 2).time_s == pytest.approx(100e-6)
    assert table.price("all_reduce", 100_000, 2, 2).time_s == pytest.approx(1000e-6)
    between = table.price("all_reduce", 10_000, 2, 2)
    assert between.time_s == pytest.approx((100e-6 * 1000e-6) ** 0.5)
    assert between.kind == "measured"
    assert table.price("all_reduce", 10, 2, 2).time_s == pytest.approx(100e-6), "latency does not shrink"
    assert table.price("all_reduce", 200_000, 2, 2).time_s == pytest.approx(2000e-6), "bandwidth stays"


def test_a_small_message_shows_no_rate() -> None:
    """The 160 bytes of a gradient norm take 8 ms, mostly waiting; 3 MB do not take 19,000 times as long."""
    norm = row(160, 8000.0)
    route = Route(host_cluster().links[0], load_priors().link("gloo"))
    alone = prices(norm).price("all_reduce", 3_000_000, 2, 2)
    assert alone.time_s == pytest.approx(8e-3 + transfer_s(3_000_000 - 160, route))
    assert alone.kind == "interpolated" and alone.spread >= 0.25
    scattered = prices(norm, row(1_000_000, 5000.0, kind="reduce_scatter"))
    found = scattered.price("all_reduce", 2_000_000, 2, 2)
    assert found.time_s == pytest.approx(10e-3), "gloo's reduce-scatter is an all-reduce"
    assert found.kind == "interpolated"
    assert scattered.price("all_reduce", 160, 2, 2).kind == "measured"


def test_rows_of_the_running_step_scale_the_sweep() -> None:
    """The sweep gives the form; at 100 kB the step took twice as long as the sweep says."""
    table = prices(row(1000, 100.0, in_situ=False), row(100_000, 1000.0, in_situ=False), row(100_000, 2000.0))
    assert table.price("all_reduce", 100_000, 2, 2).time_s == pytest.approx(2000e-6)
    assert table.price("all_reduce", 1000, 2, 2).time_s == pytest.approx(200e-6)


def test_a_sweep_alone_lacks_the_waiting_of_a_running_step() -> None:
    found = prices(row(1000, 100.0, in_situ=False)).price("all_reduce", 1000, 2, 2)
    assert found.kind == "interpolated"
    assert found.time_s == pytest.approx(100e-6 + load_priors().link("gloo").in_situ_us * 1e-6)
    assert found.spread >= 0.25


def test_an_unmeasured_kind_costs_what_its_ranks_send() -> None:
    table = prices(row(1_000_000, 1000.0), row(2_000_000, 2000.0))
    gathered = table.price("all_gather", 2_000_000, 2, 2)
    assert gathered.time_s == pytest.approx(1000e-6)
    assert gathered.kind == "interpolated"
    assert table.price("send", 2_000_000, 2, 2).time_s == pytest.approx(2000e-6)
    # four ranks send 2 x 3/4 of the message where two send 2 x 1/2
    assert table.price("all_reduce", 1_000_000, 4, 4).time_s == pytest.approx(1500e-6)


def test_gloo_reduce_scatter_is_an_all_reduce_unless_measured() -> None:
    unmeasured = prices(row(1_000_000, 1000.0))
    assert unmeasured.price("reduce_scatter", 1_000_000, 2, 2).time_s == pytest.approx(1000e-6)
    modelled = prices()
    assert (
        modelled.price("reduce_scatter", 10**6, 2, 2).time_s
        == modelled.price("all_reduce", 10**6, 2, 2).time_s
    )
    measured = prices(row(1_000_000, 1000.0), row(1_000_000, 700.0, kind="reduce_scatter"))
    assert measured.price("reduce_scatter", 1_000_000, 2, 2).time_s == pytest.approx(700e-6)
    nccl = catalogue()
    assert (
        nccl.price("reduce_scatter", 10**9, 8, 8).time_s < 0.6 * nccl.price("all_reduce", 10**9, 8, 8).time_s
    )


def test_other_machines_and_libraries_are_never_used() -> None:
    nothing = prices().price("all_reduce", 1000, 2, 2)
    assert prices(row(1000, 77.0), same_device=False).price("all_reduce", 1000, 2, 2) == nothing
    assert prices(row(1000, 77.0, backend="nccl")).price("all_reduce", 1000, 2, 2) == nothing
    assert prices(row(1000, 77.0, group_size=0)).price("all_reduce", 1000, 2, 2) == nothing
    assert nothing.kind == "assumed"
    assert prices().assumptions() and not prices(row(1000, 77.0)).assumptions()


def test_a_run_in_one_node_prices_that_link_level_only() -> None:
    cluster = load_cluster("8xH100-SXM")
    rows = (row(10**6, 50.0, backend="nccl", group_size=8),)
    profile = Profile(manifest=Manifest(world_size=8), collectives=rows)
    table = CollectivePrices(profile, cluster, same_device=True)
    assert table.price("all_reduce", 10**6, 8, 8).kind == "measured"
    assert table.price("all_reduce", 10**6, 8, 64).kind == "assumed"
    wide = Profile(manifest=Manifest(world_size=16), collectives=rows)
    ambiguous = CollectivePrices(wide, cluster, same_device=True)
    assert ambiguous.price("all_reduce", 10**6, 8, 8).kind == "assumed"


def test_wire_share() -> None:
    assert wire_share("all_reduce", 4) == 1.5
    assert wire_share("all_gather", 4) == 0.75
    assert wire_share("send", 2) == 1.0


@given(st.sampled_from(KINDS), st.integers(0, 2**34), st.sampled_from([2, 4, 8, 16, 64, 1024]))
def test_more_bytes_never_cost_less(kind: str, size_bytes: int, group: int) -> None:
    table = catalogue()
    small, large = (
        table.price(kind, size_bytes, group, group),
        table.price(kind, 2 * size_bytes, group, group),
    )
    assert 0 < small.time_s <= large.time_s + 1e-12
    if group <= 8:
        assert table.price(kind, size_bytes, group, group * 8).time_s > small.time_s, "leaving the node costs"
