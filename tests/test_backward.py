"""A backward pass without torch's engine runs the same operators in the same order, and computes the same."""

from __future__ import annotations

import dataclasses
import os
import signal
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from llmprof.hooks.backward import ReadyNodes, Walk
from llmprof.hooks.child import run_forked
from llmprof.hooks.classes import trace_tensor_parallel
from llmprof.hooks.inputs import find_sizes
from llmprof.hooks.prepare import prepare, trace_at, trace_base
from llmprof.hooks.workload import TraceRequest, describe_inputs, trace_workload
from tests.models import TinyGPT2, TinyLlama, classifier, conv_net, cross_entropy


class _Scale(torch.autograd.Function):
    """Two results of which one may stay unused, with and without zeros for its gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, keep_none: bool) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(x, weight)
        ctx.set_materialize_grads(not keep_none)
        return x * weight, x + weight

    @staticmethod
    def backward(ctx: Any, first: Tensor, second: Tensor | None) -> tuple[Tensor, Tensor, None]:
        x, weight = ctx.saved_tensors
        extra = first if second is None else first + second
        return extra * weight, extra * x, None


class Odd(nn.Module):
    """Functions in Python, hooks on tensors, broadcasting, casts, gradients inside the forward pass, recomputation."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.LayerNorm(16))
        self.weight = nn.Parameter(torch.ones(16))
        self.scale = nn.Parameter(torch.ones(()))
        self.row = nn.Parameter(torch.ones(1, 16))

    def forward(self, x: Tensor) -> Tensor:
        y = self.inner(x)
        y.register_hook(lambda gradient: gradient * 2)
        y = checkpoint(self.inner, y, use_reentrant=False)
        for keep_none in (True, False):
            y = _Scale.apply(y, self.weight.expand_as(y), keep_none)[0]  # type: ignore[no-untyped-call]
        y = (y * self.row + self.row.to(torch.float64)).float() * self.scale
        with torch.enable_grad():
            z = (y * y).sum()
        (force,) = torch.autograd.grad(z, y, create_graph=True)
        out: Tensor = (force + y).pow(2).mean()
        return out


_TOKENS = torch.zeros(2, 32, dtype=torch.long)
_CASES: dict[str, tuple[nn.Module, tuple[Tensor, ...], Any]] = {
    "llama": (TinyLlama(layers=2), (_TOKENS,), cross_entropy),
    "llama without loss": (TinyLlama(layers=2), (_TOKENS,), None),
    "tied": (TinyLlama(layers=2, tied=True), (_TOKENS,), cross_entropy),
    "gpt2": (TinyGPT2(), (_TOKENS, _TOKENS), None),
    "convolutions": (conv_net(), (torch.zeros(4, 3, 16, 16),), None),
    "perceptron": (classifier(), (torch.zeros(4, 32),), None),
    "recurrent": (nn.GRU(16, 16, num_layers=2), (torch.zeros(4, 3, 16),), None),
    "batch norm": (nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)), (torch.zeros(4, 8),), None),
    "odd": (Odd(), (torch.zeros(4, 16),), None),
}


def _request(case: str, *, engine: bool | None, degrees: tuple[int, ...] = ()) -> TraceRequest:
    model, inputs, loss_fn = _CASES[case]
    args, kwargs = describe_inputs(inputs, {})
    return TraceRequest(
        model=model, args=args, kwargs=kwargs, loss_fn=loss_fn, degrees=degrees, engine=engine
    )


@pytest.mark.parametrize("case", _CASES)
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_same_operators_in_the_same_order(case: str, precision: str) -> None:
    traces = []
    for engine in (True, False):
        request = dataclasses.replace(_request(case, engine=engine), precision=precision)
        sizes = find_sizes(request.args, request.kwargs)
        traces.append(trace_at(prepare(request, keep=0), request, sizes, (sizes.batch, sizes.seq)))
    assert sum(op.phase.startswith("backward") for op in traces[0].ops) >= 10
    assert traces[0].ops == traces[1].ops
    assert traces[0] == traces[1]


def test_same_classes_of_tensor_and_sequence_parallelism() -> None:
    found = []
    for engine in (True, False):
        request = _request("llama", engine=engine, degrees=(2,))
        sizes = find_sizes(request.args, request.kwargs)
        base = trace_base(request, sizes)
        points = ((2, 32), (3, 32), (2, 34), (3, 36), (5, 40), (4, 48), (7, 38), (2, 38))
        found.append(trace_tensor_parallel(request, sizes, base, points))
    assert {(c.tp, c.sp) for c in found[0].classes} == {(2, False), (2, True)}
    assert found[0] == found[1]


def test_child_without_the_engine_makes_the_same_workload(monkeypatch: pytest.MonkeyPatch) -> None:
    with_engine = trace_workload(_request("gpt2", engine=None))
    # a device in use turns the engine off; nothing in the child may then call it
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.autograd.graph, "_engine_run_backward", None)
    monkeypatch.setattr(torch.autograd, "_engine_run_backward", None)
    assert trace_workload(_request("gpt2", engine=None)) == with_engine
    with pytest.raises(Exception, match="NoneType"):
        trace_workload(_request("gpt2", engine=True))


@pytest.mark.parametrize("case", ["odd", "llama"])
def test_gradients_are_equal(case: str) -> None:
    model, inputs, loss_fn = _CASES[case]
    torch.manual_seed(0)
    inputs = tuple(torch.randn_like(t) if t.is_floating_point() else t for t in inputs)
    found = []
    for walk in (None, Walk()):
        model.zero_grad()
        for _ in range(2):  # the second pass adds to gradients
            if walk is None:
                _loss(model, inputs, loss_fn).backward()
            else:
                with walk.installed():
                    _loss(model, inputs, loss_fn).backward()
        found.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
    assert len(found[0]) == sum(1 for _ in model.parameters())
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def _loss(model: nn.Module, inputs: tuple[Tensor, ...], loss_fn: Any) -> Tensor:
    out = model(*inputs)
    loss: Tensor = loss_fn(out, inputs[0]) if loss_fn else out
    return loss


class _Node:
    def __init__(self, number: int, name: str = "") -> None:
        self.number, self.name = number, name

    def _sequence_nr(self) -> int:
        return self.number


def test_ready_nodes_leave_by_sequence_number() -> None:
    ready = ReadyNodes()
    numbers = [5, 1, 9, 7, 3, 8, 2, 6]
    for number in numbers:
        ready.push(_Node(number))
    assert [ready.pop().number for _ in numbers] == sorted(numbers, reverse=True)
    assert not ready
    for name in "abcd":  # by hand: below the root a are b and c; of equal children the right one rises
        ready.push(_Node(1, name))
    assert [ready.pop().name for _ in "abcd"] == ["a", "c", "b", "d"]


def test_child_that_a_signal_ends_is_replaced_once(tmp_path: Any) -> None:
    tries = tmp_path / "tries"

    def dies(times: int) -> bytes:
        with tries.open("a") as file:
            file.write("x")
        if len(tries.read_text()) <= times:
            os.kill(os.getpid(), signal.SIGKILL)
        return b"done"

    assert run_forked(lambda: dies(1), timeout_s=30) == (b"done", "ok")
    tries.unlink()
    result = run_forked(lambda: dies(5), timeout_s=30)
    assert result.status == "died" and f"signal {int(signal.SIGKILL)}" in result.payload.decode()
    assert tries.read_text() == "xx"
