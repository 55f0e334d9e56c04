"""A ModelShape becomes a Workload without torch: the shipped symbolic layers of a reference decoder, sizes filled in.

The layers were traced from the decoder of `llmprof.hooks.reference_decoder`; every dimension is one product of named
sizes. Operators are those of eager PyTorch with a flash attention kernel.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from itertools import groupby
from math import prod
from pathlib import Path
from typing import Literal, NamedTuple

import msgspec

from llmprof.errors import WorkloadError
from llmprof.schema.model import ModelShape
from llmprof.schema.workload import (
    ClassTrace,
    Dim,
    LayerSpec,
    LayerTrace,
    OpSpec,
    OptimizerSpec,
    ParameterSpec,
    Poly,
    TensorSpec,
    Workload,
)

VERSION = 1
DATA_FILE = Path(__file__).parent / "reference_data" / "decoder.json"
PRECISIONS = ("bfloat16", "float16", "float32")
MAX_TP = 64
Mode = Literal["whole", "tp", "sp"]
"""A class of degrees: unsharded, tensor-parallel, tensor-parallel with sequence parallelism between."""


def reference_workload(
    shape: ModelShape,
    *,
    degrees: Iterable[tuple[int, bool]] = ((1, False),),
    precision: str = "bfloat16",
    batch: int = 1,
    accum: int = 1,
    dp: int = 1,
) -> Workload:
    """What a decoder of a shape does for one microbatch, in eager mode with a fused attention kernel.

    Parameters are float32 masters with AdamW's state in float32; in 16 bit, operators of the forward and backward pass
    act on a working copy and activations of `precision`, with norm statistics, router scores and the loss in float32.

    Args:
        shape: the decoder.
        degrees: classes (tensor-parallel degree, sequence parallelism) to make beside (1, False).
        precision: one of PRECISIONS.
        batch: sequences of a microbatch, `accum` microbatches a step and replica, `dp` replicas: the captured sizes.

    Raises:
        WorkloadError: an impossible shape, an unknown precision, or a degree that does not divide the model.
    """
    shape.check()
    if precision not in PRECISIONS:
        raise WorkloadError(
            f"precision {precision!r} of a reference decoder is not one of {', '.join(PRECISIONS)}",
            hint=f"use {PRECISIONS[0]}: a layout's precision can still be another",
        )
    wanted = dict.fromkeys([(1, False), *((tp, sp and tp > 1) for tp, sp in degrees)])
    for tp, _ in wanted:
        problem = tensor_parallel_problem(shape, tp)
        if problem:
            raise WorkloadError(problem, hint="choose a degree that divides the model")
    table = _load()
    layers, sequence = _layer_specs(shape, table)
    return Workload(
        name=shape.name or "decoder",
        layers=layers,
        sequence=sequence,
        classes=tuple(_class(shape, table, tp=tp, sp=sp, precision=precision) for tp, sp in wanted),
        optimizer=OptimizerSpec(name="AdamW", state_slots=2, state_dtype="float32", launch="foreach"),
        batch=batch,
        seq=shape.seq,
        accum=accum,
        dp=dp,
        precision=precision,
        implementation="eager",
        source="reference",
    )


def tensor_parallel_problem(shape: ModelShape, tp: int) -> str:
    """Why a tensor-parallel degree cannot split a decoder evenly, "" when it can.

    Key-and-value heads fewer than ranks are replicated; the vocabulary is rounded up.
    """
    if not 1 <= tp <= MAX_TP:
        return f"tp={tp} is not between 1 and {MAX_TP}"
    split = {"heads": shape.heads}
    if shape.dense_layers or not shape.experts:
        split["ffn"] = shape.ffn
    if shape.experts:
        split["expert_ffn"] = shape.expert_ffn or shape.ffn
        split["shared_ffn"] = shape.shared_ffn
    for name, size in split.items():
        if size % tp:
            return f"{name}={size} is not a multiple of tp={tp}"
    if shape.kv_heads % tp and tp % shape.kv_heads:
        return f"kv_heads={shape.kv_heads} is neither a multiple nor a divisor of tp={tp}"
    return ""


def named_sizes(shape: ModelShape, tp: int) -> dict[str, int]:
    """The sizes that dimensions are products of, beside batch and sequence; `_tp` marks one rank's share."""
    expert_ffn = shape.expert_ffn or shape.ffn
    return {
        "hidden": shape.hidden, "width": shape.head_width, "experts": shape.experts, "topk": shape.topk,
        "positions": shape.seq,
        "ffn": shape.ffn, "ffn_tp": shape.ffn // tp,
        "heads": shape.heads, "heads_tp": shape.heads // tp,
        "kv_heads": shape.kv_heads, "kv_heads_tp": max(1, shape.kv_heads // tp),
        "vocab": shape.vocab, "vocab_tp": -(-shape.vocab // tp),
        "expert_ffn": expert_ffn, "expert_ffn_tp": expert_ffn // tp,
        "shared_ffn": shape.shared_ffn, "shared_ffn_tp": shape.shared_ffn // tp,
    }  # fmt: skip


def layer_keys(shape: ModelShape, mode: Mode) -> dict[str, str]:
    """The table's row for each layer of a decoder, by layer name in forward order."""
    rotary = "rope" if shape.positions == "rope" else "none"
    positions = "learned" if shape.positions == "learned" else rotary
    block = f"{mode} block {shape.norm} {rotary} {'bias' if shape.bias else 'plain'}"
    unit = "gated" if shape.gated else "gelu"
    dense = shape.dense_layers if shape.experts else shape.layers
    kinds = [f"{block} {unit}"] if dense else []
    if dense < shape.layers:
        kinds.append(f"{block} {unit} {'shared ' if shape.shared_ffn else ''}experts")
    tied = " tied" if shape.tied else ""
    return {
        "prologue": f"{mode} prologue {positions}{tied}",
        **{f"block{i}": key for i, key in enumerate(kinds)},
        "epilogue": f"{mode} epilogue {shape.norm}{tied}",
        "loss": f"{mode} loss",
    }


def mode_of(tp: int, *, sp: bool) -> Mode:
    """The mode of a class of degrees."""
    if tp == 1:
        return "whole"
    return "sp" if sp else "tp"


class _Layer(msgspec.Struct, frozen=True):
    """A layer of the table: indices of operators and tensors; parameters as (name, whole, local, matmul, tied to)."""

    ops: tuple[int, ...]
    saved: tuple[int, ...]
    boundary: tuple[int, ...]
    parameters: tuple[tuple[str, int, int, bool, str], ...]


class _TableFile(msgspec.Struct, frozen=True):
    """The shipped file. Tensors are (dims, dtype, group, one for each rank); operators (op, phase, module, inputs,
    outputs, attributes, collective)."""

    version: int
    torch: str
    dims: tuple[str, ...]
    tensors: tuple[tuple[tuple[int, ...], str, int, int], ...]
    ops: tuple[tuple[str, str, str, tuple[int, ...], tuple[int, ...], tuple[str, ...], str], ...]
    layers: dict[str, _Layer]


class _Product(NamedTuple):
    """coefficient x sizes / divisor, times batch and the whole or the local sequence."""

    coefficient: int
    divisor: int
    names: tuple[str, ...]
    batch: bool
    seq: bool
    local_seq: bool


_Run = tuple[int, int]
"""Index of an operator, number of consecutive calls."""


class _Table(NamedTuple):
    """The file with its products parsed and equal consecutive operators counted."""

    dims: tuple[_Product, ...]
    file: _TableFile
    runs: dict[str, tuple[_Run, ...]]


@lru_cache(maxsize=1)
def _load() -> _Table:
    file = msgspec.json.decode(DATA_FILE.read_bytes(), type=_TableFile)
    if file.version != VERSION:
        raise WorkloadError(
            f"{DATA_FILE.name} has version {file.version}, but {VERSION} is read",
            hint="install llmprof again",
        )
    runs = {
        key: tuple((index, len(list(same))) for index, same in groupby(layer.ops))
        for key, layer in file.layers.items()
    }
    return _Table(tuple(_product(text) for text in file.dims), file, runs)


def _product(text: str) -> _Product:
    numerator, _, divisor = text.partition("/")
    factors = numerator.split("*")
    coefficient = prod(int(f) for f in factors if f.isdigit())
    names = tuple(f for f in factors if not f.isdigit() and f not in ("b", "s", "s_tp"))
    return _Product(coefficient, int(divisor or 1), names, "b" in factors, "s" in factors, "s_tp" in factors)


class _Filled:
    """The table with the sizes of one shape under one class of degrees filled in; what is not used is not made."""

    def __init__(self, shape: ModelShape, table: _Table, *, tp: int, precision: str) -> None:
        sizes = named_sizes(shape, tp) | {"tp": tp}
        self._dims = [_fill(product, sizes, tp) for product in table.dims]
        self._file, self._runs, self._tp, self._precision = table.file, table.runs, tp, precision
        self._attributes = None if shape.causal else ()
        self._tensors: dict[int, tuple[TensorSpec, ...]] = {}
        self._lists: dict[tuple[int, ...], tuple[TensorSpec, ...]] = {}
        self._ops: dict[_Run, OpSpec | None] = {}

    def shape(self, index: int) -> tuple[int, ...]:
        """A tensor without batch and sequence."""
        return tuple(d for i in self._file.tensors[index][0] if isinstance(d := self._dims[i], int))

    def layer(self, key: str) -> LayerTrace:
        """A layer of the table."""
        layer = self._file.layers[key]
        boundary = self._list(layer.boundary)
        return LayerTrace(
            ops=tuple(op for run in self._runs[key] if (op := self._op(run)) is not None),
            saved=self._list(layer.saved),
            boundary=boundary[0] if boundary else None,
            parameters=tuple(self.shape(local) for _, _, local, _, _ in layer.parameters),
        )

    def _op(self, run: _Run) -> OpSpec | None:
        if run not in self._ops:
            self._ops[run] = self._make(run)
        return self._ops[run]

    def _make(self, run: _Run) -> OpSpec | None:
        op, phase, module, inputs, outputs, attributes, collective = self._file.ops[run[0]]
        made = OpSpec(
            op=op,
            phase=phase,
            module=module,
            inputs=self._list(inputs),
            outputs=self._list(outputs),
            count=run[1],
            attributes=attributes if self._attributes is None else self._attributes,
            collective=collective,
            axis="tp" if collective else "",
        )
        if op == "aten::_to_copy" and made.inputs == made.outputs:
            return None  # a cast to the dtype that it has
        return made

    def _list(self, indices: tuple[int, ...]) -> tuple[TensorSpec, ...]:
        found = self._lists.get(indices)
        if found is None:
            found = self._lists[indices] = tuple(spec for index in indices for spec in self._tensor(index))
        return found

    def _tensor(self, index: int) -> tuple[TensorSpec, ...]:
        if index not in self._tensors:
            dims, dtype, group, ranks = self._file.tensors[index]
            dtype = self._precision if dtype == "bfloat16" else dtype
            spec = TensorSpec(tuple(self._dims[i] for i in dims), dtype, group)
            self._tensors[index] = (spec,) * (self._tp if ranks else 1)
        return self._tensors[index]


def _fill(product: _Product, sizes: dict[str, int], tp: int) -> Dim:
    value = -(-product.coefficient * prod(sizes[name] for name in product.names) // product.divisor)
    if not (product.batch or product.seq or product.local_seq):
        return value
    div = tp if product.local_seq else 1
    if not (product.seq or product.local_seq):
        return Poly(cb=value)
    return Poly(cbs=value, div=div) if product.batch else Poly(cs=value, div=div)


def _class(shape: ModelShape, table: _Table, *, tp: int, sp: bool, precision: str) -> ClassTrace:
    filled = _Filled(shape, table, tp=tp, precision=precision)
    keys = layer_keys(shape, mode_of(tp, sp=sp))
    replicated = _router_share(shape) if tp > 1 else 0.0
    return ClassTrace(
        tp=tp,
        sp=sp,
        layers={name: filled.layer(key) for name, key in keys.items()},
        replicated_flops_fraction=replicated,
        replicated_modules=("feed_forward.router",) if replicated else (),
    )


def _router_share(shape: ModelShape) -> float:
    """Share of the matmul FLOPs of weights that routers do, which every tensor-parallel rank repeats."""
    if not shape.experts:
        return 0.0
    routers = (shape.layers - shape.dense_layers) * shape.hidden * shape.experts
    embedding = 0 if shape.tied else shape.vocab * shape.hidden
    return routers / (shape.active_parameters - embedding)


def _layer_specs(
    shape: ModelShape, table: _Table
) -> tuple[tuple[LayerSpec, ...], tuple[tuple[str, int], ...]]:
    filled = _Filled(shape, table, tp=1, precision="float32")
    dense = shape.dense_layers if shape.experts else shape.layers
    counts = [n for n in (dense, shape.layers - dense) if n]
    specs, sequence = [], []
    for name, key in layer_keys(shape, "whole").items():
        block = int(name.removeprefix("block")) if name.startswith("block") else None
        parameters = tuple(
            ParameterSpec(name=p, shape=filled.shape(whole), dtype="float32", tied_to=tied, matmul=matmul)
            for p, whole, _, matmul, tied in table.file.layers[key].parameters
        )
        if block is None:
            specs.append(LayerSpec(name=name, kind=name, parameters=parameters))
            sequence.append((name, 1))
        else:
            first = sum(counts[:block])
            specs.append(
                LayerSpec(
                    name=name,
                    kind="block",
                    module=f"layers.{first}",
                    class_name="Block",
                    parameters=parameters,
                )
            )
            sequence.append((name, counts[block]))
    return tuple(specs), tuple(sequence)
