"""Layers with a mixture of experts under expert parallelism: each rank holds a part of the experts, tokens go to them.

Experts are known by their weights: parameters with one matrix for each expert that a grouped matmul reads, or a batched
one where each expert takes a fixed number of tokens (its capacity). Whatever a rank routes is exchanged before the first
of these matmuls and back after the last, and so are the gradients; what a rank computes stays the same on average.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from itertools import groupby
from typing import NamedTuple

from llmprof.errors import LayoutError
from llmprof.extrapolate.work import LayerWork, Op, Parameter, Shape
from llmprof.schema.layout import Layout
from llmprof.schema.operators import Tensor, family, split_name
from llmprof.schema.workload import LayerSpec, LayerTrace

IMBALANCE = 0.05
"""Tokens that the fullest rank gets beyond the mean, as a share of it: assumed, for routers trained to balance."""
IMBALANCE_SPREAD = 0.9
"""Spread of that share: a well balanced router or a forced balance has a third of it, an unbalanced one three times."""


def find_experts(
    parameters: Iterable[tuple[str, Shape]], operands: Collection[tuple[object, ...]]
) -> frozenset[str]:
    """Names of the parameters that hold one part for each expert.

    Args:
        parameters: name and shape of each parameter of a layer.
        operands: shapes of what grouped and batched matmuls of the layer read.
    """
    named = list(parameters)
    modules = {
        (name.rpartition(".")[0], shape[0])
        for name, shape in named
        if len(shape) == 3 and (shape in operands or (shape[0], shape[2], shape[1]) in operands)
    }
    return frozenset(
        name for name, shape in named if shape and (name.rpartition(".")[0], shape[0]) in modules
    )


def experts_of(spec: LayerSpec, trace: LayerTrace | None) -> frozenset[str]:
    """Names of a layer's parameters that hold one part for each expert, from its unsharded trace."""
    multiplied = (op for op in (trace.ops if trace else ()) if family(op.op) == "batched_matmul")
    operands = {t.dims for op in multiplied for t in op.inputs}
    return find_experts(((p.name, p.shape) for p in spec.parameters), operands)


def check_experts(layers: Iterable[LayerWork], layout: Layout) -> None:
    """Refuse to divide experts where there are none.

    Raises:
        LayoutError: no layer has any.
    """
    if layout.ep > 1 and not any(p.expert for layer in layers for p in layer.parameters):
        raise LayoutError(
            f"ep={layout.ep} divides experts, but no layer has weights of experts that a grouped matmul reads",
            hint="leave ep out",
        )


def divide_experts(
    ops: Sequence[Op], parameters: Sequence[Parameter], layout: Layout
) -> tuple[list[Op], tuple[Parameter, ...]]:
    """Operators and parameters of one rank, with the exchange of tokens; unchanged in a layer without experts.

    Raises:
        LayoutError: the degree does not divide the experts.
    """
    operands = {t.shape for op in ops if _multiplies(op) for t in op.inputs}
    names = find_experts(((p.name, p.shape) for p in parameters), operands)
    if not names:
        return list(ops), tuple(parameters)
    shapes = _Shapes.of(parameters, names)
    if shapes.number % layout.ep:
        raise LayoutError(
            f"ep={layout.ep} does not divide the {shapes.number} experts ({shapes.number} / {layout.ep} = "
            f"{shapes.number / layout.ep:.2f})",
            hint=f"choose a divisor of {shapes.number}",
        )
    local = [_divide(op, shapes, layout.ep) for op in ops]
    own = tuple(
        replace(p, shape=_first_divided(p.shape, layout.ep), expert=True) if p.name in names else p
        for p in parameters
    )
    return _with_exchange(local, layout, count=shapes.number), own


class _Shapes(NamedTuple):
    """Shapes by which tensors of experts are known.

    Attributes:
        number: of experts in the layer.
        modules: that hold their parameters.
        weights: of parameters of experts, also transposed; shapes that other parameters have too are left out.
    """

    number: int
    modules: frozenset[str]
    weights: frozenset[Shape]

    @classmethod
    def of(cls, parameters: Sequence[Parameter], names: frozenset[str]) -> _Shapes:
        own = {p.shape for p in parameters if p.name in names}
        own |= {(s[0], s[2], s[1]) for s in own if len(s) == 3}
        count = next(p.shape[0] for p in parameters if p.name in names)
        modules = frozenset(name.rpartition(".")[0] for name in names)
        return cls(count, modules, frozenset(own - {p.shape for p in parameters if p.name not in names}))

    def holds(self, tensor: Tensor, op: Op) -> bool:
        """Whether a tensor has a part for each expert; a vector for each is told from others by where it is used."""
        near = len(tensor.shape) == 3 or op.phase == "optimizer" or op.module in self.modules
        return near and tensor.shape in self.weights


def _multiplies(op: Op) -> bool:
    return family(op.op) == "batched_matmul"


def _first_divided(shape: Shape, ep: int) -> Shape:
    return (shape[0] // ep, *shape[1:])


def _divide(op: Op, shapes: _Shapes, ep: int) -> Op:
    """An operator with this rank's experts; grouped matmuls keep their number of tokens, capacities add up."""
    tensors = (*op.inputs, *op.outputs)
    routed = _multiplies(op) and any(shapes.holds(t, op) for t in tensors)
    grouped = "grouped_mm" in split_name(op.op)[1]

    def one(tensor: Tensor) -> Tensor:
        if shapes.holds(tensor, op) or (routed and grouped and tensor.shape == (shapes.number,)):
            return tensor._replace(shape=_first_divided(tensor.shape, ep))
        if routed and not grouped and len(tensor.shape) == 3:
            return tensor._replace(shape=_gathered(tensor.shape, op, shapes, ep))
        return tensor

    return replace(op, inputs=tuple(map(one, op.inputs)), outputs=tuple(map(one, op.outputs)), routed=routed)


def _gathered(shape: Shape, op: Op, shapes: _Shapes, ep: int) -> Shape:
    """(experts, capacity, width), or transposed for the gradient of a weight: fewer experts, tokens of all ranks."""
    transposed = op.outputs[0].shape in shapes.weights and shape == op.inputs[0].shape
    axis = 2 if transposed else 1
    sizes = list(_first_divided(shape, ep))
    sizes[axis] *= ep
    return tuple(sizes)


def _with_exchange(ops: Sequence[Op], layout: Layout, *, count: int) -> list[Op]:
    """Each row of experts' operators between its exchanges, forward and backward."""
    routed = [op for op in ops if op.routed and op.phase == "forward"]
    before: dict[int, list[Op]] = {}
    after: dict[int, list[Op]] = {}
    for _, same in groupby(routed, key=lambda op: op.module):
        row = list(same)
        there, back = _rows(row[0], row[0].inputs[0]), _rows(row[-1], row[-1].outputs[0])
        sort = count > layout.ep
        before[id(row[0])] = [
            _counts(row[0], count, layout.ep),
            *_exchange(row[0], there, "forward", sort=sort),
        ]
        after[id(row[-1])] = [
            *_exchange(row[-1], back, "forward", sort=sort),
            *_exchange(row[-1], back, "backward_input", sort=sort),
            *_exchange(row[0], there, "backward_input", sort=sort),
        ]
    return [new for op in ops for new in (*before.get(id(op), ()), op, *after.get(id(op), ()))]


def _rows(op: Op, tensor: Tensor) -> Tensor:
    """Tokens as they travel: in the dtype of activations, also where the matmul reads a narrower one."""
    return tensor._replace(dtype=op.outputs[0].dtype)


def _exchange(op: Op, rows: Tensor, phase: str, *, sort: bool) -> list[Op]:
    """An all-to-all of routed tokens, and putting them in order where a rank holds several experts."""
    index = Tensor(rows.shape[:-1], "int64")
    order = _other(op, "aten::index_select", phase, (rows, index), (rows,), family="embedding")
    message = _other(
        op, "c10d::alltoall_base", phase, (rows,), (rows,), family="collective", collective="all_to_all"
    )
    return [message, order] if sort else [message]


def _counts(op: Op, count: int, ep: int) -> Op:
    """How many tokens each expert gets from each rank."""
    return _other(
        op,
        "c10d::_allgather_base",
        "forward",
        (Tensor((count,), "int64"),),
        (Tensor((ep, count), "int64"),),
        family="collective",
        collective="all_gather",
    )


def _other(
    op: Op,
    name: str,
    phase: str,
    inputs: tuple[Tensor, ...],
    outputs: tuple[Tensor, ...],
    *,
    family: str,
    collective: str = "",
) -> Op:
    return Op(
        op=name,
        phase=phase,
        module=op.module,
        inputs=inputs,
        outputs=outputs,
        count=1,
        attributes=frozenset(),
        collective=collective,
        axis="ep" if collective else "",
        family=family,
        routed=True,
    )
