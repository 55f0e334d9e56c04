"""Bytes of a live model and of what autograd saves, computed by hand."""

from __future__ import annotations

import torch
from torch import nn

from llmprof.hooks.memory import static_memory


def sizes(model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> dict[str, int]:
    rows = static_memory(model, optimizer, rank=3)
    assert {row.rank for row in rows} == {3} and {row.time_us for row in rows} == {None}
    return {row.category: row.size_bytes for row in rows}


def train(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> None:
    model(x).sum().backward()
    optimizer.step()


def test_parameters_gradients_and_two_moments_of_adam() -> None:
    model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16))
    optimizer = torch.optim.AdamW(model.parameters())
    parameters = (8 * 16 + 16 + 2 * 16) * 4
    buffers = 2 * 16 * 4 + 8
    empty = sizes(model, optimizer)
    assert empty == {"parameters": parameters, "gradients": parameters, "optimizer": 0, "buffers": buffers}
    train(model, optimizer, torch.randn(4, 8))
    steps = 4 * 4  # one step count per parameter
    assert sizes(model, optimizer) == {**empty, "optimizer": 2 * parameters + steps}
    optimizer.zero_grad(set_to_none=True)
    assert sizes(model, None) == {**empty, "optimizer": 0}


def test_frozen_and_half_precision_parameters() -> None:
    model = nn.Sequential(nn.Linear(8, 16, bias=False), nn.Linear(16, 4, bias=False).bfloat16())
    model[0].requires_grad_(False)
    assert sizes(model) == {
        "parameters": 8 * 16 * 4 + 16 * 4 * 2,
        "gradients": 128,
        "optimizer": 0,
        "buffers": 0,
    }


def test_tied_weights_and_views_of_one_flat_buffer_count_once() -> None:
    tied = nn.Sequential(nn.Embedding(10, 4), nn.Linear(4, 10, bias=False))
    tied[1].weight = tied[0].weight
    assert sizes(tied)["parameters"] == sizes(tied)["gradients"] == 160
    flat = torch.zeros(8 * 4 + 4)
    linear = nn.Linear(4, 8, bias=False)
    linear.weight = nn.Parameter(flat[:32].view(8, 4))
    linear.extra = nn.Parameter(flat[32:])
    assert sizes(linear)["parameters"] == 36 * 4


def test_several_optimizers_and_meta_parameters() -> None:
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    optimizers = [torch.optim.SGD(layer.parameters(), momentum=0.9, lr=0.1) for layer in model]
    model(torch.randn(2, 4)).sum().backward()
    for optimizer in optimizers:
        optimizer.step()
    found = {row.category: row.size_bytes for row in static_memory(model, optimizers, rank=0)}
    assert found["optimizer"] == 2 * 64
    assert sizes(nn.Linear(4, 4, device="meta"))["parameters"] == 0
