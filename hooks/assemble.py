"""Traces of a twin under each class of degrees, put together to a Workload."""

from __future__ import annotations

from itertools import groupby
from typing import TYPE_CHECKING

import msgspec

from llmprof.hooks.classes import trace_class, trace_tensor_parallel
from llmprof.hooks.fit import choose_points
from llmprof.hooks.inputs import InputSizes, find_sizes
from llmprof.hooks.lossrows import loss_layer
from llmprof.hooks.optimizers import describe_optimizer
from llmprof.hooks.parameters import parameter_specs
from llmprof.hooks.prepare import Base, trace_base
from llmprof.schema.workload import ClassTrace, LayerSpec, Workload

if TYPE_CHECKING:
    from llmprof.hooks.workload import TraceRequest


def assemble_workload(request: TraceRequest) -> Workload:
    """See `llmprof.hooks.workload.trace_workload_here`."""
    sizes = find_sizes(request.args, request.kwargs, batch_dim=request.batch_dim, seq_dim=request.seq_dim)
    base = trace_base(request, sizes)
    step = max((1, *request.degrees)) if sizes.has_tokens else 1
    points = choose_points(sizes.batch, sizes.seq, vary_seq=sizes.has_tokens, step=step)
    single = trace_class(request, sizes, base, base.prepared, points)
    parallel = trace_tensor_parallel(request, sizes, base, points)
    classes, loss_notes = _with_loss(request, sizes, base, (*single.classes, *parallel.classes))
    layers = tuple(_layer_spec(base, name) for name in classes[0].layers)
    present = {layer.name for layer in layers}
    sequence = [n for n in ("prologue", *base.order, "epilogue", "loss") if n in present]
    return Workload(
        name=request.name or type(request.model).__name__,
        layers=layers,
        sequence=tuple((name, len(list(same))) for name, same in groupby(sequence)),
        classes=classes,
        optimizer=describe_optimizer(request.optimizer),
        batch=request.batch or sizes.batch,
        seq=request.seq or sizes.seq,
        accum=request.accum,
        dp=request.dp,
        tokens_per_sequence_dim=sizes.has_tokens,
        precision=request.precision,
        implementation=request.implementation,
        tp_refusal=parallel.refusal,
        warnings=tuple(
            dict.fromkeys((*sizes.notes, *base.trace.notes, *single.notes, *parallel.notes, *loss_notes))
        ),
    )


def _with_loss(
    request: TraceRequest, sizes: InputSizes, base: Base, classes: tuple[ClassTrace, ...]
) -> tuple[tuple[ClassTrace, ...], tuple[str, ...]]:
    """Classes with the loss from captured rows, where it was neither in the model nor traced."""
    if base.trace.returns_loss or "loss" in classes[0].layers:
        return classes, ()
    if not request.outside_rows:
        return classes, ("The loss was not seen: its operators are not in the workload.",)
    varying = {sizes.batch, sizes.seq, sizes.batch * sizes.seq}
    last = {t.shape[-1] for t in base.trace.outputs if len(t.shape) > 1}
    fixed = last | {n for t in base.trace.outputs for n in t.shape if n not in varying}
    loss, notes = loss_layer(
        request.outside_rows, batch=sizes.batch, seq=sizes.seq, accum=request.accum, fixed=fixed
    )
    if not loss.ops:
        return classes, notes
    return tuple(msgspec.structs.replace(c, layers={**c.layers, "loss": loss}) for c in classes), notes


def _layer_spec(base: Base, name: str) -> LayerSpec:
    parameters = parameter_specs(base.prepared.module, base.placed, base.trace).get(name, ())
    if name not in base.skeleton.first:
        return LayerSpec(name=name, kind=name, parameters=parameters)
    block = base.skeleton.first[name]
    return LayerSpec(
        name=name,
        kind="block",
        module=base.prepared.original.get(block, block),
        class_name=type(base.prepared.module.get_submodule(block)).__name__,
        parameters=parameters,
    )
