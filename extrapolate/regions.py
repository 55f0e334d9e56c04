"""Calls of a forward pass become regions: each is one fused kernel, which reads what comes from outside and writes
what is needed outside; its backward reads the gradients of what it wrote and what was saved, and writes gradients."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from llmprof.extrapolate.flow import Call, Handle, Value, bare_name, size_of
from llmprof.schema.operators import family
from llmprof.schema.workload import TensorSpec

_LINEAR = ("add", "sub", "neg", "rsub", "native_dropout", "dropout")
_SCALING = ("mul", "div")
_LOSSES = ("nll", "cross_entropy")


@dataclass(slots=True, eq=False)
class Region:
    """Calls that share a kernel.

    Attributes:
        name: of the fused operator: its family is that of the most special operator inside.
        reads: activations from outside, with the handles through which they are read.
        constants: weights and tables, each once.
        writes: activations needed outside.
        tables: outputs that are no activations.
        saved: kept for the backward: filled in by `save`.
    """

    calls: list[Call]
    name: str
    reads: dict[Value, list[Handle]] = field(default_factory=dict)
    constants: list[TensorSpec] = field(default_factory=list)
    writes: list[Value] = field(default_factory=list)
    tables: list[TensorSpec] = field(default_factory=list)
    saved: list[Value] = field(default_factory=list)

    def inputs(self) -> tuple[TensorSpec, ...]:
        """What is read from outside: slices where only slices of a tensor are."""
        found: list[TensorSpec] = []
        for value, handles in self.reads.items():
            read = sum(h.size.elements for h in handles)
            whole = any(h.whole for h in handles) or read >= value.size.elements
            found += [value.spec] if whole else [h.spec for h in handles]
        return (*found, *self.constants)

    def outputs(self) -> tuple[TensorSpec, ...]:
        """What is written: for others, or for the backward."""
        inside = set(self.calls)
        kept = [v for v in self.saved if v.maker in inside and v not in self.writes]
        return (*(v.spec for v in (*self.writes, *kept)), *self.tables)


def partition(calls: Sequence[Call], *, sums: bool, softmax: bool) -> list[Region]:
    """Largest regions of connected fusible calls with no matmul on a way between them, in program order.

    Args:
        sums: a residual sum ends its region, as where a norm is a kernel of its own.
        softmax: a softmax ends its region before a dropout.
    """
    parent = {call: call for call in calls if call.fusible}

    def root(call: Call) -> Call:
        while parent[call] is not call:
            parent[call] = parent[parent[call]]
            call = parent[call]
        return call

    for call in parent:
        for handle in call.reads:
            maker = handle.value.maker
            if maker is None or not maker.fusible or maker.depth != call.depth:
                continue
            cut = sums and handle.value.is_sum
            cut |= softmax and "softmax" in maker.op.op and family(call.op.op) == "random"
            if not cut:
                parent[root(call)] = root(maker)
    groups: dict[Call, list[Call]] = {}
    for call in parent:
        groups.setdefault(root(call), []).append(call)
    return [_region(members) for members in groups.values()]


def _region(calls: list[Call]) -> Region:
    region = Region(calls, _name(calls))
    inside = set(calls)
    tables = {spec for call in calls for spec in call.tables}
    for call in calls:
        for handle in call.reads:
            if handle.value.maker not in inside:
                handles = region.reads.setdefault(handle.value, [])
                if handle not in handles:
                    handles.append(handle)
        for spec in call.constants:
            if spec not in region.constants and spec not in tables:
                region.constants.append(spec)
        region.tables += call.tables
        for value in call.writes:
            if not value.readers or any(reader not in inside for reader in value.readers):
                region.writes.append(value)
    return region


def _name(calls: Sequence[Call]) -> str:
    names = [bare_name(call.op.op) for call in calls]
    families = {family(call.op.op) for call in calls}
    if "normalization" in families:
        return "fused::layer_norm" if any("layer_norm" in n for n in names) else "fused::rms_norm"
    if "rsqrt" in names and "reduction" in families:
        return "fused::rms_norm"
    if "softmax_loss" in families:
        return (
            "fused::cross_entropy" if any(loss in n for n in names for loss in _LOSSES) else "fused::softmax"
        )
    return "fused::elementwise"


def is_linear(call: Call) -> bool:
    """True when the gradient of its inputs does not need them."""
    name = bare_name(call.op.op)
    if name in _LINEAR or family(call.op.op) in ("copy", "fill"):
        return True
    return name in _SCALING and len(call.reads) <= 1


def save(calls: Sequence[Call], regions: Sequence[Region], *, shards: bool) -> list[Value]:
    """What a fused implementation keeps for the backward, each storage once; every region's part is noted in it.

    A matmul keeps its activations, attention its inputs and results, a region that is not linear what it reads
    (a softmax what it writes), a dropout its mask, a norm its statistics, a lookup its indices.

    Args:
        regions: with residual sums and softmaxes cut, so that a residual sum is kept instead of its two parts.
        shards: of an activation gathered over the tensor-parallel group only the local shard is kept.
    """
    kept: dict[Value, None] = {}
    for call in calls:
        if not call.fusible:
            kept.update(dict.fromkeys(_kept_by(call, shards=shards)))
    for region in regions:
        region.saved = _kept_by_region(region)
        kept.update(dict.fromkeys(region.saved))
    return list(kept)


def _kept_by(call: Call, *, shards: bool) -> list[Value]:
    values = [h.value for h in call.reads]
    if call.kind == "matmul":
        return [_shard_of(v) for v in values] if shards else values
    if call.kind == "attention":
        return [*values, *call.writes] if family(call.op.op) == "attention" else values
    return [v for v in (*values, *call.writes[1:]) if not v.size.floating]


def _shard_of(value: Value) -> Value:
    maker = value.maker
    if maker is not None and is_relayout(maker):
        maker = maker.reads[0].value.maker
    if maker is not None and maker.op.collective == "all_gather" and maker.reads:
        return maker.reads[0].value
    return value


def is_relayout(call: Call) -> bool:
    """A copy between a collective and its use, because the dimension that is gathered or scattered is not the first."""
    if bare_name(call.op.op) != "cat" or not call.reads:
        return False
    makers = [h.value.maker for h in call.reads]
    readers = [reader for value in call.writes for reader in value.readers]
    return all(m is not None and m.op.collective for m in makers) or (
        bool(readers) and all(reader.op.collective for reader in readers)
    )


def _kept_by_region(region: Region) -> list[Value]:
    masks = [v for c in region.calls if "dropout" in bare_name(c.op.op) for v in c.writes[1:]]
    statistics = [
        v
        for c in region.calls
        for v in (c.writes if bare_name(c.op.op) == "rsqrt" else c.writes[1:] if _is_norm(c) else ())
    ]
    if region.name == "fused::softmax":
        return [*(v for v in region.writes if v.size.floating), *masks]
    if all(is_linear(call) for call in region.calls):
        return masks
    return [*region.reads, *masks, *statistics]


def _is_norm(call: Call) -> bool:
    return family(call.op.op) == "normalization"


def is_weight(spec: TensorSpec) -> bool:
    """True for a vector or matrix that grows with neither batch nor sequence."""
    size = size_of(spec)
    return size.floating and not (size.per_batch or size.per_token)


def is_pass_through(region: Region) -> bool:
    """True for residual sums alone: their gradient is handed on as it is."""
    return all(call.kind == "fusible" and all(v.is_sum for v in call.writes) for call in region.calls)
