"""The reference decoder as data: published parameter counts, FLOPs by hand, equality with fresh traces, no torch."""

from __future__ import annotations

import itertools
import subprocess
import sys
from math import prod
from typing import Any

import msgspec
import pytest

from llmprof.errors import WorkloadError
from llmprof.extrapolate.baselines import layer_counts, model_flops_per_token, tensors_at
from llmprof.extrapolate.memory import state_bytes
from llmprof.extrapolate.partition import partition
from llmprof.extrapolate.precision import choose_precision
from llmprof.extrapolate.request import choose_class
from llmprof.hooks.layers import FitError
from llmprof.hooks.reference_fit import Fit
from llmprof.hooks.reference_trace import TracedLayer, TracePoint, trace_reference
from llmprof.schema.layout import Layout
from llmprof.schema.model import NORMS, POSITIONS, ModelShape
from llmprof.schema.operators import MATMUL_FAMILIES, Tensor, family, flops, size_bytes
from llmprof.schema.reference import reference_workload, tensor_parallel_problem
from llmprof.schema.workload import ClassTrace, OpSpec, TensorSpec, Workload

LLAMA_7B = ModelShape(
    layers=32, hidden=4096, ffn=11008, heads=32, kv_heads=32, vocab=32000, seq=4096, name="llama-2-7b"
)
LLAMA_3_8B = ModelShape(layers=32, hidden=4096, ffn=14336, heads=32, kv_heads=8, vocab=128256, seq=8192)
LLAMA_3_70B = ModelShape(layers=80, hidden=8192, ffn=28672, heads=64, kv_heads=8, vocab=128256, seq=8192)
GPT_3 = ModelShape(
    layers=96, hidden=12288, ffn=49152, heads=96, kv_heads=96, vocab=50257, seq=2048,
    gated=False, tied=True, bias=True, norm="layernorm", positions="learned",
)  # fmt: skip
MIXTRAL = ModelShape(
    layers=32, hidden=4096, ffn=14336, heads=32, kv_heads=8, vocab=32000, seq=4096, experts=8, topk=2
)
DEEP = ModelShape(
    layers=6, hidden=1024, ffn=2048, heads=16, kv_heads=16, vocab=5003, seq=512,
    experts=16, topk=4, expert_ffn=512, shared_ffn=1024, dense_layers=2, bias=True,
)  # fmt: skip
SMALL = ModelShape(layers=2, hidden=136, ffn=656, heads=24, kv_heads=8, head_dim=18, vocab=1019, seq=173)
PUBLISHED = {
    6_738_415_616: LLAMA_7B,
    8_030_261_248: LLAMA_3_8B,
    70_553_706_496: LLAMA_3_70B,
    174_604_259_328: GPT_3,
    46_702_792_704: MIXTRAL,
}


def whole(work: Workload) -> ClassTrace:
    """The unsharded class."""
    found = work.find_class(1, sp=False)
    assert found is not None
    return found


def matmul_flops(work: Workload, trace: ClassTrace, *, batch: int, seq: int) -> int:
    """FLOPs of forward and backward of one microbatch on one rank."""
    total = 0
    for name, repeats in layer_counts(work).items():
        for op in trace.layers[name].ops:
            if family(op.op) in MATMUL_FAMILIES:
                inputs, outputs = tensors_at(op.inputs, batch, seq), tensors_at(op.outputs, batch, seq)
                total += repeats * op.count * flops(op.op, inputs, outputs, frozenset(op.attributes))
    return total


@pytest.mark.parametrize(("count", "shape"), PUBLISHED.items(), ids=lambda v: str(v)[:12])
def test_parameters_are_those_published(count: int, shape: ModelShape) -> None:
    work = reference_workload(shape)
    repeats = layer_counts(work)
    own = [(layer.name, p) for layer in work.layers for p in layer.parameters if not p.tied_to]
    assert sum(repeats[name] * prod(p.shape) for name, p in own) == count == shape.parameters


@pytest.mark.parametrize("shape", [*PUBLISHED.values(), DEEP], ids=lambda s: str(s.parameters))
def test_parameters_are_those_of_the_shape_at_every_degree(shape: ModelShape) -> None:
    work = reference_workload(shape, degrees=[(8, False), (8, True)])
    names = [[p.name for p in layer.parameters] for layer in work.layers]
    assert all(len(set(n)) == len(n) for n in names)
    one = whole(work)
    for trace in work.classes:
        for layer in work.layers:
            local = trace.layers[layer.name].parameters
            assert len(local) == len(layer.parameters) == len(one.layers[layer.name].parameters)
            for spec, mine in zip(layer.parameters, local, strict=True):
                split = [w // m for w, m in zip(spec.shape, mine, strict=True) if w != m]
                assert trace.tp > 1 or mine == spec.shape
                assert split in ([], [trace.tp]) or -(-spec.shape[0] // trace.tp) == mine[0]


def test_step_flops_by_hand() -> None:
    b, s, h = 2, 4096, 4096
    weights = 32 * (4 * h * h + 3 * h * 11008) + h * 32000
    # attention: half of 4 b s s h forward, five matmuls where the forward has two backward
    attention = 32 * (2 * b * s * s * h) * 7 // 2
    work = reference_workload(LLAMA_7B)
    assert matmul_flops(work, whole(work), batch=b, seq=s) == 6 * b * s * weights + attention
    assert model_flops_per_token(work, s) == 6 * weights + 6 * 32 * h * s


def test_active_experts_and_the_full_square_count() -> None:
    h, s = 4096, 4096
    weights = 32 * (2 * h * h + 2 * h * 1024 + h * 8 + 2 * 3 * h * 14336) + h * 32000
    assert model_flops_per_token(reference_workload(MIXTRAL), s) == 6 * weights + 6 * 32 * h * s
    square = reference_workload(msgspec.structs.replace(MIXTRAL, causal=False))
    assert model_flops_per_token(square, s) == 6 * weights + 12 * 32 * h * s


@pytest.mark.parametrize("shape", [*PUBLISHED.values(), DEEP], ids=lambda s: str(s.parameters))
def test_ranks_share_the_flops(shape: ModelShape) -> None:
    shape = msgspec.structs.replace(shape, vocab=shape.vocab // 8 * 8)
    work = reference_workload(shape, degrees=[(tp, sp) for tp in (2, 4, 8) for sp in (False, True)])
    batch, seq = 2, 512
    total = matmul_flops(work, whole(work), batch=batch, seq=seq)
    sparse = shape.layers - shape.dense_layers if shape.experts else 0
    routers = 6 * batch * seq * sparse * shape.hidden * shape.experts
    assert len(work.classes) == 7
    for trace in work.classes[1:]:
        mine = matmul_flops(work, trace, batch=batch, seq=seq)
        assert trace.tp * (mine - routers) == total - routers
        assert routers / total <= trace.replicated_flops_fraction < 0.01 or not routers


VARIANTS: dict[str, dict[str, Any]] = {
    "llama": {},
    "gpt": {"norm": "layernorm", "positions": "learned", "bias": True, "gated": False, "tied": True},
    "alibi": {"norm": "layernorm", "positions": "alibi"},
    "experts": {"experts": 6, "topk": 2, "expert_ffn": 576, "bias": True},
    "mixed": {"layers": 4, "dense_layers": 2, "experts": 9, "topk": 5, "expert_ffn": 320, "shared_ffn": 448},
}
DEGREES = ((1, False), (4, False), (2, True))


def shown(tensors: tuple[TensorSpec, ...], batch: int, seq: int) -> list[Tensor]:
    """Tensors at a size."""
    return list(tensors_at(tensors, batch, seq))


def expanded(ops: tuple[OpSpec, ...]) -> list[OpSpec]:
    """Operators one by one."""
    return [op for op in ops for _ in range(op.count)]


@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize(("tp", "sp"), DEGREES)
def test_the_data_is_what_a_fresh_trace_of_other_sizes_gives(name: str, tp: int, sp: bool) -> None:
    shape = msgspec.structs.replace(SMALL, **VARIANTS[name])
    batch, seq = 4, 56
    traced = trace_reference(TracePoint(shape=shape, batch=batch, seq=seq, tp=tp, sp=sp))
    work = reference_workload(shape, degrees=[(tp, sp)])
    found = work.find_class(tp, sp=sp)
    assert found is not None and set(found.layers) == set(traced)
    for layer, real in traced.items():
        data = found.layers[layer]
        check_ops(expanded(data.ops), real, batch, seq)
        assert shown(data.saved, batch, seq) == list(real.saved)
        boundary = (data.boundary,) if data.boundary else ()
        assert shown(boundary, batch, seq) == ([real.boundary] if real.boundary else [])
        assert data.parameters == real.local
        specs = work.layer(layer).parameters
        assert [(p.name, p.shape, p.tied_to) for p in specs] == [
            (p.name, p.shape, p.tied_to) for p in real.specs
        ]
        assert tp > 1 or [p.matmul for p in specs] == [p.matmul for p in real.specs]


def check_ops(ops: list[OpSpec], real: TracedLayer, batch: int, seq: int) -> None:
    """Every operator, in order."""
    assert [(o.op, o.phase, o.module, o.collective) for o in ops] == [
        (o.op, o.phase, o.module, o.collective) for o in real.ops
    ]
    for op, other in zip(ops, real.ops, strict=True):
        assert shown(op.inputs, batch, seq) == list(other.inputs), op
        assert shown(op.outputs, batch, seq) == list(other.outputs), op
        assert op.attributes == other.attributes
        assert op.axis == ("tp" if op.collective else "")


def messages(work: Workload, layer: str, *, tp: int, sp: bool) -> list[tuple[str, str, int]]:
    """Collectives of a layer: phase, kind, bytes of the whole buffer at batch 2 and 512 tokens."""
    found = work.find_class(tp, sp=sp)
    assert found is not None
    return [
        (op.phase.split("_")[0], op.collective, max(size_bytes(t) for t in shown((*op.inputs, *op.outputs), 2, 512)))
        for op in expanded(found.layers[layer].ops)
        if op.collective
    ]  # fmt: skip


def test_collectives_of_tensor_parallelism() -> None:
    work = reference_workload(LLAMA_7B, degrees=[(8, False), (8, True)])
    activation, scalar = 2 * 2 * 512 * 4096, 4 * 2 * 512
    reduce = [("forward", "all_reduce", activation)] * 2 + [("backward", "all_reduce", activation)] * 2
    assert messages(work, "block0", tp=8, sp=False) == reduce
    gather, scatter = (
        ("forward", "all_gather", activation),
        ("forward", "reduce_scatter", activation),
    )
    back = [("backward", kind, activation) for kind in ("all_gather", "reduce_scatter")] * 2
    assert messages(work, "block0", tp=8, sp=True) == [gather, scatter] * 2 + back
    assert messages(work, "prologue", tp=8, sp=False) == reduce[:1]
    assert messages(work, "epilogue", tp=8, sp=False) == reduce[-1:]
    # the loss exchanges one number for each token, never the logits
    assert messages(work, "loss", tp=8, sp=True) == [("forward", "all_reduce", scalar)] * 3


def test_sequence_parallelism_shards_what_lies_between() -> None:
    work = reference_workload(LLAMA_7B, degrees=[(4, False), (4, True)])
    plain, sharded = work.find_class(4, sp=False), work.find_class(4, sp=True)
    assert plain is not None and sharded is not None
    boundary = sharded.layers["block0"].boundary
    assert boundary is not None and boundary.shape_at(2, 512) == (2, 128, 4096)
    saved = [work.saved_bytes(c, batch=1, seq=4096) for c in (whole(work), plain, sharded)]
    assert saved[0] > saved[1] > saved[2]


def test_few_key_value_heads_are_replicated_and_vocabulary_is_rounded_up() -> None:
    work = reference_workload(msgspec.structs.replace(LLAMA_3_8B, vocab=50257), degrees=[(16, True)])
    trace = work.classes[1]
    by_name = dict(
        zip((p.name for p in work.layer("block0").parameters), trace.layers["block0"].parameters, strict=True)
    )
    assert by_name["attention.query.weight"] == (256, 4096)
    assert by_name["attention.key.weight"] == (128, 4096)
    assert trace.layers["epilogue"].parameters[-1] == (3142, 4096)


@pytest.mark.parametrize(
    ("shape", "tp", "message"),
    [
        (LLAMA_7B, 3, "heads=32 is not a multiple of tp=3"),
        (msgspec.structs.replace(LLAMA_7B, ffn=11000), 16, "ffn=11000 is not a multiple of tp=16"),
        (msgspec.structs.replace(MIXTRAL, shared_ffn=100), 8, "shared_ffn=100 is not a multiple of tp=8"),
        (msgspec.structs.replace(LLAMA_7B, heads=24, kv_heads=6, head_dim=128), 4, "kv_heads=6 is neither"),
        (LLAMA_7B, 0, "tp=0 is not between 1 and 64"),
        (LLAMA_7B, 128, "tp=128 is not between 1 and 64"),
    ],
)
def test_degrees_that_do_not_divide_are_refused(shape: ModelShape, tp: int, message: str) -> None:
    with pytest.raises(WorkloadError, match=message):
        reference_workload(shape, degrees=[(tp, False)])
    assert message in tensor_parallel_problem(shape, tp)


def test_precisions() -> None:
    """In float32 no casts are left; 16-bit kinds differ in name only."""
    bfloat, half, single = (
        reference_workload(LLAMA_7B, precision=p) for p in ("bfloat16", "float16", "float32")
    )
    blocks = [whole(w).layers["block0"] for w in (bfloat, half, single)]
    assert len(blocks[0].ops) == len(blocks[1].ops)
    assert not any(op.op == "aten::_to_copy" for op in blocks[2].ops)
    dtypes = [
        {t.dtype for op in block.ops for t in (*op.inputs, *op.outputs) if t.dims and "uint" not in t.dtype}
        for block in blocks
    ]
    assert dtypes == [{"bfloat16", "float32"}, {"float16", "float32"}, {"float32"}]
    assert model_flops_per_token(single, 512) == model_flops_per_token(bfloat, 512)
    with pytest.raises(WorkloadError, match="'float8' of a reference decoder is not one of"):
        reference_workload(LLAMA_7B, precision="float8")


def test_a_workload_that_a_layout_can_use() -> None:
    work = reference_workload(MIXTRAL, degrees=[(1, True), (8, True)], batch=2, accum=4, dp=8)
    assert [(c.tp, c.sp) for c in work.classes] == [(1, False), (8, True)]
    assert (work.source, work.implementation, work.seq) == ("reference", "eager", 4096)
    assert choose_class(work, Layout.parse("tp=8,sp=1"), 4096).tp == 8
    assert msgspec.json.decode(msgspec.json.encode(work), type=Workload) == work


def test_leading_dense_blocks() -> None:
    work = reference_workload(DEEP)
    assert work.sequence == (("prologue", 1), ("block0", 2), ("block1", 4), ("epilogue", 1), ("loss", 1))
    assert [layer.module for layer in work.layers] == ["", "layers.0", "layers.2", "", ""]
    modules = {op.module for op in whole(work).layers["block1"].ops}
    assert {"feed_forward.router", "feed_forward.experts", "feed_forward.shared.gate"} <= modules


def test_every_kind_of_decoder_is_in_the_data() -> None:
    kinds: list[dict[str, Any]] = [{}, {"experts": 8, "topk": 2}, {"experts": 8, "topk": 2, "shared_ffn": 64}]
    switches = itertools.product(NORMS, POSITIONS, (False, True), (False, True), (False, True), kinds)
    for norm, positions, gated, bias, tied, kind in switches:
        shape = msgspec.structs.replace(
            SMALL, norm=norm, positions=positions, gated=gated, bias=bias, tied=tied, **kind
        )
        work = reference_workload(shape, degrees=[(2, False), (2, True)])
        assert len(work.classes) == 3
        own = [(layer.name, p) for layer in work.layers for p in layer.parameters if not p.tied_to]
        assert sum(layer_counts(work)[name] * prod(p.shape) for name, p in own) == shape.parameters


def test_dimensions_that_are_no_product_are_refused() -> None:
    fit = Fit([(LLAMA_7B, 2, 64, 1), (LLAMA_3_8B, 3, 48, 1), (LLAMA_3_70B, 5, 96, 1)])
    with pytest.raises(FitError, match="no product"):
        fit.dim((7, 11, 13), "here")
    with pytest.raises(FitError, match="was held out"):
        fit.dim((2 * 64, 3 * 48, 5 * 96 + 1), "here")
    assert fit.dim((2 * 64, 3 * 48, 5 * 96), "here") == "b*s"


def test_loads_without_torch() -> None:
    code = (
        "import sys; from llmprof.schema.reference import reference_workload;"
        "from llmprof.schema.model import parse_model;"
        "reference_workload(parse_model('llama:layers=2,hidden=64,heads=4'), degrees=[(2, True)]);"
        "assert 'torch' not in sys.modules and 'numpy' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


@pytest.mark.parametrize(
    ("layout", "per_parameter"),
    [("dp=8", 2 + 4 + 4 + 8), ("dp=8,zero=1", 2 + 4 + 12 / 8), ("dp=8,zero=3", 16 / 8)],
)
def test_state_is_that_of_mixed_precision(layout: str, per_parameter: float) -> None:
    """A 16-bit working copy, float32 gradients, masters and two moments; sharded, the parameters are the masters."""
    rule = choose_precision(captured="bfloat16", asked="", device_kind="cuda", masters=True)
    plan = partition(reference_workload(LLAMA_7B), Layout.parse(layout), seq=4096, precision=rule)
    assert rule.mixed and not rule.changes and rule.working == "bfloat16"
    size = sum(state_bytes(plan, 0).values())
    assert size == pytest.approx(per_parameter * LLAMA_7B.parameters, rel=1e-9)
