"""Traces of the reference decoder at several sizes become the symbolic layers that ship as data.

`python -m llmprof.hooks.reference_trace` writes `llmprof/schema/reference_data/decoder.json`. Every dimension is one
product of named sizes that holds at each of three traces; a fourth is held out, and the written layers must give it
integer by integer.
"""

from __future__ import annotations

import contextlib
import itertools
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import torch
from torch.distributed import distributed_c10d

from llmprof.hooks.fake import fake_mode, fake_world, quiet
from llmprof.hooks.layers import find_skeleton, raw_layers
from llmprof.hooks.optimizers import trace_optimizer
from llmprof.hooks.parameters import PlacedParameter, local_shapes, parameter_specs, place_parameters
from llmprof.hooks.record import TracedOp
from llmprof.hooks.reference_decoder import Decoder, loss_of
from llmprof.hooks.reference_fit import Fit, ReferenceTable
from llmprof.hooks.reference_parallel import Rank
from llmprof.hooks.structure import find_blocks
from llmprof.hooks.tracer import Subject, materialise, trace_passes
from llmprof.schema.model import ModelShape
from llmprof.schema.operators import Tensor
from llmprof.schema.reference import DATA_FILE, Mode, layer_keys
from llmprof.schema.workload import ParameterSpec


@dataclass(frozen=True, kw_only=True)
class TracePoint:
    """What the decoder is traced at: a whole shape, a microbatch, a rank's class of degrees."""

    shape: ModelShape
    batch: int
    seq: int
    tp: int = 1
    sp: bool = False


@dataclass(frozen=True, kw_only=True)
class TracedLayer:
    """One layer at one point, sizes as integers; parameters as (unsharded, local) shapes follow `specs`."""

    ops: tuple[TracedOp, ...]
    saved: tuple[Tensor, ...]
    boundary: Tensor | None
    specs: tuple[ParameterSpec, ...]
    local: tuple[tuple[int, ...], ...]


def trace_reference(point: TracePoint) -> dict[str, TracedLayer]:
    """Trace one forward, backward and optimizer step of the reference decoder on fake tensors, by layer name."""
    whole = _meta_decoder(point.shape, Rank())
    world = fake_world(0, point.tp) if point.tp > 1 else contextlib.nullcontext()
    with world, quiet():
        group = distributed_c10d._get_default_group().group_name if point.tp > 1 else ""
        rank = Rank(tp=point.tp, sp=point.sp, group=group)
        module = _meta_decoder(point.shape, rank)
        mode = fake_mode()
        materialise(module, mode)
        blocks = find_blocks(module)
        subject = Subject(
            module=module,
            mode=mode,
            names={id(part): name for name, part in module.named_modules()},
            blocks=[b.name for b in blocks],
            axes={group: "tp"} if group else {},
            loss_fn=loss_of(rank),
        )
        with mode:
            tokens = torch.zeros(point.batch, point.seq, dtype=torch.long)
        trace = trace_passes(subject, (tokens,), {})
        skeleton = find_skeleton(trace, blocks)
        placed = place_parameters(module, blocks, skeleton, trace)
        updates = _optimizer_step(module, placed, mode)
    specs, local = parameter_specs(whole, placed, trace), local_shapes(module, placed)
    return {
        name: TracedLayer(
            ops=tuple(_as_on_accelerator(o) for o in (*raw.ops, *updates.get(name, ())) if _runs(o)),
            saved=tuple(_statistic(t) for t in raw.saved),
            boundary=raw.boundary,
            specs=specs.get(name, ()),
            local=local.get(name, ()),
        )
        for name, raw in raw_layers(trace, skeleton).items()
    }


def _meta_decoder(shape: ModelShape, rank: Rank) -> Decoder:
    with torch.device("meta"):
        return Decoder(shape, rank).to(torch.bfloat16)


def _optimizer_step(
    module: Decoder, placed: Sequence[PlacedParameter], mode: torch._subclasses.FakeTensorMode
) -> dict[str, tuple[TracedOp, ...]]:
    """AdamW over float32 masters of one layer of each kind, as lists of tensors (torch's default on accelerators)."""
    parameters = dict(module.named_parameters(remove_duplicate=False))
    own = {p.name: p.layer for p in placed if not p.tied_to}
    optimizer = torch.optim.AdamW([parameters[name] for name in own], foreach=True)
    local = {
        id(parameters[name]): [(layer, tuple(parameters[name].shape), torch.float32)]
        for name, layer in own.items()
    }
    return trace_optimizer(optimizer, local, mode)


def _runs(op: TracedOp) -> bool:
    """False for what only a trace on fake tensors does: detaching saved tensors."""
    return op.op != "aten::detach" or op.phase == "forward"


def _as_on_accelerator(op: TracedOp) -> TracedOp:
    """Where fake CPU tensors differ: LayerNorm's statistics are float32; weight gradients of grouped matmuls are told."""
    if "layer_norm" in op.op:
        inputs, outputs = (tuple(_statistic(t) for t in part) for part in (op.inputs, op.outputs))
        return op._replace(inputs=inputs, outputs=outputs)
    matrices = all(len(t.shape) == 2 for t in op.inputs[:2])
    if op.op == "aten::_grouped_mm" and op.phase == "backward_input" and matrices:
        return op._replace(phase="backward_weight")  # (m, tokens) x (tokens, n), cut by expert
    return op


def _statistic(tensor: Tensor) -> Tensor:
    """One number for each token of a (b, s, 1) tensor is a norm's statistic."""
    if len(tensor.shape) == 3 and tensor.shape[-1] == 1 and tensor.dtype == "bfloat16":
        return tensor._replace(dtype="float32")
    return tensor


_SIZES = (
    ModelShape(
        layers=2, hidden=88, ffn=464, heads=60, kv_heads=20, head_dim=14, vocab=809, seq=149,
        experts=5, topk=2, expert_ffn=832, shared_ffn=304,
    ),
    ModelShape(
        layers=2, hidden=184, ffn=592, heads=56, kv_heads=28, head_dim=22, vocab=1013, seq=211,
        experts=7, topk=3, expert_ffn=1216, shared_ffn=368,
    ),
    ModelShape(
        layers=2, hidden=328, ffn=688, heads=60, kv_heads=12, head_dim=26, vocab=1223, seq=157,
        experts=11, topk=5, expert_ffn=448, shared_ffn=1072,
    ),
    ModelShape(
        layers=2, hidden=424, ffn=976, heads=24, kv_heads=4, head_dim=34, vocab=1429, seq=223,
        experts=13, topk=4, expert_ffn=704, shared_ffn=1184,
    ),
)  # fmt: skip
"""Sizes whose products can be told apart; the last is held out, and has fewer key-and-value heads than ranks."""
_MICROBATCHES = ((3, 136), (5, 152), (7, 104), (2, 184))
_DEGREES: dict[Mode, tuple[int, ...]] = {"whole": (1, 1, 1, 1), "tp": (2, 4, 2, 8), "sp": (2, 4, 2, 8)}


def points_of(variant: dict[str, object], mode: Mode) -> tuple[TracePoint, ...]:
    """Where a variant is traced: three points for the fit, one held out."""
    sizes = zip(_SIZES, _MICROBATCHES, _DEGREES[mode], strict=True)
    return tuple(
        TracePoint(shape=_variant(shape, variant), batch=b, seq=s, tp=tp, sp=mode == "sp")
        for shape, (b, s), tp in sizes
    )


def _variant(shape: ModelShape, variant: dict[str, object]) -> ModelShape:
    wanted = dict(variant)
    kind = wanted.pop("kind", "dense")
    if kind == "dense":
        wanted |= {"experts": 0, "topk": 0, "expert_ffn": 0, "shared_ffn": 0}
    elif kind == "experts":
        wanted |= {"shared_ffn": 0}
    return msgspec.structs.replace(shape, **wanted)


def variants() -> Iterator[dict[str, object]]:
    """Every kind of block once, then every kind of embedding and head."""
    for norm, positions, bias, gated in itertools.product(
        ("rmsnorm", "layernorm"), ("rope", "none"), (False, True), (True, False)
    ):
        for kind in ("dense", "experts", "shared"):
            yield {"norm": norm, "positions": positions, "bias": bias, "gated": gated, "kind": kind}
    for norm, positions, tied in itertools.product(
        ("rmsnorm", "layernorm"), ("rope", "learned", "none"), (False, True)
    ):
        yield {"norm": norm, "positions": positions, "tied": tied}


def build_table(chosen: Iterable[dict[str, object]], modes: Iterable[Mode] = ("whole", "tp", "sp")) -> bytes:
    """Trace and fit the chosen variants in the chosen modes; the shipped file's contents.

    Raises:
        FitError: a dimension is no single product of sizes, or the held-out trace is not reproduced.
    """
    table = ReferenceTable()
    for variant, mode in itertools.product(chosen, modes):
        points = points_of(variant, mode)
        traces = [trace_reference(point) for point in points]
        fit = Fit([(p.shape, p.batch, p.seq, p.tp) for p in points])
        for name, key in layer_keys(points[0].shape, mode).items():
            table.add(key, [trace[name] for trace in traces], fit)
        print(f"{mode} {variant}", file=sys.stderr)
    return table.encode()


def main() -> None:
    """Write the data file, or the path given."""
    path = Path(sys.argv[1]) if len(sys.argv) > 1 else DATA_FILE
    path.parent.mkdir(exist_ok=True)
    torch.set_num_threads(1)
    path.write_bytes(build_table(variants()))


if __name__ == "__main__":
    main()
