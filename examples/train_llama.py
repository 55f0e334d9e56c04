"""Trains a small Llama-style decoder on the Python standard library's own sources, byte by byte.

    python examples/train_llama.py --steps 20
    torchrun --nproc-per-node 2 examples/train_llama.py --steps 20 --parallel ddp
    torchrun --nproc-per-node 2 examples/train_llama.py --steps 20 --parallel fsdp2

The decorator on `train` is the only line that llmprof needs.
"""

from __future__ import annotations

import argparse
import math
import os
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler

import llmprof

VOCAB = 256  # one token per byte


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Sizes of the decoder; `seq` is the longest sequence in tokens."""

    layers: int = 4
    hidden: int = 256
    heads: int = 8
    kv_heads: int = 4
    ffn: int = 704
    seq: int = 256
    vocab: int = VOCAB


class RMSNorm(nn.Module):
    """Scales each token to unit root mean square, then by a learned weight."""

    def __init__(self, hidden: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(hidden))

    def forward(self, x: Tensor) -> Tensor:
        scale = torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + self.eps)
        return (x.float() * scale).type_as(x) * self.weight


def rope_tables(seq: int, head_dim: int) -> tuple[Tensor, Tensor]:
    """Cosines and sines of the rotary position embedding, each (seq, head_dim / 2)."""
    frequencies = 10_000.0 ** (-torch.arange(0, head_dim, 2).float() / head_dim)
    angles = torch.outer(torch.arange(seq).float(), frequencies)
    return torch.cos(angles), torch.sin(angles)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotates pairs of channels of x (batch, seq, heads, head_dim) by the angle of their position."""
    even, odd = x[..., ::2], x[..., 1::2]
    cos, sin = cos[None, :, None, :].type_as(x), sin[None, :, None, :].type_as(x)
    return torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1).flatten(-2)


class Attention(nn.Module):
    """Causal self-attention in which several query heads share one key and value head."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.head_dim = config.hidden // config.heads
        kv_hidden = config.kv_heads * self.head_dim
        self.query = nn.Linear(config.hidden, config.hidden, bias=False)
        self.key = nn.Linear(config.hidden, kv_hidden, bias=False)
        self.value = nn.Linear(config.hidden, kv_hidden, bias=False)
        self.output = nn.Linear(config.hidden, config.hidden, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        batch, seq, _ = x.shape
        query = rotate(self.query(x).view(batch, seq, -1, self.head_dim), cos, sin)
        key = rotate(self.key(x).view(batch, seq, -1, self.head_dim), cos, sin)
        value = self.value(x).view(batch, seq, -1, self.head_dim)
        mixed = F.scaled_dot_product_attention(
            query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2), is_causal=True, enable_gqa=True
        )
        return self.output(mixed.transpose(1, 2).reshape(batch, seq, -1))


class FeedForward(nn.Module):
    """SwiGLU: a gated linear unit with the SiLU as its gate."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.gate = nn.Linear(config.hidden, config.ffn, bias=False)
        self.up = nn.Linear(config.hidden, config.ffn, bias=False)
        self.down = nn.Linear(config.ffn, config.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    """One decoder layer: attention, then feed-forward, each with a norm before and a residual around."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(config.hidden)
        self.attention = Attention(config)
        self.feed_forward_norm = RMSNorm(config.hidden)
        self.feed_forward = FeedForward(config)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x), cos, sin)
        return x + self.feed_forward(self.feed_forward_norm(x))


class Decoder(nn.Module):
    """The language model: tokens (batch, seq) to logits (batch, seq, vocab)."""

    cos: Tensor
    sin: Tensor

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.embedding = nn.Embedding(config.vocab, config.hidden)
        self.layers = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = RMSNorm(config.hidden)
        self.head = nn.Linear(config.hidden, config.vocab, bias=False)
        cos, sin = rope_tables(config.seq, config.hidden // config.heads)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)
        self.apply(init_weights)

    def forward(self, tokens: Tensor) -> Tensor:
        seq = tokens.shape[1]
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x, self.cos[:seq], self.sin[:seq])
        return self.head(self.norm(x))


def init_weights(module: nn.Module) -> None:
    """Draws the weights of linear and embedding layers from N(0, 0.02)."""
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=0.02)


class SourceBytes(Dataset[tuple[Tensor, Tensor]]):
    """Windows of the standard library's sources: (inputs, targets), targets shifted by one byte."""

    def __init__(self, seq: int, limit_bytes: int = 4_000_000) -> None:
        self.seq = seq
        text = bytearray()
        for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
            text += path.read_bytes()
            if len(text) >= limit_bytes:
                break
        self.tokens = torch.frombuffer(text, dtype=torch.uint8)[:limit_bytes]

    def __len__(self) -> int:
        return (len(self.tokens) - 1) // self.seq

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        window = self.tokens[index * self.seq : (index + 1) * self.seq + 1].long()
        return window[:-1], window[1:]


def batches(args: argparse.Namespace) -> Iterator[tuple[Tensor, Tensor]]:
    """Endless (inputs, targets) of this rank's share of the batch, in an order that the seed fixes."""
    data = SourceBytes(args.seq)
    rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    sampler: DistributedSampler[tuple[Tensor, Tensor]] = DistributedSampler(
        data, num_replicas=world, rank=rank, seed=args.seed
    )
    loader = DataLoader(data, batch_size=args.batch // world, sampler=sampler, drop_last=True)
    epoch = 0
    while True:
        sampler.set_epoch(epoch)
        yield from loader
        epoch += 1


def parallelize(model: nn.Module, kind: str) -> nn.Module:
    """Wraps the model for data parallelism: "ddp" replicates it, "fsdp2" shards it, "none" leaves it."""
    if kind == "ddp":
        return DistributedDataParallel(model)
    if kind == "fsdp2":
        for layer in model.get_submodule("layers").children():
            fully_shard(layer)
        fully_shard(model)
    return model


def learning_rate(step: int, args: argparse.Namespace) -> float:
    """A linear warm-up over a tenth of the steps, then half a cosine down to a tenth of the rate."""
    warmup = max(1, args.steps // 10)
    if step < warmup:
        return float(args.lr * (step + 1) / warmup)
    progress = (step - warmup) / max(1, args.steps - warmup)
    return float(args.lr * (0.1 + 0.45 * (1 + math.cos(math.pi * progress))))


@llmprof.profile(logdir="runs/llama")
def train(args: argparse.Namespace) -> float:
    """Runs the training loop and returns the last loss of this rank."""
    torch.manual_seed(args.seed)
    device = torch.device(args.device)
    config = ModelConfig(
        layers=args.layers,
        hidden=args.hidden,
        heads=args.heads,
        kv_heads=args.kv_heads,
        ffn=args.ffn,
        seq=args.seq,
    )
    model = parallelize(Decoder(config).to(device), args.parallel)
    if args.compile:
        model.compile()
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, betas=(0.9, 0.95), weight_decay=0.1)
    loss = torch.zeros(())
    for step, (inputs, targets) in zip(range(args.steps), batches(args), strict=False):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, args)
        with torch.autocast(device.type, dtype=torch.bfloat16, enabled=args.bf16):
            logits = model(inputs.to(device))
            loss = F.cross_entropy(logits.flatten(0, 1), targets.to(device).flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if args.rank == 0:
            print(f"step {step + 1:3d}/{args.steps}  loss {loss.item():.4f}", flush=True)
    return loss.item()


def parse_args() -> argparse.Namespace:
    """Command-line options; every size has a default that a laptop trains in under a minute."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--batch", type=int, default=8, help="sequences per step over all ranks")
    parser.add_argument("--parallel", choices=("none", "ddp", "fsdp2"), default="none")
    parser.add_argument(
        "--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu"
    )
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--bf16", action="store_true", help="compute in bfloat16 under autocast")
    parser.add_argument("--compile", action="store_true", help="compile the model")
    for name in ("layers", "hidden", "heads", "kv_heads", "ffn", "seq"):
        option = f"--{name.replace('_', '-')}"
        parser.add_argument(option, type=int, default=getattr(ModelConfig, name))
    args = parser.parse_args()
    args.rank = int(os.environ.get("RANK", "0"))
    return args


def main() -> None:
    """Trains with the options of the command line and prints the last loss, exact to the bit."""
    args = parse_args()
    if args.parallel != "none":
        if args.device == "cuda":
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        dist.init_process_group("nccl" if args.device == "cuda" else "gloo")
    loss = train(args)
    if args.rank == 0:
        print(f"final loss {loss:.6f} = {loss.hex()}")
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
