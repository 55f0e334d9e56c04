"""Traces of a twin under each class of degrees, put together to a Workload."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from llmprof.errors import WorkloadError
from llmprof.hooks.fake import fake_mode
from llmprof.hooks.fit import DimFit, Point, choose_points
from llmprof.hooks.inputs import InputSizes, find_sizes, make_inputs
from llmprof.hooks.layers import Skeleton, find_skeleton, fit_layer, merge_equal, raw_layers
from llmprof.hooks.optimizers import describe_optimizer, trace_optimizer
from llmprof.hooks.parameters import (
    PlacedParameter,
    local_parameters_of,
    local_shapes,
    parameter_specs,
    place_parameters,
)
from llmprof.hooks.record import TracedOp
from llmprof.hooks.structure import Block, cut_depth, find_blocks
from llmprof.hooks.tracer import PassTrace, Subject, materialise, trace_passes
from llmprof.hooks.twin import build_twin
from llmprof.schema.workload import (
    ClassTrace,
    LayerSpec,
    LayerTrace,
    OpSpec,
    TensorSpec,
    Workload,
)

if TYPE_CHECKING:
    from llmprof.hooks.workload import TraceRequest


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """A twin that can be traced.

    Attributes:
        subject: the twin on fake tensors.
        blocks: its repeated blocks.
        original: FQN in the live model by FQN in the twin (they differ when the twin was cut).
        live_names: FQNs in the twin by `id` of the live parameter.
    """

    subject: Subject
    blocks: tuple[Block, ...]
    original: dict[str, str]
    live_names: dict[int, list[str]]

    @property
    def module(self) -> nn.Module:
        """The twin."""
        return self.subject.module

    def original_container(self, block: Block) -> str:
        """Container of a block, as in the live model."""
        return self.original.get(block.container, block.container)


def prepare(
    request: TraceRequest, *, keep: int, shard: Callable[[nn.Module], dict[str, str]] | None = None
) -> Prepared:
    """Twin of the request's model, cut to `keep` blocks of each kind (0: all), sharded, on fake tensors."""
    twin = build_twin(request.model)
    module = twin.module
    all_blocks = find_blocks(module)
    original = cut_depth(module, all_blocks, keep=keep) if keep else {n: n for n, _ in module.named_modules()}
    names: dict[int, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    axes = shard(module) if shard else {}
    mode: FakeTensorMode = fake_mode()
    materialise(module, mode)
    dtypes = {p.dtype for p in module.parameters() if p.is_floating_point()}
    compute = getattr(torch, request.precision, None)
    autocast = compute if compute in (torch.bfloat16, torch.float16) and dtypes == {torch.float32} else None
    blocks = find_blocks(module)
    subject = Subject(
        module=module,
        mode=mode,
        names={id(part): name for name, part in module.named_modules()},
        blocks=[b.name for b in blocks],
        axes=axes,
        loss_fn=request.loss_fn,
        autocast=autocast,
    )
    return Prepared(
        subject=subject,
        blocks=blocks,
        original=original,
        live_names={k: [n for p in ps for n in names.get(id(p), ())] for k, ps in twin.parameters_of.items()},
    )


def trace_at(prepared: Prepared, request: TraceRequest, sizes: InputSizes, point: Point) -> PassTrace:
    """One pass at a batch and a sequence length."""
    with prepared.subject.mode:
        args, kwargs = make_inputs(request.args, request.kwargs, sizes, point)
    return trace_passes(prepared.subject, args, kwargs)


def assemble_workload(request: TraceRequest) -> Workload:
    """See `llmprof.hooks.workload.trace_workload_here`."""
    sizes = find_sizes(request.args, request.kwargs, batch_dim=request.batch_dim, seq_dim=request.seq_dim)
    base = _trace_base(request, sizes)
    points = choose_points(sizes.batch, sizes.seq, vary_seq=sizes.has_tokens, step=1)
    trace, notes = _trace_class(request, sizes, base, base.prepared, points)
    layers = tuple(_layer_spec(base, name) for name in trace.layers)
    present = {layer.name for layer in layers}
    sequence = [n for n in ("prologue", *base.order, "epilogue", "loss") if n in present]
    return Workload(
        name=request.name or type(request.model).__name__,
        layers=layers,
        sequence=tuple((name, len(list(same))) for name, same in groupby(sequence)),
        classes=(trace,),
        optimizer=describe_optimizer(request.optimizer),
        batch=request.batch or sizes.batch,
        seq=request.seq or sizes.seq,
        accum=request.accum,
        dp=request.dp,
        tokens_per_sequence_dim=sizes.has_tokens,
        precision=request.precision,
        implementation=request.implementation,
        warnings=(*sizes.notes, *base.trace.notes, *notes),
    )


@dataclass(frozen=True, kw_only=True)
class Base:
    """The unsharded twin and how its layers lie.

    Attributes:
        keep: blocks of each kind that the twin was cut to, 0 for all.
        prepared: the unsharded twin.
        trace: its pass at the captured sizes.
        skeleton: which visit stands for which layer.
        order: layer name of every block visit of the whole model.
        placed: its parameters by layer.
    """

    keep: int
    prepared: Prepared
    trace: PassTrace
    skeleton: Skeleton
    order: tuple[str, ...]
    placed: tuple[PlacedParameter, ...]


def _trace_base(request: TraceRequest, sizes: InputSizes) -> Base:
    """A twin cut to two blocks of each kind when these two do the same and each runs once, else the whole twin."""
    point = (sizes.batch, sizes.seq)
    all_blocks = find_blocks(build_twin(request.model).module)
    found = _try_shallow(request, sizes, point, all_blocks) if len(all_blocks) > 2 else None
    if found is None:
        prepared = prepare(request, keep=0)
        trace = trace_at(prepared, request, sizes, point)
        skeleton = find_skeleton(trace, prepared.blocks)
        found = (0, prepared, trace, skeleton, skeleton.order)
    keep, prepared, trace, skeleton, order = found
    placed = place_parameters(prepared.module, prepared.blocks, skeleton, trace)
    return Base(keep=keep, prepared=prepared, trace=trace, skeleton=skeleton, order=order, placed=placed)


def _try_shallow(
    request: TraceRequest, sizes: InputSizes, point: Point, all_blocks: Sequence[Block]
) -> tuple[int, Prepared, PassTrace, Skeleton, tuple[str, ...]] | None:
    try:
        prepared = prepare(request, keep=2)
        trace = trace_at(prepared, request, sizes, point)
    except WorkloadError:
        return None
    if list(trace.visits) != [b.name for b in prepared.blocks]:
        return None
    skeleton = find_skeleton(trace, prepared.blocks)
    kinds = {
        (prepared.original_container(b), b.signature): name
        for b, name in zip(prepared.blocks, skeleton.order, strict=True)
    }
    keys = [(b.container, b.signature) for b in all_blocks]
    if len(kinds) != len(skeleton.kinds) or any(key not in kinds for key in keys):
        return None
    return 2, prepared, trace, skeleton, tuple(kinds[key] for key in keys)


def _trace_class(
    request: TraceRequest, sizes: InputSizes, base: Base, prepared: Prepared, points: Sequence[Point]
) -> tuple[ClassTrace, tuple[str, ...]]:
    raws = [raw_layers(trace_at(prepared, request, sizes, p), base.skeleton) for p in points]
    fit = DimFit(points)
    shapes = local_shapes(prepared.module, base.placed)
    optimizer, notes = _optimizer_ops(request, base, prepared)
    layers = {}
    for name in raws[0]:
        ops, saved, boundary = fit_layer(name, [raw[name] for raw in raws], fit)
        layers[name] = LayerTrace(
            ops=(*ops, *optimizer.get(name, ())),
            saved=saved,
            boundary=boundary,
            parameters=shapes.get(name, ()),
        )
    return ClassTrace(traced_at=tuple(points), layers=layers), notes


def _optimizer_ops(
    request: TraceRequest, base: Base, prepared: Prepared
) -> tuple[dict[str, tuple[OpSpec, ...]], tuple[str, ...]]:
    """Operators of one optimizer step by layer; none, and a note, when its class cannot be traced."""
    if request.optimizer is None:
        return {}, ("The run has no optimizer that we saw: its step is not in the workload.",)
    parameters = local_parameters_of(prepared.module, base.placed, prepared.live_names)
    try:
        traced = trace_optimizer(request.optimizer, parameters, prepared.subject.mode)
    except Exception as error:  # noqa: BLE001 (user code: the workload is useful without it)
        name = type(request.optimizer).__name__
        return {}, (
            f"{name}.step cannot be traced ({type(error).__name__}: {error}): its operators are missing.",
        )
    return {layer: merge_equal([_fixed(op) for op in ops]) for layer, ops in traced.items()}, ()


def _fixed(op: TracedOp) -> OpSpec:
    """An operator whose shapes do not depend on batch or sequence."""
    return OpSpec(
        op=op.op,
        phase=op.phase,
        module=op.module,
        inputs=tuple(TensorSpec(t.shape, t.dtype, t.group) for t in op.inputs),
        outputs=tuple(TensorSpec(t.shape, t.dtype, t.group) for t in op.outputs),
        attributes=op.attributes,
    )


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
