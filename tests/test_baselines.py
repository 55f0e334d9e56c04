"""Model FLOPs, MFU and the baselines against a tiny decoder whose numbers are worked out by hand."""

from __future__ import annotations

import msgspec
import pytest

from llmprof.errors import WorkloadError
from llmprof.extrapolate.baselines import (
    bound_step_time_s,
    captured_mfu,
    mfu,
    model_flops_per_step,
    model_flops_per_token,
    naive_step_time_s,
    second_baseline_step_time_s,
    step_time_us,
)
from llmprof.schema.catalogue import load_cluster
from llmprof.schema.layout import Layout
from llmprof.schema.profile import Manifest, Profile, SourceRow, StepRow
from llmprof.schema.workload import (
    ClassTrace,
    LayerSpec,
    LayerTrace,
    OpSpec,
    ParameterSpec,
    Poly,
    TensorSpec,
    Workload,
)

H, FFN, VOCAB, LAYERS, HEADS = 8, 16, 32, 3, 2
BLOCK_PARAMETERS = 4 * H * H + 3 * H * FFN
MATMUL_PARAMETERS = LAYERS * BLOCK_PARAMETERS + VOCAB * H
TOKENS = Poly(cbs=1)
"""Rows of a matmul: batch x sequence."""


def tensor(*dims: int | Poly) -> TensorSpec:
    return TensorSpec(dims, "float32")


def matmul(rows: int, columns: int) -> OpSpec:
    """tokens x rows times rows x columns."""
    return OpSpec(op="aten::mm", phase="forward", inputs=(tensor(TOKENS, rows), tensor(rows, columns)))


def attention(*, causal: bool) -> OpSpec:
    query = tensor(Poly(cb=1), HEADS, Poly(cs=1), H // HEADS)
    return OpSpec(
        op="aten::_scaled_dot_product_flash_attention_for_cpu",
        phase="forward",
        inputs=(query, query, query),
        attributes=("causal",) if causal else (),
    )


def weight(name: str, *shape: int, trainable: bool = True, matmul: bool = True) -> ParameterSpec:
    return ParameterSpec(name=name, shape=shape, dtype="float32", trainable=trainable, matmul=matmul)


def decoder(*, causal: bool = True, frozen: bool = False, gradient_flows: bool = True) -> Workload:
    """Embedding, 3 blocks (four h x h, three h x ffn), head; recompute and optimizer work must not count."""
    embedding = OpSpec(
        op="aten::embedding",
        phase="forward",
        inputs=(tensor(VOCAB, H), TensorSpec((Poly(cb=1), Poly(cs=1)), "int64")),
    )
    block_ops = (
        *(matmul(H, H),) * 4,
        matmul(H, FFN),
        matmul(H, FFN),
        matmul(FFN, H),
        attention(causal=causal),
        OpSpec(op="aten::mul", phase="forward", inputs=(tensor(TOKENS, H),)),
        OpSpec(op="aten::mm", phase="optimizer", inputs=(tensor(H, H), tensor(H, H))),
        *(
            (OpSpec(op="aten::mm", phase="backward_input", inputs=(tensor(TOKENS, H), tensor(H, H))),)
            if gradient_flows
            else ()
        ),
    )
    weights = (
        *(weight(f"w{i}", H, H, trainable=not frozen) for i in range(4)),
        *(weight(f"f{i}", H, FFN, trainable=not frozen) for i in range(3)),
    )
    return Workload(
        layers=(
            LayerSpec(name="prologue", kind="prologue", parameters=(weight("e", VOCAB, H, matmul=False),)),
            LayerSpec(name="block0", kind="block", parameters=weights),
            LayerSpec(name="epilogue", kind="epilogue", parameters=(weight("head", VOCAB, H),)),
        ),
        sequence=(("prologue", 1), ("block0", LAYERS), ("epilogue", 1)),
        classes=(
            ClassTrace(
                layers={
                    "prologue": LayerTrace(ops=(embedding,)),
                    "block0": LayerTrace(ops=block_ops),
                    "epilogue": LayerTrace(ops=(matmul(H, VOCAB),)),
                }
            ),
        ),
        batch=2,
        seq=64,
        precision="bfloat16",
    )


@pytest.mark.parametrize("seq", [4, 64, 1000])
def test_causal_decoder_is_6_n_plus_6_l_h_s(seq: int) -> None:
    assert model_flops_per_token(decoder(), seq) == 6 * MATMUL_PARAMETERS + 6 * LAYERS * H * seq


def test_full_square_attention_is_12_l_h_s() -> None:
    expected = 6 * MATMUL_PARAMETERS + 12 * LAYERS * H * 64
    assert model_flops_per_token(decoder(causal=False), 64) == expected


def test_frozen_blocks_count_4_or_2() -> None:
    rest = 6 * VOCAB * H + 6 * LAYERS * H * 64
    blocks = LAYERS * BLOCK_PARAMETERS
    assert model_flops_per_token(decoder(frozen=True), 64) == pytest.approx(rest + 4 * blocks)
    stopped = decoder(frozen=True, gradient_flows=False)
    assert model_flops_per_token(stopped, 64) == pytest.approx(rest + 2 * blocks)


def test_a_class_traced_at_one_sequence_length_keeps_it() -> None:
    workload = decoder()
    fixed = msgspec.structs.replace(workload.classes[0], seq=64)
    workload = msgspec.structs.replace(workload, classes=(fixed,))
    assert model_flops_per_token(workload, 1000) == 6 * MATMUL_PARAMETERS + 6 * LAYERS * H * 64


def test_without_an_unsharded_trace_there_is_no_answer() -> None:
    with pytest.raises(WorkloadError):
        model_flops_per_token(msgspec.structs.replace(decoder(), classes=()), 64)


def test_flops_of_a_step_count_every_sequence_once() -> None:
    layout = Layout(dp=4, mb=2, accum=3, tp=2, recompute="full")
    assert model_flops_per_step(decoder(), layout, 64) == model_flops_per_token(decoder(), 64) * 24 * 64


def test_naive_is_flops_over_gpus_times_mfu_times_peak() -> None:
    cluster = load_cluster("8xA100-80GB")
    layout = Layout(dp=4, tp=2)
    flops = model_flops_per_token(decoder(), 64) * 4 * 64
    found = naive_step_time_s(decoder(), layout, cluster, seq=64, mfu=0.5)
    assert found == pytest.approx(flops / (8 * 0.5 * 312e12))
    cold = naive_step_time_s(decoder(), layout, cluster, seq=64)
    assert cold == pytest.approx(found * 0.5 / 0.4)


def test_second_baseline_adds_bubble_and_all_reduce() -> None:
    cluster = load_cluster("8xA100-80GB")
    layout = Layout(dp=2, pp=4, accum=8)
    naive = naive_step_time_s(decoder(), layout, cluster, seq=64)
    parameters = MATMUL_PARAMETERS + VOCAB * H
    all_reduce_s = 2 * (1 / 2) * (parameters * 4 / 4) / 300e9
    naive_s = naive_step_time_s(decoder(), layout, cluster, seq=64)
    found = second_baseline_step_time_s(decoder(), layout, cluster, naive_s=naive_s)
    assert found == pytest.approx(naive * (1 + 3 / 8) + all_reduce_s)


def test_second_baseline_uses_the_outer_link_between_nodes() -> None:
    cluster = load_cluster("8xA100-80GB")
    inside = Layout(dp=8)
    across = Layout(dp=16)
    parameters = (MATMUL_PARAMETERS + VOCAB * H) * 4

    def all_reduce(layout: Layout) -> float:
        naive = naive_step_time_s(decoder(), layout, cluster, seq=64)
        return second_baseline_step_time_s(decoder(), layout, cluster, naive_s=naive) - naive

    assert all_reduce(inside) == pytest.approx(2 * 7 / 8 * parameters / 300e9)
    assert all_reduce(across) == pytest.approx(2 * 15 / 16 * parameters / 25e9)


def test_bound_is_flops_at_peak_or_optimizer_bytes() -> None:
    cluster = load_cluster("8xH100-SXM")
    for layout in (Layout(dp=1), Layout(dp=8), Layout(dp=2, tp=2, pp=2, accum=4)):
        bound = bound_step_time_s(decoder(), layout, cluster, seq=64)
        flops_bound = model_flops_per_step(decoder(), layout, 64) / (layout.gpus * 989.4e12)
        parameters = MATMUL_PARAMETERS + VOCAB * H
        # parameter and gradient read, parameter written (3 x 4 bytes); two states read and written (16 bytes)
        memory_bound = parameters * 28 / (layout.gpus * 3.35e12)
        assert bound == pytest.approx(max(flops_bound, memory_bound))


def test_mfu_by_hand() -> None:
    assert mfu(100e12, 2.0, gpus=1, peak=100e12) == 0.5


def profile_on(device_name: str, *, precision: str = "bfloat16") -> Profile:
    source = SourceRow(
        rank=0,
        hostname="h",
        device="cuda",
        device_name=device_name,
        device_count=8,
        threads=1,
        memory_bytes=None,
        backend="nccl",
        clock="cuda",
        software="",
    )
    manifest = Manifest(world_size=2, precision=precision, model_flops_per_step=312e12)
    steps = tuple(StepRow(rank=0, step=i, start_us=0, duration_us=t) for i, t in enumerate((1e6, 1e6, 9e6)))
    return Profile(manifest=manifest, steps=steps, sources=(source,))


def test_captured_mfu_needs_the_same_device_and_precision() -> None:
    device = load_cluster("8xA100-80GB").device
    assert captured_mfu(profile_on("NVIDIA A100-SXM4-80GB"), device, "bfloat16") == pytest.approx(0.5)
    assert captured_mfu(profile_on("NVIDIA H200"), device, "bfloat16") is None
    assert captured_mfu(profile_on("NVIDIA A100-SXM4-80GB"), device, "float32") is None


def test_step_time_is_the_median_of_the_slowest_rank() -> None:
    rows = [
        StepRow(rank=0, step=0, start_us=0, duration_us=10.0),
        StepRow(rank=1, step=0, start_us=0, duration_us=12.0),
        StepRow(rank=0, step=1, start_us=0, duration_us=20.0),
        StepRow(rank=1, step=1, start_us=0, duration_us=16.0),
        StepRow(rank=0, step=2, start_us=0, duration_us=999.0, instrumented=True),
        StepRow(rank=0, step=3, start_us=0, duration_us=999.0, kind="compile"),
    ]
    assert step_time_us(Profile(manifest=Manifest(), steps=tuple(rows))) == 16.0
    assert step_time_us(Profile(manifest=Manifest())) is None
