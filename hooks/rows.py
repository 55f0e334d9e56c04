"""A request and a layout become every operator of one step on one rank, with torch's own sharding and optimizer.

This is the exact trace that classes and arithmetic stand for; tests hold it against real runs.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard

from llmprof.errors import LayoutError, WorkloadError
from llmprof.hooks.classes import AttributePath, divide_integers, integer_variants
from llmprof.hooks.dataflow import Dataflow, trace_dataflow
from llmprof.hooks.fake import fake_world, no_checkpointing, quiet, sharding_rules_inside
from llmprof.hooks.inputs import find_sizes, make_inputs
from llmprof.hooks.plan import TensorPlan, apply_plan, find_plan
from llmprof.hooks.prepare import prepare
from llmprof.hooks.record import ModuleClock, OpTracer, TracedOp
from llmprof.hooks.structure import find_blocks
from llmprof.schema.layout import Layout

if TYPE_CHECKING:
    from llmprof.hooks.workload import TraceRequest

BOOKKEEPING = {
    "aten::detach": "autograd and DTensor wrap results anew; no data moves",
    "aten::detach_": "as aten::detach, in place",
    "aten::alias": "a view of the same data",
    "aten::empty": "allocations inside operators are seen by the profiler only",
    "aten::empty_like": "as aten::empty",
    "aten::empty_strided": "as aten::empty",
    "aten::new_empty": "as aten::empty",
    "aten::resize_": "an allocation inside an out= operator, seen by the profiler only",
    "aten::as_strided": "views that kernels and FSDP make of flat buffers below the dispatcher",
    "_c10d_functional::wait_tensor": "waits happen at the first use, which the profiler and the tracer nest differently",
}
"""Operators in which a trace and a profile may differ, each with its reason: none computes or moves data."""

BACKEND_WORK = {
    "aten::split": "gloo runs a reduce-scatter as an all-reduce of the whole flat buffer and cuts it",
    "aten::copy_": "gloo copies this rank's part of that flat buffer out",
}
"""One-dimensional work that a backend does inside a collective: part of the collective's price, not of the trace."""


def dataflow_of(request: TraceRequest) -> tuple[TensorPlan, Dataflow]:
    """The tensor-parallel plan of the request's whole model, and the data flow it was read from.

    Raises:
        WorkloadError: the model cannot be traced.
    """
    sizes = find_sizes(request.args, request.kwargs, batch_dim=request.batch_dim, seq_dim=request.seq_dim)
    prepared = prepare(request, keep=0)
    with prepared.subject.mode:
        args, kwargs = make_inputs(request.args, request.kwargs, sizes, (sizes.batch, sizes.seq))
    flow = trace_dataflow(prepared.subject, args, kwargs)
    return find_plan(prepared.module, flow, request.tp_plan), flow


def trace_rows(request: TraceRequest, layout: Layout, *, rank: int = 0) -> tuple[TracedOp, ...]:
    """Operators of one training step (forward, backward, optimizer) of one rank, in execution order.

    Args:
        request: the model at the microbatch of one rank; `loss_fn` and `optimizer` are used when set.
        layout: plain, `zero=3` data parallelism over all of dp (FSDP2 on every block and on the root), tensor
            parallelism with and without sequence parallelism, and their products.
        rank: which rank to play.

    Raises:
        LayoutError: the layout uses what is not traced but simulated (pipeline, DDP, context, experts).
        WorkloadError: the model cannot be traced under it.
    """
    if layout.pp > 1 or layout.cp > 1 or layout.ep > 1 or (layout.dp > 1 and layout.dp_shard != layout.dp):
        raise LayoutError(f"{layout} is simulated, not traced", hint="use zero=3 over all of dp, tp and sp")
    plan, flow = dataflow_of(request)
    twin = prepare(request, keep=0).module
    first: WorkloadError | None = None
    with fake_world(rank, layout.gpus):
        # one mesh for all tries: torch caches sharding rules with the first of equal meshes
        mesh = init_device_mesh("cpu", (layout.dp, layout.tp), mesh_dim_names=("dp", "tp"))
        for variant in _variants(twin, plan, flow, layout):
            try:
                return tuple(_step(request, layout, mesh, (plan, flow), variant))
            except WorkloadError as error:
                first = first or error
    raise first or WorkloadError(f"the model cannot be traced under {layout}")


def _variants(
    twin: nn.Module, plan: TensorPlan, flow: Dataflow, layout: Layout
) -> Iterator[tuple[AttributePath, ...]]:
    if layout.tp == 1:
        yield ()
    else:
        yield from integer_variants(twin, plan, flow, layout.tp)


def _step(
    request: TraceRequest,
    layout: Layout,
    mesh: DeviceMesh,
    planned: tuple[TensorPlan, Dataflow],
    variant: tuple[AttributePath, ...],
) -> list[TracedOp]:
    plan, flow = planned

    def shard(module: nn.Module) -> dict[str, str]:
        if layout.tp > 1:
            divide_integers(module, plan, variant, layout.tp)
            apply_plan(module, mesh["tp"], plan, flow, sp=layout.sp)
        if layout.dp > 1:
            for block in find_blocks(module):
                fully_shard(module.get_submodule(block.name), mesh=mesh["dp"])
            fully_shard(module, mesh=mesh["dp"])
        return {mesh.get_group(axis).group_name: axis for axis in ("dp", "tp")}

    prepared = prepare(request, keep=0, shard=shard)
    subject = prepared.subject
    sizes = find_sizes(request.args, request.kwargs, batch_dim=request.batch_dim, seq_dim=request.seq_dim)
    tracer = OpTracer(ModuleClock(subject.names, ()), [], subject.axes)
    with subject.mode, quiet(), no_checkpointing(), sharding_rules_inside(tracer.paused):
        args, kwargs = make_inputs(request.args, request.kwargs, sizes, (sizes.batch, sizes.seq))
        target = torch.zeros((sizes.batch, sizes.seq), dtype=torch.long)
        optimizer: Any = None
        if request.optimizer is not None:
            kind: Any = type(request.optimizer)
            optimizer = kind(subject.module.parameters(), lr=1e-3, foreach=False)
        try:
            for _ in range(2):  # the first step makes the optimizer's state
                tracer.rows.clear()
                tracer.phase = "forward"
                tracer.clock.begin()
                with tracer:
                    output = subject.module(*args, **kwargs)
                    loss = request.loss_fn(output, target) if request.loss_fn else output.sum()
                    tracer.phase = "backward"
                    loss.backward()
                    tracer.phase = "optimizer"
                    if optimizer is not None:
                        optimizer.step()
                subject.module.zero_grad()
        except RuntimeError as error:
            raise WorkloadError(f"the step cannot be traced under {layout}: {error}") from error
    return list(tracer.rows)
