"""What a fake trace says a rank does is what two real ranks do, operator by operator."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from llmprof.hooks.modules import ModuleNames
from llmprof.hooks.plan import apply_plan
from llmprof.hooks.record import TracedOp
from llmprof.hooks.recorder import Recorder
from llmprof.hooks.rows import BACKEND_WORK, BOOKKEEPING, dataflow_of, trace_rows
from llmprof.hooks.workload import TraceRequest, describe_inputs
from llmprof.schema.layout import Layout
from llmprof.schema.operators import collective_kind, format_shapes, is_free, size_bytes
from tests.models import Attention, TinyLlama, cross_entropy
from tests.two_ranks import run_two_ranks

LAYOUTS = ("dp=1", "dp=2,zero=3", "dp=1,tp=2", "dp=1,tp=2,sp=1")


def _request() -> TraceRequest:
    torch.manual_seed(0)
    model = TinyLlama(layers=2)
    args, kwargs = describe_inputs((torch.zeros(2, 32, dtype=torch.long),), {})
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)
    return TraceRequest(model=model, args=args, kwargs=kwargs, optimizer=optimizer, loss_fn=cross_entropy)


def _shard(request: TraceRequest, layout: Layout) -> nn.Module:
    """The user's side: the same layout, applied to the real model with torch's own functions."""
    model = request.model
    assert isinstance(model, TinyLlama)
    if layout.tp > 1:
        plan, flow = dataflow_of(request)
        for module in model.modules():
            if isinstance(module, Attention):
                module.n_heads //= layout.tp
                module.n_kv_heads //= layout.tp
        apply_plan(model, init_device_mesh("cpu", (layout.tp,)), plan, flow, sp=layout.sp)
    if layout.zero == 3:
        for block in model.layers:
            fully_shard(block)
        fully_shard(model)
    return model


def measure(layouts: tuple[str, ...]) -> dict[str, list[Any]]:
    """Operators and collectives of one real step under each layout: [(operator, shapes, dtype, count)], [(kind, bytes, count)]."""
    found: dict[str, list[Any]] = {}
    for text in layouts:
        model = _shard(_request(), Layout.parse(text))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)
        tokens = torch.zeros(2, 32, dtype=torch.long)
        names = ModuleNames()
        names.add(model)
        recorder = Recorder(names, rank=0, device="cpu")
        for step in range(3):
            if step == 2:
                recorder.start()
                recorder.mark_step(step)
            cross_entropy(model(tokens), tokens).backward()
            optimizer.step()
            optimizer.zero_grad()
        recorder.mark_step(3)
        recording = recorder.stop()
        found[text] = [
            [(r.op, r.shapes, r.dtype, r.count) for r in recording.operators],
            [(r.kind, r.size_bytes, r.count) for r in recording.collectives],
        ]
    return found


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    found: dict[str, list[Any]] = run_two_ranks(measure, Path(tmp_path_factory.mktemp("ranks")), LAYOUTS)
    return found


def _operators(rows: Any) -> Counter[tuple[str, str, str]]:
    """Counts by (operator, shapes, dtype), without the named bookkeeping and without collectives."""
    counts: Counter[tuple[str, str, str]] = Counter()
    for op, shapes, dtype, count in rows:
        in_backend = op in BACKEND_WORK and "x" not in shapes
        if op not in BOOKKEEPING and not collective_kind(op) and not in_backend:
            assert count == int(count)
            counts[op, shapes, dtype if shapes else ""] += int(count)
    return counts


def _described(row: TracedOp) -> tuple[str, str, str, int]:
    return row.op, format_shapes(row.inputs), next((t.dtype for t in row.inputs if t.shape), ""), 1


def _message_bytes(row: TracedOp) -> int:
    return max(size_bytes(t) for t in (*row.inputs, *row.outputs))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_trace_equals_real_two_rank_profile(layout: str, measured: dict[str, list[Any]]) -> None:
    rows = trace_rows(_request(), Layout.parse(layout))
    real, traced = _operators(measured[layout][0]), _operators(_described(row) for row in rows)
    assert sum(traced.values()) > 600
    assert real - traced == Counter()
    assert traced - real == Counter()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_collectives_equal_real_two_rank_profile(layout: str, measured: dict[str, list[Any]]) -> None:
    real: Counter[tuple[str, int]] = Counter()
    for kind, size, count in measured[layout][1]:
        real[kind, size] += int(count)
    rows = trace_rows(_request(), Layout.parse(layout))
    traced = Counter((row.collective, _message_bytes(row)) for row in rows if row.collective)
    assert bool(traced) == (layout != "dp=1")
    assert traced == real


def test_bookkeeping_is_free() -> None:
    assert all(is_free(op) for op in BOOKKEEPING)
    assert all(reason for reason in (*BOOKKEEPING.values(), *BACKEND_WORK.values()))


def test_group_axes_and_ranks_do_not_matter() -> None:
    first, last = (trace_rows(_request(), Layout(dp=2, zero=3, tp=2), rank=rank) for rank in (0, 3))
    assert _operators(map(_described, first)) == _operators(map(_described, last))
    assert Counter(row.axis for row in first if row.collective).keys() == {"dp", "tp"}
