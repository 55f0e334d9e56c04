"""What a user must never notice: losses bit for bit the same, no hook left, no recompilation, no exception of ours."""

from __future__ import annotations

import copy
import io
import os
import random
import socket
import subprocess
import sys
import textwrap
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.utils.checkpoint
from torch import nn
from torch.nn.modules import module as nn_module
from torch.optim import optimizer as optimizers
from torch.utils.data import DataLoader, TensorDataset, dataloader

import llmprof
from llmprof.hooks import private
from llmprof.hooks.recorder import Recorder

SHORT: dict[str, Any] = {"wait": 3, "warmup": 1, "active": 2}
STEPS = 9


class Net(nn.Module):
    """Dropout needs the random number generator; the checkpoint recomputes."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, 8)
        self.inner = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.2), nn.ReLU(inplace=True))
        self.head = nn.Linear(8, 16)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        x = torch.utils.checkpoint.checkpoint(self.inner, x, use_reentrant=False)
        return self.head(x)


def losses(wrap: Callable[[nn.Module], nn.Module] = lambda module: module) -> list[str]:
    torch.manual_seed(0)
    model = wrap(Net())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    data = TensorDataset(torch.randint(0, 16, (4 * STEPS, 5)))
    found = []
    for (tokens,) in DataLoader(data, batch_size=4, shuffle=True):
        loss = nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(float(loss.item()).hex())
    return found


def hook_state() -> dict[str, Any]:
    tables = [name for name in dir(nn_module) if name.startswith("_global_") and "hook" in name]
    state: dict[str, Any] = {name: list(getattr(nn_module, name)) for name in tables if name.endswith("s")}
    state["optimizer"] = list(optimizers._global_optimizer_post_hooks)
    state["optimizer_pre"] = list(optimizers._global_optimizer_pre_hooks)
    state["next"] = dataloader._BaseDataLoaderIter.__next__
    state["filters"] = list(warnings.filters)
    state["meta_path"] = list(sys.meta_path)
    return state


def test_losses_and_random_numbers_are_those_of_the_plain_run(tmp_path: Path) -> None:
    plain = losses()
    after_plain = torch.get_rng_state()
    random.seed(1)
    np.random.seed(1)
    states = random.getstate(), np.random.get_state(legacy=False)
    with llmprof.session(logdir=tmp_path, **SHORT):
        captured = losses()
    assert captured == plain
    assert torch.equal(torch.get_rng_state(), after_plain)
    assert random.getstate() == states[0]
    assert str(np.random.get_state(legacy=False)) == str(states[1])
    assert llmprof.load_profile(tmp_path).operators


def test_every_hook_is_taken_out_again_and_those_of_others_stay(tmp_path: Path) -> None:
    theirs = nn_module.register_module_forward_hook(lambda module, args, output: None)
    before = hook_state()
    with llmprof.session(logdir=tmp_path, **SHORT):
        assert hook_state() != before
        losses()
    assert hook_state() == before
    with pytest.raises(RuntimeError), llmprof.session(logdir=tmp_path, **SHORT):
        losses()
        raise RuntimeError
    assert hook_state() == before
    theirs.remove()


def test_hooks_are_out_between_steps_of_a_window_too_when_the_run_ends_there(tmp_path: Path) -> None:
    before = hook_state()
    with llmprof.session(logdir=tmp_path, wait=4, warmup=0, active=100, workload=False):
        losses()
    assert hook_state() == before
    assert not private.profiler_active()
    profile = llmprof.load_profile(tmp_path)
    assert profile.manifest.window == tuple(range(4, STEPS))


def test_models_can_be_copied_and_saved_while_captured(tmp_path: Path) -> None:
    with llmprof.session(logdir=tmp_path, workload=False, **SHORT):
        torch.manual_seed(0)
        model = Net()
        optimizer = torch.optim.AdamW(model.parameters())
        for _ in range(STEPS):
            model(torch.ones(2, 3, dtype=torch.long)).mean().backward()
            optimizer.step()
            twin = copy.deepcopy(model)
            torch.save(model, io.BytesIO())
    assert not twin._forward_pre_hooks or all(
        type(h).__name__ == "_Once" for h in twin._forward_pre_hooks.values()
    )
    assert not model._forward_pre_hooks and not model._forward_hooks
    assert twin(torch.ones(2, 3, dtype=torch.long)).shape == (2, 3, 16)


@pytest.mark.parametrize("how", ["model", "in place", "blocks"])
def test_compiled_models_are_not_compiled_again(tmp_path: Path, how: str) -> None:
    from torch._dynamo.utils import counters

    def compiled(module: nn.Module) -> nn.Module:
        if how == "model":
            return torch.compile(module, backend="eager", fullgraph=False)  # type: ignore[return-value]
        target = module if how == "in place" else module.get_submodule("head")
        target.compile(backend="eager")
        return module

    def count(capture: bool) -> tuple[list[str], dict[str, int], dict[str, int]]:
        torch._dynamo.reset()
        counters.clear()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            if capture:
                with llmprof.session(logdir=tmp_path, workload=False, **SHORT):
                    found = losses(compiled)
            else:
                found = losses(compiled)
        return found, dict(counters["frames"]), dict(counters["graph_break"])

    assert count(capture=True) == count(capture=False)
    assert len(llmprof.load_profile(tmp_path).steps) == STEPS


def test_a_failing_recorder_does_not_reach_the_loop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: Recorder) -> None:
        raise OSError("no profiler here")

    monkeypatch.setattr(Recorder, "start", fail)
    plain = losses()
    with llmprof.session(logdir=tmp_path, workload=False, **SHORT):
        assert losses() == plain
    profile = llmprof.load_profile(tmp_path)
    assert any("no profiler here" in text for text in profile.manifest.warnings)


def test_an_unwritable_directory_does_not_reach_the_loop(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("not a directory")
    before = hook_state()
    with llmprof.session(logdir=blocked / "run", workload=False, **SHORT):
        assert losses() == losses()
    assert hook_state() == before


SCRIPT = """
import os, sys, torch, torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(16), nn.Linear(16, 32), nn.Linear(32, 16)
    def forward(self, x):
        return x + self.down(torch.relu(self.up(self.norm(x))))

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(32, 16), nn.Linear(16, 32)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
    def forward(self, x):
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x).clone()

def train(kind):
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = Net()
    if kind == "ddp":
        model = nn.parallel.DistributedDataParallel(model)
    else:
        for block in model.blocks:
            fully_shard(block)
        fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    generator = torch.Generator().manual_seed(dist.get_rank())
    found = []
    for _ in range(9):
        tokens = torch.randint(0, 32, (2, 8), generator=generator)
        loss = nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item().hex())
    with open(os.path.join(sys.argv[2], f"losses-{dist.get_rank()}"), "w") as file:
        file.write(" ".join(found))
    del model, optimizer, loss  # torch itself may deadlock when DDP outlives the process group
    dist.destroy_process_group()

if __name__ == "__main__":
    torch.set_num_threads(1)
    import llmprof
    llmprof.profile(logdir=sys.argv[2] + "/run", wait=3, warmup=1, active=2)(train)(sys.argv[1])
"""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def launch(tmp_path: Path, kind: str, *, on: bool) -> list[str]:
    directory = tmp_path / ("on" if on else "off")
    directory.mkdir()
    script = directory / "train.py"
    script.write_text(textwrap.dedent(SCRIPT))
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    command += ["--master-addr", "127.0.0.1", "--master-port", str(free_port())]
    command += [str(script), kind, str(directory)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "LLMPROF": "1" if on else "0"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=240)
    assert done.returncode == 0, done.stderr[-3000:]
    return [(directory / f"losses-{rank}").read_text() for rank in (0, 1)]


@pytest.mark.parametrize(("kind", "layout"), [("ddp", "dp=2,mb=2"), ("fsdp2", "dp=2,zero=3,mb=2")])
def test_two_ranks_train_to_the_same_bits(tmp_path: Path, kind: str, layout: str) -> None:
    assert launch(tmp_path, kind, on=True) == launch(tmp_path, kind, on=False)
    assert not (tmp_path / "off" / "run").exists()
    profile = llmprof.load_profile(tmp_path / "on" / "run")
    assert profile.manifest.status == "complete", profile.manifest
    assert profile.manifest.layout == layout
    assert {row.rank for row in profile.steps} == {row.rank for row in profile.operators} == {0, 1}
    assert profile.workload is not None and profile.workload.dp == 2, profile.manifest.warnings
    kinds = {row.kind for row in profile.collectives}
    assert kinds == ({"all_reduce"} if kind == "ddp" else {"all_gather", "reduce_scatter"})
    assert {row.backend for row in profile.sources} == {"gloo"}
