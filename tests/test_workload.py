"""Workloads: layers, conservation over classes, exactness away from the fitted sizes, losses, other kinds of model."""

from __future__ import annotations

import dataclasses

import msgspec
import pytest
import torch
from torch import nn

from llmprof.errors import WorkloadError
from llmprof.hooks.inputs import FakeSpec, find_sizes, make_inputs
from llmprof.hooks.layers import raw_layers
from llmprof.hooks.lossrows import loss_layer
from llmprof.hooks.prepare import trace_at, trace_base
from llmprof.hooks.workload import TraceRequest, describe_inputs, trace_workload, trace_workload_here
from llmprof.schema.operators import Tensor, flops
from llmprof.schema.profile import OperatorRow
from llmprof.schema.store import load_workload
from llmprof.schema.workload import ClassTrace, Poly, Workload
from tests.models import TinyGPT2, TinyLlama, classifier, conv_net, cross_entropy
from tests.samples import SAMPLE, tiny_llama_request


@pytest.fixture(scope="module")
def traced() -> Workload:
    request = tiny_llama_request()
    return trace_workload(request)


def _flops(workload: Workload, trace: ClassTrace, batch: int, seq: int) -> int:
    total = 0
    for name, count in workload.sequence:
        for op in trace.layers[name].ops:
            inputs = [Tensor(t.shape_at(batch, seq), t.dtype) for t in op.inputs]
            outputs = [Tensor(t.shape_at(batch, seq), t.dtype) for t in op.outputs]
            total += count * op.count * flops(op.op, inputs, outputs, frozenset(op.attributes))
    return total


def test_layers_and_parameters(traced: Workload) -> None:
    assert traced.sequence == (("prologue", 1), ("block0", 4), ("epilogue", 1), ("loss", 1))
    counts = dict(traced.sequence)
    parameters = sum(
        counts[layer.name] * torch.Size(p.shape).numel() for layer in traced.layers for p in layer.parameters
    )
    assert parameters == sum(p.numel() for p in TinyLlama().parameters())
    by_name = {p.name: p for layer in traced.layers for p in layer.parameters}
    assert not by_name["tok.weight"].matmul and by_name["out.weight"].matmul
    assert by_name["attention.wq.weight"].matmul and not by_name["attention_norm.weight"].matmul
    assert traced.layer("block0").module == "layers.0" and traced.layer("block0").class_name == "Block"


def test_matmul_flops_by_hand(traced: Workload) -> None:
    b, s, h, kv, ffn, vocab = 4, 64, 64, 32, 176, 256
    projections = 4 * (2 * h * h + 2 * h * kv + 3 * h * ffn) + h * vocab
    attention = (
        4 * (2 * b * s * s * h) * 7 // 2
    )  # causal: half of 4 b s s h forward, 5/2 of it again backward
    assert _flops(traced, traced.classes[0], b, s) == 6 * b * s * projections + attention


@pytest.mark.parametrize(("batch", "seq"), [(1, 64), (4, 64), (8, 4096)])
def test_flops_are_conserved_over_classes(traced: Workload, batch: int, seq: int) -> None:
    whole = _flops(traced, traced.classes[0], batch, seq)
    assert {(c.tp, c.sp) for c in traced.classes} == {
        (1, False),
        (2, False),
        (2, True),
        (4, False),
        (4, True),
    }
    for trace in traced.classes:
        if trace.batch in (None, batch):
            assert trace.replicated_flops_fraction == 0.0
            assert trace.tp * _flops(traced, trace, batch, seq) == whole


def test_too_few_heads_are_the_refusal(traced: Workload) -> None:
    assert "4 heads, which tp=8 does not divide" in traced.tp_refusal


def test_collectives_of_a_block(traced: Workload) -> None:
    plain, sharded = traced.find_class(2, sp=False), traced.find_class(2, sp=True)
    assert plain is not None and sharded is not None
    kinds = [op.collective for op in plain.layers["block0"].ops for _ in range(op.count) if op.collective]
    assert kinds == ["all_reduce"] * 4
    kinds = [op.collective for op in sharded.layers["block0"].ops for _ in range(op.count) if op.collective]
    assert sorted(kinds) == ["all_gather"] * 4 + ["reduce_scatter"] * 4
    for op in (o for o in sharded.layers["block0"].ops if o.collective):
        full = max(
            (t.shape_at(4, 64) for t in (*op.inputs, *op.outputs)),
            key=lambda shape: torch.Size(shape).numel(),
        )
        assert torch.Size(full).numel() == 4 * 64 * 64 and op.axis == "tp"
    boundary = sharded.layers["block0"].boundary
    assert boundary is not None and boundary.shape_at(4, 64) == (4, 32, 64)


def test_fit_is_exact_at_a_size_that_was_not_traced() -> None:
    request = tiny_llama_request()
    workload = trace_workload_here(_single_device(request))
    sizes = find_sizes(request.args, request.kwargs)
    base = trace_base(request, sizes)
    raws = raw_layers(trace_at(base.prepared, request, sizes, (7, 40)), base.skeleton)
    for name, raw in raws.items():
        fitted = [op for op in workload.classes[0].layers[name].ops if op.phase != "optimizer"]
        expanded = [op for op in fitted for _ in range(op.count)]
        assert [o.op for o in expanded] == [o.op for o in raw.ops]
        for op, real in zip(expanded, raw.ops, strict=True):
            assert [t.shape_at(7, 40) for t in op.inputs] == [t.shape for t in real.inputs]
            assert [t.shape_at(7, 40) for t in op.outputs] == [t.shape for t in real.outputs]


def _single_device(request: TraceRequest) -> TraceRequest:
    """The same request without tensor-parallel classes."""
    return dataclasses.replace(request, degrees=())


def test_depth_does_not_change_a_block(traced: Workload) -> None:
    torch.manual_seed(0)
    args, kwargs = describe_inputs((torch.zeros(4, 64, dtype=torch.long),), {})
    shallow = TraceRequest(
        model=TinyLlama(layers=2),
        args=args,
        kwargs=kwargs,
        loss_fn=cross_entropy,
        degrees=(),
    )
    ops = trace_workload_here(shallow).classes[0].layers["block0"].ops
    deep = traced.classes[0].layers["block0"].ops
    assert ops == tuple(op for op in deep if op.phase != "optimizer")


def test_saved_activations_equal_what_autograd_keeps() -> None:
    model, tokens = TinyLlama(layers=2), torch.zeros(4, 64, dtype=torch.long)
    owned = {t.untyped_storage().data_ptr() for t in (*model.parameters(), *model.buffers())}
    kept: dict[int, int] = {}
    alive = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in owned:
            kept[storage.data_ptr()] = storage.nbytes()
            alive.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        cross_entropy(model(tokens), tokens.clone())
    args, kwargs = describe_inputs((tokens,), {})
    request = TraceRequest(model=model, args=args, kwargs=kwargs, loss_fn=cross_entropy, degrees=())
    workload = trace_workload_here(request)
    item = {"float32": 4, "int64": 8, "bool": 1}
    total = sum(
        count * torch.Size(t.shape_at(4, 64)).numel() * item[t.dtype]
        for name, count in workload.sequence
        for t in workload.classes[0].layers[name].saved
    )
    # 0-dim results (the loss's total weight) aside, every storage is there once
    assert abs(total - sum(kept.values())) <= 8


def test_optimizer_operators_touch_every_parameter_once(traced: Workload) -> None:
    assert traced.optimizer.name == "AdamW" and traced.optimizer.state_slots == 2
    for trace in traced.classes:
        for layer in traced.layers:
            updates = [
                op
                for op in trace.layers[layer.name].ops
                for _ in range(op.count)
                if op.op == "aten::addcdiv_"
            ]
            assert sorted(op.inputs[0].dims for op in updates) == sorted(trace.layers[layer.name].parameters)


def test_foreach_lists_are_split_over_layers() -> None:
    model = TinyLlama(layers=3)
    args, kwargs = describe_inputs((torch.zeros(2, 16, dtype=torch.long),), {})
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
    workload = trace_workload_here(
        TraceRequest(model=model, args=args, kwargs=kwargs, optimizer=optimizer, degrees=())
    )
    assert workload.optimizer.launch == "foreach"
    block = workload.classes[0].layers["block0"]
    update = next(op for op in block.ops if op.op == "aten::_foreach_addcdiv_")
    first = [t.dims for t in update.inputs if t.group == 1]
    assert sorted(first) == sorted(block.parameters)


def test_loss_from_captured_rows_is_symbolic() -> None:
    def row(op: str, phase: str, shapes: str, count: float) -> OperatorRow:
        return OperatorRow(
            rank=0, op=op, family="softmax_loss", module="", phase=phase, shapes=shapes, dtype="float32",
            device="cpu", count=count, time_us=1.0, time_iqr_us=0.0, time_n=1, exclusive_us=1.0, flops=0, bytes=0,
        )  # fmt: skip

    rows = [
        row("aten::_log_softmax_backward_data", "backward_input", "256x256,256x256", 2),
        row("aten::_log_softmax", "forward", "256x256", 2),
        row("aten::slice", "forward", "4x63x256", 2),
    ]
    layer, notes = loss_layer(rows, batch=4, seq=64, accum=2, fixed={256})
    assert [op.phase for op in layer.ops] == ["forward", "forward", "backward_input"]
    assert layer.ops[0].inputs[0].dims == (Poly(cbs=1), 256) and layer.ops[0].count == 1
    assert layer.ops[1].inputs[0].dims == (Poly(cb=1), Poly(c=-1, cs=1), 256)
    assert notes and "256" in notes[0]


def test_loss_inside_the_model_and_ties_and_fused_projections() -> None:
    tokens = torch.zeros(2, 32, dtype=torch.long)
    args, kwargs = describe_inputs((tokens, tokens), {})
    workload = trace_workload(TraceRequest(model=TinyGPT2(), args=args, kwargs=kwargs, degrees=(2,)))
    assert workload.sequence == (("prologue", 1), ("block0", 3), ("epilogue", 1))
    assert any(op.op == "aten::nll_loss_forward" for op in workload.classes[0].layers["epilogue"].ops)
    tied = {p.name: p for layer in workload.layers for p in layer.parameters}["head.weight"]
    assert tied.tied_to == "wte.weight" and tied.matmul
    assert all(c.tp == 1 for c in workload.classes) and "h.0" in workload.tp_refusal


@pytest.mark.parametrize(
    ("model", "shape", "blocks"), [(conv_net(), (4, 3, 16, 16), 0), (classifier(), (4, 32), 2)]
)
def test_models_without_a_sequence(model: nn.Module, shape: tuple[int, ...], blocks: int) -> None:
    args, kwargs = describe_inputs((torch.zeros(shape),), {})
    workload = trace_workload(TraceRequest(model=model, args=args, kwargs=kwargs))
    assert not workload.tokens_per_sequence_dim and workload.seq == 1 and workload.batch == 4
    assert (
        sum(n for name, n in workload.sequence if name.startswith("block")) >= blocks
    ) and workload.classes
    shapes = [
        p.shape
        for layer in workload.layers
        for p in layer.parameters
        for _ in range(dict(workload.sequence)[layer.name])
    ]
    assert sum(torch.Size(s).numel() for s in shapes) == sum(p.numel() for p in model.parameters())
    assert workload.tp_refusal


def test_inputs_are_resized_where_the_sizes_recur() -> None:
    args = (
        FakeSpec((4, 64), torch.int64),
        FakeSpec((4, 1, 64, 64), torch.bool),
        FakeSpec((64,), "float32"),
        3,
    )
    sizes = find_sizes(args, {})
    made, _ = make_inputs(args, {}, sizes, (2, 16))
    assert [tuple(t.shape) for t in made[:3]] == [(2, 16), (2, 1, 16, 16), (64,)]
    assert made[3] == 3
    with pytest.raises(WorkloadError, match="without a tensor input"):
        find_sizes((3,), {})


def test_sample_file_is_what_the_code_produces(traced: Workload) -> None:
    assert msgspec.json.decode(msgspec.json.encode(traced), type=Workload) == load_workload(SAMPLE)
