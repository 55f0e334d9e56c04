"""Context parallelism: what it divides, what a ring and an exchange of heads send, and what of it is exposed."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmprof.errors import LayoutError
from llmprof.extrapolate.cost import Cost
from llmprof.extrapolate.forecast import Forecaster, Simulation
from llmprof.extrapolate.groups import axis_groups
from llmprof.extrapolate.implementation import apply_implementation
from llmprof.extrapolate.ledger import Calls
from llmprof.extrapolate.machine import INTERFERENCE, Machine, Round
from llmprof.extrapolate.memory import state_bytes
from llmprof.extrapolate.partition import Plan, partition
from llmprof.extrapolate.precision import PrecisionRule
from llmprof.extrapolate.work import Op
from llmprof.schema.layout import Layout
from llmprof.schema.model import ModelShape, parse_model
from llmprof.schema.operators import Tensor
from llmprof.schema.profile import Manifest, Profile
from llmprof.schema.reference import reference_workload
from tests.workloads import gpu_cluster
from tests.workloads import workload as two_matmuls

AS_TRACED = PrecisionRule(captured="bfloat16", target="bfloat16", masters=True)
SHAPE = parse_model("llama:layers=2,hidden=96,ffn=192,heads=12,kv_heads=6,vocab=480,seq=96")
WIDTH = 8
"""Of a head."""


def plan_of(
    layout: str, *, seq: int = 96, shape: ModelShape = SHAPE, implementation: str = "megatron"
) -> Plan:
    asked = Layout.parse(layout)
    work = reference_workload(shape, degrees=[(asked.tp, asked.sp)])
    work = apply_implementation(work, implementation)
    return partition(work, asked, seq=seq, precision=AS_TRACED)


def attention_of(plan: Plan, phase: str) -> list[Op]:
    layer = plan.layers["block0"]
    ops = layer.forward if phase == "forward" else layer.backward
    return [op for op in ops if op.family == "attention"]


def messages_of(plan: Plan, phase: str) -> list[Op]:
    layer = plan.layers["block0"]
    ops = layer.forward if phase == "forward" else layer.backward
    return [op for op in ops if op.axis == "cp"]


@settings(deadline=None, max_examples=40)
@given(
    cp=st.sampled_from([1, 2, 3, 4, 6]),
    kind=st.sampled_from(["ring", "ulysses"]),
    tp=st.sampled_from([1, 2]),
    mb=st.integers(1, 3),
    implementation=st.sampled_from(["eager", "compile", "megatron"]),
    causal=st.booleans(),
)
def test_work_is_divided_and_parameters_are_not(
    cp: int, kind: str, tp: int, mb: int, implementation: str, causal: bool
) -> None:
    kind = "ring" if 6 // tp % cp and cp % (6 // tp) else kind
    shape = (
        SHAPE
        if causal
        else parse_model("llama:layers=2,hidden=96,ffn=192,heads=12,kv_heads=6,vocab=480,seq=96,causal=0")
    )
    if kind == "ulysses" and 12 // tp % cp:
        kind = "ring"
    degrees = f"tp={tp},sp={int(tp > 1)},mb={mb}"
    whole = plan_of(degrees, shape=shape, implementation=implementation)
    divided = plan_of(f"{degrees},cp={cp}:{kind}", shape=shape, implementation=implementation)
    for name, layer in whole.layers.items():
        part = divided.layers[name]
        assert part.matmul_flops * cp == layer.matmul_flops
        assert part.parameters == layer.parameters
        assert part.saved_bytes * cp == pytest.approx(layer.saved_bytes, abs=4096 * cp)
        assert part.boundary_bytes * cp == layer.boundary_bytes


def test_ring_behind_a_causal_mask_by_hand() -> None:
    # 4 ranks of 24 tokens; keys and values of 6 heads in 16 bit: 2 x 6 x 24 x 8 x 2 bytes
    plan = plan_of("cp=4")
    block = 2 * 6 * 24 * WIDTH * 2
    own, others, last = attention_of(plan, "forward")
    assert (own.count, own.round, own.attributes) == (1, 1, frozenset({"causal"}))
    assert [t.shape[2] for t in own.inputs[:3]] == [24, 24, 24]
    assert (others.count, others.round, others.attributes) == (2, 2, frozenset())
    assert [t.shape[2] for t in others.inputs[:3]] == [24, 12, 12]
    assert (last.count, last.round) == (1, 0)
    assert [(m.collective, m.count, m.message_bytes) for m in messages_of(plan, "forward")] == [
        ("send", 1, block),
        ("send", 2, block),
    ]
    # the gradients of a block follow it, and come home with the last message
    assert [(m.count, m.message_bytes, m.round) for m in messages_of(plan, "backward")] == [
        (1, block, 1),
        (2, 2 * block, 2),
        (1, block, 3),
    ]
    assert {op.flops * 2 for op in attention_of(plan, "backward")} == {own.flops * 5}


def test_ring_of_two_has_no_middle() -> None:
    plan = plan_of("cp=2")
    assert [op.count for op in attention_of(plan, "forward")] == [1, 1]
    assert [m.count for m in messages_of(plan, "forward")] == [1]
    assert [m.count for m in messages_of(plan, "backward")] == [1, 1]


def test_heads_are_exchanged_by_four_all_to_alls() -> None:
    # 3 ranks of 32 tokens: queries and results of 12 heads, keys and values of 6
    plan = plan_of("cp=3:ulysses")
    query, key = 12 * 32 * WIDTH * 2, 6 * 32 * WIDTH * 2
    (attention,) = attention_of(plan, "forward")
    assert [t.shape for t in attention.inputs[:3]] == [
        (1, 4, 96, WIDTH),
        (1, 2, 96, WIDTH),
        (1, 2, 96, WIDTH),
    ]
    for phase, sizes in (("forward", [query, key, key, query]), ("backward", [query, query, key, key])):
        found = messages_of(plan, phase)
        assert [(m.collective, m.message_bytes, m.round) for m in found] == [
            ("all_to_all", size, 0) for size in sizes
        ]


def test_fewer_key_heads_than_ranks_are_repeated() -> None:
    shape = parse_model("llama:layers=2,hidden=96,ffn=192,heads=12,kv_heads=2,vocab=480,seq=96")
    plan = plan_of("cp=4:ulysses", shape=shape)
    (attention,) = attention_of(plan, "forward")
    assert [t.shape[1] for t in attention.inputs[:3]] == [3, 1, 1]
    assert messages_of(plan, "forward")[1].message_bytes == 4 * 24 * WIDTH * 2


@pytest.mark.parametrize(
    ("layout", "seq", "says"),
    [
        ("cp=5", 96, r"cp=5 does not divide the 96 tokens of a sequence \(96 / 5 = 19.20\)"),
        ("cp=4", 100, "cuts a causal sequence in 8 pieces, but 100 tokens are not a multiple"),
        ("cp=8:ulysses", 96, "a rank has 12 of queries and 6 of keys and values"),
        ("cp=4:ulysses,tp=2", 96, "a rank has 6 of queries and 3 of keys and values"),
    ],
)
def test_what_does_not_divide_is_refused(layout: str, seq: int, says: str) -> None:
    with pytest.raises(LayoutError, match=says):
        plan_of(layout, seq=seq)


def test_attention_without_a_kernel_is_refused() -> None:
    work = apply_implementation(reference_workload(SHAPE), "megatron", attention="math")
    with pytest.raises(LayoutError, match="has attention without a fused kernel over the sequence"):
        partition(work, Layout.parse("cp=2"), seq=96, precision=AS_TRACED)


def test_models_without_attention_are_divided_too() -> None:
    plan = partition(two_matmuls(), Layout.parse("cp=4"), seq=32, precision=AS_TRACED)
    whole = partition(two_matmuls(), Layout.parse("dp=1"), seq=32, precision=AS_TRACED)
    assert plan.layers["block0"].matmul_flops * 4 == whole.layers["block0"].matmul_flops


def test_gradients_are_summed_and_state_is_sharded_over_context_ranks() -> None:
    layout = Layout(dp=4, cp=2, tp=2, zero=3, shard=2)
    groups = axis_groups(layout, gpu_cluster())
    assert groups["cp"] == (2, 4)
    assert groups["dp"] == (8, 16)
    assert groups["shard"] == (4, 8)
    assert groups["replicate"] == (2, 16)
    assert (layout.replicas, layout.state_shards, layout.gpus) == (8, 4, 16)
    plain = axis_groups(Layout(dp=4, cp=2), gpu_cluster())
    assert plain["dp"] == (8, 8) and plain["shard"] == (1, 1)


def test_state_of_a_rank() -> None:
    whole, sharded = plan_of("dp=1"), plan_of("dp=2,cp=4,zero=3")
    assert {k: v // 8 for k, v in state_bytes(whole, 0).items() if k == "gradients"} == {
        "gradients": state_bytes(sharded, 0)["gradients"]
    }
    assert state_bytes(plan_of("cp=4"), 0) == state_bytes(whole, 0)


def forecaster(shape: ModelShape, *, degrees: tuple[int, bool] = (1, False)) -> Forecaster:
    work = apply_implementation(reference_workload(shape, degrees=[degrees]), "megatron")
    return Forecaster(Profile(manifest=Manifest(name="x"), workload=work), gpu_cluster(), draws=0)


def machine(found: Forecaster, layout: Layout) -> Machine:
    return found.simulate(layout).machine


def test_a_round_takes_the_longer_of_both_and_the_interference() -> None:
    on = machine(forecaster(SHAPE), Layout.parse("cp=2"))
    for compute_s, messages_s in ((3.0, 1.0), (1.0, 3.0)):
        compute = Cost(
            seconds={("attention", "measured"): compute_s}, weighted={("attention", "measured"): 0.0}
        )
        messages = Cost(seconds={("link:x", "measured"): messages_s}, weighted={("link:x", "measured"): 0.0})
        line = Cost(seconds={("matmul", "measured"): 0.5}, weighted={("matmul", "measured"): 0.0})
        segment = on.segment({"forward": line}, [Round("forward", "cp", compute, messages)])
        left = max(0.0, messages_s - compute_s) + INTERFERENCE * 1.0
        assert segment.parts == pytest.approx({"forward": 0.5 + compute_s, "cp": left})
        assert segment.device_s == pytest.approx(np.array([0.5 + compute_s + left]))


def test_messages_of_a_ring_are_hidden_where_attention_is_long_enough() -> None:
    shape = parse_model("llama:layers=2,hidden=4096,ffn=8192,heads=32,kv_heads=8,vocab=32000,seq=65536")
    found = forecaster(shape)
    long = found.simulate(Layout.parse("cp=8,recompute=full"))
    short = found.simulate(Layout.parse("cp=8"), seq=1024)
    # forward and recomputation 7 messages each, backward 8, in 2 blocks
    assert sum(sent_of(long).values()) == 2 * (7 + 7 + 8)
    assert long.parts["cp"] == pytest.approx(INTERFERENCE * sending_s(long))
    assert 0.2 * sending_s(short) < short.parts["cp"] <= sending_s(short)


def sent_of(simulation: Simulation) -> Calls:
    calls = simulation.stages[0].ledger.flat().calls()
    return {call: times for call, times in calls.items() if call.axis == "cp"}


def sending_s(simulation: Simulation) -> float:
    price = simulation.machine.prices.collectives.price
    return sum(
        times * price(call.kind, call.size_bytes, call.group_size, call.span).time_s
        for call, times in sent_of(simulation).items()
    )


@pytest.mark.parametrize("kind", ["ring", "ulysses"])
@pytest.mark.parametrize(
    "rest",
    [
        "pp=2,accum=4",
        "pp=2,accum=4,schedule=zero-bubble",
        "dp=2,zero=1",
        "dp=2,zero=3,accum=2",
        "tp=2,sp=1",
        "zero=3",
    ],
)
def test_parts_sum_to_the_step(kind: str, rest: str) -> None:
    found = forecaster(SHAPE, degrees=(2, True) if "tp" in rest else (1, False))
    simulation = found.simulate(Layout.parse(f"cp=3:{kind},{rest}"))
    assert sum(simulation.parts.values()) == pytest.approx(float(simulation.step_s[0]))
    assert simulation.parts["cp"] > 0


def test_attention_keeps_16_bit_where_matmuls_take_8() -> None:
    rule = PrecisionRule(captured="bfloat16", target="float8", masters=True)
    plan = partition(reference_workload(SHAPE), Layout.parse("cp=2"), seq=96, precision=rule)
    dtypes = {
        op.family: op.inputs[0].dtype
        for op in plan.layers["block0"].forward
        if op.family in ("attention", "matmul")
    }
    assert dtypes == {"attention": "bfloat16", "matmul": "float8"}
    assert rule.matmul((Tensor((2, 2), "bfloat16"),))[0].dtype == "float8"
