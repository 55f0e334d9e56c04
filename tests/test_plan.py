"""Tensor-parallel plans: read from the data flow, taken from the model or the user, refused with a reason."""

from __future__ import annotations

import torch
from torch import nn

from llmprof.hooks.plan import find_plan, indivisible
from llmprof.hooks.rows import dataflow_of
from llmprof.hooks.workload import TraceRequest, describe_inputs
from tests.models import FusedBlock, TinyGPT2, TinyLlama, classifier


def _request(model: nn.Module, *inputs: torch.Tensor) -> TraceRequest:
    args, kwargs = describe_inputs(inputs, {})
    return TraceRequest(model=model, args=args, kwargs=kwargs)


TOKENS = torch.zeros(2, 16, dtype=torch.long)


def test_structural_plan_of_a_decoder() -> None:
    plan, flow = dataflow_of(_request(TinyLlama(layers=1), TOKENS))
    names = {name.removeprefix("layers.0."): role for name, role in plan.roles.items()}
    assert names == {
        "tok": "embedding",
        "attention.wq": "colwise",
        "attention.wk": "colwise",
        "attention.wv": "colwise",
        "attention.wo": "rowwise",
        "feed_forward.gate": "colwise",
        "feed_forward.up": "colwise",
        "feed_forward.down": "rowwise",
        "out": "gathered",
    }
    assert plan.source == "structure"
    assert flow.heads == {"layers.0.attention": (8, 8)}


def test_structural_plan_of_a_flat_block_does_not_follow_the_residual() -> None:
    plan, _ = dataflow_of(_request(TinyGPT2(layers=2), TOKENS, TOKENS))
    assert {plan.roles[f"h.1.{name}"] for name in ("qkv", "mlp.0")} == {"colwise"}
    assert {plan.roles[f"h.1.{name}"] for name in ("proj", "mlp.2")} == {"rowwise"}


def test_structural_plan_of_a_perceptron_pairs_projections() -> None:
    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.ModuleList(
                [nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8)) for _ in range(2)]
            )

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for part in self.body:
                x = x + part(x)
            return x

    plan, _ = dataflow_of(_request(Pair(), torch.zeros(2, 8)))
    assert plan.roles == {
        "body.0.0": "colwise",
        "body.0.2": "rowwise",
        "body.1.0": "colwise",
        "body.1.2": "rowwise",
    }


def test_leaking_projections_stay_replicated() -> None:
    plan, _ = dataflow_of(_request(classifier(), torch.zeros(2, 32)))
    assert "colwise" not in plan.roles.values() and "rowwise" not in plan.roles.values()


def test_user_and_model_plans_come_first() -> None:
    model = TinyLlama(layers=2)
    _, flow = dataflow_of(_request(model, TOKENS))
    user = find_plan(model, flow, {"layers.*.feed_forward.gate": "colwise", "tok": "rowwise"})
    assert user.source == "user"
    assert user.roles["layers.1.feed_forward.gate"] == "colwise" and "layers.1.attention.wq" not in user.roles
    assert user.roles["tok"] == "embedding" and user.roles["out"] == "gathered"
    model.tp_plan = {"layers.*.attention.wo": "rowwise"}  # type: ignore[assignment]
    assert find_plan(model, flow).source == "model"
    assert find_plan(model, flow).roles["layers.0.attention.wo"] == "rowwise"


def test_too_few_heads_are_named() -> None:
    plan, flow = dataflow_of(_request(TinyLlama(layers=1), TOKENS))
    assert indivisible(plan, flow, 4) == ""
    assert "wk has 4 heads, which tp=8 does not divide" in indivisible(plan, flow, 8)
    assert "features, which tp=3 does not divide" in indivisible(plan, flow, 3)


def test_fused_block_runs() -> None:
    assert FusedBlock(16, 2)(torch.zeros(1, 4, 16)).shape == (1, 4, 16)
