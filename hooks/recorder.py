"""A profiled window of a running training loop in, a Recording of attributed rows out."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.profiler import ProfilerActivity

from llmprof.hooks import events, private
from llmprof.hooks.aggregate import Aggregator, Statistics, Tables
from llmprof.hooks.attribute import MODULE_SCOPE, STEP_SCOPE, attribute
from llmprof.hooks.calls import Attribution
from llmprof.hooks.groups import Groups
from llmprof.hooks.modules import ModuleNames
from llmprof.hooks.timeline import Step
from llmprof.schema.profile import CollectiveRow, HostRow, OperatorRow, PhaseRow, SpanRow

_MAX_HOOK_ERRORS = 3


@dataclass(frozen=True, kw_only=True)
class Recording:
    """What one profiled window says about one rank.

    Attributes:
        operators, collectives, spans, phases, host: rows of `llmprof.schema.profile`; spans are of one step.
        steps: (index, duration in microseconds) of each step; the phases of a step sum to its duration.
        attributed_fraction: share of the operators' exclusive time whose innermost module is known (or that
            is the optimizer's or the data loader's); None when nothing was recorded.
        root_fraction: share of the operators' exclusive time that is the root module's own.
        warnings: what went wrong, or was not recorded.
        outside_rows: the operators that ran outside every module of the model, such as the loss.
    """

    operators: tuple[OperatorRow, ...] = ()
    collectives: tuple[CollectiveRow, ...] = ()
    spans: tuple[SpanRow, ...] = ()
    phases: tuple[PhaseRow, ...] = ()
    host: tuple[HostRow, ...] = ()
    steps: tuple[tuple[int, float], ...] = ()
    attributed_fraction: float | None = None
    root_fraction: float | None = None
    warnings: tuple[str, ...] = ()
    outside_rows: tuple[OperatorRow, ...] = ()


class Recorder:
    """Records one window of steps; use a new one for the next window.

    Args:
        model_names: names of the modules of the model.
        rank: global rank, written into the rows.
        device: device type that does the work, "cpu" or "cuda".
    """

    def __init__(self, model_names: ModuleNames, *, rank: int, device: str) -> None:
        self._names = model_names
        self._rank = rank
        self._device = device
        self._scopes = _ModuleScopes(model_names)
        self._open_scope = private.scope_type()
        self._profiler: torch.profiler.profile | None = None
        self._warnings: list[str] = []
        self._start_us = 0.0

    @property
    def active(self) -> bool:
        """True between `start` and `stop` when a window is being recorded."""
        return self._profiler is not None

    def start(self) -> None:
        """Opens the window. When that is impossible, `active` stays False and the reason is among the warnings."""
        if self._profiler is not None:
            return
        if private.profiler_active():
            self._warnings.append("no operators recorded: another torch profiler was active in this process")
            return
        began = time.perf_counter()
        activities = [ProfilerActivity.CPU]
        if self._device == "cuda":
            activities.append(ProfilerActivity.CUDA)
            torch.cuda.synchronize()
        profiler = private.window_profiler(activities)
        try:
            self._scopes.install()
            with private.quiet_kineto():
                profiler.start()
        except RuntimeError as error:
            self._scopes.remove()
            self._warnings.append(f"no operators recorded: the torch profiler did not start ({error})")
            return
        self._profiler = profiler
        self._start_us = (time.perf_counter() - began) * 1e6

    def enter(self, module: nn.Module) -> None:
        """Opens the scope of a module whose forward was already being entered when the window opened."""
        if self._profiler is not None:
            self._scopes.enter(module)

    def mark_step(self, step: int) -> None:
        """Marks the boundary at which step number `step` begins, or the last one ended."""
        if self._profiler is not None:
            with self._open_scope(f"{STEP_SCOPE}{step}"):
                pass

    def stop(self) -> Recording:
        """Closes the window and turns what it recorded into rows; never raises."""
        profiler, self._profiler = self._profiler, None
        if profiler is None:
            return Recording(warnings=tuple(self._warnings))
        began = time.perf_counter()
        try:
            if self._device == "cuda":
                torch.cuda.synchronize()
            self._scopes.remove()
            profiler.stop()
            results = private.kineto_results(profiler)
            del profiler
            stop_us = (time.perf_counter() - began) * 1e6
            return self._recording(results, stop_us)
        except Exception as error:  # noqa: BLE001 (the training run goes on whatever happens here)
            self._warnings.append(f"no operators recorded: {type(error).__name__}: {error}")
            return Recording(warnings=tuple(self._warnings))

    def _recording(self, results: Any, stop_us: float) -> Recording:
        self._warnings += self._scopes.warnings()
        if results is None:
            self._warnings.append("no operators recorded: this torch does not expose the profiler's events")
            return Recording(warnings=tuple(self._warnings))
        recorded = events.read(results, look_through=self._look_through, device=self._device)
        found = attribute(recorded, self._names, self._scopes.labels)
        if found.compiled_regions:
            self._warnings.append(
                "compiled regions are opaque: their operators belong to the compiled module"
            )
        steps = steps_of(found)
        if not steps:
            self._warnings.append("no operators recorded: the window holds no complete step")
            return Recording(warnings=tuple(self._warnings))
        groups = Groups.of(self._names.roots())
        tables = Aggregator(found, steps, groups, rank=self._rank, device=self._device).tables()
        return Recording(
            operators=tables.operators,
            collectives=tables.collectives,
            spans=tables.spans,
            phases=tables.phases,
            host=self._host_rows(tables, found, stop_us),
            steps=tuple((step.number, step.duration_us) for step in steps),
            attributed_fraction=tables.attributed_fraction,
            root_fraction=tables.root_fraction,
            warnings=tuple(self._warnings),
            outside_rows=tables.outside_rows,
        )

    def _look_through(self, name: str, overload: str) -> bool:
        return private.is_composite(name, overload, self._device)

    def _host_rows(self, tables: Tables, found: Attribution, stop_us: float) -> tuple[HostRow, ...]:
        samples = {
            "dispatch_us_per_operator": tables.host_us_per_operator,
            "dtensor_dispatch_us_per_op": tuple(found.wrapper_us),
            "profiler_start_us": (self._start_us,),
            "profiler_stop_us": (stop_us,),
        }
        return tuple(
            HostRow(rank=self._rank, name=name, value=s.median, iqr=s.iqr, n=s.n)
            for name, values in samples.items()
            if (s := Statistics.of(values)).n
        )


def steps_of(found: Attribution) -> list[Step]:
    """The steps between consecutive marks."""
    return [
        Step(number, start, end)
        for (number, start), (_, end) in zip(found.marks, found.marks[1:], strict=False)
        if end > start
    ]


class _ModuleScopes:
    """Global forward hooks that open one profiler scope per module call, on any thread.

    The hooks return None, touch no tensor, do nothing while a graph is compiled, and switch themselves off
    after three errors.
    """

    def __init__(self, names: ModuleNames) -> None:
        self.labels: list[tuple[str, bool]] = []
        self._names = names
        self._open_scope: Callable[[str], private.Scope] = private.scope_type()
        self._enter: Callable[[nn.Module], None] = self._open
        self._leave: Callable[[nn.Module], None] = self._close
        self._numbers: dict[int, int] = {}
        self._modules: list[nn.Module] = []
        self._local = threading.local()
        self._handles: list[Any] = []
        self._errors: list[str] = []

    def install(self) -> None:
        for hook in (_ModuleScopes._before, _ModuleScopes._after):
            private.skip_frame(hook)
        self._enter = private.uncompiled(self._open)
        self._leave = private.uncompiled(self._close)
        self._handles = [
            register_module_forward_pre_hook(self._before),
            register_module_forward_hook(self._after, always_call=True),
        ]

    def remove(self) -> None:
        """Removes our own hooks only, and lets go of the modules seen."""
        for handle in self._handles:
            handle.remove()
        self._handles = []
        self._modules = []
        self._numbers = {}

    def warnings(self) -> list[str]:
        if not self._errors:
            return []
        return [f"module hooks failed {len(self._errors)} times, the first time with {self._errors[0]}"]

    def enter(self, module: nn.Module) -> None:
        """As the hook before the module's forward does."""
        self._enter(module)

    def _before(self, module: nn.Module, args: Any) -> None:
        if torch.compiler.is_compiling():
            return
        if self._handles:  # the window may close between two hooks of one call
            self._enter(module)

    def _after(self, module: nn.Module, args: Any, output: Any) -> None:
        if torch.compiler.is_compiling():
            return
        self._leave(module)

    def _open(self, module: nn.Module) -> None:
        if len(self._errors) >= _MAX_HOOK_ERRORS:
            return
        try:
            scope = self._open_scope(f"{MODULE_SCOPE}{self._number(module)}")
            scope.__enter__()
            self._stack().append((module, scope))
        except Exception as error:  # noqa: BLE001 (it would reach the user's forward)
            self._errors.append(f"{type(error).__name__}: {error}")

    def _close(self, module: nn.Module) -> None:
        try:
            stack = self._stack()
            if not any(opened is module for opened, _ in stack):
                return
            while stack:  # an inner module whose end was not seen ends here
                opened, scope = stack.pop()
                scope.__exit__(None, None, None)
                if opened is module:
                    return
        except Exception as error:  # noqa: BLE001 (it would reach the user's forward)
            self._errors.append(f"{type(error).__name__}: {error}")

    def _stack(self) -> list[tuple[nn.Module, private.Scope]]:
        stack: list[tuple[nn.Module, private.Scope]] | None = getattr(self._local, "stack", None)
        if stack is None:
            stack = self._local.stack = []
        return stack

    def _number(self, module: nn.Module) -> int:
        number = self._numbers.get(id(module))
        if number is None:
            number = self._numbers[id(module)] = len(self.labels)
            self.labels.append(self._names.label(module))
            self._modules.append(module)  # its id stays unique while the window is open
        return number
