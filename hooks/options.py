"""What a person can ask of a capture, checked."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, TypedDict

from llmprof.errors import RequestError


class SessionOptions(TypedDict, total=False):
    """Arguments of `llmprof.profile` and `llmprof.session`; the defaults are those of `CaptureOptions`."""

    logdir: str | os.PathLike[str]
    name: str
    wait: int
    warmup: int
    active: int
    repeat: int
    workload: bool
    batch_dim: int
    seq_dim: int
    loss_fn: Callable[..., Any] | None
    trace: bool


@dataclass(frozen=True, kw_only=True)
class CaptureOptions:
    """How a run is captured.

    Attributes:
        logdir: where the run is written; TensorBoard can be pointed at it.
        name: subdirectory of `logdir` for this run, "" to write into `logdir` itself (an earlier run is replaced).
        wait: steps at the start that are only timed and not averaged.
        warmup: steps after that, timed while the profiler is made ready.
        active: steps in a profiled window.
        repeat: number of windows, each after `wait` + `warmup` more steps.
        workload: trace the model for forecasts when the run ends (rank 0).
        batch_dim: dimension of the model's inputs that counts sequences.
        seq_dim: dimension of the token input that counts tokens.
        loss_fn: maps the model's output to a loss, for a workload that contains the loss.
        trace: also keep a Chrome trace of the window.
    """

    logdir: str | os.PathLike[str] = "runs/llmprof"
    name: str = ""
    wait: int = 5
    warmup: int = 2
    active: int = 3
    repeat: int = 1
    workload: bool = True
    batch_dim: int = 0
    seq_dim: int = 1
    loss_fn: Callable[..., Any] | None = None
    trace: bool = False

    def __post_init__(self) -> None:
        for key in ("wait", "warmup", "active", "repeat"):
            value = getattr(self, key)
            if not isinstance(value, int) or value < 0:
                raise RequestError(f"{key}={value!r} is not a number of steps", hint=f"set {key}=0 or more")

    @property
    def directory(self) -> Path:
        """The run directory."""
        return Path(self.logdir) / self.name if self.name else Path(self.logdir)


def make_options(given: SessionOptions) -> CaptureOptions:
    """Options from keyword arguments.

    Raises:
        RequestError: an unknown option, or a value that is no number of steps.
    """
    known = [field.name for field in fields(CaptureOptions)]
    unknown = sorted(set(given) - set(known))
    if unknown:
        raise RequestError(f"unknown option {unknown[0]!r}", hint=f"known options: {', '.join(known)}")
    return CaptureOptions(**given)
