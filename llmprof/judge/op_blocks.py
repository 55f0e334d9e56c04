"""One block of a published transformer, or K-FAC's matmuls for it, becomes operator calls, as forecasts make them."""

from __future__ import annotations

from functools import lru_cache

from llmprof.errors import WorkloadError
from llmprof.extrapolate.baselines import tensors_at
from llmprof.extrapolate.implementation import apply_implementation
from llmprof.judge.cells import Reject
from llmprof.judge.op_calls import OpCall, Product, product
from llmprof.judge.op_shapes import Block
from llmprof.schema.model import ModelShape
from llmprof.schema.reference import reference_workload
from llmprof.schema.workload import LayerTrace

_ANY_VOCABULARY = 1024
"""A block does not depend on it."""


def block_calls(block: Block, *, heads: int, dtype: str, phases: tuple[str, ...]) -> list[OpCall]:
    """Operators of one block in eager torch, with attention scores written out, over the full square.

    Args:
        phases: of `OpSpec.phase`.

    Raises:
        Reject: sizes that contradict each other.
    """
    try:
        trace = _trace(block.hidden, block.ffn, heads, block.seq, dtype)
    except WorkloadError as error:
        raise Reject(f"sizes contradict each other: {error.message.partition(': ')[2]}") from error
    return [
        OpCall(
            op.op,
            tensors_at(op.inputs, block.batch, block.seq),
            tensors_at(op.outputs, block.batch, block.seq),
            frozenset(op.attributes),
        )
        for op in trace.ops
        if op.phase in phases
        for _ in range(op.count)
    ]


def curvature_calls(block: Block, *, dtype: str) -> list[OpCall]:
    """The Kronecker factors of a block's linear layers: inputs x inputs and gradients x gradients over all tokens."""
    tokens = block.batch * block.seq
    return [product(Product(n, n, tokens), dtype) for layer in _linears(block) for n in layer]


def precondition_calls(block: Block, *, dtype: str) -> list[OpCall]:
    """The gradient of each linear layer between the inverses of its two Kronecker factors."""
    return [
        product(Product(out, columns, k), dtype) for columns, out in _linears(block) for k in (out, columns)
    ]


def _linears(block: Block) -> list[tuple[int, int]]:
    """Inputs and outputs of query, key, value, attention output, and the two layers of the MLP."""
    h, ffn = block.hidden, block.ffn
    return [*[(h, h)] * 4, (h, ffn), (ffn, h)]


@lru_cache(maxsize=64)
def _trace(hidden: int, ffn: int, heads: int, seq: int, dtype: str) -> LayerTrace:
    shape = ModelShape(
        name="block", layers=1, hidden=hidden, ffn=ffn, heads=heads, kv_heads=heads, vocab=_ANY_VOCABULARY, seq=seq,
        gated=False, norm="layernorm", positions="learned", bias=True, tied=True, causal=False,
    )  # fmt: skip
    workload = reference_workload(shape.check(), precision=dtype)
    eager = apply_implementation(workload, "eager", attention="math")
    return eager.classes[0].layers["block0"]
