"""A distributed parameter in, the axes it is split over and the shapes that operators see of it out."""

from __future__ import annotations

from collections.abc import Iterator

import torch

_NAMES = {
    "dp": ("dp", "data", "replicate", "shard", "fsdp", "ddp", "dp_replicate", "dp_shard", "dp_shard_cp", "dp_cp"),
    "tp": ("tp", "tensor", "model", "mp"),
    "sp": ("sp", "sequence"),
    "cp": ("cp", "context"),
    "pp": ("pp", "pipe", "pipeline", "stage"),
    "ep": ("ep", "expert", "experts"),
}  # fmt: skip
_AXIS_OF_NAME = {name: axis for axis, names in _NAMES.items() for name in names}


def axis_of_name(name: str) -> str:
    """Axis that a mesh dimension's usual names mean ("fsdp" -> "dp"); "" for any other name."""
    return _AXIS_OF_NAME.get(name.lower(), "")


def axes(parameter: torch.Tensor, *, fully_sharded: bool) -> Iterator[tuple[int, str, int]]:
    """(mesh dimension, axis, ranks) of a DTensor's mesh; nothing for other tensors.

    Args:
        parameter: any tensor.
        fully_sharded: the model is wrapped by `fully_shard`; then a dimension without a telling name is "dp",
            else a single one without a name is "tp".
    """
    mesh = getattr(parameter, "device_mesh", None)
    if mesh is None:
        return
    names = mesh.mesh_dim_names or ("",) * mesh.ndim
    for dim, name in enumerate(names):
        unnamed = "dp" if fully_sharded else "tp" if mesh.ndim == 1 else ""
        yield dim, axis_of_name(name) or (name if name and not fully_sharded else unnamed), mesh.size(dim)


def computed_shape(parameter: torch.Tensor, *, fully_sharded: bool) -> tuple[int, ...]:
    """Shape of a parameter as operators see it: gathered over "dp", split over every other axis."""
    shape = list(parameter.shape)
    placements = getattr(parameter, "placements", ())
    for dim, axis, ranks in axes(parameter, fully_sharded=fully_sharded):
        split = getattr(placements[dim], "dim", None)
        if split is not None and axis != "dp":
            shape[split] = -(-shape[split] // ranks)
    return tuple(shape)


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """The local shard of a DTensor, any other tensor itself."""
    to_local = getattr(tensor, "to_local", None)
    if to_local is None:
        return tensor
    with torch.no_grad():
        local: torch.Tensor = to_local()
    return local
