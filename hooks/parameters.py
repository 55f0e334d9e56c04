"""Parameters of a twin are given to layers: names below the layer's module, shapes, ties and use in matmuls."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from llmprof.hooks.fake import local_tensor
from llmprof.hooks.layers import Skeleton
from llmprof.hooks.record import dtype_name
from llmprof.hooks.structure import Block
from llmprof.hooks.tracer import PassTrace
from llmprof.schema.workload import ParameterSpec


@dataclass(frozen=True, kw_only=True)
class PlacedParameter:
    """One name of one parameter.

    Attributes:
        layer: LayerSpec name.
        name: FQN in the twin.
        relative: FQN below the layer's module.
        tied_to: the parameter's first FQN when this is another name of it, else "".
    """

    layer: str
    name: str
    relative: str
    tied_to: str


def place_parameters(
    module: nn.Module, blocks: Sequence[Block], skeleton: Skeleton, trace: PassTrace
) -> tuple[PlacedParameter, ...]:
    """Every parameter of the first block of each kind, and all that belong to no block.

    What belongs to no block is prologue when its module ran before the first block (or never), else epilogue.
    """
    layer_of_block = {first: name for name, first in skeleton.first.items()}
    block_names = {b.name for b in blocks}
    primary: dict[int, str] = {}
    placed = []
    for name, parameter in module.named_parameters(remove_duplicate=False):
        tied_to = primary.setdefault(id(parameter), name)
        block = _ancestor(name, block_names)
        if block and block not in layer_of_block:
            continue
        if block:
            layer, relative = layer_of_block[block], name.removeprefix(f"{block}.")
        else:
            owner = _ancestor(name, trace.first_segment.keys())
            after = trace.visits and trace.first_segment.get(owner, 0) > 1
            layer, relative = ("epilogue" if after else "prologue"), name
        placed.append(
            PlacedParameter(
                layer=layer, name=name, relative=relative, tied_to="" if tied_to == name else tied_to
            )
        )
    return tuple(placed)


def parameter_specs(
    module: nn.Module, placed: Sequence[PlacedParameter], trace: PassTrace
) -> dict[str, tuple[ParameterSpec, ...]]:
    """Unsharded parameters by layer; `module` is the unsharded twin."""
    by_name = dict(module.named_parameters(remove_duplicate=False))
    found: dict[str, list[ParameterSpec]] = {}
    for place in placed:
        parameter = by_name[place.name]
        found.setdefault(place.layer, []).append(
            ParameterSpec(
                name=place.relative,
                shape=tuple(parameter.shape),
                dtype=dtype_name(parameter.dtype),
                trainable=parameter.requires_grad,
                tied_to=place.tied_to,
                matmul=place.name in trace.matmul_parameters,
            )
        )
    return {layer: tuple(specs) for layer, specs in found.items()}


def local_shapes(
    module: nn.Module, placed: Sequence[PlacedParameter]
) -> dict[str, tuple[tuple[int, ...], ...]]:
    """Shapes on this rank by layer, in the order of `parameter_specs`."""
    by_name = dict(module.named_parameters(remove_duplicate=False))
    found: dict[str, list[tuple[int, ...]]] = {}
    for place in placed:
        found.setdefault(place.layer, []).append(tuple(local_tensor(by_name[place.name]).shape))
    return {layer: tuple(shapes) for layer, shapes in found.items()}


def local_parameters_of(
    module: nn.Module, placed: Sequence[PlacedParameter], live_names: Mapping[int, Sequence[str]]
) -> dict[int, list[tuple[str, tuple[int, ...], torch.dtype]]]:
    """(layer, local shape, dtype) of what an optimizer updates, by `id` of the live parameter."""
    by_name = dict(module.named_parameters(remove_duplicate=False))
    layer_of = {place.name: place.layer for place in placed if not place.tied_to}
    found: dict[int, list[tuple[str, tuple[int, ...], torch.dtype]]] = {}
    for live, names in live_names.items():
        for name in names:
            if name in layer_of and by_name[name].requires_grad:
                local = local_tensor(by_name[name])
                found.setdefault(live, []).append((layer_of[name], tuple(local.shape), local.dtype))
    return found


def _ancestor(name: str, among: Container[str]) -> str:
    """The nearest module around a parameter that is in a collection, "" when none is."""
    owner = name.rpartition(".")[0]
    while owner and owner not in among:
        owner = owner.rpartition(".")[0]
    return owner
