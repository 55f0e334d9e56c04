"""The live model, its recorded inputs and the captured rows as a request for a Workload."""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING

import numpy as np

from llmprof.errors import LlmprofError
from llmprof.hooks import captured

if TYPE_CHECKING:
    from llmprof.hooks.capture import Capture
    from llmprof.hooks.workload import TraceRequest
    from llmprof.schema.workload import Workload

TRACE_TIMEOUT_S = 120.0

logger = logging.getLogger("llmprof")


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
    model = capture.taps.roots.main
    assert model is not None and inputs.args is not None
    counts = [row.microbatches for row in capture.rows if row.kind == "train"]
    recorded = capture.windows.recorded
    return TraceRequest(
        model=model,
        args=inputs.args,
        kwargs=inputs.kwargs,
        optimizer=capture.taps.main_optimizer(),
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
    if roots.main is None:
        return "no module with parameters was seen running forward (the run was too short?)"
    if roots.inputs.args is None:
        return f"the inputs of {type(roots.main).__name__} were not seen; the run was too short (4 steps are enough)"
    return ""
