"""A live model and the inputs of one microbatch become a Workload: layers with symbolic operators per class of degrees."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec
import torch
from torch import nn

from llmprof.errors import WorkloadError
from llmprof.hooks.assemble import assemble_workload
from llmprof.hooks.child import run_forked
from llmprof.hooks.fake import clear_global_hooks
from llmprof.hooks.inputs import FakeSpec, describe_inputs
from llmprof.schema.profile import OperatorRow
from llmprof.schema.workload import Workload

__all__ = ["FakeSpec", "TraceRequest", "describe_inputs", "trace_workload", "trace_workload_here"]


@dataclass(frozen=True, kw_only=True)
class TraceRequest:
    """What is known about a training step when its window has closed.

    Attributes:
        model: the live root module, wrapped and sharded or not; it is only read.
        args, kwargs: inputs of the root forward, tensors as FakeSpec (see `describe_inputs`).
        optimizer: the live optimizer, or None.
        batch, seq: captured sequences per microbatch and tokens per sequence; 0 means as in the inputs.
        accum: microbatches per step and replica.
        dp: data-parallel degree of the run.
        loss_fn: loss of (output) or (output, target), when the user named it.
        outside_rows: captured operators of forward and backward work that ran outside every module.
        precision: compute dtype of the matmuls.
        batch_dim, seq_dim: dimensions of the token input.
        tp_plan: tensor-parallel style ("colwise", "rowwise", ...) by module name pattern, when the user gave one.
        degrees: tensor-parallel degrees to trace beside 1.
        name: name of the workload.
        implementation: "eager" or "compile".
        engine: run backward passes with torch's engine; None: where it works, which is not in a fork of a process
            that used an accelerator.
    """

    model: nn.Module
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    optimizer: torch.optim.Optimizer | None = None
    batch: int = 0
    seq: int = 0
    accum: int = 1
    dp: int = 1
    loss_fn: Callable[..., Any] | None = None
    outside_rows: tuple[OperatorRow, ...] = ()
    precision: str = "float32"
    batch_dim: int = 0
    seq_dim: int = 1
    tp_plan: Mapping[str, str] | None = None
    degrees: tuple[int, ...] = (2, 4, 8)
    name: str = ""
    implementation: str = "eager"
    engine: bool | None = None


def trace_workload(request: TraceRequest, *, timeout_s: float = 120) -> Workload:
    """Trace in a forked child, so that nothing of this process changes.

    Args:
        request: what to trace.
        timeout_s: wall time after which the child is killed.

    Raises:
        WorkloadError: no twin can be built or traced (the module is named), or the time ran out.
    """
    if request.engine is None:
        request = dataclasses.replace(request, engine=not _accelerator_in_use())

    def work() -> bytes:
        torch.set_num_threads(1)
        torch.set_default_device("cpu")
        clear_global_hooks()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                return b"W" + msgspec.json.encode(trace_workload_here(request))
            except WorkloadError as error:
                return b"E" + msgspec.json.encode((error.message, error.hint))

    result = run_forked(work, timeout_s=timeout_s)
    if result.status == "late":
        raise WorkloadError(
            f"tracing {type(request.model).__name__} took more than {timeout_s:g} s and was stopped",
            hint="raise the limit, or trace fewer degrees",
        )
    if result.status != "ok":
        reason = result.payload.decode(errors="replace") or "the process ended"
        raise WorkloadError(f"{type(request.model).__name__} cannot be traced: {reason}")
    if result.payload[:1] == b"E":
        message, hint = msgspec.json.decode(result.payload[1:], type=tuple[str, str])
        raise WorkloadError(message, hint=hint)
    return msgspec.json.decode(result.payload[1:], type=Workload)


def _accelerator_in_use() -> bool:
    """True when torch's engine may have started its device threads, or would start them in a child: it fails there."""
    return torch.cuda.is_initialized() or torch.xpu.is_initialized() or torch.backends.mps.is_available()


def trace_workload_here(request: TraceRequest) -> Workload:
    """Trace in this process: a fake process group takes the place of the default one meanwhile.

    Raises:
        WorkloadError: no twin can be built or traced.
    """
    return assemble_workload(request)
