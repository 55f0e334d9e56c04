"""Step boundaries of many shapes of training loop: first as bare events, then as real loops under a session."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import llmprof
from llmprof.hooks.steps import BATCHES_WITHOUT_OPTIMIZER, MAX_REPEATS, StepDetector, StepFacts
from llmprof.hooks.window import FIRST_STEP, Schedule


class Events:
    """A detector, and the facts of the boundaries it made."""

    def __init__(self) -> None:
        self.facts: list[StepFacts] = []
        self.detector = StepDetector(self.facts.append)

    def __len__(self) -> int:
        return len(self.facts)


@given(
    steps=st.integers(1, 8),
    accumulation=st.integers(1, 6),
    optimizers=st.integers(1, 4),
    loader=st.booleans(),
)
def test_one_boundary_for_each_step_whatever_the_loop(
    steps: int, accumulation: int, optimizers: int, loader: bool
) -> None:
    events = Events()
    for _ in range(steps):
        for _ in range(accumulation):
            if loader:
                events.detector.batch_requested()
            events.detector.root_forward(grad=True, tokens=8, sequences=2)
        for key in range(optimizers):
            events.detector.optimizer_stepped(key)
    if loader:
        events.detector.batch_requested()  # the request that finds the loader empty
    else:
        events.detector.root_forward(grad=True)
    assert len(events) == steps
    assert all(f.microbatches == accumulation and f.complete and not f.evaluated for f in events.facts)
    assert all(f.tokens == 8 * accumulation and f.sequences == 2 * accumulation for f in events.facts)


def test_two_optimizers_without_loader_are_one_step_as_soon_as_both_are_known() -> None:
    events = Events()
    for _ in range(5):
        for key in (1, 2):  # discriminator, generator: each with its own forward
            events.detector.root_forward(grad=True)
            events.detector.optimizer_stepped(key)
    assert len(events) == 5  # the first boundary falls between the two, the other four once in each iteration


def test_a_critic_stepped_five_times_on_one_batch_is_one_step() -> None:
    events = Events()
    for _ in range(3):
        events.detector.batch_requested()
        for _ in range(5):
            events.detector.root_forward(grad=True)
            events.detector.optimizer_stepped(1)
    events.detector.batch_requested()
    assert [f.microbatches for f in events.facts] == [5, 5, 5]


def test_many_steps_on_one_batch_fall_back_to_forwards_and_say_so() -> None:
    events = Events()
    events.detector.batch_requested()
    for _ in range(MAX_REPEATS + 10):
        events.detector.root_forward(grad=True)
        events.detector.optimizer_stepped(1)
    assert len(events) == 10
    assert "forward passes" in events.detector.warnings[0]


def test_evaluation_ends_the_step_before_it_and_marks_the_one_it_is_in() -> None:
    events = Events()
    for _ in range(2):
        events.detector.root_forward(grad=True)
        events.detector.optimizer_stepped(1)
    for _ in range(3):
        events.detector.root_forward(grad=False)
    events.detector.root_forward(grad=True)
    events.detector.optimizer_stepped(1)
    events.detector.root_forward(grad=True)
    assert [f.evaluated for f in events.facts] == [False, False, True]
    assert [f.microbatches for f in events.facts] == [1, 1, 1]


def test_explicit_steps_switch_detection_off() -> None:
    events = Events()
    for _ in range(4):
        events.detector.batch_requested()
        events.detector.root_forward(grad=True, tokens=8)
        events.detector.optimizer_stepped(1)
        events.detector.step(tokens=100)
    assert [f.tokens for f in events.facts] == [100] * 4


def test_inference_counts_batches() -> None:
    events = Events()
    for _ in range(6):
        events.detector.batch_requested(grad=False)
        events.detector.root_forward(grad=False)
    assert len(events) == 5  # the sixth is not over
    assert not any(f.evaluated for f in events.facts)


def test_batches_without_an_optimizer_become_steps_after_a_while_and_say_so() -> None:
    events = Events()
    for _ in range(BATCHES_WITHOUT_OPTIMIZER + 11):
        events.detector.batch_requested()
    assert len(events) == 10
    assert "no torch optimizer" in events.detector.warnings[0]


@given(wait=st.integers(0, 9), warmup=st.integers(0, 4), active=st.integers(0, 4), repeat=st.integers(0, 3))
def test_windows_are_as_long_as_asked_and_apart(wait: int, warmup: int, active: int, repeat: int) -> None:
    windows = Schedule(wait=wait, warmup=warmup, active=active, repeat=repeat).windows()
    assert len(windows) == (repeat if active else 0)
    assert all(len(window) == active and window.start >= FIRST_STEP for window in windows)
    for before, after in pairwise(windows):
        assert after.start - before.stop >= min(wait + warmup, after.start)


# Real loops


class Net(nn.Module):
    """Two layers, the smallest thing that trains."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.outer = nn.Linear(4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.outer(self.inner(x).relu())


def loader(batches: int = 10, workers: int = 0) -> DataLoader[tuple[torch.Tensor, ...]]:
    return DataLoader(TensorDataset(torch.ones(2 * batches, 4)), batch_size=2, num_workers=workers)


def update(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> None:
    model(x).mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def plain() -> None:
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters())
    for (x,) in loader():
        update(model, optimizer, x)


def no_loader() -> None:
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(10):
        update(model, optimizer, torch.ones(2, 4))


def two_workers() -> None:
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters())
    for (x,) in loader(workers=2):
        update(model, optimizer, x)


def accumulation() -> None:
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters())
    for number, (x,) in enumerate(loader(40)):
        model(x).mean().backward()
        if number % 4 == 3:
            optimizer.step()
            optimizer.zero_grad()


def gan() -> None:
    generator, critic = nn.Linear(4, 4), Net()
    first = torch.optim.AdamW(critic.parameters())
    second = torch.optim.AdamW(generator.parameters())
    for (x,) in loader():
        (critic(x).mean() - critic(generator(x).detach()).mean()).backward()
        first.step()
        first.zero_grad()
        critic(generator(x)).mean().backward()
        second.step()
        second.zero_grad()


def optimizer_in_backward() -> None:
    model = Net()
    optimizers = {p: torch.optim.SGD([p], lr=0.1) for p in model.parameters()}

    def apply(parameter: torch.Tensor) -> None:
        optimizers[parameter].step()  # type: ignore[index]
        optimizers[parameter].zero_grad()  # type: ignore[index]

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(apply)
    for (x,) in loader():
        model(x).mean().backward()


def recomputed() -> None:
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(10):
        hidden = torch.utils.checkpoint.checkpoint(model, torch.ones(2, 4), use_reentrant=False)
        hidden.mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def generator_of_batches(session: llmprof.Session) -> None:
    def batches() -> Iterator[torch.Tensor]:
        for _ in range(10):
            yield torch.ones(2, 4)

    model = Net()
    optimizer = torch.optim.AdamW(model.parameters())
    for x in session.data(batches()):
        update(model, optimizer, x)


def captured(directory: Path, loop: Callable[..., Any], *, hand_over: bool = False) -> llmprof.Profile:
    with llmprof.session(logdir=directory, wait=2, warmup=0, active=1, workload=False) as session:
        loop(session) if hand_over else loop()
    return llmprof.load_profile(directory)


@pytest.mark.parametrize("loop", [plain, no_loader, accumulation, gan, optimizer_in_backward, recomputed])
def test_real_loops_have_ten_steps(tmp_path: Path, loop: Callable[[], None]) -> None:
    steps = captured(tmp_path, loop).steps
    assert [row.step for row in steps] == list(range(10))
    watched = [row for row in steps if row.step >= 3]  # forwards are watched from the second step on
    assert {row.microbatches for row in watched} == {4 if loop is accumulation else 1} or loop is gan
    assert all(row.duration_us > 0 for row in steps)


@pytest.mark.filterwarnings("ignore:This process.*is multi-threaded:DeprecationWarning")
def test_loader_workers_do_not_disturb(tmp_path: Path) -> None:
    assert len(captured(tmp_path, two_workers).steps) == 10


def test_own_iterables_are_watched_through_the_session(tmp_path: Path) -> None:
    profile = captured(tmp_path, generator_of_batches, hand_over=True)
    assert len(profile.steps) == 10
    assert any(row.name == "input_wait_us" and row.n == 10 for row in profile.host)


def test_evaluation_between_epochs_is_listed_and_not_averaged(tmp_path: Path) -> None:
    def epochs() -> None:
        model = Net()
        optimizer = torch.optim.AdamW(model.parameters())
        for _ in range(2):
            for (x,) in loader(8):
                update(model, optimizer, x)
            model.eval()
            with torch.no_grad():
                for (x,) in loader(5):
                    model(x)
            model.train()

    steps = captured(tmp_path, epochs).steps
    trained = [row for row in steps if row.kind != "outlier"]
    assert len(trained) == 16
    assert [row.step for row in steps if row.kind == "evaluation"] == [8]
