"""Reads off a live run what it is: layout, compute dtype, devices, software, model FLOPs."""

from __future__ import annotations

import os
import platform
import resource
import socket
import sys
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from llmprof.errors import LayoutError
from llmprof.hooks import private
from llmprof.schema.layout import PRECISIONS, Layout
from llmprof.schema.operators import MATMUL_FAMILIES
from llmprof.schema.profile import OperatorRow, SourceRow

_TP_NAMES = ("tp", "model", "mp", "tensor")
_FSDP1_ZERO = {
    "FULL_SHARD": 3,
    "SHARD_GRAD_OP": 2,
    "NO_SHARD": 0,
    "HYBRID_SHARD": 3,
    "_HYBRID_SHARD_ZERO2": 2,
}


def captured_layout(root: nn.Module | None, *, world_size: int) -> Layout | None:
    """The layout that the wrappers of the root show, without microbatches; None when they do not explain the world.

    DDP replicates; FSDP1 and FSDP2 shard; a further mesh axis of the parameters is tensor parallelism. Pipeline
    stages cannot be seen from one rank.
    """
    if root is None:
        return Layout() if world_size == 1 else None
    modules = list(root.modules())
    degrees = _sharded_by_mesh(root, is_fsdp=any(private.is_fsdp2(m) for m in modules))
    if not degrees:
        degrees = _sharded_by_wrapper(modules, world_size)
    try:
        layout = Layout(**degrees)  # type: ignore[arg-type]
    except LayoutError:
        return None
    return layout if layout.gpus == world_size else None


def _sharded_by_wrapper(modules: Iterable[nn.Module], world_size: int) -> dict[str, int]:
    for module in modules:
        if type(module).__name__ == "FullyShardedDataParallel":
            strategy = getattr(getattr(module, "sharding_strategy", None), "name", "FULL_SHARD")
            group: Any = getattr(module, "process_group", None)
            zero = _FSDP1_ZERO.get(strategy, 3)
            shard = group.size() if "HYBRID" in strategy and group is not None else 0
            return {"dp": world_size, "zero": zero, "shard": 0 if shard == world_size else shard}
        if isinstance(module, DistributedDataParallel):
            return {"dp": module.process_group.size()}
    return {"dp": 1}


def _sharded_by_mesh(root: nn.Module, *, is_fsdp: bool) -> dict[str, int]:
    """Degrees from the DTensor parameters: each mesh axis is replicated (dp), FSDP-sharded or tensor-parallel."""
    sharded: list[Any] = [p for p in root.parameters() if hasattr(p, "placements")]
    meshes = [(p.device_mesh, p.placements) for p in sharded]
    if not meshes:
        return {}
    widest = max((mesh for mesh, _ in meshes), key=lambda mesh: mesh.ndim)
    names = widest.mesh_dim_names or ("",) * widest.ndim
    placements = [p for mesh, p in meshes if mesh.ndim == widest.ndim]
    is_sharded = [any(not p[axis].is_replicate() for p in placements) for axis in range(widest.ndim)]
    tp_axes = [axis for axis, name in enumerate(names) if name in _TP_NAMES]
    if not tp_axes:
        tp_axes = [axis for axis in range(widest.ndim) if is_sharded[axis]][is_fsdp:]
    tp = dp = shard = 1
    for axis in range(widest.ndim):
        if axis in tp_axes:
            tp *= widest.size(axis)
        else:
            dp *= widest.size(axis)
            shard *= widest.size(axis) if is_fsdp and is_sharded[axis] else 1
    if not is_fsdp:
        return {"dp": dp, "tp": tp}
    return {"dp": dp, "zero": 3, "shard": 0 if shard == dp else shard, "tp": tp}


def compute_precision(root: nn.Module | None, autocast: torch.dtype | None) -> str:
    """Dtype of the matmuls: autocast, else FSDP's parameter dtype, else that of the parameters."""
    if autocast is not None:
        return _precision_name(autocast)
    if root is None:
        return "float32"
    for module in root.modules():
        dtype = _mixed_precision_dtype(module)
        if dtype is not None:
            return _precision_name(dtype)
    matrices = [p for p in root.parameters() if p.dim() >= 2 and p.is_floating_point()]
    if not matrices:
        return "float32"
    name = _precision_name(max(matrices, key=lambda p: p.numel()).dtype)
    is_cuda = matrices[0].device.type == "cuda"
    uses_tf32 = is_cuda and torch.get_float32_matmul_precision() != "highest"
    return "tfloat32" if name == "float32" and uses_tf32 else name


def _mixed_precision_dtype(module: nn.Module) -> torch.dtype | None:
    """Compute dtype that FSDP1 (`mixed_precision`) or FSDP2 (`_mp_policy` of its state) casts parameters to."""
    if private.is_fsdp2(module):
        state: Any = getattr(module, "_get_fsdp_state", lambda: None)()
        policy: Any = getattr(state, "_mp_policy", None)
    else:
        policy = getattr(module, "mixed_precision", None)
    dtype = getattr(policy, "param_dtype", None)
    return dtype if isinstance(dtype, torch.dtype) else None


def _precision_name(dtype: torch.dtype) -> str:
    name = str(dtype).removeprefix("torch.")
    name = "float8" if name.startswith("float8") else name
    return name if name in PRECISIONS else "float32"


def model_flops_per_step(operators: Iterable[OperatorRow]) -> float | None:
    """Matmul and attention FLOPs of one step on this rank without recomputation; None when no matmul was seen.

    A backward pass of attention recomputes scores: by the convention of MFU it counts twice the forward.
    """
    total = 0.0
    for row in operators:
        if row.family not in MATMUL_FAMILIES:
            continue
        flops = row.count * row.flops
        if row.family == "attention":
            total += 3 * flops if row.phase == "forward" else 0.0
        elif row.phase in ("forward", "backward_input", "backward_weight"):
            total += flops
    return total or None


def source_row(*, rank: int, device: str, clock: str, backend: str) -> SourceRow:
    """The machine and the software that this rank runs on."""
    on_cuda = device == "cuda" and torch.cuda.is_available()
    return SourceRow(
        rank=rank,
        hostname=socket.gethostname(),
        device=device,
        device_name=torch.cuda.get_device_name() if on_cuda else _cpu_name(),
        device_count=torch.cuda.device_count() if on_cuda else os.cpu_count() or 1,
        threads=torch.get_num_threads(),
        memory_bytes=_device_memory_bytes() if on_cuda else _host_memory_bytes(),
        backend=backend,
        clock=clock,
        software=f"torch {torch.__version__}, python {platform.python_version()}",
    )


def peak_memory_bytes(device: str) -> int:
    """Peak bytes so far: of torch's allocator on CUDA (the user's counters stay as they are), resident on CPU."""
    if device == "cuda":
        return torch.cuda.max_memory_allocated()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def compile_count() -> int:
    """Frames and graphs that torch.compile has made so far; 0 while it was never imported."""
    utils: Any = sys.modules.get("torch._dynamo.utils")
    counters = getattr(utils, "counters", None)
    return 0 if counters is None else int(counters["frames"]["total"] + counters["stats"]["unique_graphs"])


def _cpu_name() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            for line in file:
                if line.startswith("model name"):
                    return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _host_memory_bytes() -> int | None:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError):
        return None


def _device_memory_bytes() -> int:
    return int(torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory)
