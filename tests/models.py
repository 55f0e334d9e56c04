"""Small models for tests: a Llama-like decoder, a GPT-2-like one with fused projections, a conv net, a classifier."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional


class RMSNorm(nn.Module):
    """Root-mean-square normalisation, spelled out."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden))

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5) * self.weight


def rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary position embedding of (b, s, h, d)."""
    even, odd = x[..., ::2], x[..., 1::2]
    c, s = cos[None, :, None, :], sin[None, :, None, :]
    return torch.stack([even * c - odd * s, even * s + odd * c], -1).flatten(-2)


class Attention(nn.Module):
    """Grouped-query attention that holds its head counts as integers."""

    def __init__(self, hidden: int, heads: int, kv_heads: int) -> None:
        super().__init__()
        self.n_heads, self.n_kv_heads, self.head_dim = heads, kv_heads, hidden // heads
        self.wq = nn.Linear(hidden, heads * self.head_dim, bias=False)
        self.wk = nn.Linear(hidden, kv_heads * self.head_dim, bias=False)
        self.wv = nn.Linear(hidden, kv_heads * self.head_dim, bias=False)
        self.wo = nn.Linear(heads * self.head_dim, hidden, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        b, t, _ = x.shape
        q = rope(self.wq(x).view(b, t, self.n_heads, self.head_dim), cos, sin)
        k = rope(self.wk(x).view(b, t, self.n_kv_heads, self.head_dim), cos, sin)
        v = self.wv(x).view(b, t, self.n_kv_heads, self.head_dim)
        repeat = self.n_heads // self.n_kv_heads
        k, v = k.repeat_interleave(repeat, 2), v.repeat_interleave(repeat, 2)
        out = functional.scaled_dot_product_attention(
            q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=True
        )
        mixed: Tensor = self.wo(out.transpose(1, 2).reshape(b, t, -1))
        return mixed


class FeedForward(nn.Module):
    """SwiGLU."""

    def __init__(self, hidden: int, ffn: int) -> None:
        super().__init__()
        self.gate = nn.Linear(hidden, ffn, bias=False)
        self.up = nn.Linear(hidden, ffn, bias=False)
        self.down = nn.Linear(ffn, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(functional.silu(self.gate(x)) * self.up(x))
        return out


class Block(nn.Module):
    """Pre-norm decoder block."""

    def __init__(self, hidden: int, heads: int, kv_heads: int, ffn: int) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(hidden)
        self.attention = Attention(hidden, heads, kv_heads)
        self.ffn_norm = RMSNorm(hidden)
        self.feed_forward = FeedForward(hidden, ffn)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x), cos, sin)
        return x + self.feed_forward(self.ffn_norm(x))


class TinyLlama(nn.Module):
    """A decoder with everything that matters and nothing more."""

    cos: Tensor
    sin: Tensor

    def __init__(
        self,
        *,
        layers: int = 4,
        hidden: int = 64,
        heads: int = 8,
        kv_heads: int = 4,
        ffn: int = 176,
        vocab: int = 256,
        max_seq: int = 64,
        tied: bool = False,
    ) -> None:
        super().__init__()
        self.tok = nn.Embedding(vocab, hidden)
        self.layers = nn.ModuleList(Block(hidden, heads, kv_heads, ffn) for _ in range(layers))
        self.norm = RMSNorm(hidden)
        self.out = nn.Linear(hidden, vocab, bias=False)
        if tied:
            self.out.weight = self.tok.weight
        inverse = 1.0 / (10000 ** (torch.arange(0, hidden // heads, 2).float() / (hidden // heads)))
        angles = torch.outer(torch.arange(max_seq).float(), inverse)
        self.register_buffer("cos", torch.cos(angles), persistent=False)
        self.register_buffer("sin", torch.sin(angles), persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        seq = tokens.shape[1]
        x = self.tok(tokens)
        for layer in self.layers:
            x = layer(x, self.cos[:seq], self.sin[:seq])
        logits: Tensor = self.out(self.norm(x))
        return logits


def cross_entropy(logits: Tensor, target: Tensor) -> Tensor:
    """Mean token loss of (b, s, v) logits."""
    return functional.cross_entropy(logits.flatten(0, 1).float(), target.flatten())


class FusedBlock(nn.Module):
    """GPT-2-like block: one projection for query, key and value, cut with `split`; biases everywhere."""

    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.hidden, self.heads = hidden, heads
        self.ln_1, self.ln_2 = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.qkv, self.proj = nn.Linear(hidden, 3 * hidden), nn.Linear(hidden, hidden)
        self.mlp = nn.Sequential(nn.Linear(hidden, 4 * hidden), nn.GELU(), nn.Linear(4 * hidden, hidden))

    def forward(self, x: Tensor) -> Tensor:
        b, t, c = x.shape
        parts = self.qkv(self.ln_1(x)).split(self.hidden, dim=2)
        q, k, v = (p.view(b, t, self.heads, c // self.heads).transpose(1, 2) for p in parts)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(mixed.transpose(1, 2).reshape(b, t, c))
        out: Tensor = x + self.mlp(self.ln_2(x))
        return out


class TinyGPT2(nn.Module):
    """Learned positions, LayerNorm, tied embedding; returns the loss when it is given targets."""

    def __init__(self, *, layers: int = 3, hidden: int = 64, heads: int = 4, vocab: int = 320) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(vocab, hidden), nn.Embedding(64, hidden)
        self.h = nn.ModuleList(FusedBlock(hidden, heads) for _ in range(layers))
        self.ln_f = nn.LayerNorm(hidden)
        self.head = nn.Linear(hidden, vocab, bias=False)
        self.head.weight = self.wte.weight

    def forward(self, tokens: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.wte(tokens) + self.wpe(positions)
        for block in self.h:
            x = block(x)
        logits = self.head(self.ln_f(x))
        return logits, cross_entropy(logits, targets)


def conv_net() -> nn.Module:
    """Two convolutions and a classifier over 3 x 16 x 16 images."""
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(8, 8, 3, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(2048, 10),
    )


def classifier() -> nn.Module:
    """A perceptron over 32 features."""
    return nn.Sequential(
        nn.Linear(32, 64),
        nn.ReLU(),
        nn.Linear(64, 64),
        nn.ReLU(),
        nn.Linear(64, 64),
        nn.ReLU(),
        nn.Linear(64, 8),
    )
