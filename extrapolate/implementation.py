"""A traced workload becomes what another implementation of the same model would run: rewrite rules in one table.

`eager` is the trace; `plain` has its kernels under tensor-parallel layers of the model's own, without DTensor. `compile`
fuses whatever is connected, as inductor does. `megatron` and `te` (Transformer Engine) fuse norm, rope, activation, dropout
and residual sum, softmax and cross-entropy each by itself, and put projections that share their input in one matmul. Matmul
FLOPs never change. A fused operator moves the bytes that come from outside its region and those that are needed outside
it. Its backward mirrors it: it reads the gradients of what was written and what was saved, and writes the gradients of
what was read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from llmprof.errors import WorkloadError
from llmprof.extrapolate.attention import FIRST, NATIVE, with_kernel, with_math_attention
from llmprof.extrapolate.flow import Call, Value, kind_of, size_of, trace_flow
from llmprof.extrapolate.merge import Merges, find_merges
from llmprof.extrapolate.mirror import mirror
from llmprof.extrapolate.regions import Region, is_relayout, partition, save
from llmprof.extrapolate.routing import with_early_weights
from llmprof.schema.workload import ClassTrace, LayerTrace, OpSpec, TensorSpec, Workload

ATTENTION = ("flash", "first", "math")


@dataclass(frozen=True, kw_only=True, slots=True)
class Rules:
    """What an implementation does with the traced stream.

    Attributes:
        sums: a residual sum is a kernel of its own, or of its dropout; else it is fused with the norm behind it.
        merges: projections that share their input run as one matmul.
        leading: collectives gather and scatter the leading dimension: without copies around them, and of an activation
            gathered for a matmul the backward keeps the local shard.
        early: experts weight their tokens before their last matmul, not after it.
        views: views cost host time; else they are compiled away.
        native: attention kernels are written for the device's own generation.
        optimizer: how the optimizer launches, "" as traced.
    """

    sums: bool
    merges: bool
    leading: bool
    early: bool
    views: bool
    native: bool
    optimizer: str


IMPLEMENTATIONS: dict[str, Rules | None] = {
    "eager": None,
    "plain": None,
    "compile": Rules(
        sums=False, merges=False, leading=False, early=False, views=False, native=False, optimizer=""
    ),
    "megatron": Rules(
        sums=True, merges=True, leading=True, early=True, views=True, native=False, optimizer="fused"
    ),
    "te": Rules(sums=True, merges=True, leading=True, early=True, views=True, native=True, optimizer="fused"),
}
"""By name. In 16 bit `te` moves the bytes of `megatron`: its norm writes what the matmul reads either way."""


def apply_implementation(workload: Workload, name: str, *, attention: str = "flash") -> Workload:
    """The workload as another implementation runs it.

    Args:
        workload: traced in eager mode.
        name: one of IMPLEMENTATIONS.
        attention: "flash" keeps the traced kernel, "first" takes the first FlashAttention for it, "math" writes scores
            of sequence x sequence out.

    Raises:
        WorkloadError: an unknown name, or a workload that is of another implementation already.
    """
    if name not in IMPLEMENTATIONS or attention not in ATTENTION:
        known, asked = (IMPLEMENTATIONS, name) if name not in IMPLEMENTATIONS else (ATTENTION, attention)
        raise WorkloadError(f"implementation {asked!r} is not known", hint=f"use one of {', '.join(known)}")
    if workload.implementation not in ("eager", name):
        raise WorkloadError(
            f"the workload is of implementation {workload.implementation!r}, and only eager ones are rewritten",
            hint=f"leave the implementation out, or trace the model in eager mode to forecast {name}",
        )
    rules = IMPLEMENTATIONS[name] if workload.implementation != name else None
    if name == workload.implementation and attention == "flash":
        return workload
    return msgspec.structs.replace(
        workload,
        classes=tuple(_rewrite_class(trace, rules, attention) for trace in workload.classes),
        implementation=name,
        optimizer=msgspec.structs.replace(
            workload.optimizer, launch=(rules and rules.optimizer) or workload.optimizer.launch
        ),
    )


def _rewrite_class(trace: ClassTrace, rules: Rules | None, attention: str) -> ClassTrace:
    by_batch = trace.batch is None
    layers = {}
    for name, layer in trace.layers.items():
        changed = _with_attention(layer, attention, native=rules is not None and rules.native)
        layers[name] = changed if rules is None else _rewrite(changed, rules, by_batch=by_batch)
    return msgspec.structs.replace(trace, layers=layers)


def _with_attention(layer: LayerTrace, attention: str, *, native: bool) -> LayerTrace:
    if attention == "math":
        return with_math_attention(layer)
    if attention == "first":
        return with_kernel(layer, FIRST)
    return with_kernel(layer, NATIVE) if native else layer


def _rewrite(layer: LayerTrace, rules: Rules, *, by_batch: bool) -> LayerTrace:
    layer = with_early_weights(layer) if rules.early else layer
    calls = trace_flow(layer.ops, by_batch=by_batch)
    regions = partition(calls, sums=rules.sums, softmax=rules.sums)
    kept = _saved(layer, calls, regions, rules)
    if rules.leading:
        regions = [r for r in regions if not (len(r.calls) == 1 and is_relayout(r.calls[0]))]
    merges = find_merges(layer.ops, calls) if rules.merges else Merges()
    forward = _forward(layer.ops, regions, merges, rules)
    backward = mirror(layer.ops, calls, regions, merges, fuse_sums=not rules.sums, views=rules.views)
    optimizer = () if rules.optimizer else tuple(op for op in layer.ops if op.phase == "optimizer")
    return msgspec.structs.replace(layer, ops=(*forward, *backward, *optimizer), saved=kept)


def _saved(
    layer: LayerTrace, calls: Sequence[Call], regions: Sequence[Region], rules: Rules
) -> tuple[TensorSpec, ...]:
    """Saved by rule, unless that is more than what was traced: then the rule has misread the layer."""
    small = regions if rules.sums else partition(calls, sums=True, softmax=True)
    specs = tuple(value.spec for value in save(calls, small, shards=rules.leading))
    if small is not regions:
        _note_saved(regions, small)
    if sum(size_of(s).bytes for s in specs) > sum(size_of(s).bytes for s in layer.saved):
        return layer.saved
    return specs


def _note_saved(regions: Sequence[Region], small: Sequence[Region]) -> None:
    """What smaller regions save, noted in the larger ones that hold them."""
    holder = {call: region for region in regions for call in region.calls}
    for part in small:
        region = holder[part.calls[0]]
        merged: dict[Value, None] = dict.fromkeys((*region.saved, *part.saved))
        region.saved = list(merged)


def _forward(ops: Sequence[OpSpec], regions: Sequence[Region], merges: Merges, rules: Rules) -> list[OpSpec]:
    """The forward operators: a region where its last call was, a merged matmul where its first was."""
    ending: dict[int, list[OpSpec]] = {}
    for region in regions:
        ending.setdefault(region.calls[-1].index, []).append(_fused(region))
    inside = _spans(regions) if rules.views else {}
    result: list[OpSpec] = []
    for index, op in enumerate(ops):
        if op.phase != "forward":
            continue
        kind = kind_of(op.op)
        if kind == "fusible":
            result += ending.get(index, ())
        elif kind == "view":
            dropped = not rules.views or inside.get(index) == op.module
            if not dropped or op.op.endswith("wait_tensor"):
                result.append(op)
        elif index not in merges.dropped:
            result.append(merges.replaced.get(index, op))
    return result


def _spans(regions: Sequence[Region]) -> dict[int, str]:
    """Module by index, for operators between the first and the last call of a region: views there are fused away."""
    return {
        index: region.calls[0].op.module
        for region in regions
        for index in range(region.calls[0].index, region.calls[-1].index)
    }


def _fused(region: Region) -> OpSpec:
    first = region.calls[0].op
    if len(region.calls) == 1:
        return first if first.count == 1 else msgspec.structs.replace(first, count=1)
    return OpSpec(
        op=region.name, phase="forward", module=first.module, inputs=region.inputs(), outputs=region.outputs()
    )
