"""A collective call in, its kind, message size, mesh axis and group size out, without asking any other rank."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod

import torch.distributed as dist
from torch import nn

from llmprof.hooks import private
from llmprof.hooks.calls import Call, Range
from llmprof.hooks.events import (
    ELEMENT_TYPE,
    GROUP_DESCRIPTION,
    GROUP_SIZE,
    INPUT_ELEMENTS,
    OUTPUT_ELEMENTS,
)
from llmprof.hooks.meshes import axes, axis_of_name
from llmprof.schema.operators import Tensor, size_bytes, split_name

_GATHERED = ("all_gather", "reduce_scatter")

_DTYPES = {
    "float": "float32",
    "double": "float64",
    "half": "float16",
    "long": "int64",
    "int": "int32",
    "byte": "uint8",
    "char": "int8",
}
"""Names of dtypes in a collective's metadata that differ from ours."""


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
        group_size = int(metadata.get(GROUP_SIZE, 0) or 0) or self._group_size_of_call(call)
        axis = self._axis(call, metadata, group_size)
        if not group_size:
            group_size = self.axes.get(axis, 0) or (self.sizes[0] if len(set(self.sizes)) == 1 else 0)
        told = _told_message(metadata)
        return Message(
            kind=call.kind,
            axis=axis,
            group_size=group_size,
            size_bytes=size_bytes(told) if told else _message_bytes(call, group_size),
            dtype=told.dtype if told else call.inputs[0].dtype if call.inputs else "",
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
        described = axis_of_name(metadata.get(GROUP_DESCRIPTION, "").removeprefix("mesh_"))
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
        sizes: dict[str, int] = {}
        data_parallel = False
        for root in roots:
            fully_sharded = any(map(private.is_fsdp2, root.modules()))
            for module in root.modules():
                if isinstance(module, nn.parallel.DistributedDataParallel) or private.is_fsdp1(module):
                    sizes["dp"] = dist.get_world_size(getattr(module, "process_group", None))
            for parameter in root.parameters():
                _add_axes(sizes, parameter, fully_sharded=fully_sharded)
            data_parallel = data_parallel or fully_sharded or "dp" in sizes
        return cls(
            backend=dist.get_backend(),
            world_size=dist.get_world_size(),
            sizes=tuple(size for size in private.group_sizes() if size > 1),
            axes=sizes,
            data_parallel=data_parallel,
        )


def _add_axes(found: dict[str, int], parameter: nn.Parameter, *, fully_sharded: bool) -> None:
    sizes: dict[str, int] = {}
    for _, axis, ranks in axes(parameter, fully_sharded=fully_sharded):
        sizes[axis] = sizes.get(axis, 1) * ranks  # dp_replicate x dp_shard
    found.update(sizes)


def _told_message(metadata: Mapping[str, str]) -> Tensor | None:
    """The larger of the input and output buffers that the backend reports, None when it reports none."""
    try:
        elements = max(int(metadata[INPUT_ELEMENTS]), int(metadata[OUTPUT_ELEMENTS]))
    except (KeyError, ValueError):
        return None
    dtype = metadata.get(ELEMENT_TYPE, "").lower()
    return Tensor((elements,), _DTYPES.get(dtype, dtype)) if elements else None


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


def match_transfers(collectives: Sequence[Call], transfers: Sequence[Range]) -> list[Range | None]:
    """Pairs each collective with what the backend's own thread did for it, from issue (or its turn) to completion.

    The pair of a call is the first later transfer of equally many elements: every rank issues in the same
    order, and kinds need not agree, as gloo runs a reduce-scatter as an all-reduce. The interval begins when
    the call was issued, or when the thread had finished its previous transfer.

    Args:
        collectives: calls in order of start.
        transfers: ranges of the backend's threads.
    """
    pending = sorted(transfers, key=lambda transfer: transfer.start_us)
    free_us: dict[int, float] = {}
    previous_end_us = []
    for transfer in pending:
        previous_end_us.append(free_us.get(transfer.thread, 0.0))
        free_us[transfer.thread] = transfer.end_us
    used = [False] * len(pending)
    first, matched = 0, list[Range | None]()
    for call in collectives:
        while first < len(pending) and (used[first] or pending[first].start_us < call.start_us):
            first += 1
        sizes = _element_counts(call.inputs)
        fits = (
            i for i in range(first, len(pending)) if not used[i] and _elements(pending[i].inputs) in sizes
        )
        found = next(fits, None)
        if found is None:
            matched.append(None)
            continue
        used[found] = True
        begin_us = max(call.start_us, previous_end_us[found])
        matched.append(pending[found]._replace(start_us=begin_us))
    return matched


def _element_counts(tensors: Sequence[Tensor]) -> set[int]:
    return {_elements(tensors), *(prod(tensor.shape) for tensor in tensors)}


def _elements(tensors: Sequence[Tensor]) -> int:
    return sum(prod(tensor.shape) for tensor in tensors)
