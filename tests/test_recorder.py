"""Windows of real single-process training loops: counts, FLOPs, phases and owners, computed by hand."""

from __future__ import annotations

from collections import defaultdict

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

from llmprof.schema.profile import PHASES
from tests.models import TinyLlama
from tests.recorded_loops import LAYERS, LINEARS, MATMUL_PARAMETERS, SEQ, Loop, decoder_recording
from tests.recording import STEPS, calls, flops, record, rows


class Checkpointed(TinyLlama):
    """The decoder with every block recomputed in the backward pass."""

    reentrant = False

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        cos, sin = (self.get_buffer(name)[: tokens.shape[1]] for name in ("cos", "sin"))
        x = self.tok(tokens)
        for layer in self.layers:
            x = checkpoint(layer, x, cos, sin, use_reentrant=self.reentrant)
        return self.out(self.norm(x))


@pytest.mark.parametrize("batch", [3, 2], ids=["96 tokens", "as many tokens as features"])
def test_matmuls_flops_and_phases_of_a_decoder(batch: int) -> None:
    recording = decoder_recording(batch)
    for phase in ("forward", "backward_input", "backward_weight"):
        assert calls(rows(recording, "mm", phase=phase)) == LINEARS, phase
    tokens = batch * SEQ
    assert flops(rows(recording, "mm")) == 6 * MATMUL_PARAMETERS * tokens
    attention_rows = [row for row in recording.operators if row.family == "attention"]
    # causal: half of two matmuls of 2 b h s s d forward, 2.5 times that backward
    forward = 2 * batch * 8 * SEQ * SEQ * 8 * LAYERS
    assert flops(attention_rows) == forward + forward * 5 / 2
    assert {row.attributes for row in attention_rows} == {"causal"}
    assert {row.phase for row in attention_rows} == {"forward", "backward_input"}


def test_every_matmul_belongs_to_its_linear_with_its_shapes() -> None:
    recording = decoder_recording()
    by_module = defaultdict(set)
    for row in rows(recording, "mm"):
        by_module[row.module].add((row.phase, row.shapes))
        assert row.count == 1 and row.time_n == STEPS and row.dtype == "float32"
    linears = ["attention.wq", "attention.wk", "attention.wv", "attention.wo"]
    linears += ["feed_forward.gate", "feed_forward.up", "feed_forward.down"]
    assert set(by_module) == {f"layers.{i}.{name}" for i in range(LAYERS) for name in linears} | {"out"}
    assert by_module["layers.1.feed_forward.down"] == {
        ("forward", "96x176,176x64"),
        ("backward_input", "96x64,64x176"),
        ("backward_weight", "64x96,96x176"),
    }
    assert {row.module for row in rows(recording, "embedding", "embedding_dense_backward")} == {"tok"}
    assert rows(recording, "embedding_dense_backward")[0].phase == "backward_weight"
    assert {row.module for row in rows(recording, "silu", "silu_backward")} == {
        f"layers.{i}.feed_forward" for i in range(LAYERS)
    }


def test_phases_partition_each_step_and_operators_make_up_their_phases() -> None:
    recording = decoder_recording()
    assert [number for number, _ in recording.steps] == [5, 6]
    for number, duration_us in recording.steps:
        found = {row.phase: row.exclusive_us for row in recording.phases if row.step == number}
        assert set(found) == set(PHASES)
        assert sum(found.values()) == pytest.approx(duration_us, rel=1e-6)
    for phase in ("forward", "recompute", "backward_input", "backward_weight", "optimizer", "other"):
        of_rows = sum(row.exclusive_us for row in rows(recording, phase=phase))
        per_step = sum(row.exclusive_us for row in recording.phases if row.phase == phase) / STEPS
        assert of_rows == pytest.approx(per_step, rel=1e-6, abs=1e-6)


def test_attribution_reaches_the_innermost_modules() -> None:
    recording = decoder_recording()
    assert recording.warnings == ()
    assert recording.attributed_fraction == 1 and all(row.attributed for row in recording.operators)
    assert recording.root_fraction is not None and 0 < recording.root_fraction < 0.5
    outside = {row.op for row in recording.outside_rows}
    assert {"aten::_log_softmax", "aten::nll_loss_forward", "aten::nll_loss_backward"} <= outside
    assert "aten::mm" not in outside
    assert all(row.module == "" and row in recording.operators for row in recording.outside_rows)
    assert {row.module for row in rows(recording, phase="optimizer")} == {"optimizer"}


def test_operators_that_only_call_others_are_looked_through() -> None:
    recording = decoder_recording()
    composite = {
        "linear",
        "matmul",
        "reshape",
        "repeat_interleave",
        "flatten",
        "scaled_dot_product_attention",
    }
    assert rows(recording, *composite) == []
    # keys and values are repeated for the query heads: one copy each, and a sum over the copies going back
    assert calls(rows(recording, "clone", phase="forward")) == 2 * LAYERS
    repeated = "3x32x4x2x8"
    back = [row for row in rows(recording, "sum", phase="backward_input") if row.shapes == repeated]
    assert calls(back) == 2 * LAYERS
    assert {row.module for row in back} == {f"layers.{i}.attention" for i in range(LAYERS)}


def test_a_result_tensor_is_no_input() -> None:
    model, x, y = nn.Linear(8, 8), torch.randn(4, 8), torch.empty(4, 4)

    def step() -> None:
        model(x).sum().backward()
        torch.mm(x, x.t(), out=y)

    found = rows(record(step, model), "mm", phase="other")
    assert [(row.shapes, row.flops) for row in found] == [("4x8,8x4", 2 * 4 * 8 * 4)]


def test_tied_weights_keep_both_uses_apart() -> None:
    recording = decoder_recording(tied=True)
    assert {row.module for row in rows(recording, "embedding_dense_backward")} == {"tok"}
    assert {row.module for row in rows(recording, "mm") if "256" in row.shapes} == {"out"}
    assert calls(rows(recording, "mm", phase="backward_weight")) == LINEARS


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed_blocks_are_recompute(reentrant: bool) -> None:
    model = Checkpointed(layers=LAYERS)
    model.reentrant = reentrant
    recording = record(Loop(model), model)
    assert calls(rows(recording, "mm", phase="recompute")) == 7 * LAYERS
    for phase in ("forward", "backward_input", "backward_weight"):
        assert calls(rows(recording, "mm", phase=phase)) == LINEARS
    again = {row.module for row in rows(recording, "mm", phase="recompute")}
    assert again == {row.module for row in rows(recording, "mm", phase="forward")} - {"out"}
    assert recording.attributed_fraction is not None and recording.attributed_fraction >= 0.97


def test_a_checkpointed_function_is_recompute_too() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y: torch.Tensor = checkpoint(lambda z: torch.sigmoid(z).exp(), self.fc(x), use_reentrant=False)
            return y

    model, x = Model(), torch.randn(4, 8)
    recording = record(lambda: model(x).sum().backward(), model)
    assert calls(rows(recording, "sigmoid", phase="forward")) == 1
    assert calls(rows(recording, "sigmoid", phase="recompute")) == 1
    assert calls(rows(recording, "sigmoid_backward", phase="backward_input")) == 1


def test_a_gradient_penalty_is_no_recomputation() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))
    x = torch.randn(4, 8, requires_grad=True)

    def step() -> None:
        (gradient,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        gradient.pow(2).sum().backward()

    recording = record(step, model)
    assert rows(recording, phase="recompute") == []
    assert calls(rows(recording, "tanh_backward")) >= 1


def test_weights_that_another_module_uses_and_products_by_einsum() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = nn.MultiheadAttention(16, 2, bias=False, batch_first=True)
            self.weight = nn.Parameter(torch.randn(16, 12))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y, _ = self.attention(x, x, x, need_weights=False)
            return torch.einsum("bsh,hf->bsf", y, self.weight)

    model, x = Model(), torch.randn(3, 5, 16)
    recording = record(lambda: model(x).sum().backward(), model)
    weight = [row for row in recording.operators if row.phase == "backward_weight" and row.flops]
    # 15 tokens: of the fused query, key and value projection, of the output projection, of the einsum
    assert {(row.module, row.flops) for row in weight} == {
        ("attention", 2 * 15 * 16 * 48),
        ("attention", 2 * 15 * 16 * 16),
        ("", 2 * 15 * 16 * 12),
    }


def test_frozen_parameters_in_place_operators_and_accumulation() -> None:
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(inplace=True), nn.Linear(16, 8))
    model[0].requires_grad_(False)
    x = torch.randn(12, 8)
    optimizer = torch.optim.SGD(model[2].parameters(), lr=0.1)

    def step() -> None:
        optimizer.zero_grad()
        for _ in range(3):
            model(x).pow(2).sum().backward()
        optimizer.step()

    recording = record(step, model)
    assert calls(rows(recording, "addmm", phase="forward")) == 6
    weight = rows(recording, "mm", phase="backward_weight")
    assert [(row.module, row.count) for row in weight] == [("2", 3)]
    assert rows(recording, "mm", phase="backward_input") == []  # nothing below needs a gradient
    accumulated = rows(recording, "add_", phase="backward_weight", module="2")
    assert calls(accumulated) == 2 * 2  # weight and bias, from the second microbatch on


def test_clipping_is_the_optimizers_and_logging_is_other() -> None:
    model = TinyLlama(layers=1)
    recording = record(Loop(model, clip=True), model)
    assert calls(rows(recording, "_foreach_norm", phase="optimizer", module="optimizer")) >= 1
    assert calls(rows(recording, "_local_scalar_dense", phase="other")) == 1


def test_a_loss_module_is_outside_the_model() -> None:
    model, criterion = nn.Linear(8, 4), nn.CrossEntropyLoss()
    x, y = torch.randn(6, 8), torch.zeros(6, dtype=torch.long)
    recording = record(lambda: criterion(model(x), y).backward(), model, criterion)
    outside = {row.op: row.module for row in recording.outside_rows}
    assert outside["aten::_log_softmax"] == "CrossEntropyLoss"
    assert outside["aten::_log_softmax_backward_data"] == "CrossEntropyLoss"
    assert "aten::addmm" not in outside


def test_waiting_for_data_is_input() -> None:
    model = nn.Linear(8, 4)
    batches = iter(DataLoader(TensorDataset(torch.randn(64, 8)), batch_size=4))
    recording = record(lambda: model(next(batches)[0]).sum().backward(), model)
    assert {row.module for row in rows(recording, "stack")} == {"input"}
    by_phase: dict[str, float] = defaultdict(float)
    for row in recording.phases:
        by_phase[row.phase] += row.exclusive_us
    loaded = sum(row.exclusive_us for row in rows(recording, phase="input")) * STEPS
    assert by_phase["input"] > loaded > 0
