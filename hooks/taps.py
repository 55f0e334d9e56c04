"""Turns torch's own hooks into step events: optimizer steps, batches of a DataLoader, forwards of the root modules."""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook
from torch.utils.data import dataloader

from llmprof.hooks.guard import Guard
from llmprof.hooks.roots import Roots
from llmprof.hooks.steps import StepDetector

BATCHES_BEFORE_ROOTS = 16
"""Batches without any optimizer step after which root forwards are watched (an inference loop)."""


class Taps:
    """All hooks that stay in for the whole session, and what they learn about the model.

    Module hooks go in after the first optimizer step, never before: `torch.compile` guards on the global hooks it
    finds at its first compilation, and taking them out again would recompile every frame.

    Args:
        detector: receives the events.
        guard: keeps errors of the hooks away from the user.
    """

    def __init__(self, detector: StepDetector, guard: Guard) -> None:
        self._detector = detector
        self._guard = guard
        self._thread = threading.get_ident()
        self._process = os.getpid()
        self._removers: list[Callable[[], None]] = []
        self._batches = 0
        self.roots = Roots(detector)
        self.optimizers: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self.optimizer_time = 0.0
        self.input_wait_s = 0.0

    def install(self) -> None:
        """Put the optimizer and DataLoader hooks in."""
        handle = register_optimizer_step_post_hook(self._guard.wrap(self._after_optimizer))
        self._removers.append(handle.remove)
        self._removers.append(self._wrap_loader())

    def remove(self) -> None:
        """Take everything out that was put in; other hooks stay."""
        while self._removers:
            self._removers.pop()()
        self.roots.remove()

    def main_optimizer(self) -> Optimizer | None:
        """The optimizer that holds most parameters of the main root."""
        main = self.roots.main
        known = {id(p) for p in main.parameters()} if main is not None else set()
        found, most = None, 0
        for optimizer in self.optimizers:
            held = sum(id(p) in known for group in optimizer.param_groups for p in group["params"])
            if held > most:
                found, most = optimizer, held
        return found

    def at_boundary(self) -> None:
        """A step has ended: the next one may watch more."""
        if self._detector_saw_enough():
            self.roots.advance(self._guard, self.optimizers)

    def before_batch(self) -> None:
        """A batch is about to be requested, from a DataLoader or through `session.data`."""
        if not self._is_training_thread():
            return
        self._batches += 1
        if self._batches >= BATCHES_BEFORE_ROOTS and not self.roots.installed:
            self.roots.advance(self._guard, self.optimizers)
        self._detector.batch_requested(grad=torch.is_grad_enabled())

    def after_batch(self, waited_s: float) -> None:
        """A batch has arrived after `waited_s` seconds."""
        if self._is_training_thread():
            self.input_wait_s += waited_s

    def _detector_saw_enough(self) -> bool:
        return bool(self.optimizers) or self.roots.installed

    def _is_training_thread(self) -> bool:
        return threading.get_ident() == self._thread and os.getpid() == self._process

    def _after_optimizer(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if os.getpid() != self._process:
            return
        self.optimizer_time = time.perf_counter()
        if optimizer not in self.optimizers:
            self.optimizers.add(optimizer)
            weakref.finalize(optimizer, self._detector.forget, id(optimizer)).atexit = False
            self.roots.search_again(self._guard)
        if not self.roots.installed:
            self.roots.advance(self._guard, self.optimizers)
        self._detector.optimizer_stepped(id(optimizer))

    def _wrap_loader(self) -> Callable[[], None]:
        """Wrap `__next__` of every DataLoader iterator; the returned function puts the original back."""
        owner = dataloader._BaseDataLoaderIter
        original = owner.__next__
        before, after = self._guard.wrap(self.before_batch), self._guard.wrap(self.after_batch)
        active = True

        def next_batch(iterator: Any) -> Any:
            if not active:
                return original(iterator)
            before()
            start = time.perf_counter()
            try:
                return original(iterator)
            finally:
                after(time.perf_counter() - start)

        def restore() -> None:
            nonlocal active
            active = False
            if owner.__next__ is next_batch:
                owner.__next__ = original  # type: ignore[method-assign]

        owner.__next__ = next_batch  # type: ignore[method-assign, assignment]
        return restore
