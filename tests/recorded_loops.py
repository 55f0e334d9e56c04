"""Training loops to record, and what one recorded decoder must hold."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from llmprof.hooks.recorder import Recording
from tests.models import TinyLlama, cross_entropy
from tests.recording import record

LAYERS = 2
LINEARS = 7 * LAYERS + 1  # wq, wk, wv, wo, gate, up, down; the head
MATMUL_PARAMETERS = LAYERS * (2 * 64 * 64 + 2 * 32 * 64 + 3 * 64 * 176) + 256 * 64
SEQ = 32


class Loop:
    """A training loop of one step."""

    def __init__(self, model: nn.Module, *, batch: int = 3, clip: bool = False, accum: int = 1) -> None:
        torch.manual_seed(0)
        self.model = model
        self.optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
        self.tokens = torch.randint(0, 256, (batch, SEQ))
        self.clip, self.accum = clip, accum
        self.losses: list[float] = []

    def __call__(self) -> None:
        self.optimizer.zero_grad()
        for _ in range(self.accum):
            loss = cross_entropy(self.model(self.tokens), self.tokens)
            loss.backward()
        if self.clip:
            nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.losses.append(loss.item())


def decoder_recording(batch: int = 3, **options: Any) -> Recording:
    model = TinyLlama(layers=LAYERS, **options)
    return record(Loop(model, batch=batch), model)
