"""Forward operators of a traced layer become calls and values: who reads what, inferred from sizes and program order.

A trace holds shapes, not identities. A tensor is told from others by its number of elements and dtype; where several
match, eager programs read in a way that decides: a fresh intermediate is read soon, projections beside each other
share their input, a residual sum adds to the sum before it, and a chain of operators that occurs twice in a row
works on two tensors, not twice on one. A wrong guess between tensors of one size leaves bytes the same.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from math import prod
from typing import NamedTuple

from llmprof.schema.operators import ITEM_BYTES, family, split_name
from llmprof.schema.workload import Dim, OpSpec, TensorSpec

PROBE_BATCH, PROBE_SEQ = 1009, 10007
"""Primes at which symbolic sizes are compared, so that equal products have equal factors."""
FUSIBLE = ("elementwise", "normalization", "softmax_loss", "reduction", "copy", "random", "fill")
_NOT_FUSIBLE = ("topk", "sort", "argsort", "cumsum", "cumprod", "multinomial", "randperm")
_FLOATS = ("float32", "bfloat16", "float16", "float64", "float8", "float8_e4m3fn", "float8_e5m2")
_SHORTEST_REPEAT = 3


class Size(NamedTuple):
    """A tensor at the probe sizes: elements, bytes, what it grows with, whether it can have a gradient."""

    elements: int
    bytes: int
    per_batch: bool
    per_token: bool
    floating: bool


@lru_cache(maxsize=65536)
def size_of(spec: TensorSpec) -> Size:
    """The size of a tensor by which it is recognised."""
    elements = prod(spec.shape_at(PROBE_BATCH, PROBE_SEQ))
    return Size(
        elements,
        elements * ITEM_BYTES.get(spec.dtype, 4),
        elements != prod(spec.shape_at(1, PROBE_SEQ)),
        elements != prod(spec.shape_at(PROBE_BATCH, 1)),
        spec.dtype in _FLOATS,
    )


@lru_cache(maxsize=4096)
def bare_name(op: str) -> str:
    """ "add" of "aten::add_.Tensor"."""
    return split_name(op)[1].rstrip("_")


@lru_cache(maxsize=4096)
def kind_of(op: str) -> str:
    """ "view", "fusible", "matmul", "attention" (also batched matmuls) or "other"."""
    found = family(op)
    if found in ("view", "allocation"):
        return "view"
    if found in FUSIBLE and bare_name(op) not in _NOT_FUSIBLE:
        return "fusible"
    if found in ("attention", "batched_matmul"):
        return "attention"
    return "matmul" if found == "matmul" else "other"


@dataclass(slots=True, eq=False)
class Value:
    """An activation: the storage, whatever its views.

    Attributes:
        maker: the call that wrote it, None for what the layer was given.
        readers: calls, each once.
        is_sum: it is a sum of two activations of its size (the residual stream).
    """

    spec: TensorSpec
    size: Size
    maker: Call | None
    readers: list[Call] = field(default_factory=list)
    is_sum: bool = False


@dataclass(slots=True, eq=False)
class Handle:
    """A value as an operator sees it: whole, or a slice of it.

    Attributes:
        shapes: dimensions under which views have shown it.
        touched: when it was last made or read, for comparison.
    """

    value: Value
    spec: TensorSpec
    size: Size
    shapes: list[tuple[Dim, ...]]
    whole: bool = True
    read: bool = False
    touched: int = 0

    @property
    def fresh(self) -> bool:
        """True until it, or a slice of it, is read."""
        return not (self.read or (self.whole and self.value.readers))


@dataclass(slots=True, eq=False)
class Call:
    """One call of a forward operator.

    Attributes:
        index: of its OpSpec in the layer's operators (several calls where that counts several).
        reads: activations; `constants` are its other inputs (weights, tables).
        writes: activations; `tables` are its other outputs.
        depth: matmuls and the like on the longest way to it: calls of different depth cannot share a kernel.
    """

    number: int
    index: int
    op: OpSpec
    kind: str
    reads: list[Handle] = field(default_factory=list)
    constants: list[TensorSpec] = field(default_factory=list)
    writes: list[Value] = field(default_factory=list)
    tables: list[TensorSpec] = field(default_factory=list)
    depth: int = 0

    @property
    def fusible(self) -> bool:
        """True when it can share a kernel with its neighbours."""
        return self.kind == "fusible"


def trace_flow(ops: Sequence[OpSpec], *, by_batch: bool) -> list[Call]:
    """Calls of the forward operators, views left out.

    Args:
        ops: of one layer, in program order; other phases are skipped.
        by_batch: activations are what grows with the batch; False: with the sequence (batch not symbolic).
    """
    calls = [
        Call(number=0, index=index, op=op, kind=kind_of(op.op))
        for index, op in enumerate(ops)
        if op.phase == "forward"
        for _ in range(op.count)
    ]
    hidden = _hidden_makers(calls)
    matcher = _Matcher(by_batch=by_batch)
    for number, call in enumerate(calls):
        call.number = number
        matcher.run(call, hidden.get(number, (0, 0)))
    return [call for call in calls if call.kind != "view"]


def _hidden_makers(calls: Sequence[Call]) -> dict[int, tuple[int, int]]:
    """For each call in the second half of a repeated chain, the calls of the first half, which feed it nothing."""
    hidden: dict[int, tuple[int, int]] = {}
    start = 0
    for end in range(len(calls) + 1):
        if end == len(calls) or calls[end].kind not in ("view", "fusible"):
            kept = [n for n in range(start, end) if calls[n].kind == "fusible"]
            for first, length in _repeats([calls[n].op.op for n in kept]):
                earlier = (kept[first], kept[first + length - 1] + 1)
                later = range(earlier[1], kept[first + 2 * length - 1] + 1)
                hidden.update((n, earlier) for n in later)
            start = end + 1
    return hidden


def _repeats(names: list[str]) -> Iterator[tuple[int, int]]:
    """The longest chain that occurs twice in a row, as (start, length)."""
    for length in range(len(names) // 2, _SHORTEST_REPEAT - 1, -1):
        for first in range(len(names) - 2 * length + 1):
            if names[first : first + length] == names[first + length : first + 2 * length]:
                yield first, length
                return


class _Matcher:
    def __init__(self, *, by_batch: bool) -> None:
        self._by_batch = by_batch
        self._handles: dict[tuple[int, str], list[Handle]] = {}
        self._given_sizes: set[int] = set()
        self._clock = 0
        self._projections: dict[tuple[str, int], tuple[Handle, int]] = {}

    def run(self, call: Call, hidden: tuple[int, int]) -> None:
        op = call.op
        if call.kind == "view":
            self._view(op)
            return
        taken: list[Handle] = []
        again = 0
        for spec in op.inputs:
            size = size_of(spec)
            if not self._is_activation(size):
                call.constants.append(spec)
                continue
            handle = self._find(call, spec, size, taken, hidden)
            again += not handle.fresh or handle.value.maker is None
            taken.append(handle)
        for handle in taken:
            self._clock += 1
            handle.read, handle.touched = True, self._clock
            if call not in handle.value.readers:
                handle.value.readers.append(call)
            maker = handle.value.maker
            if maker is not None:
                call.depth = max(call.depth, maker.depth + (0 if maker.fusible else 1))
        call.reads = taken
        self._write(call, is_sum=again == 1 and self._is_sum(call))

    def _is_activation(self, size: Size) -> bool:
        return size.per_batch if self._by_batch else size.per_token

    def _is_sum(self, call: Call) -> bool:
        """Two activations of one size, which is that of something that the layer was given."""
        if len(call.reads) != 2 or bare_name(call.op.op) != "add":
            return False
        first, second = call.reads
        return first.size == second.size and first.size.elements in self._given_sizes

    def _write(self, call: Call, *, is_sum: bool) -> None:
        op = call.op
        for spec in op.outputs:
            size = size_of(spec)
            if not self._is_activation(size):
                call.tables.append(spec)
                continue
            value = Value(spec, size, call, is_sum=is_sum)
            call.writes.append(value)
            self._new_handle(value, spec, size)

    def _new_handle(self, value: Value, spec: TensorSpec, size: Size, *, whole: bool = True) -> Handle:
        self._clock += 1
        handle = Handle(value, spec, size, [spec.dims], whole=whole, touched=self._clock)
        self._handles.setdefault((size.elements, spec.dtype), []).append(handle)
        return handle

    def _view(self, op: OpSpec) -> None:
        """A view of another size is another handle on the storage last touched; of the same size, another shape."""
        if not op.inputs or not op.outputs:
            return
        spec, size = op.inputs[0], size_of(op.inputs[0])
        if not self._is_activation(size):
            return
        known = self._known(spec, size, [])
        if (
            size_of(op.outputs[0]).elements > size.elements
        ):  # heads are repeated in the order in which they were made
            same = self._handles.get((size.elements, spec.dtype), ())
            known = [h for h in same if h.fresh][:1] or known
        else:
            known = [h for h in known if not _is_turned(h)] or known
        source = max(known, key=_touched) if known else self._given(spec, size)
        for out in op.outputs:
            out_size = size_of(out)
            if out_size.elements != size.elements:
                self._new_handle(source.value, out, out_size, whole=False)
            elif out.dims not in source.shapes:
                source.shapes.append(out.dims)

    def _known(self, spec: TensorSpec, size: Size, taken: list[Handle]) -> list[Handle]:
        """Handles that the tensor may be: those seen under exactly its dimensions, else all of its size."""
        known = [h for h in self._handles.get((size.elements, spec.dtype), ()) if h not in taken]
        return [h for h in known if spec.dims in h.shapes] or known

    def _given(self, spec: TensorSpec, size: Size) -> Handle:
        self._given_sizes.add(size.elements)
        return self._new_handle(Value(spec, size, None), spec, size)

    def _find(
        self, call: Call, spec: TensorSpec, size: Size, taken: list[Handle], hidden: tuple[int, int]
    ) -> Handle:
        if call.kind == "matmul":
            return self._projected(call, spec, size, taken)
        known = self._known(spec, size, taken)
        fresh = [h for h in known if h.fresh]
        newest = max(known, key=_touched, default=None)
        if newest is not None and newest.fresh and not newest.whole:
            return newest
        made = [h for h in fresh if _made_by_fusible(h, call, hidden)]
        if call.kind != "fusible":
            rest = [h for h in fresh if h not in made]
            found = made or rest or known
            return max(found, key=_touched) if found else self._given(spec, size)
        if made:
            return max(made, key=_touched)
        if taken and bare_name(call.op.op) == "add" and size == taken[0].size:
            sums = [h for h in known if h.value.is_sum or h.value.maker is None]
            if sums:
                return max(sums, key=_is_sum_then_touched)
        outside = [h for h in fresh if h.value.maker is None or not h.value.maker.fusible]
        if outside:
            return outside[0]
        return max(known, key=_touched) if known else self._given(spec, size)

    def _projected(self, call: Call, spec: TensorSpec, size: Size, taken: list[Handle]) -> Handle:
        """Projections in one module share their input, unless an attention or a collective has just made another."""
        known = [h for h in self._handles.get((size.elements, spec.dtype), ()) if h not in taken]
        key = (call.op.module.rpartition(".")[0], size.elements)
        before, depth = self._projections.get(key, (None, 0))
        fresh = [h for h in known if h.fresh]
        beyond = [h for h in fresh if _is_beyond(h, depth)]
        if beyond:
            found = beyond[-1]
        elif before is not None and before in known:
            return before
        else:
            ready = fresh or known
            found = max(ready, key=_touched) if ready else self._given(spec, size)
        maker = found.value.maker
        self._projections[key] = found, maker.depth if maker is not None else 0
        return found


def _touched(handle: Handle) -> int:
    return handle.touched


def _is_beyond(handle: Handle, depth: int) -> bool:
    """Given from outside, or made by or after an attention or a collective behind a projection of a depth."""
    maker = handle.value.maker
    return maker is None or maker.kind in ("attention", "other") or maker.depth > depth + 1


def _is_turned(handle: Handle) -> bool:
    """A fresh product with a table of positions: the halves that are rotated are those of what it was made from."""
    maker = handle.value.maker
    return handle.fresh and maker is not None and any(size_of(c).per_token for c in maker.constants)


def _is_sum_then_touched(handle: Handle) -> tuple[bool, int]:
    return handle.value.is_sum, handle.touched


def _made_by_fusible(handle: Handle, call: Call, hidden: tuple[int, int]) -> bool:
    """True for an intermediate that `call` may read: not one of an equal call beside it, nor of a repeated chain."""
    maker = handle.value.maker
    if maker is None or not maker.fusible or maker.index == call.index:
        return False
    return not hidden[0] <= maker.number < hidden[1]
