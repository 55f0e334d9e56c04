"""A model's module tree becomes a list of repeated blocks, and a deep model a shallow one with the same blocks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import nn

Signature = tuple[Any, ...]
"""What makes two modules equal: their class, their submodules' classes and their parameters' shapes."""


@dataclass(frozen=True, kw_only=True)
class Block:
    """One member of a container of repeated modules.

    Attributes:
        name: FQN from the root.
        container: FQN of its container.
        signature: equal for members that do the same.
    """

    name: str
    container: str
    signature: Signature


def signature_of(module: nn.Module) -> Signature:
    """Class, submodules and parameter shapes of a module."""
    parameters = tuple(
        (name, tuple(p.shape), str(p.dtype), p.requires_grad)
        for name, p in module.named_parameters(remove_duplicate=False)
    )
    return (type(module), tuple((n, type(m)) for n, m in module.named_modules()), parameters)


def find_blocks(root: nn.Module) -> tuple[Block, ...]:
    """Members of the outermost containers that hold at least two equal modules with parameters, in order.

    A container is a ModuleList, a ModuleDict or a Sequential. A member without parameters is no block (its work
    belongs to the block before it), and a member of another class at either end of a container belongs to
    what comes before or after the blocks.
    """
    containers = list(_repeating_containers(root, ""))
    classes = {type(m) for _, members in containers for m in _equal_members(members)}
    blocks = []
    for path, members in containers:
        inside = [(name, m) for name, m in members if any(True for _ in m.parameters())]
        while inside and type(inside[0][1]) not in classes:
            inside.pop(0)
        while inside and type(inside[-1][1]) not in classes:
            inside.pop()
        for name, module in inside:
            blocks.append(Block(name=f"{path}{name}", container=path[:-1], signature=signature_of(module)))
    return tuple(blocks)


def cut_depth(root: nn.Module, blocks: tuple[Block, ...], *, keep: int = 2) -> dict[str, str]:
    """Remove all but the first `keep` blocks of each kind, in place.

    Returns:
        The original FQN of each module that stays, by its new FQN.
    """
    seen: Counter[tuple[str, Signature]] = Counter()
    dropped: set[str] = set()
    for block in blocks:
        seen[block.container, block.signature] += 1
        if seen[block.container, block.signature] > keep:
            dropped.add(block.name)
    renamed: dict[str, str] = {}
    for container in dict.fromkeys(b.container for b in blocks):
        module = root.get_submodule(container)
        prefix = f"{container}." if container else ""
        kept = [(k, m) for k, m in module._modules.items() if f"{prefix}{k}" not in dropped]
        renumber = isinstance(module, (nn.ModuleList, nn.Sequential)) and all(k.isdigit() for k, _ in kept)
        module._modules.clear()
        for position, (key, member) in enumerate(kept):
            new = str(position) if renumber else key
            module._modules[new] = member
            renamed[f"{prefix}{new}"] = f"{prefix}{key}"
    return {name: _original(name, renamed) for name, _ in root.named_modules()}


def _original(name: str, renamed: dict[str, str]) -> str:
    parts = name.split(".")
    for end in range(len(parts), 0, -1):
        head = ".".join(parts[:end])
        if head in renamed:
            return ".".join([renamed[head], *parts[end:]])
    return name


def _repeating_containers(module: nn.Module, path: str) -> Iterator[tuple[str, list[tuple[str, nn.Module]]]]:
    members = [(name, child) for name, child in module._modules.items() if child is not None]
    if isinstance(module, (nn.ModuleList, nn.ModuleDict, nn.Sequential)) and _equal_members(members):
        yield path, members
        return
    for name, child in members:
        yield from _repeating_containers(child, f"{path}{name}.")


def _equal_members(members: list[tuple[str, nn.Module]]) -> list[nn.Module]:
    """Members that have an equal sibling; lookup tables are no blocks."""
    candidates = [
        m for _, m in members if any(True for _ in m.parameters()) and not isinstance(m, nn.Embedding)
    ]
    counts = Counter(signature_of(m) for m in candidates)
    return [m for m in candidates if counts[signature_of(m)] > 1]
