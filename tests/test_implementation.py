"""Implementation profiles: what is fused, the bytes that it moves, what is saved, and what never changes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from llmprof.errors import WorkloadError
from llmprof.extrapolate.baselines import model_flops_per_token, tensors_at
from llmprof.extrapolate.flow import trace_flow
from llmprof.extrapolate.implementation import IMPLEMENTATIONS, apply_implementation
from llmprof.schema.operators import MATMUL_FAMILIES, bytes_moved, family, flops, is_free
from llmprof.schema.store import load_workload
from llmprof.schema.workload import ClassTrace, LayerTrace, OpSpec, Workload
from tests.blocks import gpt_block, llama_block, one_layer
from tests.workloads import workload as two_matmuls

TINY_LLAMA = Path(__file__).parent / "data" / "tiny_llama_workload.json"
FUSED = ("compile", "megatron", "te")
BATCH, SEQ = 2, 64
H, F, A = 4096, 11008, 32


def llama() -> Workload:
    """One block of Llama 7B."""
    return one_layer(llama_block(hidden=H, ffn=F, heads=A, kv_heads=A))


def captured() -> Workload:
    """A small Llama as traced, at several tensor-parallel degrees."""
    return load_workload(TINY_LLAMA)


def calls(trace: ClassTrace, phase: str = "") -> Iterator[OpSpec]:
    """Operators of all layers, those of the optimizer left out."""
    for layer in trace.layers.values():
        yield from (o for o in layer.ops if o.phase.startswith(phase) and o.phase != "optimizer")


def matmul_flops(trace: ClassTrace, *, batch: int = BATCH, seq: int = SEQ) -> dict[str, int]:
    """FLOPs by family and phase."""
    total: dict[str, int] = {}
    for op in calls(trace):
        if family(op.op) in MATMUL_FAMILIES:
            inputs, outputs = tensors_at(op.inputs, batch, seq), tensors_at(op.outputs, batch, seq)
            key = f"{family(op.op)} {op.phase}"
            total[key] = total.get(key, 0) + op.count * flops(
                op.op, inputs, outputs, frozenset(op.attributes)
            )
    return total


def moved(ops: Iterator[OpSpec]) -> int:
    """Bytes of what is no matmul."""
    return sum(
        op.count * bytes_moved(op.op, tensors_at(op.inputs, BATCH, SEQ), tensors_at(op.outputs, BATCH, SEQ))
        for op in ops
        if family(op.op) not in MATMUL_FAMILIES
    )


def launches(ops: Iterator[OpSpec]) -> int:
    """Operators that launch a kernel."""
    return sum(op.count for op in ops if not is_free(op.op))


def block_of(work: Workload) -> LayerTrace:
    """The only layer."""
    return work.classes[0].layers["block0"]


def only(work: Workload, op: str, module: str) -> OpSpec:
    """The one operator of a name in a module."""
    (found,) = [o for o in block_of(work).ops if o.op == op and o.module == module]
    return found


def test_eager_is_the_trace() -> None:
    work = captured()
    assert apply_implementation(work, "eager") is work


@pytest.mark.parametrize("name", FUSED)
@pytest.mark.parametrize("index", range(7))
def test_matmuls_keep_their_flops_in_every_class(name: str, index: int) -> None:
    before, after = captured().classes[index], apply_implementation(captured(), name).classes[index]
    batch, seq = before.batch or BATCH, before.seq or SEQ
    assert matmul_flops(after, batch=batch, seq=seq) == matmul_flops(before, batch=batch, seq=seq)


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
@pytest.mark.parametrize("attention", ["flash", "math"])
def test_model_flops_do_not_depend_on_the_implementation(name: str, attention: str) -> None:
    work = apply_implementation(captured(), name, attention=attention)
    assert model_flops_per_token(work, SEQ) == pytest.approx(
        model_flops_per_token(captured(), SEQ), rel=1e-12
    )


@pytest.mark.parametrize("name", FUSED)
@pytest.mark.parametrize("attention", ["flash", "math"])
@pytest.mark.parametrize("work", [captured(), llama(), two_matmuls()], ids=["captured", "llama", "two"])
def test_fused_kernels_move_fewer_bytes_and_launch_less(name: str, attention: str, work: Workload) -> None:
    eager = apply_implementation(work, "eager", attention=attention)
    fused = apply_implementation(work, name, attention=attention)
    for before, after in zip(eager.classes, fused.classes, strict=True):
        for phase in ("forward", "backward"):
            assert moved(calls(after, phase)) <= moved(calls(before, phase))
            assert launches(calls(after, phase)) <= launches(calls(before, phase))
        assert fused.saved_bytes(after, batch=BATCH, seq=SEQ) <= eager.saved_bytes(
            before, batch=BATCH, seq=SEQ
        )


@pytest.mark.parametrize("name", FUSED)
def test_twice_is_once(name: str) -> None:
    once = apply_implementation(captured(), name)
    assert once.implementation == name
    assert apply_implementation(once, name) == once


def test_a_fused_norm_reads_its_input_once_and_writes_its_result() -> None:
    norm = only(apply_implementation(llama(), "megatron"), "fused::rms_norm", "norm1")
    assert family(norm.op) == "normalization"
    tokens = BATCH * SEQ
    x, weight, statistic = 2 * tokens * H, 2 * H, 4 * tokens
    assert moved(iter([norm])) == 2 * x + weight + statistic
    back = only(apply_implementation(llama(), "megatron"), "fused::rms_norm_backward", "norm1")
    # gradient, input and statistic in; gradients of input and weight out
    assert moved(iter([back])) == 3 * x + 2 * weight + statistic


@pytest.mark.parametrize("name", FUSED)
def test_swiglu_is_one_kernel_over_gate_and_up(name: str) -> None:
    work, wide = apply_implementation(llama(), name), 2 * BATCH * SEQ * F
    assert moved(iter([only(work, "fused::elementwise", "mlp")])) == 3 * wide
    assert moved(iter([only(work, "fused::elementwise_backward", "mlp")])) == 5 * wide


def test_rope_rotates_query_and_key_each_in_one_kernel() -> None:
    ropes = [o for o in block_of(apply_implementation(llama(), "compile")).ops if o.module == "attn"]
    forward = [o for o in ropes if o.op == "fused::elementwise"]
    x, table = 2 * BATCH * SEQ * H, 2 * SEQ * H // A
    assert [moved(iter([o])) for o in forward] == [2 * x + table] * 2


def test_written_out_scores_pass_one_fused_softmax() -> None:
    work, scores = llama(), 2 * BATCH * A * SEQ * SEQ
    fused = apply_implementation(work, "megatron", attention="math")
    mask = 2 * SEQ * SEQ
    assert moved(iter([only(fused, "fused::softmax", "attn")])) == 2 * scores + mask
    eager = block_of(apply_implementation(work, "eager", attention="math"))
    chain = [o for o in eager.ops if o.module == "attn" and o.phase == "forward" and not is_free(o.op)]
    assert [o.op for o in chain][-5:] == [
        "aten::bmm",
        "aten::mul",
        "aten::add",
        "aten::_softmax",
        "aten::bmm",
    ]
    # in place of the kernel's statistics (float32, a token and head) the probabilities are kept, in 16 bit
    flash = apply_implementation(work, "megatron")
    saved = [w.saved_bytes(w.classes[0], batch=BATCH, seq=SEQ) for w in (fused, flash)]
    assert saved[0] - saved[1] == scores - 4 * BATCH * A * SEQ


def test_projections_that_share_their_input_are_one_matmul() -> None:
    work = apply_implementation(one_layer(llama_block(hidden=H, ffn=F, heads=A, kv_heads=8)), "megatron")
    matmuls = {(o.module, o.phase): o for o in block_of(work).ops if o.op == "aten::mm"}
    forward = {module for module, phase in matmuls if phase == "forward"}
    assert forward == {"attn.q", "attn.o", "mlp.gate", "mlp.down"}
    assert matmuls["attn.q", "forward"].inputs[1].dims == (H, H + 2 * 8 * H // A)
    assert matmuls["mlp.gate", "forward"].outputs[0].dims[-1] == 2 * F
    assert matmuls["attn.o", "forward"].outputs[0].dims[-1] == H
    compiled = apply_implementation(llama(), "compile")
    assert sum(o.op == "aten::mm" for o in block_of(compiled).ops) == 3 * 7


def test_launches_of_a_llama_block() -> None:
    count = {
        name: launches(calls(apply_implementation(llama(), name).classes[0], "forward"))
        for name in IMPLEMENTATIONS
    }
    # eager: 2 norms of 8, 2 ropes of 5, 7 matmuls, silu, mul, attention, 2 sums
    assert count["eager"] == 2 * 8 + 2 * 5 + 7 + 2 + 1 + 2
    # compile: the first sum is fused with the second norm
    assert count["compile"] == 2 + 2 + 7 + 1 + 1 + 1
    # megatron: 4 matmuls, both sums by themselves
    assert count["megatron"] == count["te"] == 2 + 2 + 4 + 1 + 1 + 2


@pytest.mark.parametrize("name", FUSED)
@pytest.mark.parametrize(("hidden", "heads", "seq"), [(1024, 16, 1024), (6144, 64, 2048)])
def test_saved_bytes_of_a_gpt_block_are_those_of_the_closed_form(
    name: str, hidden: int, heads: int, seq: int
) -> None:
    work = apply_implementation(one_layer(gpt_block(hidden=hidden, heads=heads)), name)
    b, s, h, a = 4, seq, hidden, heads
    # equation 2 of "Reducing Activation Recomputation in Large Transformer Models": s b h (34 + 5 a s / h),
    # which leaves mean and deviation of both norms out (two float32 a token each)
    expected = 34 * s * b * h + 5 * a * s * s * b
    assert work.saved_bytes(work.classes[0], batch=b, seq=s) == expected + 2 * 2 * 4 * s * b


@pytest.mark.parametrize("name", FUSED)
def test_saved_bytes_of_a_llama_block_with_flash_attention(name: str) -> None:
    work, b, s = apply_implementation(llama(), name), 2, 512
    # of 2 s b h each: both norms' inputs and results, query, key, value, the attention's result; of 2 s b f each: gate,
    # up, and their product; in float32 a norm's statistic a token and the attention's a token and head
    expected = 2 * s * b * (8 * H + 3 * F) + 4 * s * b * (2 + A)
    assert work.saved_bytes(work.classes[0], batch=b, seq=s) == expected


def test_megatron_keeps_the_shard_of_what_sequence_parallelism_gathers() -> None:
    work = apply_implementation(captured(), "megatron")
    trace = work.find_class(4, sp=True)
    assert trace is not None
    block, hidden = trace.layers["block0"], 64
    residual = [t for t in block.saved if t.dims[-1] == hidden]
    # both norms' inputs and results, each a fourth of the sequence
    assert [t.shape_at(BATCH, SEQ) for t in residual] == [(BATCH, SEQ // 4, hidden)] * 4
    assert not any(o.op == "aten::cat" for o in block.ops if o.phase == "forward")


def test_a_fused_optimizer_is_one_update() -> None:
    work = apply_implementation(captured(), "megatron")
    assert work.optimizer.launch == "fused"
    assert not any(o.phase == "optimizer" for layer in work.classes[0].layers.values() for o in layer.ops)
    assert apply_implementation(captured(), "compile").optimizer == captured().optimizer


def test_who_reads_what_in_the_order_of_another_program() -> None:
    """Query, key and value have one size, are projected first and rotated afterwards."""
    found = trace_flow(llama_block(hidden=64, ffn=96, heads=4, kv_heads=4).ops, by_batch=True)
    attention = next(c for c in found if c.kind == "attention")
    makers = [h.value.maker for h in attention.reads]
    assert sorted(m.op.op for m in makers if m is not None) == ["aten::add", "aten::add", "aten::mm"]
    rotated = [
        h.value.maker.op.module for c in found if c.op.op == "aten::neg" for h in c.reads if h.value.maker
    ]
    assert rotated == ["attn.q", "attn.k"]
    sums = [v for c in found for v in c.writes if v.is_sum]
    assert len(sums) == 2


@pytest.mark.parametrize(
    ("name", "attention", "message"),
    [("fast", "flash", "'fast' is not known"), ("compile", "sparse", "'sparse' is not known")],
)
def test_unknown_names_are_refused(name: str, attention: str, message: str) -> None:
    with pytest.raises(WorkloadError, match=message):
        apply_implementation(captured(), name, attention=attention)


def test_what_is_fused_already_is_not_made_into_something_else() -> None:
    with pytest.raises(WorkloadError, match="is of implementation 'compile'"):
        apply_implementation(apply_implementation(captured(), "compile"), "megatron")
