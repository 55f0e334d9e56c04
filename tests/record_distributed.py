"""Run by torchrun: records two steps of a model in one layout and writes what was found as JSON per rank."""

from __future__ import annotations

import gc
import json
import sys
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from llmprof.hooks.memory import static_memory
from llmprof.hooks.modules import ModuleNames
from llmprof.hooks.recorder import Recorder

HIDDEN, FFN, TOKENS, STEPS = 64, 160, 48, 2


class Block(nn.Module):
    """A residual feed-forward block."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(HIDDEN, FFN, bias=False)
        self.down = nn.Linear(FFN, HIDDEN, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = x + self.down(torch.relu(self.up(x)))
        return y


def build(layout: str) -> nn.Module:
    """Two blocks, distributed as asked."""
    torch.manual_seed(0)
    model: nn.Module = nn.Sequential(Block(), Block())
    if layout == "ddp":
        return nn.parallel.DistributedDataParallel(model)
    if layout in ("tp", "fsdp2_tp"):
        mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
        for block in model.children():
            parallelize_module(block, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        if layout == "fsdp2_tp":
            fully_shard(model, mesh=mesh["dp"])
    if layout == "fsdp2":
        for block in model.children():
            fully_shard(block)
        fully_shard(model)
    return model


def main(layout: str, directory: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    found = record(layout, dist.get_rank())
    Path(directory, f"{dist.get_rank()}.json").write_text(json.dumps(found))
    dist.barrier()
    gc.collect()  # torch itself may deadlock when DDP outlives the process group
    dist.destroy_process_group()


def record(layout: str, rank: int) -> dict[str, Any]:
    """What the recorder found in two steps."""
    model = build(layout)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=layout in ("ddp", "fsdp2"))
    x = torch.randn(TOKENS, HIDDEN)

    def step() -> float:
        optimizer.zero_grad()
        loss = model(x).pow(2).mean()
        loss.backward()
        optimizer.step()
        return float(loss.item())

    losses = [step(), step()]  # in the second step DDP rebuilds its buckets
    names = ModuleNames()
    names.add(model)
    recorder = Recorder(names, rank=rank, device="cpu")
    recorder.start()
    for number in range(STEPS):
        recorder.mark_step(number)
        losses.append(step())
    recorder.mark_step(STEPS)
    recording = recorder.stop()
    losses.append(step())
    tables = ("operators", "collectives", "phases", "host", "spans")
    found = {name: msgspec.to_builtins(getattr(recording, name)) for name in tables}
    found["steps"] = list(recording.steps)
    found["warnings"] = list(recording.warnings)
    found["attributed_fraction"] = recording.attributed_fraction
    found["losses"] = losses
    memory = static_memory(model, optimizer, rank=rank)
    found["memory"] = {row.category: row.size_bytes for row in memory}
    return found


if __name__ == "__main__":
    main(*sys.argv[1:])
