"""A trace request becomes twins that can be traced: cut to two blocks of a kind, sharded, on fake tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from llmprof.errors import WorkloadError
from llmprof.hooks.fake import fake_mode
from llmprof.hooks.fit import Point
from llmprof.hooks.inputs import InputSizes, make_inputs
from llmprof.hooks.layers import Skeleton, find_skeleton
from llmprof.hooks.parameters import PlacedParameter, place_parameters
from llmprof.hooks.structure import Block, cut_depth, find_blocks
from llmprof.hooks.tracer import PassTrace, Subject, materialise, trace_passes
from llmprof.hooks.twin import build_twin

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
        passes: what was traced already, by (batch, seq).
    """

    subject: Subject
    blocks: tuple[Block, ...]
    original: dict[str, str]
    live_names: dict[int, list[str]]
    passes: dict[Point, PassTrace]

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
        engine=request.engine is not False,
    )
    return Prepared(
        subject=subject,
        blocks=blocks,
        original=original,
        passes={},
        live_names={k: [n for p in ps for n in names.get(id(p), ())] for k, ps in twin.parameters_of.items()},
    )


def trace_at(prepared: Prepared, request: TraceRequest, sizes: InputSizes, point: Point) -> PassTrace:
    """One pass at a batch and a sequence length."""
    if point not in prepared.passes:
        with prepared.subject.mode:
            args, kwargs = make_inputs(request.args, request.kwargs, sizes, point)
        prepared.passes[point] = trace_passes(prepared.subject, args, kwargs)
    return prepared.passes[point]


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


def trace_base(request: TraceRequest, sizes: InputSizes) -> Base:
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
