"""Finds the modules that the training loop calls, and watches their forwards."""

from __future__ import annotations

import os
import threading
import warnings
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as nn_module
from torch.optim.optimizer import Optimizer

from llmprof.hooks import private
from llmprof.hooks.guard import Guard
from llmprof.hooks.owner import MOST, find_owner, num_parameters
from llmprof.hooks.rootinputs import RootInputs
from llmprof.hooks.steps import StepDetector

_COMPILE_WARNING = r"Using `torch\.compile\(module\)` when there are global hooks"


class Roots:
    """The outermost modules with parameters that the loop calls: found in one step, watched from then on."""

    def __init__(self, detector: StepDetector) -> None:
        self._detector = detector
        self._thread = threading.get_ident()
        self._process = os.getpid()
        self._depth = 0
        self._boundaries = 0
        self._finding: list[Callable[[], None]] = []
        self._watching: list[Callable[[], None]] = []
        self._restore_filter: Callable[[], None] | None = None
        self._known: dict[int, weakref.ref[nn.Module]] = {}
        self._trained: set[int] = set()
        self._main_id = 0
        self.entering: nn.Module | None = None
        self._owner: weakref.ref[nn.Module] | None = None
        self.called_in_parts = ""
        self.inputs = RootInputs()

    @property
    def installed(self) -> bool:
        """True from the moment that forwards are watched."""
        return bool(self._finding or self._watching)

    @property
    def settled(self) -> bool:
        """True when the roots have been looked for and are only watched."""
        return bool(self._watching)

    @property
    def modules(self) -> list[nn.Module]:
        """The roots that are alive, in the order in which they were first called."""
        return [module for ref in self._known.values() if (module := ref()) is not None]

    @property
    def main(self) -> nn.Module | None:
        """The root with the most parameters among those that ran with gradients."""
        ref = self._known.get(self._main_id)
        return ref() if ref is not None else None

    @property
    def owner(self) -> nn.Module | None:
        """The module that holds all that is trained, when the loop calls its parts and never itself."""
        return self._owner() if self._owner is not None else None

    @property
    def named(self) -> list[nn.Module]:
        """Modules whose names cover everything: the owner, then the roots."""
        return [*([self.owner] if self.owner is not None else []), *self.modules]

    def advance(self, guard: Guard, optimizers: Iterable[Optimizer]) -> None:
        """At first find the roots, by the depth of calls; after a step of that, only watch them.

        Args:
            guard: keeps errors of the hooks away from the user.
            optimizers: those seen so far; they tell what is trained when hooks do not.
        """
        if not self.installed:
            self._ignore_compile_warning()
            self._find(guard)
        elif self._finding and self._passes_a_step():
            self._complete(guard, list(optimizers))
            watch = nn_module.register_module_forward_pre_hook(guard.wrap(self._watch))
            self._watching.append(watch.remove)
            self._stop_finding()

    def search_again(self, guard: Guard) -> None:
        """A new optimizer was stepped, so another model may be trained now."""
        if self.settled:
            while self._watching:
                self._watching.pop()()
            self._find(guard)

    def _find(self, guard: Guard) -> None:
        self._boundaries = 0
        find = nn_module.register_module_forward_pre_hook(guard.wrap(self._enter))
        leave = nn_module.register_module_forward_hook(guard.wrap(self._leave), always_call=True)
        self._finding = [find.remove, leave.remove]

    def _passes_a_step(self) -> bool:
        """True at the second boundary after the hooks went in: everything has been called once."""
        self._boundaries += 1
        return self._boundaries > 1

    def _complete(self, guard: Guard, optimizers: list[Optimizer]) -> None:
        """Look for the owner of the trained parameters when no root holds most of them: the loop calls its parts."""
        main = self.main
        trained = {id(p): p.numel() for o in optimizers for group in o.param_groups for p in group["params"]}
        held = sum(trained.get(id(p), 0) for p in main.parameters()) if main is not None else 0
        is_whole = held >= MOST * sum(trained.values())
        owner = None if is_whole else find_owner(trained)
        if owner is None:
            self.inputs.watch(main, guard)
            return
        self._owner = weakref.ref(owner)
        self.called_in_parts = type(owner).__name__

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
        if self._depth == 0 and self._is_call_of_the_loop():
            self._found(module)
            self._called(module, args)
        if self._finding:  # the call may have been a boundary, after which roots are only watched
            self._depth += 1

    def _leave(self, module: nn.Module, args: tuple[Any, ...], result: Any) -> None:
        self._depth = max(0, self._depth - 1)

    def _watch(self, module: nn.Module, args: tuple[Any, ...]) -> None:
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
        is_main = id(module) == self._main_id
        tokens, sequences = self.inputs.size(args) if grad and is_main else (None, None)
        self.entering = module
        try:
            self._detector.root_forward(
                grad=grad, counts=not grad or is_main, tokens=tokens, sequences=sequences
            )
        finally:
            self.entering = None

    def _choose_main(self, module: nn.Module) -> None:
        if id(module) == self._main_id:
            return
        main = self.main
        if main is None or num_parameters(module) > num_parameters(main):
            self._main_id = id(module)
