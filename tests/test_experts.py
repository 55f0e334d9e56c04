"""Expert parallelism: what it divides, what travels to experts and back, and who sums whose gradients."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmprof.errors import LayoutError
from llmprof.extrapolate.baselines import second_baseline_step_time_s
from llmprof.extrapolate.buckets import BucketKind, stage_buckets
from llmprof.extrapolate.experts import IMBALANCE, experts_of, find_experts
from llmprof.extrapolate.forecast import Forecaster
from llmprof.extrapolate.groups import COMMON, EXPERTS, axis_groups
from llmprof.extrapolate.implementation import apply_implementation
from llmprof.extrapolate.memory import state_bytes
from llmprof.extrapolate.optimizer import optimizer_ops
from llmprof.extrapolate.partition import Plan, partition
from llmprof.extrapolate.precision import PrecisionRule
from llmprof.extrapolate.routing import with_early_weights
from llmprof.extrapolate.work import LayerWork, Op, Parameter, Shards
from llmprof.schema.layout import Layout
from llmprof.schema.model import ModelShape, parse_model
from llmprof.schema.profile import Manifest, Profile
from llmprof.schema.reference import reference_workload
from llmprof.schema.workload import LayerTrace, OpSpec, ParameterSpec, Poly, TensorSpec, Workload
from tests.workloads import gpu_cluster
from tests.workloads import workload as two_matmuls

AS_TRACED = PrecisionRule(captured="bfloat16", target="bfloat16", masters=True)
HIDDEN, WIDE, EXPERT_COUNT, TOPK, SEQ = 96, 64, 12, 3, 32
SHAPE = parse_model(
    f"moe:layers=2,hidden={HIDDEN},ffn={WIDE},heads=12,kv_heads=6,vocab=480,seq={SEQ},"
    f"experts={EXPERT_COUNT},topk={TOPK},shared_ffn=48"
)
WEIGHTS = 3 * EXPERT_COUNT * HIDDEN * WIDE
"""Elements of the experts of one block."""


def moe(layout: Layout, *, shape: ModelShape = SHAPE, implementation: str = "megatron") -> Workload:
    return apply_implementation(reference_workload(shape, degrees=[(layout.tp, layout.sp)]), implementation)


def plan_of(layout: str, *, shape: ModelShape = SHAPE, implementation: str = "megatron") -> Plan:
    asked = Layout.parse(layout)
    work = moe(asked, shape=shape, implementation=implementation)
    return partition(work, asked, seq=SEQ, precision=AS_TRACED)


def exchanges(layer: LayerWork) -> list[Op]:
    return [op for op in (*layer.forward, *layer.backward) if op.collective == "all_to_all"]


@settings(deadline=None, max_examples=40)
@given(
    ep=st.sampled_from([1, 2, 3, 4, 6, 12]),
    copies=st.sampled_from([1, 2]),
    cp=st.sampled_from([1, 2]),
    tp=st.sampled_from([1, 2]),
    implementation=st.sampled_from(["eager", "compile", "megatron"]),
    bias=st.booleans(),
)
def test_experts_are_divided_and_nothing_else(
    ep: int, copies: int, cp: int, tp: int, implementation: str, bias: bool
) -> None:
    shape = msgspec.structs.replace(SHAPE, bias=bias)
    degrees = f"cp={cp},tp={tp},sp={int(tp > 1)}"
    whole = plan_of(degrees, shape=shape, implementation=implementation)
    divided = plan_of(f"{degrees},dp={ep * copies},ep={ep}", shape=shape, implementation=implementation)
    for name, layer in whole.layers.items():
        part = divided.layers[name]
        assert part.matmul_flops == layer.matmul_flops, "each rank brings as many tokens as it takes"
        assert part.saved_bytes == layer.saved_bytes
        held = sum(p.numel * (ep if p.expert else 1) for p in part.parameters)
        assert held == sum(p.numel for p in layer.parameters)
        if ep > 1 and name == "block0":
            found = {p.name for p in part.parameters if p.expert}
            assert found == {p.name for p in part.parameters if ".experts." in p.name}


def test_tokens_travel_there_and_back_by_hand() -> None:
    layer = plan_of("dp=4,ep=4").layers["block0"]
    rows = SEQ * TOPK * HIDDEN * 2
    assert [(op.phase, op.message_bytes, op.count) for op in exchanges(layer)] == [
        ("forward", rows, 1),
        ("forward", rows, 1),
        ("backward_input", rows, 1),
        ("backward_input", rows, 1),
    ]
    counts = [op for op in layer.forward if op.axis == "ep" and op.collective == "all_gather"]
    assert [op.message_bytes for op in counts] == [4 * EXPERT_COUNT * 8]
    names = [op.op for op in layer.forward]
    first, last = names.index("aten::_grouped_mm"), len(names) - 1 - names[::-1].index("aten::_grouped_mm")
    there, back = (i for i, op in enumerate(layer.forward) if op.collective == "all_to_all")
    assert there < first and last < back
    # three experts a rank: what arrives is put in order, and what leaves
    sorts = [op for op in (*layer.forward, *layer.backward) if op.routed and op.op == "aten::index_select"]
    assert len(sorts) == 4
    one_each = plan_of("dp=12,ep=12").layers["block0"]
    assert not [op for op in one_each.forward if op.routed and op.op == "aten::index_select"]


def test_a_rank_reads_its_own_experts() -> None:
    layer = plan_of("dp=4,ep=4").layers["block0"]
    grouped = [op for op in (*layer.forward, *layer.backward) if op.op == "aten::_grouped_mm"]
    assert grouped and all(op.routed for op in grouped)
    for op in grouped:
        assert {t.shape[0] for t in (*op.inputs, *op.outputs) if len(t.shape) == 3} == {EXPERT_COUNT // 4}
        assert {t.shape for t in op.inputs if len(t.shape) == 1} == {(EXPERT_COUNT // 4,)}
    router = next(op for op in layer.forward if op.module == "feed_forward.router" and op.family == "matmul")
    assert router.outputs[0].shape == (SEQ, EXPERT_COUNT)


def test_messages_keep_16_bit_where_experts_compute_in_8() -> None:
    rule = PrecisionRule(captured="bfloat16", target="float8", masters=True)
    layout = Layout.parse("dp=4,ep=4")
    plan = partition(moe(layout), layout, seq=SEQ, precision=rule)
    layer = plan.layers["block0"]
    assert {op.inputs[0].dtype for op in exchanges(layer)} == {"bfloat16"}
    assert {op.inputs[0].dtype for op in layer.forward if op.op == "aten::_grouped_mm"} == {"float8"}


@pytest.mark.parametrize(
    ("layout", "says"),
    [
        ("dp=8,ep=8", r"ep=8 does not divide the 12 experts \(12 / 8 = 1.50\)"),
        ("dp=5,ep=5", r"ep=5 does not divide the 12 experts"),
    ],
)
def test_degrees_that_do_not_divide_are_refused(layout: str, says: str) -> None:
    with pytest.raises(LayoutError, match=says):
        plan_of(layout)


def test_models_without_experts_are_refused() -> None:
    with pytest.raises(LayoutError, match="ep=2 divides experts, but no layer has weights of experts"):
        partition(two_matmuls(), Layout.parse("dp=2,ep=2"), seq=32, precision=AS_TRACED)


def capacity_block(capacity: int) -> tuple[tuple[ParameterSpec, ...], LayerTrace]:
    """Experts that take a fixed number of tokens each: batched matmuls (experts, capacity, width)."""
    tokens, wide = (
        (Poly(c=EXPERT_COUNT), Poly(c=capacity), HIDDEN),
        (Poly(c=EXPERT_COUNT), Poly(c=capacity), WIDE),
    )
    weight = (EXPERT_COUNT, HIDDEN, WIDE)

    def bmm(
        phase: str, a: tuple[int | Poly, ...], b: tuple[int | Poly, ...], out: tuple[int | Poly, ...]
    ) -> OpSpec:
        specs = [TensorSpec(dims, "bfloat16") for dims in (a, b, out)]
        return OpSpec(
            op="aten::bmm", phase=phase, module="moe.experts", inputs=tuple(specs[:2]), outputs=(specs[2],)
        )

    flipped = (EXPERT_COUNT, WIDE, HIDDEN)
    return (ParameterSpec(name="moe.experts.up", shape=weight, dtype="float32"),), LayerTrace(
        ops=(
            bmm("forward", tokens, weight, wide),
            bmm("backward_weight", (tokens[0], HIDDEN, tokens[1]), wide, weight),
            bmm("backward_input", wide, flipped, tokens),
        ),
        parameters=(weight,),
    )


def test_experts_of_fixed_capacity_take_tokens_of_all_ranks() -> None:
    capacity = 20
    parameters, trace = capacity_block(capacity)
    base = two_matmuls()
    layers = tuple(
        msgspec.structs.replace(s, parameters=parameters) if s.name == "block0" else s for s in base.layers
    )
    classes = tuple(
        msgspec.structs.replace(c, layers={**c.layers, "block0": trace}) for c in base.classes if c.tp == 1
    )
    work = msgspec.structs.replace(base, layers=layers, classes=classes)
    whole, divided = (
        partition(work, Layout.parse(layout), seq=32, precision=AS_TRACED).layers["block0"]
        for layout in ("dp=3", "dp=3,ep=3")
    )
    assert divided.matmul_flops == whole.matmul_flops
    forward = next(op for op in divided.forward if op.op == "aten::bmm")
    assert [t.shape for t in forward.inputs] == [(4, 3 * capacity, HIDDEN), (4, HIDDEN, WIDE)]
    weight = next(op for op in divided.backward if op.phase == "backward_weight")
    assert [t.shape for t in weight.inputs] == [(4, HIDDEN, 3 * capacity), (4, 3 * capacity, WIDE)]
    sizes = [op.message_bytes for op in exchanges(divided)]
    there, back = EXPERT_COUNT * capacity * HIDDEN * 2, EXPERT_COUNT * capacity * WIDE * 2
    assert sorted(sizes) == sorted([there, there, back, back])


def test_experts_are_known_by_what_multiplies_them() -> None:
    named = [("experts.up", (4, 8, 6)), ("experts.bias", (4, 6)), ("router", (4, 8)), ("conv", (4, 3, 3))]
    assert find_experts(named, {(4, 6, 8)}) == {"experts.up", "experts.bias"}
    assert find_experts(named, {(4, 8)}) == frozenset()
    assert experts_of(two_matmuls().layer("block0"), None) == frozenset()


def test_groups_of_experts_lie_inside_those_of_replicas() -> None:
    layout, cluster = Layout(dp=8, cp=2, tp=2, ep=4, zero=3, shard=4), gpu_cluster()
    groups = axis_groups(layout, cluster)
    assert groups["ep"] == (4, 8)
    assert groups[COMMON.shard][0] == 8 and groups[COMMON.replicate][0] == 2
    assert groups[EXPERTS.summed] == (4, 32)
    assert groups[EXPERTS.shard][0] == 2 and groups[EXPERTS.replicate][0] == 2
    outside = axis_groups(Layout(dp=8, ep=4, order="tp-cp-dp-ep-pp"), cluster)
    assert outside["ep"] == (4, 8) and outside[EXPERTS.summed] == (2, 2)


def test_state_of_experts_is_held_once_in_each_group() -> None:
    common = sum(p.numel for p in plan_of("dp=1").stage_parameters(0)) - 2 * WEIGHTS
    for layout, experts, rest in (
        ("dp=4,ep=4", 2 * WEIGHTS / 4, common),
        ("dp=8,ep=4,zero=3", 2 * WEIGHTS / 8, common / 8),
        ("dp=4,cp=2,ep=2,zero=3", 2 * WEIGHTS / 8, common / 8),
    ):
        state = state_bytes(plan_of(layout), 0)
        assert state["gradients"] == pytest.approx(4 * (experts + rest), abs=8)


def test_updates_are_those_of_a_rank_s_share() -> None:
    layer = plan_of("dp=12,ep=3,zero=3", implementation="eager").layers["block0"]
    shards = Shards.of(Layout.parse("dp=12,ep=3,zero=3"))
    assert shards == (12, 4)
    ops = optimizer_ops(layer, layer.optimizer, shards=shards, grouped=False)
    sizes = {t.shape for op in ops for t in op.inputs if len(t.shape) == 3}
    assert sizes == {(1, HIDDEN, WIDE), (1, WIDE, HIDDEN)}
    eight = optimizer_ops(layer, layer.optimizer, shards=Shards(24, 8), grouped=False)
    assert {t.shape for op in eight for t in op.inputs if len(t.shape) == 3} == {
        (4, HIDDEN // 8, WIDE),
        (4, WIDE // 8, HIDDEN),
    }


def test_buckets_of_experts_are_filled_apart() -> None:
    mib = 1 << 20
    found = stage_buckets((((mib, mib), (30 * mib,), 2),))
    assert found.kinds == (BucketKind(mib, False), BucketKind(3 * mib, False), BucketKind(30 * mib, True))
    assert [found.kinds[k] for k in found.kind] == [
        BucketKind(mib, False), BucketKind(30 * mib, True), BucketKind(3 * mib, False), BucketKind(30 * mib, True),
    ]  # fmt: skip


def forecaster(shape: ModelShape = SHAPE, *, tp: int = 1) -> Forecaster:
    layout = Layout(tp=tp, sp=tp > 1)
    return Forecaster(
        Profile(manifest=Manifest(name="x"), workload=moe(layout, shape=shape)), gpu_cluster(), draws=0
    )


def test_exchange_is_exposed_and_the_fullest_rank_is_waited_for() -> None:
    simulation = forecaster().simulate(Layout.parse("dp=4,ep=4"))
    calls = simulation.stages[0].ledger.flat().calls()
    price = simulation.machine.prices.collectives.price
    time_s = {
        call: times * price(call.kind, call.size_bytes, call.group_size, call.span).time_s
        for call, times in calls.items()
        if call.axis == "ep"
    }
    assert sum(n for call, n in calls.items() if call.kind == "all_to_all") == 2 * 4
    assert simulation.parts["ep"] == pytest.approx((1 + IMBALANCE) * sum(time_s.values()))


def test_who_sums_gradients() -> None:
    calls = forecaster().simulate(Layout.parse("dp=8,ep=4")).stages[0].ledger.flat().calls()
    sizes: dict[int, float] = {}
    for call, times in calls.items():
        if call.kind == "all_reduce":
            sizes[call.group_size] = sizes.get(call.group_size, 0.0) + times * call.size_bytes
    common = sum(p.numel for p in plan_of("dp=1").stage_parameters(0)) - 2 * WEIGHTS
    assert sizes == {8: 4 * common, 2: 4 * 2 * WEIGHTS / 4}


@pytest.mark.parametrize(
    "layout",
    [
        "dp=4,ep=2", "dp=4,ep=4,zero=1,accum=2", "dp=4,ep=2,zero=3", "dp=4,ep=2,pp=2,accum=4", "dp=4,ep=2,pp=2,accum=4,schedule=zero-bubble", "dp=4,ep=4,zero=3,shard=2",
        "dp=2,ep=4,cp=2", "dp=2,ep=2,tp=2,sp=1,recompute=full", "dp=6,ep=3,zero=2,accum=2",
    ],
)  # fmt: skip
def test_parts_sum_to_the_step(layout: str) -> None:
    found = forecaster(tp=2 if "tp" in layout else 1)
    simulation = found.simulate(Layout.parse(layout))
    assert sum(simulation.parts.values()) == pytest.approx(float(simulation.step_s[0]))
    assert simulation.parts["ep"] > 0
    assert any("the fullest rank gets 5% more" in line for line in simulation.assumptions)


def test_second_baseline_reduces_a_rank_s_own_experts() -> None:
    work, cluster = moe(Layout()), gpu_cluster()
    whole = sum(p.numel for p in plan_of("dp=1").stage_parameters(0)) - 2 * WEIGHTS
    link = cluster.level(8).bandwidth_bytes_per_s
    found = second_baseline_step_time_s(work, Layout(dp=8, ep=4), cluster, naive_s=1.0)
    sent = 2 * 7 / 8 * 4 * whole + 2 * 1 / 2 * 4 * 2 * WEIGHTS / 4
    assert found == pytest.approx(1.0 + sent / link)


def test_parameters_say_who_shares_them() -> None:
    weight = Parameter(name="w", shape=(4, 2), dtype="float32", trainable=True, tied_to="", expert=True)
    assert Shards(8, 2).by(weight) == 2


def test_megatron_weights_tokens_before_the_last_matmul() -> None:
    plain = parse_model(
        f"moe:layers=1,hidden={HIDDEN},ffn={WIDE},heads=12,kv_heads=6,vocab=480,seq={SEQ},experts=4,topk=2"
    )
    rows = SEQ * 2
    layers = {name: reference_layer(plain, name) for name in ("compile", "megatron", "te")}
    for name, layer in layers.items():
        kept = [t.shape_at(1, SEQ) for t in layer.saved]
        # the rows that experts read; where they are weighted after the last matmul its result, too
        assert kept.count((rows, HIDDEN)) == (2 if name == "compile" else 1)
    ops = layers["megatron"].ops
    weighted = next(op for op in ops if op.op == "fused::elementwise" and op.module == "feed_forward.experts")
    assert [t.shape_at(1, SEQ) for t in weighted.inputs] == [(rows, WIDE), (rows, WIDE), (rows,)]
    gradient = next(
        op for op in ops if op.op == "fused::elementwise_backward" and op.module == weighted.module
    )
    assert [t.shape_at(1, SEQ) for t in gradient.outputs] == [(rows, WIDE), (rows, WIDE), (rows,)]


def reference_layer(shape: ModelShape, implementation: str) -> LayerTrace:
    work = apply_implementation(reference_workload(shape), implementation)
    return work.classes[0].layers["block0"]


def test_experts_with_a_bias_are_weighted_as_traced() -> None:
    shape = msgspec.structs.replace(SHAPE, bias=True)
    trace = reference_workload(shape).classes[0].layers["block0"]
    assert with_early_weights(trace) is trace
    dense = reference_workload(parse_model("gpt:layers=1,hidden=96,heads=12,vocab=480,seq=32")).classes[0]
    assert with_early_weights(dense.layers["block0"]) is dense.layers["block0"]
