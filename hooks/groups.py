"""A collective call in, its kind, message size, mesh axis and group size out, without asking any other rank."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from math import prod

import torch.distributed as dist
from torch import nn

from llmprof.hooks import private
from llmprof.hooks.attribute import Call
from llmprof.schema.operators import size_bytes, split_name

_GATHERED = ("all_gather", "reduce_scatter")

_AXES = {
    "dp": ("dp", "data", "replicate", "shard", "fsdp", "ddp", "dp_replicate", "dp_shard", "dp_shard_cp", "dp_cp"),
    "tp": ("tp", "tensor", "model", "mp"),
    "sp": ("sp", "sequence"),
    "cp": ("cp", "context"),
    "pp": ("pp", "pipe", "pipeline", "stage"),
    "ep": ("ep", "expert", "experts"),
}  # fmt: skip
_AXIS_OF_NAME = {name: axis for axis, names in _AXES.items() for name in names}


@dataclass(frozen=True, kw_only=True)
class Message:
    """What one collective call moves; `group_size` 0 and `axis` "" when not known."""

    kind: str
    axis: str
    group_size: int
    size_bytes: int
    dtype: str


@dataclass(frozen=True, kw_only=True)
class Groups:
    """Process groups and mesh axes of this process, as the model's wrappers and parameters show them.

    Attributes:
        backend: of the default group ("gloo", "nccl"), "" without one.
        world_size: ranks in the default group.
        sizes: ranks in each group that has more than one, default group included.
        axes: ranks by axis of the meshes that parameters are distributed over.
        data_parallel: some root is wrapped in DDP or FSDP.
    """

    backend: str = ""
    world_size: int = 1
    sizes: tuple[int, ...] = ()
    axes: dict[str, int] = field(default_factory=dict)
    data_parallel: bool = False

    def message(self, call: Call) -> Message:
        """Describes one collective call, from the backend's metadata where it gives any, else from shapes."""
        metadata = dict(call.metadata)
        group_size = int(metadata.get("Group size", 0) or 0) or self._group_size_of_call(call)
        axis = self._axis(call, metadata, group_size)
        if not group_size:
            group_size = self.axes.get(axis, 0) or (self.sizes[0] if len(set(self.sizes)) == 1 else 0)
        dtype = call.inputs[0].dtype if call.inputs else ""
        return Message(
            kind=call.kind,
            axis=axis,
            group_size=group_size,
            size_bytes=_message_bytes(call, group_size),
            dtype=dtype,
        )

    def _group_size_of_call(self, call: Call) -> int:
        _, name = split_name(call.op)
        if call.kind not in _GATHERED:
            return 0
        if "_base_" in name and len(call.inputs) >= 2:
            sizes = sorted(prod(tensor.shape) for tensor in call.inputs[:2])
            return sizes[1] // sizes[0] if sizes[0] else 0
        numbers = [value for value in call.scalars if isinstance(value, int) and not isinstance(value, bool)]
        return numbers[0] if call.op.startswith("_c10d_functional") and numbers else 0

    def _axis(self, call: Call, metadata: dict[str, str], group_size: int) -> str:
        described = _AXIS_OF_NAME.get(metadata.get("Process Group Description", "").removeprefix("mesh_"))
        if described:
            return described
        if call.kind in ("send", "recv"):
            return "pp"
        if call.fsdp:
            return "dp"
        if call.op.startswith("_c10d_functional"):
            others = [axis for axis in self.axes if axis != "dp"]
            fitting = [axis for axis in others if group_size in (0, self.axes[axis])]
            return fitting[0] if len(fitting) == 1 else ""
        return "dp" if self.data_parallel else ""

    @classmethod
    def of(cls, roots: Iterable[nn.Module]) -> Groups:
        """Reads the groups that exist now; no communication."""
        if not (dist.is_available() and dist.is_initialized()):
            return cls()
        axes: dict[str, int] = {}
        data_parallel = False
        for root in roots:
            for module in root.modules():
                sharded = private.is_fsdp2(module)
                group = getattr(module, "process_group", None)
                if isinstance(module, nn.parallel.DistributedDataParallel) or private.is_fsdp1(module):
                    axes["dp"] = dist.get_world_size(group)
                data_parallel = data_parallel or sharded or "dp" in axes
            for parameter in root.parameters():
                _add_axes(axes, parameter, data_parallel=data_parallel)
        return cls(
            backend=dist.get_backend(),
            world_size=dist.get_world_size(),
            sizes=tuple(size for size in private.group_sizes() if size > 1),
            axes=axes,
            data_parallel=data_parallel,
        )


def _add_axes(axes: dict[str, int], parameter: nn.Parameter, *, data_parallel: bool) -> None:
    mesh = getattr(parameter, "device_mesh", None)
    if mesh is None:
        return
    names = mesh.mesh_dim_names or ()
    if not names and mesh.ndim == 1:
        names = ("dp" if data_parallel else "tp",)
    found: dict[str, int] = {}
    for dim, name in enumerate(names):
        axis = _AXIS_OF_NAME.get(name, name)
        found[axis] = found.get(axis, 1) * mesh.size(dim)
    axes.update(found)


def _message_bytes(call: Call, group_size: int) -> int:
    """The full buffer for all_gather and reduce_scatter, else all tensors."""
    sizes = [size_bytes(tensor) for tensor in call.inputs]
    if not sizes:
        return 0
    if call.kind not in _GATHERED:
        return sum(sizes)
    largest = max(sizes)
    gathers_from_part = call.op.startswith("_c10d_functional::all_gather") or len(sizes) == 1
    return largest * max(1, group_size) if call.kind == "all_gather" and gathers_from_part else largest
