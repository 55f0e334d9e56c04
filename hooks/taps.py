"""Turns torch's own hooks into step events: optimizer steps, batches of a DataLoader, forwards of the root modules."""

from __future__ import annotations

import os
import threading
import time
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as nn_module
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook
from torch.utils.data import dataloader

from llmprof.hooks import private
from llmprof.hooks.guard import Guard
from llmprof.hooks.rootinputs import RootInputs
from llmprof.hooks.steps import StepDetector

BATCHES_BEFORE_ROOTS = 16
"""Batches without any optimizer step after which root forwards are watched (an inference loop)."""

_COMPILE_WARNING = r"Using `torch\.compile\(module\)` when there are global hooks"


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
            self.roots.advance(self._guard)

    def before_batch(self) -> None:
        """A batch is about to be requested, from a DataLoader or through `session.data`."""
        if not self._is_training_thread():
            return
        self._batches += 1
        if self._batches >= BATCHES_BEFORE_ROOTS and not self.roots.installed:
            self.roots.advance(self._guard)
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
        if os.getpid() != self._process or torch.compiler.is_compiling():
            return
        self.optimizer_time = time.perf_counter()
        self.optimizers.add(optimizer)
        if not self.roots.installed:
            self.roots.advance(self._guard)
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


class Roots:
    """The outermost modules with parameters that the loop calls: found in one step, watched from then on."""

    def __init__(self, detector: StepDetector) -> None:
        self._detector = detector
        self._thread = threading.get_ident()
        self._process = os.getpid()
        self._depth = 0
        self._finding: list[Callable[[], None]] = []
        self._watching: list[Callable[[], None]] = []
        self._restore_filter: Callable[[], None] | None = None
        self._known: dict[int, weakref.ref[nn.Module]] = {}
        self._trained: set[int] = set()
        self._main_id = 0
        self.inputs = RootInputs()

    @property
    def installed(self) -> bool:
        """True from the moment that forwards are watched."""
        return bool(self._finding or self._watching)

    @property
    def modules(self) -> list[nn.Module]:
        """The roots that are alive, in the order in which they were first called."""
        return [module for ref in self._known.values() if (module := ref()) is not None]

    @property
    def main(self) -> nn.Module | None:
        """The root with the most parameters among those that ran with gradients."""
        ref = self._known.get(self._main_id)
        return ref() if ref is not None else None

    def advance(self, guard: Guard) -> None:
        """At first find the roots, by the depth of calls; once some are known, only watch them."""
        if not self.installed:
            self._ignore_compile_warning()
            find = nn_module.register_module_forward_pre_hook(guard.wrap(self._enter))
            leave = nn_module.register_module_forward_hook(guard.wrap(self._leave), always_call=True)
            self._finding = [find.remove, leave.remove]
        elif self._finding and self._known:
            watch = nn_module.register_module_forward_pre_hook(guard.wrap(self._watch))
            self._watching.append(watch.remove)
            self._stop_finding()
            self.inputs.watch(self.main, guard)

    def remove(self) -> None:
        """Take all hooks out."""
        self._stop_finding()
        while self._watching:
            self._watching.pop()()
        if self._restore_filter is not None:
            self._restore_filter()
            self._restore_filter = None
        self.inputs.remove()

    def _stop_finding(self) -> None:
        while self._finding:
            self._finding.pop()()
        self._depth = 0

    def _ignore_compile_warning(self) -> None:
        """torch.compile warns about global hooks, which a user with `-W error` would get as an exception."""
        warnings.filterwarnings("ignore", message=_COMPILE_WARNING)
        entry = warnings.filters[0]

        def restore() -> None:
            if entry in warnings.filters:
                warnings.filters.remove(entry)  # type: ignore[attr-defined]

        self._restore_filter = restore

    def _enter(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        if torch.compiler.is_compiling():
            return
        if self._depth == 0 and self._is_call_of_the_loop():
            self._found(module)
            self._called(module, args)
        self._depth += 1

    def _leave(self, module: nn.Module, args: tuple[Any, ...], result: Any) -> None:
        if torch.compiler.is_compiling():
            return
        self._depth = max(0, self._depth - 1)

    def _watch(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        if torch.compiler.is_compiling():
            return
        ref = self._known.get(id(module))
        if ref is not None and ref() is module and self._is_call_of_the_loop():
            self._called(module, args)

    def _is_call_of_the_loop(self) -> bool:
        """False for a recomputation (it runs inside the backward pass) and in other threads or processes."""
        return (
            threading.get_ident() == self._thread
            and os.getpid() == self._process
            and not private.in_backward()
        )

    def _found(self, module: nn.Module) -> None:
        if id(module) not in self._known and next(module.parameters(), None) is not None:
            self._known[id(module)] = weakref.ref(module)

    def _called(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        if id(module) not in self._known:
            return
        grad = torch.is_grad_enabled() and module.training
        if grad:
            self._trained.add(id(module))
            self._choose_main(module)
        elif self._trained and id(module) not in self._trained:
            return  # a frozen reference model beside the trained one
        if not grad or id(module) != self._main_id:
            self._detector.root_forward(grad=grad, counts=not grad)
            return
        tokens, sequences = self.inputs.size(args)
        self._detector.root_forward(grad=True, tokens=tokens, sequences=sequences)

    def _choose_main(self, module: nn.Module) -> None:
        if id(module) == self._main_id:
            return
        main = self.main
        if main is None or _num_parameters(module) > _num_parameters(main):
            self._main_id = id(module)


def _num_parameters(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())
