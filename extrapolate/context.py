"""Attention of one rank's tokens under context parallelism: as a ring of key and value blocks, or with heads exchanged.

Everything but attention acts on each token by itself and is simply divided. In a ring each rank keeps its queries and
hands the block of keys and values on, while it works on the one it has; behind a causal mask the sequence is cut in
2 cp pieces of which rank i holds the i-th and the i-th from the end, so that all ranks do the same work in each round.
The other way (Ulysses) gives each rank all tokens of some heads and back, by all-to-alls that nothing hides.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

from llmprof.errors import LayoutError
from llmprof.extrapolate.work import Op
from llmprof.schema.layout import Layout
from llmprof.schema.operators import MATMUL_FAMILIES, Tensor, family, size_bytes, split_name
from llmprof.schema.workload import OpSpec, Poly, TensorSpec

_HEADS_SECOND = ("_flash_attention", "_efficient_attention", "_flash_attn")
"""Kernels whose tensors are (batch, tokens, heads, width); those of others are (batch, heads, tokens, width)."""
_BOTH = 2
"""Blocks in a message of the backward: keys and values, and the gradients of the block before."""


def local_sequence(layout: Layout, seq: int) -> int:
    """Tokens of a sequence (of `seq` tokens) that one rank holds.

    Raises:
        LayoutError: they do not divide.
    """
    if seq % layout.cp:
        raise LayoutError(
            f"cp={layout.cp} does not divide the {seq} tokens of a sequence ({seq} / {layout.cp} = {seq / layout.cp:.2f})",
            hint="choose a divisor of the sequence length",
        )
    return seq // layout.cp


def is_divided(op: OpSpec) -> bool:
    """Whether an operator is attention over the tokens of the sequence, which context parallelism divides.

    Raises:
        LayoutError: it mixes tokens in another way, of which no division is known.
    """
    kind = family(op.op)
    grows = [sum(_by_sequence(d) for d in t.dims) for t in (*op.inputs, *op.outputs)]
    if kind == "attention":
        key = op.inputs[1 if op.phase == "forward" else 2 : 3]
        return bool(key) and any(_by_sequence(d) for d in key[0].dims)
    mixes = kind == "convolution" and any(grows)
    if mixes or (kind in MATMUL_FAMILIES and any(_is_square(t) for t in (*op.inputs, *op.outputs))):
        what = "a convolution over" if mixes else "attention without a fused kernel over"
        raise LayoutError(
            f"cp > 1: {op.module or op.op} has {what} the sequence, whose division is not known",
            hint="use a model with fused attention (scaled_dot_product_attention), or cp=1",
        )
    return False


def _by_sequence(dim: int | Poly) -> bool:
    return isinstance(dim, Poly) and bool(dim.cs or dim.cbs or dim.css or dim.cbss)


def _is_square(tensor: TensorSpec) -> bool:
    """Whether a tensor has an element for each pair of tokens."""
    pairs = any(isinstance(d, Poly) and (d.css or d.cbss) for d in tensor.dims)
    return pairs or sum(map(_by_sequence, tensor.dims)) > 1


def divide_attention(op: Op, layout: Layout) -> Iterator[Op]:
    """What takes the place of attention: rounds of a ring with their messages, or all-to-alls around it.

    Args:
        op: the kernel, with the tokens that one rank holds as queries and as keys.

    Raises:
        LayoutError: tokens or heads that do not divide, or a mask that is a tensor.
    """
    kernel = _Kernel.of(op)
    if layout.cp_kind == "ring":
        return _ring(op, kernel, layout.cp)
    return _exchanged(op, kernel, layout)


class _Kernel(NamedTuple):
    """Where a kernel has what.

    Attributes:
        heads, tokens: axes of the four-dimensional tensors.
        first: index of the queries among the inputs; keys and values follow.
        made: indices of results that are as large as queries, keys and values in this order.
    """

    heads: int
    tokens: int
    first: int
    made: tuple[int, ...]

    @classmethod
    def of(cls, op: Op) -> _Kernel:
        second = split_name(op.op)[1].startswith(_HEADS_SECOND)
        forward = op.phase == "forward"
        heads, tokens = (2, 1) if second else (1, 2)
        found = cls(heads, tokens, 0 if forward else 1, (0,) if forward else (0, 1, 2))
        needed = op.inputs[: found.first + 3]
        if len(needed) < found.first + 3 or any(len(t.shape) != 4 for t in needed):
            raise LayoutError(
                f"cp > 1: {op.op} of {op.module or 'the model'} does not show its queries, keys and values",
                hint="use cp=1 for this model",
            )
        if forward and any(len(t.shape) > 1 for t in op.inputs[3:]):
            raise LayoutError(
                f"cp > 1: {op.op} of {op.module or 'the model'} has a mask that is a tensor",
                hint="use a causal mask by attribute (is_causal=True), or cp=1",
            )
        return found

    def keys(self, op: Op) -> tuple[Tensor, ...]:
        return op.inputs[self.first + 1 : self.first + 3]


def _scaled(tensor: Tensor, axis: int, numerator: int, denominator: int = 1) -> Tensor:
    shape = list(tensor.shape)
    shape[axis] = shape[axis] * numerator // denominator
    return tensor._replace(shape=tuple(shape))


def _ring(op: Op, kernel: _Kernel, cp: int) -> Iterator[Op]:
    """cp rounds; each but one sends keys and values on, of the backward also the sum of their gradients so far.

    Forward: one's own tokens first. Backward: one's own last, so that the gradients come home with the last message.
    """
    causal = "causal" in op.attributes
    if causal and kernel.keys(op)[0].shape[kernel.tokens] % 2:
        tokens = kernel.keys(op)[0].shape[kernel.tokens] * cp
        raise LayoutError(
            f"cp={cp} cuts a causal sequence in {2 * cp} pieces, but {tokens} tokens are not a multiple of it",
            hint=f"choose a sequence length that is a multiple of {2 * cp}, or cp={cp}:ulysses",
        )
    half = _half(op, kernel) if causal else op
    if op.phase == "forward":
        rounds = [(op, 1, 1), (half, cp - 2, 1), (half, 1, 0)]
    else:
        rounds = [(half, 1, 1), (half, cp - 2, _BOTH), (op, 1, 1)]
    block = kernel.keys(op)
    for index, (work, times, blocks) in enumerate(rounds, start=1):
        number, count = index if blocks else 0, times * op.count
        if not times:
            continue
        yield replace(work, count=count, round=number)
        if op.phase == "forward" or index > 1:
            yield from (replace(s, count=count, round=number) for s in _sums(work, kernel))
        if blocks:
            yield _message(op, "send", block * blocks, count=count, round=number)


def _half(op: Op, kernel: _Kernel) -> Op:
    """All queries of a rank on the half of a block that lies before them: as much work as a causal block."""
    places = (kernel.first + 1, kernel.first + 2)
    inputs = tuple(_scaled(t, kernel.tokens, 1, 2) if i in places else t for i, t in enumerate(op.inputs))
    outputs = tuple(
        _scaled(t, kernel.tokens, 1, 2) if i in kernel.made[1:] else t for i, t in enumerate(op.outputs)
    )
    return replace(op, inputs=inputs, outputs=outputs, attributes=op.attributes - {"causal"})


def _sums(op: Op, kernel: _Kernel) -> Iterator[Op]:
    """What a round gave, added to what the rounds before gave."""
    made = [op.outputs[i] for i in kernel.made if i < len(op.outputs)]
    if op.phase == "forward":
        statistics = tuple(t for t in op.outputs[1:2] if t.shape)
        yield _elementwise(op, "fused::attention_correction", (*made, *made, *statistics), tuple(made))
        return
    for tensor in made:
        yield _elementwise(op, "aten::add_", (tensor, tensor), (tensor,))


def _exchanged(op: Op, kernel: _Kernel, layout: Layout) -> Iterator[Op]:
    """All tokens of a part of the heads: what is read is exchanged before, what is written after."""
    cp, heads = layout.cp, op.inputs[kernel.first].shape[kernel.heads]
    groups = kernel.keys(op)[0].shape[kernel.heads]
    if heads % cp or (groups % cp and cp % groups):
        raise LayoutError(
            f"cp={cp}:ulysses divides heads, but a rank has {heads} of queries and {groups} of keys and values",
            hint=f"choose a divisor of {groups}, or cp={cp}:ring",
        )

    def sent(tensor: Tensor) -> Tensor:
        """Fewer heads than ranks are repeated."""
        return _scaled(tensor, kernel.heads, max(tensor.shape[kernel.heads], cp), tensor.shape[kernel.heads])

    def whole(tensor: Tensor) -> Tensor:
        return _scaled(_scaled(sent(tensor), kernel.heads, 1, cp), kernel.tokens, cp)

    four = [len(t.shape) == 4 for t in op.inputs]
    read = op.inputs[:3] if op.phase == "forward" else op.inputs[:1]
    for tensor in read:
        yield from _all_to_all(op, sent(tensor))
    yield replace(
        op,
        inputs=tuple(whole(t) if long else t for t, long in zip(op.inputs, four, strict=True)),
        outputs=tuple(whole(t) if i in kernel.made else t for i, t in enumerate(op.outputs)),
    )
    for index in kernel.made:
        if index < len(op.outputs):
            yield from _all_to_all(op, sent(op.outputs[index]))


def _all_to_all(op: Op, tensor: Tensor) -> Iterator[Op]:
    """Parts for each rank are packed, exchanged and put in place."""
    yield replace(_elementwise(op, "aten::clone", (tensor,), (tensor,)), count=2 * op.count)
    yield _message(op, "all_to_all", (tensor,), count=op.count)


def _elementwise(op: Op, name: str, inputs: tuple[Tensor, ...], outputs: tuple[Tensor, ...]) -> Op:
    return replace(
        op, op=name, inputs=inputs, outputs=outputs, count=1, attributes=frozenset(), family=family(name)
    )


def _message(op: Op, kind: str, tensors: tuple[Tensor, ...], *, count: int, round: int = 0) -> Op:
    return replace(
        op,
        op=f"c10d::{kind}",
        inputs=tensors,
        outputs=tensors,
        count=count,
        attributes=frozenset(),
        collective=kind,
        axis="cp",
        family="collective",
        round=round,
    )


def held_messages_bytes(ops: Sequence[Op]) -> int:
    """Buffers beside the tensors of the operators: the largest message of a ring, on its way out and on its way in."""
    return 2 * max(
        (sum(size_bytes(t) for t in op.inputs) for op in ops if op.round and op.collective), default=0
    )
