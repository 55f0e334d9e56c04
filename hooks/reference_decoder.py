"""The reference decoder: a ModelShape becomes a module on one tensor-parallel rank, in plain eager PyTorch.

It is only ever traced on fake tensors (see `llmprof.hooks.reference_trace`). Names of its modules are the names that
operators of a reference workload carry.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from llmprof.hooks.reference_parallel import Rank, column_input, lookup, row_output, vocabulary_loss
from llmprof.schema.model import ModelShape


@dataclass(frozen=True, kw_only=True)
class LocalSizes:
    """Sizes of one rank's share.

    Attributes:
        heads, kv_heads: attention heads here; a key-and-value head is on several ranks where there are fewer than ranks.
        ffn, expert_ffn, shared_ffn: columns here.
        vocab: rows of the embedding here, rounded up as torch does.
    """

    heads: int
    kv_heads: int
    ffn: int
    expert_ffn: int
    shared_ffn: int
    vocab: int

    @classmethod
    def of(cls, shape: ModelShape, tp: int) -> LocalSizes:
        """The share of the first rank of `tp`; sizes that do not divide are the caller's business."""
        return cls(
            heads=shape.heads // tp,
            kv_heads=max(1, shape.kv_heads // tp),
            ffn=shape.ffn // tp,
            expert_ffn=(shape.expert_ffn or shape.ffn) // tp,
            shared_ffn=shape.shared_ffn // tp,
            vocab=-(-shape.vocab // tp),
        )


Tables = tuple[Tensor, Tensor]
"""Cosines and sines of a rotary embedding, each (s, d)."""


class RMSNorm(nn.Module):
    """Root-mean-square normalisation with statistics in float32, as Llama's published code writes it."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(hidden))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)
        return self.weight * wide.to(x.dtype)


def norm_of(shape: ModelShape) -> nn.Module:
    """The model's kind of norm over its residual stream."""
    return RMSNorm(shape.hidden) if shape.norm == "rmsnorm" else nn.LayerNorm(shape.hidden)


class RowLinear(nn.Linear):
    """A projection whose input features are sharded: partial sums are reduced, the bias is added once."""

    def __init__(self, inside: int, outside: int, *, bias: bool, rank: Rank) -> None:
        super().__init__(inside, outside, bias=bias)
        self.rank = rank

    def forward(self, input: Tensor) -> Tensor:
        if self.rank.tp == 1:
            return super().forward(input)
        out = row_output(functional.linear(input, self.weight), self.rank)
        return out if self.bias is None else out + self.bias


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of (b, heads, s, d) by tables of (s, d), halves rotated against each other."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


class Attention(nn.Module):
    """Grouped-query attention through the flash kernel."""

    def __init__(self, shape: ModelShape, rank: Rank) -> None:
        super().__init__()
        local, self.rank, self.causal = LocalSizes.of(shape, rank.tp), rank, shape.causal
        self.width = shape.head_width
        query, key_value = local.heads * self.width, local.kv_heads * self.width
        self.query = nn.Linear(shape.hidden, query, bias=shape.bias)
        self.key = nn.Linear(shape.hidden, key_value, bias=shape.bias)
        self.value = nn.Linear(shape.hidden, key_value, bias=shape.bias)
        self.output = RowLinear(query, shape.hidden, bias=shape.bias, rank=rank)

    def forward(self, x: Tensor, tables: Tables | None) -> Tensor:
        x = column_input(x, self.rank)
        q, k, v = (
            project(x).unflatten(-1, (-1, self.width)).transpose(1, 2)
            for project in (self.query, self.key, self.value)
        )
        if tables is not None:
            q, k = rotate(q, *tables), rotate(k, *tables)
        # what `scaled_dot_product_attention` runs on an accelerator; on fake CPU tensors it would choose another kernel
        mixed = torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, self.causal)[0]
        out: Tensor = self.output(mixed.transpose(1, 2).flatten(2))
        return out


class FeedForward(nn.Module):
    """SwiGLU, or GELU between two projections; as a shared expert (`inner`) it leaves the reduction to its parent."""

    def __init__(self, shape: ModelShape, width: int, rank: Rank, *, inner: bool = False) -> None:
        super().__init__()
        self.rank = Rank() if inner else rank
        self.gate = nn.Linear(shape.hidden, width, bias=shape.bias) if shape.gated else None
        self.up = nn.Linear(shape.hidden, width, bias=shape.bias)
        self.down = RowLinear(width, shape.hidden, bias=shape.bias, rank=self.rank)

    def forward(self, x: Tensor) -> Tensor:
        x = column_input(x, self.rank)
        if self.gate is None:
            wide = functional.gelu(self.up(x))
        else:
            wide = functional.silu(self.gate(x)) * self.up(x)
        out: Tensor = self.down(wide)
        return out


class Experts(nn.Module):
    """Routed experts as grouped matmuls over tokens sorted by expert."""

    def __init__(self, shape: ModelShape, width: int) -> None:
        super().__init__()
        e, h = shape.experts, shape.hidden
        self.gate = nn.Parameter(torch.empty(e, h, width)) if shape.gated else None
        self.up = nn.Parameter(torch.empty(e, h, width))
        self.down = nn.Parameter(torch.empty(e, width, h))
        self.gate_bias = nn.Parameter(torch.empty(e, width)) if shape.gated and shape.bias else None
        self.up_bias = nn.Parameter(torch.empty(e, width)) if shape.bias else None
        self.down_bias = nn.Parameter(torch.empty(e, h)) if shape.bias else None

    def forward(self, x: Tensor, ends: Tensor, experts: Tensor) -> Tensor:
        """Rows (t, h) sorted by expert, the last row of each expert (e,), the expert of each row (t,)."""

        def project(rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
            out: Tensor = torch._grouped_mm(rows, weight, offs=ends)
            return out if bias is None else out + bias.index_select(0, experts)

        wide = project(x, self.up, self.up_bias)
        if self.gate is None:
            wide = functional.gelu(wide)
        else:
            wide = functional.silu(project(x, self.gate, self.gate_bias)) * wide
        return project(wide, self.down, self.down_bias)


class MixtureOfExperts(nn.Module):
    """Router, top-k, permutation by index, grouped experts, weighting and summing back; a shared expert beside them."""

    def __init__(self, shape: ModelShape, rank: Rank) -> None:
        super().__init__()
        local, self.rank = LocalSizes.of(shape, rank.tp), rank
        self.topk, self.num_experts = shape.topk, shape.experts
        self.router = nn.Linear(shape.hidden, shape.experts, bias=False)
        self.experts = Experts(shape, local.expert_ffn)
        self.shared = FeedForward(shape, local.shared_ffn, rank, inner=True) if shape.shared_ffn else None

    def forward(self, x: Tensor) -> Tensor:
        x = column_input(x, self.rank)
        tokens = x.flatten(0, 1)
        scores = functional.softmax(self.router(tokens), dim=-1, dtype=torch.float32)
        weights, chosen = scores.topk(self.topk, dim=-1)
        weights = (weights / weights.sum(-1, keepdim=True)).to(x.dtype)
        experts, order = chosen.flatten().sort()
        counts = torch.histc(experts.float(), bins=self.num_experts, min=0, max=self.num_experts)
        rows = order // self.topk
        mixed = self.experts(tokens.index_select(0, rows), counts.cumsum(0).int(), experts)
        mixed = mixed * weights.flatten().index_select(0, order).unsqueeze(-1)
        out = torch.zeros_like(tokens).index_add(0, rows, mixed)
        if self.shared is not None:
            out = out + self.shared(tokens)
        return row_output(out.view_as(x), self.rank)


class Block(nn.Module):
    """Pre-norm decoder block, dense or with experts."""

    def __init__(self, shape: ModelShape, rank: Rank, *, sparse: bool) -> None:
        super().__init__()
        self.attention_norm = norm_of(shape)
        self.attention = Attention(shape, rank)
        self.feed_forward_norm = norm_of(shape)
        width = LocalSizes.of(shape, rank.tp).ffn
        self.feed_forward = MixtureOfExperts(shape, rank) if sparse else FeedForward(shape, width, rank)

    def forward(self, x: Tensor, tables: Tables | None) -> Tensor:
        x = x + self.attention(self.attention_norm(x), tables)
        out: Tensor = x + self.feed_forward(self.feed_forward_norm(x))
        return out


class Embedding(nn.Embedding):
    """A lookup table whose rows are sharded over the tensor-parallel ranks."""

    def __init__(self, rows: int, hidden: int, rank: Rank) -> None:
        super().__init__(rows, hidden)
        self.rank = rank

    def forward(self, input: Tensor) -> Tensor:
        return lookup(input, self.weight, self.rank)


class Positions(nn.Embedding):
    """A learned position table, whole on every rank; under sequence parallelism a rank looks up its own positions."""

    def forward(self, input: Tensor) -> Tensor:
        return functional.embedding(torch.arange(input.shape[1], device=input.device), self.weight)


class Decoder(nn.Module):
    """Embedding, blocks, norm and head; returns logits over this rank's share of the vocabulary.

    Args:
        shape: of the whole model; `layers` blocks are built.
        rank: the tensor-parallel rank that is played.
    """

    cos: Tensor
    sin: Tensor

    def __init__(self, shape: ModelShape, rank: Rank) -> None:
        super().__init__()
        rows = LocalSizes.of(shape, rank.tp).vocab
        self.rank, self.rope = rank, shape.positions == "rope"
        self.embedding = Embedding(rows, shape.hidden, rank)
        self.positions = Positions(shape.seq, shape.hidden) if shape.positions == "learned" else None
        dense = shape.dense_layers if shape.experts else shape.layers
        self.layers = nn.ModuleList(Block(shape, rank, sparse=i >= dense) for i in range(shape.layers))
        self.norm = norm_of(shape)
        self.head = nn.Linear(shape.hidden, rows, bias=False)
        if shape.tied:
            self.head.weight = self.embedding.weight
        self.register_buffer("cos", torch.empty(shape.seq, shape.head_width), persistent=False)
        self.register_buffer("sin", torch.empty(shape.seq, shape.head_width), persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        if self.positions is not None:
            x = x + self.positions(x)
        seq = tokens.shape[1]
        tables = (self.cos[:seq], self.sin[:seq]) if self.rope else None
        for layer in self.layers:
            x = layer(x, tables)
        logits: Tensor = self.head(column_input(self.norm(x), self.rank))
        return logits


def loss_of(rank: Rank) -> Callable[[Tensor, Tensor], Tensor]:
    """Mean cross-entropy in float32 of logits (b, s, v) against tokens (b, s); over sharded logits when there are ranks."""

    def whole(logits: Tensor, target: Tensor) -> Tensor:
        return functional.cross_entropy(logits.flatten(0, 1).float(), target.flatten())

    def sharded(logits: Tensor, target: Tensor) -> Tensor:
        return vocabulary_loss(logits.flatten(0, 1).float(), target.flatten(), rank).mean()

    return whole if rank.tp == 1 else sharded
