"""Captured operators that ran outside every module become the loss layer, symbolic by the sizes that recur in their shapes."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from math import ceil

from llmprof.schema.operators import parse_shapes
from llmprof.schema.profile import OperatorRow
from llmprof.schema.workload import Dim, LayerTrace, OpSpec, Poly, TensorSpec

_PHASES = ("forward", "backward_input", "backward_weight")


def loss_layer(
    rows: Sequence[OperatorRow], *, batch: int, seq: int, accum: int, fixed: Collection[int]
) -> tuple[LayerTrace, tuple[str, ...]]:
    """The loss layer of one microbatch, and notes on sizes that could mean two things.

    Args:
        rows: operators of forward and backward work outside modules, counted per step.
        batch, seq: captured sizes; seq is 1 when there is no sequence.
        accum: microbatches per step.
        fixed: sizes of the model's outputs that do not depend on batch or sequence (the vocabulary).
    """
    sizes = _Sizes(batch=batch, seq=seq, fixed=frozenset(fixed))
    ops = []
    for phase in _PHASES:
        for row in rows:
            if row.phase != phase:
                continue
            tensors = tuple(
                TensorSpec(sizes.symbolic(t.shape), t.dtype, t.group)
                for t in parse_shapes(row.shapes, row.dtype)
            )
            ops.append(
                OpSpec(
                    op=row.op,
                    phase=phase,
                    inputs=tensors,
                    count=max(1, ceil(row.count / max(accum, 1))),
                    attributes=tuple(filter(None, row.attributes.split(","))),
                )
            )
    return LayerTrace(ops=tuple(ops)), tuple(sorted(sizes.notes))


class _Sizes:
    """Reads batch and sequence out of concrete sizes."""

    def __init__(self, *, batch: int, seq: int, fixed: frozenset[int]) -> None:
        self._fixed = fixed
        self.notes: set[str] = set()
        self._meanings: dict[int, list[Dim]] = {}
        known: list[tuple[int, Dim]] = [(batch * seq, Poly(cbs=1))] if seq > 1 else []
        if seq > 2:
            known += [(batch * (seq - 1), Poly(cb=-1, cbs=1)), (seq, Poly(cs=1)), (seq - 1, Poly(c=-1, cs=1))]
        known.append((batch, Poly(cb=1)))
        for value, meaning in known:
            if value > 1:
                self._meanings.setdefault(value, []).append(meaning)

    def symbolic(self, shape: tuple[int, ...]) -> tuple[Dim, ...]:
        """Dimensions of one shape; the last one is the vocabulary where both would fit, the first one the batch."""
        return tuple(self._dim(size, place, len(shape)) for place, size in enumerate(shape))

    def _dim(self, size: int, place: int, rank: int) -> Dim:
        meanings = self._meanings.get(size, [])
        if size in self._fixed and (not meanings or (place == rank - 1 and rank > 1)):
            return size
        if not meanings:
            return size
        if len(meanings) > 1 or size in self._fixed:
            self.notes.add(
                f"Size {size} outside the modules could mean more than one thing; the loss may scale wrongly."
            )
        batch_first = place == 0 and rank > 2
        return meanings[-1] if batch_first else meanings[0]
