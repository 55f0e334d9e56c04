"""The public face of capture: a decorator and a context manager around a training loop that need not know it."""

from __future__ import annotations

import atexit
import inspect
import os
from collections.abc import AsyncGenerator, Callable, Generator, Iterable, Iterator
from contextlib import aclosing, contextmanager
from contextvars import ContextVar, Token
from functools import wraps
from pathlib import Path
from types import TracebackType
from typing import Any, ParamSpec, TypeVar, cast, overload

from typing_extensions import Self, Unpack

from llmprof.hooks.capture import Capture
from llmprof.hooks.options import CaptureOptions, SessionOptions, make_options

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")

_current: ContextVar[Session | None] = ContextVar("llmprof_session", default=None)


@overload
def profile(function: Callable[P, R], /) -> Callable[P, R]: ...
@overload
def profile(**options: Unpack[SessionOptions]) -> Callable[[Callable[P, R]], Callable[P, R]]: ...
def profile(function: Callable[P, R] | None = None, /, **options: Unpack[SessionOptions]) -> Any:
    """Captures the training loop that runs inside the decorated function.

    Used bare (`@llmprof.profile`) or with options (`@llmprof.profile(logdir="runs/a", wait=5)`). The function keeps
    its signature, its return value and its exceptions; inside another session it joins that one. `LLMPROF=0` in the
    environment switches it off.

    Args:
        function: the function, when used bare.
        **options: see `llmprof.hooks.options.CaptureOptions`.

    Raises:
        RequestError: an unknown option, or a value that is no number of steps.
    """
    checked = make_options(options)

    def decorate(target: Callable[P, R]) -> Callable[P, R]:
        return _profiled(target, checked)

    return decorate if function is None else decorate(function)


def session(**options: Unpack[SessionOptions]) -> Session:
    """A capture as a context manager: `with llmprof.session(logdir="runs/a") as s:`.

    Raises:
        RequestError: an unknown option, or a value that is no number of steps.
    """
    return Session(make_options(options))


class Session:
    """A running capture. Inside another session it hands everything on to that one.

    Args:
        options: how to capture.
        implicit: not asked for by the script itself, so a process that trains nothing writes nothing.
    """

    def __init__(self, options: CaptureOptions, *, implicit: bool = False) -> None:
        self._options = options
        self._implicit = implicit
        self._capture: Capture | None = None
        self._outer: Session | None = None
        self._token: Token[Session | None] | None = None

    @property
    def path(self) -> Path:
        """The run directory."""
        return self._outer.path if self._outer is not None else self._options.directory

    def __enter__(self) -> Self:
        self.open()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close(clean=error is None or _is_clean_exit(error))

    def open(self) -> None:
        """Start capturing; `with` does this."""
        if not is_enabled() or self._capture is not None:
            return
        outer = _current.get()
        if outer is not None and outer.is_live:
            self._outer = outer
            return
        self._capture = Capture(self._options, implicit=self._implicit)
        self._capture.open()
        self._token = _current.set(self)
        atexit.register(self.close)

    def close(self) -> None:
        """Stop capturing and write the run; harmless when called again."""
        self._close(clean=True)

    def step(self, tokens: int | None = None) -> None:
        """Mark the end of a training step; steps are no longer detected from then on.

        Args:
            tokens: tokens that this rank consumed in the step, when they cannot be read off the model's input.
        """
        target = self._target()
        if target is not None:
            target.mark_step(tokens)

    @contextmanager
    def region(self, name: str) -> Iterator[None]:
        """Name a part of the step. Steps with a region "evaluation" or "checkpoint" are listed but not averaged."""
        target = self._target()
        if target is None:
            yield
            return
        with target.region(name):
            yield

    def data(self, iterable: Iterable[T]) -> Iterator[T]:
        """Iterate over batches that do not come from a DataLoader; waiting for them counts as input."""
        target = self._target()
        return iter(iterable) if target is None else target.watch_data(iterable)

    @property
    def is_live(self) -> bool:
        """True between `open` and `close` in the process that opened it."""
        return self._capture is not None and self._capture.is_live

    def _target(self) -> Capture | None:
        owner = self._outer if self._outer is not None else self
        return owner._capture if owner.is_live else None

    def _close(self, *, clean: bool) -> None:
        if self._capture is None or not self._capture.in_this_process:
            return
        atexit.unregister(self.close)
        self._capture.close(trace_workload=clean)
        if self._token is not None:
            if _current.get() is self:
                _current.set(None)
            self._token = None


def is_enabled() -> bool:
    """False when the environment says `LLMPROF=0`."""
    return os.environ.get("LLMPROF", "1") != "0"


def _is_clean_exit(error: BaseException) -> bool:
    return isinstance(error, SystemExit) and error.code in (None, 0)


def _profiled(function: Callable[P, R], options: CaptureOptions) -> Callable[P, R]:
    """The function inside a session; coroutines and generators, also asynchronous ones, keep their kind."""
    if not is_enabled():
        return function
    untyped = cast(Callable[..., Any], function)
    if inspect.iscoroutinefunction(function):

        async def run_async(*args: Any, **kwargs: Any) -> Any:
            with Session(options):
                return await untyped(*args, **kwargs)

        return cast(Callable[P, R], wraps(function)(run_async))
    if inspect.isgeneratorfunction(function):

        def run_generator(*args: Any, **kwargs: Any) -> Generator[Any, Any, Any]:
            with Session(options):
                return (yield from untyped(*args, **kwargs))

        return cast(Callable[P, R], wraps(function)(run_generator))

    if inspect.isasyncgenfunction(function):

        async def run_async_generator(*args: Any, **kwargs: Any) -> AsyncGenerator[Any, Any]:
            with Session(options):
                async with aclosing(untyped(*args, **kwargs)) as items:
                    following = items.asend(None)
                    while True:
                        try:
                            item = await following
                        except StopAsyncIteration:
                            return
                        try:
                            following = items.asend((yield item))
                        except GeneratorExit:
                            raise
                        except BaseException as error:  # noqa: BLE001 (thrown in by the consumer)
                            following = items.athrow(error)

        return cast(Callable[P, R], wraps(function)(run_async_generator))

    @wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        with Session(options):
            return function(*args, **kwargs)

    return run
