"""Prices from calls on known link levels: fitted algorithms, corrections nearby, groups and kinds that were not measured."""

from __future__ import annotations

import pytest

from llmprof.extrapolate.collective import CollectivePrices
from llmprof.extrapolate.links import LinkModel
from llmprof.extrapolate.sweep import Measured, Message, Sweep
from llmprof.schema.cluster import Cluster, LinkLevel
from llmprof.schema.priors import load_priors
from llmprof.schema.profile import CollectiveRow, Manifest, Profile
from tests.workloads import gpu_cluster

SIZES = [1 << n for n in range(10, 31, 2)]


def cluster(*, bandwidth: float = 1.0, latency: float = 1.0) -> Cluster:
    """Nodes of eight devices; the rates of the network are scaled."""
    inner = LinkLevel(name="nvlink", span=8, bandwidth_bytes_per_s=300e9, latency_s=2e-6)
    outer = LinkLevel(
        name="network", span=0, bandwidth_bytes_per_s=25e9 * bandwidth, latency_s=5e-6 * latency
    )
    device = gpu_cluster().device
    return Cluster(name="made up", device=device, devices_per_node=8, links=(inner, outer), backend="nccl")


def model(**scales: float) -> LinkModel:
    return LinkModel.of(cluster(**scales), load_priors())


def calls(truth: LinkModel, *groups: tuple[str, int, int]) -> list[Measured]:
    messages = [Message(kind, size, ranks, span) for kind, ranks, span in groups for size in SIZES]
    return [Measured(m, truth.seconds(*m)) for m in messages]


def test_rates_of_a_level_are_found_and_carried_to_other_groups_and_kinds() -> None:
    truth = model(bandwidth=0.5, latency=3.0)
    sweep = Sweep(calls(truth, ("all_reduce", 16, 16), ("all_reduce", 32, 32)), model())
    for message in (
        Message("all_reduce", 3 << 20, 16, 16),
        Message("all_reduce", 100 << 20, 64, 64),
        Message("all_gather", 1 << 28, 32, 32),
    ):
        found = sweep.estimate(message)
        assert found is not None
        assert found.time_s == pytest.approx(truth.seconds(*message), rel=0.15)
    near, far, other = (
        sweep.estimate(Message(kind, 1 << 26, ranks, ranks))
        for kind, ranks in (("all_reduce", 32), ("all_reduce", 512), ("all_gather", 32))
    )
    assert near and far and other and near.spread < other.spread
    assert far.spread > 0.4 > near.spread


def test_levels_without_rows_are_not_priced_by_others() -> None:
    sweep = Sweep(calls(model(), ("all_reduce", 8, 8)), model())
    assert sweep.levels == ("nvlink",)
    assert sweep.estimate(Message("all_reduce", 1 << 20, 16, 16)) is None
    few = [Measured(Message("all_reduce", 1 << 20, 8, 8), 1e-3)] * 3
    assert Sweep(few, model()).levels == ()


def test_pairs_alone_leave_open_whether_members_of_a_node_share_an_adapter() -> None:
    truth = model()
    pairs = Sweep(calls(truth, ("all_reduce", 2, 16)), truth)
    groups = Sweep(calls(truth, ("all_reduce", 2, 16), ("all_reduce", 16, 16)), truth)
    asked = Message("all_reduce", 1 << 30, 16, 16)
    lone, known = pairs.estimate(asked), groups.estimate(asked)
    assert lone and known
    assert known.time_s == pytest.approx(truth.seconds(*asked), rel=0.1)
    # eight members: between as fast and eight times slower lies the square root, for the part on the network
    inside = 2 * 7 / 8 * (1 << 30) / 300e9
    assert 1.5 * known.time_s < lone.time_s < 8**0.5 * known.time_s + inside
    assert lone.spread > known.spread + 0.9


def test_captured_rows_with_spans_price_their_levels() -> None:
    truth, here = model(bandwidth=0.5), cluster()
    rows = tuple(
        CollectiveRow(
            rank=0,
            kind=call.message.kind,
            axis="dp",
            group_size=call.message.group_size,
            size_bytes=call.message.size_bytes,
            dtype="bfloat16",
            backend="nccl",
            count=1.0,
            time_us=call.time_s * 1e6,
            time_iqr_us=0.0,
            time_n=1,
            exposed_us=0.0,
            in_situ=False,
            span=call.message.span,
        )
        for call in calls(truth, ("all_reduce", 16, 16))
    )
    prices = CollectivePrices(Profile(manifest=Manifest(), collectives=rows), here, same_device=True)
    found = prices.price("all_reduce", 5 << 20, 16, 16)
    assert found.kind == "interpolated" and found.family == "link:network"
    assert found.time_s == pytest.approx(truth.seconds("all_reduce", 5 << 20, 16, 16), rel=0.1)
    assert prices.price("all_reduce", 5 << 20, 8, 8).kind == "assumed"
    assert prices.assumptions() == ()
