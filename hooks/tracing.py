"""The live model, its recorded inputs and the captured rows as a request for a Workload."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from llmprof.errors import LlmprofError
from llmprof.hooks import captured

if TYPE_CHECKING:
    from llmprof.hooks.capture import Capture
    from llmprof.hooks.workload import TraceRequest
    from llmprof.schema.workload import Workload

TRACE_TIMEOUT_S = 120.0

logger = logging.getLogger("llmprof")


@dataclass(frozen=True, kw_only=True)
class Traced:
    """What the trace at the end needs of the live model; holding it keeps that alive.

    DDP's wrapper is not held: its reducer would outlive the user's `destroy_process_group`, and freeing it after that
    can deadlock inside torch (gloo's thread waits for the interpreter lock that its joiner holds).
    """

    model: nn.Module
    optimizer: Optimizer | None

    @classmethod
    def of(cls, model: nn.Module, optimizer: Optimizer | None) -> Traced:
        """The model below the wrappers of DDP and torch.compile, and its optimizer."""
        inner = getattr(model, "_orig_mod", model)
        if isinstance(inner, DistributedDataParallel):
            inner = inner.module
        return cls(model=inner, optimizer=optimizer)


def trace(capture: Capture) -> Workload | None:
    """The run's Workload, traced in a forked child; None, with a warning that says why, when it cannot be made."""
    from llmprof.hooks.workload import trace_workload

    reason = _why_not(capture)
    if reason:
        capture.state.warnings.append(f"no workload was traced, so this run cannot be forecast: {reason}")
        return None
    logger.info("llmprof: tracing the model for forecasts (at most %.0f s)", TRACE_TIMEOUT_S)
    start = time.perf_counter()
    try:
        workload = trace_workload(make_request(capture), timeout_s=TRACE_TIMEOUT_S)
    except LlmprofError as error:
        capture.state.warnings.append(f"no workload was traced, so this run cannot be forecast: {error}")
        logger.warning("llmprof: %s", capture.state.warnings[-1])
        return None
    logger.info("llmprof: traced in %.1f s", time.perf_counter() - start)
    return workload


def make_request(capture: Capture) -> TraceRequest:
    """What is known about the model's step, for the tracer."""
    from llmprof.hooks.workload import TraceRequest

    inputs, options, state = capture.taps.roots.inputs, capture.state.options, capture.state
    traced = capture.traced
    assert traced is not None and inputs.args is not None
    counts = [row.microbatches for row in capture.rows if row.kind == "train"]
    recorded = capture.windows.recorded
    return TraceRequest(
        model=traced.model,
        args=inputs.args,
        kwargs=inputs.kwargs,
        optimizer=traced.optimizer,
        batch=inputs.batch or 1,
        seq=inputs.seq or 1,
        accum=int(np.median(counts)) if counts else 1,
        dp=state.layout.dp if state.layout is not None else 1,
        loss_fn=options.loss_fn,
        outside_rows=recorded[-1].recording.outside_rows if recorded else (),
        precision=state.precision,
        batch_dim=options.batch_dim,
        seq_dim=options.seq_dim,
        name=options.name or options.directory.name,
        implementation="compile" if captured.compile_count() else "eager",
    )


def _why_not(capture: Capture) -> str:
    roots = capture.taps.roots
    if not capture.rows:
        return "no step was seen"
    if roots.called_in_parts:
        return f"the loop calls parts of {roots.called_in_parts}, not the module itself"
    if capture.traced is None:
        return "no module with parameters and its inputs was seen running forward: 4 steps are enough"
    return ""
