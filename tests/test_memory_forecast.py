"""Memory by hand for a tiny model, over ZeRO stages, pipelines and recomputation."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmprof.extrapolate.memory import (
    Capacity,
    Live,
    backward_peak,
    forecast_memory,
    stage_memory,
    state_bytes,
)
from llmprof.extrapolate.partition import Plan, partition
from llmprof.extrapolate.precision import PrecisionRule
from llmprof.extrapolate.uncertainty import Factors
from llmprof.extrapolate.work import LayerWork
from llmprof.schema.layout import Layout
from tests.workloads import HIDDEN, VOCAB, WIDE, cpu_cluster, gpu_cluster, workload

BLOCK = 2 * HIDDEN * WIDE
EMBEDDING = VOCAB * HIDDEN
TOTAL = 4 * BLOCK + 2 * EMBEDDING
FLOAT32 = PrecisionRule(captured="float32", target="float32")
CPU = Capacity(cluster=cpu_cluster())
MIXED = PrecisionRule(captured="float32", target="bfloat16")


def plan_of(layout: str, rule: PrecisionRule = FLOAT32) -> Plan:
    return partition(workload(), Layout.parse(layout), seq=32, precision=rule)


@pytest.mark.parametrize(
    ("layout", "parameters", "gradients", "optimizer"),
    [
        ("dp=4", 4, 4, 8),
        ("dp=4,zero=1", 4, 4, 8 / 4),
        ("dp=4,zero=2", 4, 4 / 4, 8 / 4),
        ("dp=4,zero=3", 4 / 4, 4 / 4, 8 / 4),
        ("dp=4,zero=3,shard=2", 4 / 2, 4 / 2, 8 / 2),
    ],
)
def test_state_by_zero_stage(layout: str, parameters: float, gradients: float, optimizer: float) -> None:
    found = state_bytes(plan_of(layout), 0)
    assert found == {
        "parameters": parameters * TOTAL,
        "gradients": gradients * TOTAL,
        "optimizer": optimizer * TOTAL,
    }


def test_mixed_precision_keeps_masters_with_the_optimizer() -> None:
    # 2 bytes of working copy, 4 of gradient, 4 of master and 8 of Adam's state: 18 a parameter
    assert state_bytes(plan_of("dp=2", MIXED), 0) == {
        "parameters": 2 * TOTAL,
        "gradients": 4 * TOTAL,
        "optimizer": 12 * TOTAL,
    }
    assert sum(state_bytes(plan_of("dp=2,zero=1", MIXED), 0).values()) == (2 + 4 + 12 / 2) * TOTAL
    assert sum(state_bytes(plan_of("dp=2,zero=3", MIXED), 0).values()) == (4 + 4 + 8) / 2 * TOTAL


def test_activations_of_one_microbatch_by_hand() -> None:
    # a token keeps its index (8 bytes), and per block its input and two wide rows; the head its input, the loss its logits;
    # the most lives when the last block's backward begins: the head and the loss are done then
    done = 4 * 32 * (HIDDEN + VOCAB)
    saved = 4 * 32 * 4 * (HIDDEN + 2 * WIDE) + 8 * 32 + done
    assert stage_memory(plan_of("dp=1"), CPU, stage=0, in_flight=1)["activations"] == saved - done
    assert stage_memory(plan_of("dp=1"), CPU, stage=0, in_flight=3)["activations"] == 3 * saved - done
    kept = 4 * 32 * 4 * HIDDEN + 8 * 32 + done
    recomputed = stage_memory(plan_of("dp=1,recompute=full"), CPU, stage=0, in_flight=1)
    assert recomputed["activations"] == kept - done


def _layer(kind: str, *, saved: int, boundary: int, temporary: int) -> LayerWork:
    return LayerWork(
        name=kind, kind=kind, module="", forward=(), backward=(), optimizer=(), parameters=(),
        saved_bytes=saved, boundary_bytes=boundary, temporary_bytes=temporary,
    )  # fmt: skip


def test_the_largest_moment_of_a_backward_by_hand() -> None:
    block = _layer("block", saved=100, boundary=10, temporary=30)
    for logits, plain, again in (
        # a small loss: the last of three blocks has the peak, after the loss has freed its own
        (5, Live(1 + 3 * 100, 30), Live(1 + 3 * 10, 30 + 100)),
        # a large one: its logits and their gradients are the peak, and no block runs beside them
        (400, Live(1 + 3 * 100 + 400, 400), Live(1 + 3 * 10 + 400, 400)),
    ):
        layers = [
            (_layer("prologue", saved=1, boundary=1, temporary=2), 1),
            (block, 3),
            (_layer("loss", saved=logits, boundary=0, temporary=logits), 1),
        ]
        assert backward_peak(layers, in_flight=1, recompute=False) == plain
        assert backward_peak(layers, in_flight=1, recompute=True) == again
        others = 2 * (1 + 3 * 100 + logits)
        assert sum(backward_peak(layers, in_flight=3, recompute=False)) == sum(plain) + others


def test_gradients_can_be_narrower_than_their_masters() -> None:
    rule = PrecisionRule(captured="float32", target="bfloat16", narrow=True)
    assert state_bytes(plan_of("dp=2", rule), 0)["gradients"] == 2 * TOTAL
    assert (
        state_bytes(plan_of("dp=2", PrecisionRule(captured="float32", target="float32", narrow=True)), 0)[
            "gradients"
        ]
        == 4 * TOTAL
    )


def test_recomputed_block_lives_while_it_is_redone() -> None:
    plain = stage_memory(plan_of("dp=1"), CPU, stage=0, in_flight=1)
    again = stage_memory(plan_of("dp=1,recompute=full"), CPU, stage=0, in_flight=1)
    assert again["temporary"] - plain["temporary"] == 4 * 32 * (HIDDEN + 2 * WIDE)


def test_buffers_of_data_parallelism() -> None:
    cpu, gpu = CPU, Capacity(cluster=gpu_cluster())
    assert stage_memory(plan_of("dp=1"), cpu, stage=0, in_flight=1)["communication"] == 0
    assert stage_memory(plan_of("dp=2"), cpu, stage=0, in_flight=1)["communication"] == 4 * TOTAL
    # gathered: the root (embedding and head) and one block, two where the next is fetched ahead; gradients of one block twice
    serial = stage_memory(plan_of("dp=2,zero=3"), cpu, stage=0, in_flight=1)["communication"]
    assert serial == 4 * 2 * EMBEDDING + 4 * BLOCK + 8 * BLOCK
    ahead = stage_memory(plan_of("dp=2,zero=3"), gpu, stage=0, in_flight=1)["communication"]
    assert ahead == serial + 4 * BLOCK


def test_stages_hold_what_their_schedule_keeps_in_flight() -> None:
    plan = plan_of("pp=2,accum=8")
    block = 4 * 32 * (HIDDEN + 2 * WIDE)
    first = stage_memory(plan, CPU, stage=0, in_flight=2)["activations"]
    last = stage_memory(plan, CPU, stage=1, in_flight=1)["activations"]
    assert first == 2 * (2 * block + 8 * 32)
    assert last == 2 * block  # when its last block begins, the head and the loss are done


def test_verdicts() -> None:
    gpu = Capacity(cluster=gpu_cluster())
    needs = forecast_memory(plan_of("dp=1"), gpu, factors=Factors(draws=200), in_flight=[1])
    for share, verdict in ((2.0, "fits"), (1.02, "tight"), (0.7, "oom")):
        smaller = Capacity(cluster=gpu_cluster(memory=int(needs.p50 * share)))
        found = forecast_memory(plan_of("dp=1"), smaller, factors=Factors(draws=200), in_flight=[1])
        assert found.verdict == verdict
        assert (found.oom_probability >= 0.5) is (verdict == "oom")


@given(
    dp=st.sampled_from([1, 2, 4, 8]),
    zero=st.sampled_from([0, 1, 2, 3]),
    pp=st.sampled_from([1, 2, 4]),
    mb=st.integers(1, 3),
)
def test_more_sharding_never_needs_more_state(dp: int, zero: int, pp: int, mb: int) -> None:
    sizes = [
        sum(state_bytes(partition(workload(), layout, seq=32, precision=MIXED), 0).values())
        for layout in (
            Layout(dp=dp, zero=zero, pp=pp, mb=mb),
            Layout(dp=2 * dp, zero=zero, pp=pp, mb=mb),
        )
    ]
    assert sizes[1] <= sizes[0] or zero == 0


def test_measured_process_replaces_the_assumed_one() -> None:
    measured = Capacity(cluster=cpu_cluster(), framework_bytes=123)
    assert stage_memory(plan_of("dp=1"), measured, stage=0, in_flight=1)["framework"] == 123
    assert stage_memory(plan_of("dp=1"), CPU, stage=0, in_flight=1)["framework"] == 330_000_000
