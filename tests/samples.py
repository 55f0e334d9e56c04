"""Writes tests/data/tiny_llama_workload.json: `python -m tests.samples` from the project's folder."""

from __future__ import annotations

from pathlib import Path

import torch

from llmprof.hooks.workload import TraceRequest, describe_inputs, trace_workload
from llmprof.schema.store import save_workload
from llmprof.schema.workload import Workload
from tests.models import TinyLlama, cross_entropy

SAMPLE = Path(__file__).parent / "data" / "tiny_llama_workload.json"


def tiny_llama_request() -> TraceRequest:
    """4 layers, hidden 64, 8 heads, 4 key/value heads, ffn 176, vocabulary 256, batch 4, sequence 64, AdamW."""
    torch.manual_seed(0)
    model = TinyLlama()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    tokens = torch.randint(0, 256, (4, 64))
    cross_entropy(model(tokens), tokens).backward()
    optimizer.step()
    args, kwargs = describe_inputs((tokens,), {})
    return TraceRequest(
        model=model, args=args, kwargs=kwargs, optimizer=optimizer, loss_fn=cross_entropy, name="tiny-llama"
    )


def tiny_llama_workload() -> Workload:
    """The workload of `tiny_llama_request`."""
    return trace_workload(tiny_llama_request())


if __name__ == "__main__":
    save_workload(tiny_llama_workload(), SAMPLE)
