"""A twin is unsharded and unwrapped whatever wraps the live model, and the live model trains on as if nothing was."""

from __future__ import annotations

import copy
import os
import time
import warnings
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
import torch.distributed as dist
from torch import nn

from llmprof.errors import WorkloadError
from llmprof.hooks.child import run_forked
from llmprof.hooks.twin import build_twin
from llmprof.hooks.workload import TraceRequest, describe_inputs, trace_workload
from tests.models import Block, TinyLlama, cross_entropy
from tests.two_ranks import run_two_ranks

KINDS = ("plain", "ddp", "fsdp1", "fsdp1-flat", "fsdp2", "compiled", "compiled-in-place", "checkpointed")


def _wrap(model: TinyLlama, kind: str) -> nn.Module:
    if kind == "ddp":
        return nn.parallel.DistributedDataParallel(model)
    if kind.startswith("fsdp1"):
        from torch.distributed.fsdp import FullyShardedDataParallel
        from torch.distributed.fsdp.wrap import ModuleWrapPolicy

        return FullyShardedDataParallel(
            model,
            auto_wrap_policy=ModuleWrapPolicy({Block}),
            use_orig_params=kind == "fsdp1",
            device_id=torch.device("cpu"),
        )
    if kind == "fsdp2":
        from torch.distributed.fsdp import fully_shard

        for block in model.layers:
            fully_shard(block)
        fully_shard(model)
    elif kind == "compiled":
        compiled: Any = torch.compile(model, backend="aot_eager")
        return compiled
    elif kind == "compiled-in-place":
        model.compile(backend="aot_eager")
    elif kind == "checkpointed":
        from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

        for index, block in enumerate(model.layers):
            model.layers[index] = checkpoint_wrapper(block)
    return model


def _train(kind: str, *, trace: bool) -> tuple[list[float], Any]:
    torch.manual_seed(0)
    torch._dynamo.reset()
    model = _wrap(TinyLlama(layers=3, max_seq=32), kind)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    tokens = torch.arange(64).view(2, 32)
    losses, workload = [], None
    for step in range(4):
        loss = cross_entropy(model(tokens), tokens)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if trace and step == 1 and dist.get_rank() == 0:
            args, kwargs = describe_inputs((tokens,), {})
            workload = trace_workload(
                TraceRequest(
                    model=model,
                    args=args,
                    kwargs=kwargs,
                    optimizer=optimizer,
                    loss_fn=cross_entropy,
                    degrees=(2,),
                )
            )
    return losses, workload


def compare_kinds(kinds: tuple[str, ...]) -> dict[str, Any]:
    """Losses with and without a trace in between, and what the workload holds, by kind of wrapper."""
    warnings.simplefilter("ignore")  # FSDP1 and fork with threads: torch's own deprecations
    found = {}
    for kind in kinds:
        with_trace, workload = _train(kind, trace=True)
        without, _ = _train(kind, trace=False)
        found[kind] = [with_trace, without, msgspec.to_builtins(workload)]
    return found


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    found: dict[str, Any] = run_two_ranks(compare_kinds, Path(tmp_path_factory.mktemp("live")), KINDS)
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_losses_go_on_bitwise_equal(kind: str, live: dict[str, Any]) -> None:
    with_trace, without, _ = live[kind]
    assert with_trace == without
    assert len(set(with_trace)) == 4


def _forget_optimizer(workload: dict[str, Any]) -> None:
    for trace in workload["classes"]:
        for layer in trace["layers"].values():
            layer["ops"] = [op for op in layer["ops"] if op["phase"] != "optimizer"]


@pytest.mark.parametrize("kind", KINDS)
def test_every_wrapper_gives_the_same_workload(kind: str, live: dict[str, Any]) -> None:
    workload, plain = copy.deepcopy(live[kind][2]), copy.deepcopy(live["plain"][2])
    assert {(c.get("tp", 1), c.get("sp", False)) for c in workload["classes"]} == {
        (1, False),
        (2, False),
        (2, True),
    }
    assert workload["layers"] == plain["layers"]
    assert workload["sequence"] == [["prologue", 1], ["block0", 3], ["epilogue", 1], ["loss", 1]]
    if (
        kind == "fsdp1-flat"
    ):  # its parameters are updated in another order, so the layers' updates end elsewhere
        _forget_optimizer(workload)
        _forget_optimizer(plain)
    assert workload["classes"] == plain["classes"][: len(workload["classes"])]


def test_twin_keeps_ties_and_classes_and_holds_no_data() -> None:
    model = TinyLlama(layers=2, tied=True)
    model.register_forward_hook(lambda *_: None)
    twin = build_twin(model).module
    assert isinstance(twin, TinyLlama) and twin is not model
    assert twin.out.weight is twin.tok.weight and twin.tok.weight is not model.tok.weight
    assert not twin._forward_hooks and len(model._forward_hooks) == 1
    assert all(t.device.type == "meta" for t in (*twin.parameters(), *twin.buffers()))
    assert [p.shape for p in twin.parameters()] == [p.shape for p in model.parameters()]


def test_script_module_is_named() -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    model.add_module("inner", torch.jit.ScriptModule())
    with pytest.raises(WorkloadError, match="'inner'"):
        build_twin(model)


class DataDependent(nn.Module):
    """Its shapes depend on data."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x[x.sum() > 0] if x.sum().item() > 0 else x


def test_untraceable_module_is_named() -> None:
    model = nn.Sequential(nn.Linear(4, 4), DataDependent())
    args, kwargs = describe_inputs((torch.ones(2, 4),), {})
    with pytest.raises(WorkloadError, match=r"module '1' \(DataDependent\)"):
        trace_workload(TraceRequest(model=model, args=args, kwargs=kwargs))


def test_late_child_is_killed() -> None:
    def sleep() -> bytes:
        time.sleep(60)
        return b""

    start = time.monotonic()
    result = run_forked(sleep, timeout_s=0.2)
    assert (result.status, result.payload) == ("late", b"")
    assert time.monotonic() - start < 30


def test_child_cannot_change_the_parent() -> None:
    state: list[int] = []

    def change() -> bytes:
        state.extend((1, 2, 3))
        return bytes(state)

    assert run_forked(change, timeout_s=30) == (b"\x01\x02\x03", "ok")
    assert state == []


def test_failing_and_dying_children_are_told_apart() -> None:
    def fail() -> bytes:
        raise ValueError("no such thing")

    def die() -> bytes:
        os._exit(3)

    assert run_forked(fail, timeout_s=30) == (b"ValueError: no such thing", "failed")
    assert run_forked(die, timeout_s=30) == (b"", "died")
