"""Equal layers traced at several sizes become rows of the shipped table: each dimension one product of named sizes."""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Sequence
from fractions import Fraction
from typing import TYPE_CHECKING, Any

import msgspec
import torch

from llmprof.hooks.layers import FitError
from llmprof.schema.model import ModelShape
from llmprof.schema.operators import Tensor
from llmprof.schema.reference import VERSION, named_sizes

if TYPE_CHECKING:
    from llmprof.hooks.reference_trace import TracedLayer

_COEFFICIENTS = (Fraction(1), Fraction(2), Fraction(1, 2))
_MOST_FACTORS = 4


class Fit:
    """Products of named sizes by their values at some points; the last point is held out.

    Args:
        points: (whole shape, batch, sequence length, tensor-parallel degree) of each trace.
    """

    def __init__(self, points: Sequence[tuple[ModelShape, int, int, int]]) -> None:
        self.degrees = [tp for *_, tp in points]
        sizes = [
            named_sizes(shape, tp) | {"b": b, "s": s, "s_tp": s // tp, "tp": tp} for shape, b, s, tp in points
        ]
        names = [n for n in sizes[0] if max(self.degrees) > 1 or not n.endswith("tp")]
        if not points[0][0].experts:
            names = [n for n in names if not n.startswith("expert")]
        self._found: dict[tuple[int, ...], list[str]] = {}
        self._held: dict[str, int] = {}
        for count in range(1, _MOST_FACTORS + 1):
            for chosen in itertools.combinations(names, count):
                values = [1] * len(sizes)
                for name in chosen:
                    values = [v * at[name] for v, at in zip(values, sizes, strict=True)]
                if not all(values):
                    continue
                for coefficient in _COEFFICIENTS:
                    self._note(coefficient, chosen, values)

    def _note(self, coefficient: Fraction, chosen: Sequence[str], values: Sequence[int]) -> None:
        scaled = [coefficient * v for v in values]
        if any(v.denominator > 1 for v in scaled):
            return
        text = "*".join(chosen)
        if coefficient > 1:
            text = f"{coefficient}*{text}"
        elif coefficient < 1:
            text = f"{text}/{coefficient.denominator}"
        self._held[text] = int(scaled[-1])
        self._found.setdefault(tuple(int(v) for v in scaled[:-1]), []).append(text)

    def dim(self, values: Sequence[int], where: str) -> str:
        """The product (or constant) with these values at the points.

        Raises:
            FitError: none, or two of equal length, or one that misses the held-out value.
        """
        if len(set(values)) == 1:
            return str(values[0])
        found = self._found.get(tuple(values[:-1]), [])
        shortest = min(map(_length, found), default=0)
        found = [text for text in found if _length(text) == shortest]
        if len(found) != 1:
            raise FitError(f"{where}: {list(values)} is {found or 'no product of sizes'}")
        if self._held[found[0]] != values[-1]:
            raise FitError(f"{where}: {found[0]} is {self._held[found[0]]} where {values[-1]} was held out")
        return found[0]


def _length(text: str) -> int:
    """Factors of a product: `s` is shorter than `s_tp*tp`, which is the same."""
    return text.count("*") + text.count("/")


class ReferenceTable:
    """Dimensions, tensors and operators that many layers share, each once; layers as lists of operators."""

    def __init__(self) -> None:
        self._rows: dict[str, dict[Hashable, int]] = {"dims": {}, "tensors": {}, "ops": {}}
        self._layers: dict[str, dict[str, Any]] = {}

    def add(self, key: str, traces: Sequence[TracedLayer], fit: Fit) -> None:
        """Fit one layer; a key that is there already must give the same.

        Raises:
            FitError: the traces differ in more than sizes, a dimension has no product, or the key holds another layer.
        """
        if len({len(t.ops) for t in traces}) > 1:
            raise FitError(f"{key}: {[len(t.ops) for t in traces]} operators at different sizes")
        layer = {
            "ops": [self._op(key, same, fit) for same in zip(*(t.ops for t in traces), strict=True)],
            "saved": self._tensors(f"{key} saved", [t.saved for t in traces], fit),
            "boundary": self._tensors(
                f"{key} boundary", [(t.boundary,) if t.boundary else () for t in traces], fit
            ),
            "parameters": self._parameters(key, traces, fit),
        }
        if self._layers.setdefault(key, layer) != layer:
            raise FitError(f"{key}: traced as part of two models, it is not the same")

    def encode(self) -> bytes:
        """The file's contents."""
        rows = {name: list(found) for name, found in self._rows.items()}
        data = {"version": VERSION, "torch": str(torch.__version__), **rows, "layers": self._layers}
        text = msgspec.json.encode(data).decode()
        for start in ('"dims":', '"tensors":', '"ops":[[', '"layers":'):
            text = text.replace(f",{start}", f",\n{start}", 1)
        return text.replace('},"', '},\n"').encode() + b"\n"

    def _index(self, table: str, row: Hashable) -> int:
        rows = self._rows[table]
        return rows.setdefault(row, len(rows))

    def _op(self, key: str, same: Sequence[Any], fit: Fit) -> int:
        calls = {(o.op, o.phase, o.module, o.attributes, o.collective) for o in same}
        if len(calls) > 1:
            raise FitError(f"{key}: {calls} at different sizes")
        one = same[0]
        where = f"{key} {one.phase} {one.module} {one.op}"
        inputs = tuple(self._tensors(where, [o.inputs for o in same], fit))
        outputs = tuple(self._tensors(where, [o.outputs for o in same], fit))
        return self._index(
            "ops", (one.op, one.phase, one.module, inputs, outputs, one.attributes, one.collective)
        )

    def _tensors(self, where: str, lists: Sequence[Sequence[Tensor]], fit: Fit) -> list[int]:
        repeat = 0
        if len({len(tensors) for tensors in lists}) > 1:
            lists = [_folded(where, tensors, tp) for tensors, tp in zip(lists, fit.degrees, strict=True)]
            repeat = 1
        found = []
        for same in zip(*lists, strict=True):
            if len({(len(t.shape), t.dtype, t.group) for t in same}) > 1:
                raise FitError(f"{where}: rank or dtype depends on the size")
            dims = tuple(
                self._index("dims", fit.dim(values, where))
                for values in zip(*(t.shape for t in same), strict=True)
            )
            found.append(self._index("tensors", (dims, same[0].dtype, same[0].group, repeat)))
        return found

    def _parameters(self, key: str, traces: Sequence[TracedLayer], fit: Fit) -> list[tuple[Any, ...]]:
        rows = []
        for index, spec in enumerate(traces[0].specs):
            whole = [Tensor(t.specs[index].shape, "float32") for t in traces]
            local = [Tensor(t.local[index], "float32") for t in traces]
            where = f"{key} {spec.name}"
            (full,), (part,) = (
                self._tensors(where, [(t,) for t in tensors], fit) for tensors in (whole, local)
            )
            rows.append((spec.name, full, part, spec.matmul, spec.tied_to))
        return rows


def _folded(where: str, tensors: Sequence[Tensor], tp: int) -> list[Tensor]:
    """One tensor for each rank, as one."""
    if len(tensors) != tp or len(set(tensors)) > 1:
        raise FitError(f"{where}: {len(tensors)} tensors at tp={tp}")
    return list(tensors[:1])
