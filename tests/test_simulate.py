"""Streams of a stage: gradient buckets, gathered shards, host against device, all by hand."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmprof.extrapolate.buckets import BUCKET_BYTES, FIRST_BUCKET_BYTES, gradient_buckets, gradient_bytes
from llmprof.extrapolate.collective import CollectivePrices
from llmprof.extrapolate.compute import OperatorPrices
from llmprof.extrapolate.cost import Cost, Prices
from llmprof.extrapolate.fsdp import Gatherer, Unit, scatter
from llmprof.extrapolate.groups import axis_groups, axis_stride, boundary_span
from llmprof.extrapolate.machine import Machine, Segment
from llmprof.extrapolate.simulate import MAIN, Streams
from llmprof.extrapolate.uncertainty import Factors
from llmprof.extrapolate.work import Parameter
from llmprof.schema.layout import Layout
from tests.workloads import cpu_cluster, gpu_cluster, profile


def seconds(value: float, host: float = 0.0, part: str = "forward") -> Segment:
    return Segment(
        device_s=np.array([value]), host_s=np.array([host]), parts={part: value}, evidence={}, calls={}
    )


def machine(*, cpu: bool, serial: bool) -> Machine:
    cluster = cpu_cluster() if cpu else gpu_cluster()
    prices = Prices(
        operators=OperatorPrices(profile(), cluster.device, same_device=False),
        collectives=CollectivePrices(profile(), cluster, same_device=False),
        group=axis_groups(Layout(dp=2), cluster),
    )
    return Machine(prices=prices, factors=Factors(draws=0), cpu=cpu, serial_fsdp=serial)


def streams() -> Streams:
    return Streams(zero=np.zeros(1))


def test_side_stream_hides_behind_the_main_one() -> None:
    on = streams()
    first = on.run_main(np.array([2.0]), "forward")
    on.run("dp", np.array([1.0]), after=(first,))
    on.run_main(np.array([2.0]), "forward")
    found = on.finish()
    assert float(found.duration_s[0]) == 4.0
    assert found.tail_s is not None and float(found.tail_s[0]) == 0.0
    assert found.ledger.parts() == {"forward": 4.0}


def test_wait_belongs_to_who_is_waited_for() -> None:
    on = streams()
    gathered = on.run("dp", np.array([3.0]))
    on.run_main(np.array([1.0]), "forward")
    on.wait(gathered, "dp")
    on.run_main(np.array([1.0]), "forward")
    assert on.parts == {"forward": 2.0, "dp": 2.0}
    assert float(on.now(MAIN)[0]) == 4.0


@pytest.mark.parametrize(
    ("device", "host", "total", "waited"),
    [((3.0, 3.0), 1.0, 6.0, 0.0), ((1.0, 1.0), 3.0, 6.0, 4.0), ((5.0, 1.0), 2.0, 6.0, 0.0)],
)
def test_gpu_waits_for_launches_only_when_they_are_slower(
    device: tuple[float, float], host: float, total: float, waited: float
) -> None:
    on, target = streams(), machine(cpu=False, serial=False)
    for duration in device:
        target.run(on, seconds(duration, host))
    assert float(on.now()[0]) == total
    assert on.parts.get("host", 0.0) == waited


def test_cpu_adds_launching() -> None:
    on = streams()
    machine(cpu=True, serial=True).run(on, seconds(3.0, 1.0))
    assert float(on.now()[0]) == 4.0
    assert on.parts == {"forward": 3.0, "host": 1.0}


def unit(gather: float, reduce: float) -> Unit:
    return Unit(
        gather=seconds(gather, part="dp"),
        unpack=seconds(0.0, part="dp"),
        pack=seconds(0.0, part="dp"),
        reduce=seconds(reduce, part="dp"),
    )


def test_gathering_one_after_the_other_is_a_plain_sum() -> None:
    on, target = streams(), machine(cpu=True, serial=True)
    gatherer = Gatherer(target, on, [unit(2.0, 1.0)] * 3)
    for _ in range(3):
        gatherer.use()
        target.run(on, seconds(5.0))
        scatter(unit(2.0, 1.0), target, on)
    assert float(on.now()[0]) == 3 * (2 + 5 + 1)
    assert on.parts == {"forward": 15.0, "dp": 9.0}


def test_gathering_ahead_exposes_the_first_and_what_is_longer() -> None:
    # the first gather is exposed (2); the others hide behind 5 s of computation each
    on, target = streams(), machine(cpu=False, serial=False)
    gatherer = Gatherer(target, on, [unit(2.0, 1.0)] * 3)
    for _ in range(3):
        gatherer.use()
        target.run(on, seconds(5.0))
    assert float(on.now()[0]) == 17.0
    # gathers of 7 s hide 5 each: 7 + 5, then 2 more exposed for each of the two that follow
    on = streams()
    gatherer = Gatherer(target, on, [unit(7.0, 1.0)] * 3)
    for _ in range(3):
        gatherer.use()
        target.run(on, seconds(5.0))
    assert float(on.now()[0]) == 7 + 5 + 2 + 5 + 2 + 5
    assert on.parts["dp"] == 11.0


def test_hidden_communication_costs_something_on_a_gpu() -> None:
    on, target = streams(), machine(cpu=False, serial=False)
    start = target.run(on, seconds(1.0))
    target.beside(on, seconds(4.0, part="dp"), (start,), "reduce")
    target.run(on, seconds(10.0))
    found = target.finish(on)
    assert found.ledger.parts()["dp"] == pytest.approx(0.08 * 4.0)
    assert float(found.duration_s[0]) == pytest.approx(11.32)


def parameter(mebibytes: float) -> Parameter:
    return Parameter(
        name="w", shape=(int(mebibytes * (1 << 18)),), dtype="float32", trainable=True, tied_to=""
    )


def test_first_bucket_is_small_and_the_rest_close_at_25_mib() -> None:
    # in backward order: a layer of 0.5 + 0.5 MiB, then two layers of 10 + 10 MiB
    layers = [[parameter(0.5), parameter(0.5)], [parameter(10)] * 2, [parameter(10)] * 2]
    found = list(gradient_buckets([gradient_bytes(layer)[0] for layer in layers]))
    assert [b.size_bytes for b in found] == [1 << 20, 30 << 20, 10 << 20]
    assert [(b.layer, b.fraction) for b in found] == [(0, 1.0), (2, 0.5), (2, 1.0)]


@given(sizes=st.lists(st.lists(st.floats(0.01, 40), min_size=1, max_size=5), min_size=1, max_size=5))
def test_buckets_conserve_gradients(sizes: list[list[float]]) -> None:
    layers = [gradient_bytes([parameter(s) for s in layer])[0] for layer in sizes]
    found = list(gradient_buckets(layers))
    assert sum(b.size_bytes for b in found) == sum(size for layer in layers for size in layer)
    assert all(b.size_bytes >= BUCKET_BYTES for b in found[1:-1])
    assert len(found) == 1 or found[0].size_bytes >= FIRST_BUCKET_BYTES
    assert found == sorted(found, key=lambda b: (b.layer, b.fraction))


def test_factors_of_one_family_move_together() -> None:
    prices = machine(cpu=False, serial=False).prices
    cost = prices.collective("all_reduce", 1 << 20, "dp").plus(prices.collective("all_gather", 1 << 20, "dp"))
    factors = Factors(draws=400, seed=1)
    total = cost.sample(factors)
    one = prices.collective("all_reduce", 1 << 20, "dp").sample(factors)
    assert total[0] == pytest.approx(cost.nominal_s)
    assert np.corrcoef(total, one)[0, 1] > 0.999
    assert Cost().sample(factors) == pytest.approx(np.zeros(401))


def test_groups_lie_innermost_first() -> None:
    layout, cluster = Layout(dp=4, zero=3, shard=2, tp=4, pp=2), gpu_cluster()
    assert (
        axis_stride(layout, "tp") == 1 and axis_stride(layout, "dp") == 4 and axis_stride(layout, "pp") == 16
    )
    groups = axis_groups(layout, cluster)
    assert groups["tp"] == (4, 4)
    assert groups["shard"] == (2, 8)
    assert groups["replicate"] == (2, 16)
    assert groups["dp"] == (4, 16)
    assert boundary_span(layout, cluster, 0) > 8


def test_group_across_a_node_border_takes_the_outer_link() -> None:
    # tp=3 on nodes of 8: ranks 6, 7, 8 are on two nodes
    assert axis_groups(Layout(dp=8, tp=3), gpu_cluster())["tp"] == (3, 9)
    assert axis_groups(Layout(tp=3), gpu_cluster())["tp"] == (3, 3)


def test_stage_boundaries_inside_and_across_nodes() -> None:
    # 4 ranks a stage, 8 a node: stages 0-1 share a node, 1-2 do not
    layout, cluster = Layout(tp=4, pp=4), gpu_cluster()
    assert boundary_span(layout, cluster, 0) <= 8
    assert boundary_span(layout, cluster, 1) > 8
    assert boundary_span(layout, cluster, 2) <= 8
