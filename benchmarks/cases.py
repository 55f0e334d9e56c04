"""The example's decoder under each two-rank layout: what a benchmark rank trains, one step at a time."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn import functional as F

from examples.train_llama import Decoder, ModelConfig, parallelize

MICROBATCHES = 4

Step = Callable[[], float]
"""One training step: forward, backward, optimizer. Returns this rank's loss, NaN where the loss is elsewhere."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """A model and a global batch (sequences per step over all ranks), equal for every layout."""

    name: str
    model: ModelConfig
    batch: int = 8

    @property
    def tokens(self) -> int:
        """Tokens per step over all ranks."""
        return self.batch * self.model.seq


CASES = (
    Case(
        name="hidden 256, seq 128",
        model=ModelConfig(layers=4, hidden=256, heads=8, kv_heads=4, ffn=704, seq=128),
    ),
    Case(
        name="hidden 512, seq 128",
        model=ModelConfig(layers=4, hidden=512, heads=8, kv_heads=4, ffn=1408, seq=128),
    ),
    Case(
        name="hidden 384, seq 256",
        model=ModelConfig(layers=4, hidden=384, heads=6, kv_heads=2, ffn=1024, seq=256),
    ),
)


def layout_string(name: str, case: Case) -> str:
    """The layout that a name stands for, in the grammar of `llmprof forecast --layout`."""
    return {
        "single": f"dp=1,mb={case.batch}",
        "ddp": f"dp=2,mb={case.batch // 2}",
        "fsdp2": f"dp=2,zero=3,mb={case.batch // 2}",
        "tp": f"dp=1,tp=2,mb={case.batch}",
        "1f1b": f"dp=1,pp=2,mb={case.batch // MICROBATCHES},accum={MICROBATCHES},schedule=1f1b",
    }[name]


LAYOUTS = ("ddp", "fsdp2", "tp", "1f1b")


def loss_fn(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean cross-entropy over all tokens."""
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def build_step(name: str, case: Case) -> tuple[nn.Module, torch.optim.Optimizer, Step]:
    """The model, its optimizer and the step of this rank, on random tokens that the seed fixes.

    Args:
        name: "single" or one of LAYOUTS; all but "single" need an initialised process group of two ranks.
        case: sizes and the global batch.
    """
    torch.manual_seed(0)
    model = Decoder(case.model)
    if name == "1f1b":
        return _pipeline_step(model, case)
    inputs, targets = _random_batch(case)
    if name in ("ddp", "fsdp2"):
        inputs, targets = inputs.chunk(2)[dist.get_rank()], targets.chunk(2)[dist.get_rank()]
    wrapped = _tensor_parallel(model) if name == "tp" else parallelize(model, name)
    optimizer = torch.optim.AdamW(wrapped.parameters(), lr=1e-4)

    def step() -> float:
        loss = loss_fn(wrapped(inputs), targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    return wrapped, optimizer, step


def _random_batch(case: Case) -> tuple[Tensor, Tensor]:
    tokens = torch.randint(0, case.model.vocab, (case.batch, case.model.seq + 1))
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def _tensor_parallel(model: Decoder) -> nn.Module:
    """Columns then rows in every block, its input reduced once for all projections; vocabulary split at both ends."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    whole = Replicate()
    ends = {
        "embedding": RowwiseParallel(input_layouts=whole),
        "head": ColwiseParallel(output_layouts=whole),
    }
    block = {
        "attention": PrepareModuleInput(
            input_layouts=(whole, None, None), desired_input_layouts=(whole, None, None)
        ),
        **{f"attention.{name}": ColwiseParallel() for name in ("query", "key", "value")},
        "attention.output": RowwiseParallel(),
        "feed_forward": PrepareModuleInput(input_layouts=(whole,), desired_input_layouts=(whole,)),
        **{f"feed_forward.{name}": ColwiseParallel() for name in ("gate", "up")},
        "feed_forward.down": RowwiseParallel(),
    }
    parallelize_module(model, mesh, ends)
    for layer in model.layers:
        parallelize_module(layer, mesh, dict(block))
    return model


class Stage(nn.Module):
    """One half of a decoder: the first embeds tokens, the last makes logits."""

    def __init__(self, model: Decoder, *, first: bool) -> None:
        super().__init__()
        half = len(model.layers) // 2
        self.embedding = model.embedding if first else nn.Identity()
        self.layers = model.layers[:half] if first else model.layers[half:]
        self.norm = nn.Identity() if first else model.norm
        self.head = nn.Identity() if first else model.head
        self.register_buffer("cos", model.cos, persistent=False)
        self.register_buffer("sin", model.sin, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embedding(x)
        seq = x.shape[1]
        for layer in self.layers:
            x = layer(x, self.get_buffer("cos")[:seq], self.get_buffer("sin")[:seq])
        return self.head(self.norm(x))


def _pipeline_step(model: Decoder, case: Case) -> tuple[nn.Module, torch.optim.Optimizer, Step]:
    rank = dist.get_rank()
    inputs, targets = _random_batch(case)
    stage = Stage(model, first=rank == 0)
    schedule = Schedule1F1B(
        PipelineStage(stage, rank, 2, torch.device("cpu")), n_microbatches=MICROBATCHES, loss_fn=loss_fn
    )
    optimizer = torch.optim.AdamW(stage.parameters(), lr=1e-4)

    def step() -> float:
        losses: list[Tensor] = []
        if rank == 0:
            schedule.step(inputs)
        else:
            schedule.step(target=targets, losses=losses)
        optimizer.step()
        optimizer.zero_grad()
        return sum(loss.item() for loss in losses) / len(losses) if losses else math.nan

    return stage, optimizer, step
