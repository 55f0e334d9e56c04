"""The backward operators of a layer whose forward was fused: each region's mirror image, matmuls as traced."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from llmprof.extrapolate.flow import Call, Value, bare_name, kind_of, size_of
from llmprof.extrapolate.merge import Merges
from llmprof.extrapolate.regions import Region, is_pass_through, is_weight
from llmprof.schema.operators import family
from llmprof.schema.workload import OpSpec, TensorSpec

_PHASE = "backward_input"


def mirror(
    ops: Sequence[OpSpec],
    calls: Sequence[Call],
    regions: Sequence[Region],
    merges: Merges,
    *,
    fuse_sums: bool,
    views: bool,
) -> list[OpSpec]:
    """Backward operators: fused ones in the place of the traced elementwise ones, unless those moved fewer bytes.

    Args:
        ops: the layer's traced operators.
        fuse_sums: gradients of a tensor that is read several times are summed where they are read.
        views: keep views, for their host time.
    """
    backward = [(i, op) for i, op in enumerate(ops) if op.phase.startswith("backward")]
    replaced = [op for _, op in backward if kind_of(op.op) == "fusible"]
    if not replaced:
        return [merges.replaced.get(i, op) for i, op in backward if i not in merges.dropped]
    linears = {call.op.module for call in calls if call.kind == "matmul" and call.op.module}
    kept = {id(op) for op in replaced if _is_bias_gradient(op, linears)}
    fused = list(_Mirror(calls, regions, merges, fuse_sums=fuse_sums).ops())
    if _bytes(fused) > _bytes([op for op in replaced if id(op) not in kept]):
        kept, fused = {id(op) for op in replaced}, []
    result: list[OpSpec] = []
    for index, op in backward:
        kind = kind_of(op.op)
        if kind == "fusible":
            while fused and id(op) not in kept and fused[0].module == op.module:
                result.append(fused.pop(0))
            if id(op) in kept:
                result.append(op)
        elif index not in merges.dropped and (kind != "view" or views or op.op.endswith("wait_tensor")):
            result.append(merges.replaced.get(index, op))
    return [*result, *fused]


def _is_bias_gradient(op: OpSpec, linears: set[str]) -> bool:
    return family(op.op) == "reduction" and op.module in linears


def _bytes(ops: Sequence[OpSpec]) -> int:
    return sum(op.count * sum(size_of(t).bytes for t in (*op.inputs, *op.outputs)) for op in ops)


class _Mirror:
    def __init__(
        self, calls: Sequence[Call], regions: Sequence[Region], merges: Merges, *, fuse_sums: bool
    ) -> None:
        self._calls = calls
        self._regions = regions
        self._fuse_sums = fuse_sums
        self._unit: dict[Call, object] = {call: region for region in regions for call in region.calls}
        for call in calls:
            self._unit.setdefault(call, merges.group_of.get(call.index, call))

    def ops(self) -> Iterator[OpSpec]:
        """Fused operators from the last region to the first, and sums of gradients."""
        for region in reversed(self._regions):
            yield from self._region(region)
        seen: set[Value] = set()
        for call in self._calls:
            for value in (*(h.value for h in call.reads), *call.writes):
                if value not in seen and not self._is_fused_sum(value):
                    seen.add(value)
                    yield from self._sum(value, call)

    def _readers(self, value: Value, region: Region | None = None) -> int:
        """Kernels outside a region that give a gradient to a value."""
        return len({self._unit[reader] for reader in value.readers} - {region})

    def _is_fused_sum(self, value: Value) -> bool:
        """Summed by the backward of the region that made it, or that was the first to read it."""
        if not self._fuse_sums:
            return False
        made = value.maker is not None and value.maker.fusible
        return made or (bool(value.readers) and value.readers[0].fusible)

    def _sum(self, value: Value, call: Call) -> Iterator[OpSpec]:
        """Gradients of a value that several kernels read: summed, or put beside each other where each read a slice."""
        inside = self._unit[value.maker] if value.maker is not None else None
        count = self._readers(value, inside if isinstance(inside, Region) else None) - 1
        if count < 1 or not value.size.floating:
            return
        spec, module = value.spec, call.op.module
        sliced = any(
            h.value is value and h.size.elements < value.size.elements for r in value.readers for h in r.reads
        )
        if sliced:
            yield OpSpec(op="aten::cat", phase=_PHASE, module=module, inputs=(spec,), outputs=(spec,))
        else:
            inputs = (spec, spec)
            yield OpSpec(
                op="aten::add_", phase=_PHASE, module=module, inputs=inputs, outputs=(spec,), count=count
            )

    def _region(self, region: Region) -> Iterator[OpSpec]:
        incoming = list(self._incoming(region))
        outgoing = list(self._outgoing(region, len(incoming)))
        incoming += self._summed(region)
        if not incoming or not outgoing:
            return
        weights = [spec for spec in region.constants if is_weight(spec)]
        yield OpSpec(
            op=_backward_name(region),
            phase=_PHASE,
            module=region.calls[0].op.module,
            inputs=(*incoming, *(v.spec for v in region.saved), *region.constants),
            outputs=(*outgoing, *weights),
        )

    def _incoming(self, region: Region) -> Iterator[TensorSpec]:
        """Gradients of what the region wrote; 0-dimensional for a loss."""
        for value in region.writes:
            if not value.size.floating or value.maker is None:
                continue
            if value.readers:
                yield from [value.spec] * (self._readers(value, region) if self._fuse_sums else 1)
            elif value is value.maker.writes[0]:
                yield value.spec
        yield from (spec for spec in region.tables if not spec.dims)

    def _summed(self, region: Region) -> Iterator[TensorSpec]:
        """Gradients that other readers gave to what this region was the first to read."""
        for value in region.reads if self._fuse_sums else ():
            made = value.maker is not None and value.maker.fusible
            if value.size.floating and not made and self._unit[value.readers[0]] is region:
                yield from [value.spec] * (self._readers(value) - 1)

    def _outgoing(self, region: Region, incoming: int) -> Iterator[TensorSpec]:
        """Gradients of what the region read; both parts of a residual sum have the same one."""
        inside = set(region.calls)
        passed = incoming == 1 and _ends_with_sum(region)
        summed = False
        for value in region.reads:
            if not value.size.floating:
                continue
            readers = [reader for reader in value.readers if reader in inside]
            if all(w.is_sum for reader in readers for w in reader.writes) and readers:
                if not summed and not passed:
                    yield value.spec
                summed = True
            else:
                yield value.spec


def _ends_with_sum(region: Region) -> bool:
    """The only gradient that comes in is that of a residual sum, which hands it on."""
    return is_pass_through(region) or any(v.is_sum for v in region.writes)


def _backward_name(region: Region) -> str:
    if len(region.calls) == 1 and region.name != "fused::elementwise":
        name = bare_name(region.calls[0].op.op)
        if family(f"aten::{name}_backward") == family(region.calls[0].op.op):
            return f"fused::{name}_backward"
    return f"{region.name}_backward"
