"""What a rank does: conservation over layouts, stages, the dtype rule, and refusals in one clear line."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmprof.errors import LayoutError, WorkloadError
from llmprof.extrapolate.partition import Plan, partition
from llmprof.extrapolate.precision import PrecisionRule, choose_precision
from llmprof.extrapolate.request import check_supported, resolve_batch
from llmprof.extrapolate.split import split_stages
from llmprof.schema.layout import Layout
from llmprof.schema.operators import MATMUL_FAMILIES
from llmprof.schema.workload import Workload
from tests.workloads import HIDDEN, VOCAB, WIDE, gpu_cluster, workload

AS_CAPTURED = PrecisionRule(captured="float32", target="float32")


def plan_of(layout: str, work: Workload | None = None, *, seq: int = 32) -> Plan:
    return partition(work or workload(), Layout.parse(layout), seq=seq, precision=AS_CAPTURED)


def matmul_flops(plan: Plan) -> int:
    """Over all ranks and microbatches of a step."""
    one_pass = sum(plan.layers[name].matmul_flops * count for stage in plan.stages for name, count in stage)
    return one_pass * plan.layout.tp * plan.layout.dp * plan.layout.accum


def expected_flops(blocks: int, tokens: int) -> int:
    """Three passes over two weights of a block and the head, two FLOPs per weight and token."""
    return 3 * 2 * tokens * (blocks * 2 * HIDDEN * WIDE + HIDDEN * VOCAB)


@settings(deadline=None, max_examples=60)
@given(
    blocks=st.integers(1, 7),
    dp=st.sampled_from([1, 2, 3, 8]),
    tp=st.sampled_from([1, 2, 4]),
    pp=st.integers(1, 7),
    mb=st.integers(1, 4),
    accum=st.integers(1, 5),
    zero=st.sampled_from([0, 1, 2, 3]),
)
def test_flops_and_parameters_are_conserved(
    blocks: int, dp: int, tp: int, pp: int, mb: int, accum: int, zero: int
) -> None:
    work = workload(blocks=blocks)
    layout = Layout(dp=dp, tp=tp, pp=min(pp, blocks), mb=mb, accum=accum, zero=zero)
    plan = partition(work, layout, seq=16, precision=AS_CAPTURED)
    assert matmul_flops(plan) == expected_flops(blocks, layout.global_batch * 16)
    local = sum(p.numel for stage in range(layout.pp) for p in plan.stage_parameters(stage))
    embedding = VOCAB * HIDDEN
    sharded = blocks * 2 * HIDDEN * WIDE + VOCAB * HIDDEN
    assert (local - embedding) * tp == sharded


@given(blocks=st.integers(1, 12), stages=st.integers(1, 12))
def test_stages_keep_order_and_every_layer(blocks: int, stages: int) -> None:
    work = workload(blocks=blocks)
    layers = plan_of("dp=1", work).layers
    stages = min(stages, blocks)
    split = split_stages(work, layers, stages)
    flat = [name for stage in split for name, count in stage for _ in range(count)]
    assert flat == ["prologue", *["block0"] * blocks, "epilogue", "loss"]
    per_stage = [sum(c for n, c in stage if n == "block0") for stage in split]
    assert len(per_stage) == stages and min(per_stage) >= 1
    if blocks % stages == 0:
        assert set(per_stage) == {blocks // stages}
    else:
        assert max(per_stage) - min(per_stage) <= 2


def test_uneven_stages_leave_the_head_the_lighter_side() -> None:
    # 3 blocks of 2 x 64 x 256 = 32768 weights and a head of 8192: 2 + 1 with the head on the lighter stage
    split = split_stages(workload(blocks=3), plan_of("dp=1", workload(blocks=3)).layers, 2)
    assert split[0] == (("prologue", 1), ("block0", 2))
    assert split[1] == (("block0", 1), ("epilogue", 1), ("loss", 1))


def test_more_stages_than_blocks_is_refused() -> None:
    with pytest.raises(LayoutError, match="pp=5 needs at least 5 blocks, but the model has 4"):
        plan_of("pp=5")


def test_tied_parameters_count_once_in_a_stage_and_twice_across() -> None:
    work = workload(tied=True)
    whole = sum(p.numel for p in plan_of("dp=1", work).stage_parameters(0))
    assert whole == 4 * 2 * HIDDEN * WIDE + VOCAB * HIDDEN
    split = plan_of("pp=2", work)
    assert sum(p.numel for s in range(2) for p in split.stage_parameters(s)) == whole + VOCAB * HIDDEN
    assert [p.name for p in split.tied] == ["out.weight"]
    assert plan_of("dp=1", work).tied == ()


def test_shapes_follow_microbatch_and_sequence() -> None:
    layer = plan_of("tp=2,mb=3", seq=64).layers["block0"]
    up = next(op for op in layer.forward if op.op == "aten::mm")
    assert up.inputs[0].shape == (3 * 64, HIDDEN) and up.inputs[1].shape == (HIDDEN, WIDE // 2)
    assert layer.saved_bytes == 4 * 3 * 64 * (HIDDEN + 2 * WIDE // 2)
    sharded = plan_of("tp=2,sp=1,mb=3", seq=64).layers["block0"]
    assert sharded.boundary_bytes == layer.boundary_bytes // 2
    gather = next(op for op in sharded.forward if op.collective == "all_gather")
    assert gather.message_bytes == 4 * 3 * 64 * HIDDEN


def test_missing_class_names_what_was_traced_and_why() -> None:
    work = msgspec.structs.replace(workload(), tp_refusal="layers.0.up has no plan")
    with pytest.raises(
        WorkloadError, match=r"tp=8 was not traced for this model: layers\.0\.up has no plan"
    ) as e:
        plan_of("tp=8", work)
    assert e.value.hint == "traced classes: tp=1, tp=2, tp=4, tp=2 sp=1"


def test_missing_class_says_its_own_reason_only() -> None:
    refusal = "tp=2,sp=1: a; b; tp=4: c; tp=8 and tp=8,sp=1: 12 heads"
    work = msgspec.structs.replace(workload(), tp_refusal=refusal)
    for layout in ("tp=8", "tp=8,sp=1"):
        with pytest.raises(WorkloadError, match=r"for this model: 12 heads( \(|$)"):
            plan_of(layout, work)
    with pytest.raises(WorkloadError, match=r"for this model: a; b( \(|$)"):
        plan_of("tp=2,sp=1", msgspec.structs.replace(work, classes=work.classes[:1]))
    with pytest.raises(WorkloadError, match=r"for this model( \(|$)"):
        plan_of("tp=3", work)


def test_class_that_holds_for_one_batch_only() -> None:
    work = workload()
    held = tuple(msgspec.structs.replace(c, batch=2) for c in work.classes)
    work = msgspec.structs.replace(work, classes=held)
    assert plan_of("mb=2", work).layers
    with pytest.raises(WorkloadError, match="tp=1 does not hold at mb=3, seq=32"):
        plan_of("mb=3", work)


def test_replicated_work_is_refused_by_name() -> None:
    work = workload()
    classes = tuple(
        msgspec.structs.replace(c, replicated_flops_fraction=0.2, replicated_modules=("layers.0.up",))
        for c in work.classes
    )
    with pytest.raises(LayoutError, match=r"20% of the matmul work .* at tp=2: layers\.0\.up"):
        plan_of("tp=2", msgspec.structs.replace(work, classes=classes))


@pytest.mark.parametrize(
    ("layout", "what"),
    [
        ("dp=2,tp=2,etp=1", "etp=1 with tp=2"),
        ("pp=2,schedule=dualpipe", "schedule=dualpipe"),
        ("offload=optimizer", "offload=optimizer"),
        ("recompute=selective", "recompute=selective"),
    ],
)
def test_what_is_not_modelled_is_refused(layout: str, what: str) -> None:
    with pytest.raises(LayoutError, match=f"not supported yet: {what}"):
        check_supported(Layout.parse(layout), gpu_cluster())


def test_more_devices_than_the_cluster_has() -> None:
    with pytest.raises(LayoutError, match=r"dp 4 x tp 2 x pp 1 x cp 1 = 8, but 8xtest has 4 devices"):
        check_supported(Layout.parse("dp=4,tp=2"), gpu_cluster(max_devices=4))


@pytest.mark.parametrize(
    ("layout", "asked", "accum", "says"),
    [
        ("dp=2,mb=2", None, 4, "as captured (strong scaling): accum 4"),
        ("dp=2,mb=2,accum=4", None, 4, "as captured (strong scaling)"),
        ("dp=2,mb=2,accum=3", None, 3, "12 sequences = dp 2 x mb 2 x accum 3, not the captured 16"),
        ("dp=3,mb=1", None, 1, "not the captured 16"),
        ("dp=32,mb=1", None, 1, "global batch 32 sequences"),
        ("dp=2,mb=2", 64, 16, "global batch 64 sequences = dp 2 x mb 2 x accum 16"),
        ("dp=2,mb=2,accum=16", 64, 16, "as asked"),
    ],
)
def test_global_batch(layout: str, asked: int | None, accum: int, says: str) -> None:
    resolved, line = resolve_batch(Layout.parse(layout), workload(batch=4, accum=4), asked)
    assert resolved.accum == accum and says in line


@pytest.mark.parametrize(("layout", "asked"), [("dp=3,mb=2", 64), ("dp=2,mb=2,accum=2", 64), ("dp=8", 4)])
def test_global_batch_that_does_not_multiply_out(layout: str, asked: int) -> None:
    with pytest.raises(LayoutError, match=f"not the global batch of {asked}"):
        resolve_batch(Layout.parse(layout), workload(), asked)


def test_precision_rule() -> None:
    assert choose_precision(captured="float32", asked="", device_kind="cpu").changes is False
    rule = choose_precision(captured="float32", asked="", device_kind="cuda")
    assert (rule.target, rule.activation, rule.mixed) == ("bfloat16", "bfloat16", True)
    assert choose_precision(captured="bfloat16", asked="", device_kind="cuda").changes is False
    eight = choose_precision(captured="float32", asked="float8", device_kind="cuda")
    assert (eight.target, eight.activation) == ("float8", "bfloat16")


def test_dtypes_of_a_bfloat16_target() -> None:
    rule = PrecisionRule(captured="float32", target="bfloat16")
    plan = partition(workload(), Layout.parse("dp=1"), seq=32, precision=rule)
    block, loss = plan.layers["block0"], plan.layers["loss"]
    multiplications = [o for o in (*block.forward, *block.backward) if o.family in MATMUL_FAMILIES]
    assert {t.dtype for o in multiplications for t in (*o.inputs, *o.outputs)} == {"bfloat16"}
    assert {t.dtype for o in block.optimizer for t in o.inputs} == {"float32"}
    assert {t.dtype for o in loss.forward for t in o.inputs} == {"float32"}
    assert block.saved_bytes == 2 * 32 * (HIDDEN + 2 * WIDE)
    assert loss.saved_bytes == 4 * 32 * VOCAB
    index = next(o for o in plan.layers["prologue"].forward).inputs[1]
    assert index.dtype == "int64"
