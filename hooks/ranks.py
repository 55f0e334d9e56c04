"""Which rank this process is: from the process group when there is one, else from the launcher's environment."""

from __future__ import annotations

import os

import torch.distributed as dist


def current_rank() -> int:
    """Global rank, 0 for a single process."""
    if _initialized():
        return dist.get_rank()
    return _from_environment("RANK", "SLURM_PROCID", default=0)


def current_world_size() -> int:
    """Number of processes in the run, at least 1."""
    if _initialized():
        return dist.get_world_size()
    return _from_environment("WORLD_SIZE", "SLURM_NTASKS", default=1)


def current_backend() -> str:
    """Collective backend of the default process group, "" when there is none."""
    return str(dist.get_backend()) if _initialized() else ""


def _initialized() -> bool:
    return dist.is_available() and dist.is_initialized()


def _from_environment(*names: str, default: int) -> int:
    for name in names:
        value = os.environ.get(name, "")
        if value.isdigit():
            return int(value)
    return default
