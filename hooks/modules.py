"""Root modules in, one stable fully qualified name per module out, with the shapes of its parameters."""

from __future__ import annotations

import weakref
from collections.abc import Iterator

from torch import nn

from llmprof.hooks import private
from llmprof.hooks.meshes import computed_shape

_WRAPPERS = (
    "module",
    "_orig_mod",
    "_fsdp_wrapped_module",
    "_checkpoint_wrapped_module",
)
"""Attribute names under which wrappers (DDP, compile, FSDP1, checkpoint) keep the module they wrap."""

Shape = tuple[int, ...]


def strip_wrappers(name: str) -> str:
    """FQN without the parts that wrappers add: "module.layers.0._orig_mod.fc" -> "layers.0.fc"."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


class ModuleNames:
    """Names of every module of every root that was seen; keeps no module alive.

    The first root is "", its modules have their FQN. Further roots that share no module with an earlier one
    (a discriminator, a teacher) are prefixed with their class name. A module of no root gets its class name.
    """

    def __init__(self) -> None:
        self._names: weakref.WeakKeyDictionary[nn.Module, str] = weakref.WeakKeyDictionary()
        self._roots: list[weakref.ref[nn.Module]] = []
        self._shapes: dict[str, set[Shape]] = {}
        self._parents: set[str] = set()

    def add(self, root: nn.Module) -> str:
        """Registers a root and everything below it; returns the root's name. Adding it again is harmless.

        A root without parameters (a loss) stays unknown: what it does is work outside the model.
        """
        known = self._names.get(root)
        if known is not None:
            return known
        if next(root.parameters(), None) is None:
            return type(root).__name__
        inner = next((self._names[m] for m in root.modules() if m in self._names), None)
        prefix = "" if inner is not None or not self._roots else self._free_name(type(root).__name__)
        self._roots.append(weakref.ref(root))
        fully_sharded = any(map(private.is_fsdp2, root.modules()))
        for path, module in root.named_modules():
            self._register(module, _join(prefix, _stripped(root, path)), fully_sharded=fully_sharded)
        return prefix

    def _free_name(self, name: str) -> str:
        taken = set(self._names.values())
        number = 1
        candidate = name
        while candidate in taken:
            number += 1
            candidate = f"{name}_{number}"
        return candidate

    def _register(self, module: nn.Module, name: str, *, fully_sharded: bool) -> None:
        self._names.setdefault(module, name)
        parts = name.split(".")
        if name:
            self._parents.update([""] + [".".join(parts[:end]) for end in range(1, len(parts))])
        shapes = self._shapes.setdefault(name, set())
        for parameter in module.parameters(recurse=False):
            shapes.add(computed_shape(parameter, fully_sharded=fully_sharded))
            for child, shape in private.flat_parameter_shapes(parameter):
                self._shapes.setdefault(_join(name, strip_wrappers(child)), set()).add(shape)

    def name(self, module: nn.Module) -> str | None:
        """FQN of a module of a known root, else None."""
        return self._names.get(module)

    def label(self, module: nn.Module) -> tuple[str, bool]:
        """Name to show for a module, and whether it belongs to a known root."""
        name = self._names.get(module)
        return (type(module).__name__, False) if name is None else (name, True)

    def has_children(self, name: str) -> bool:
        """True when the named module has modules below it."""
        return name in self._parents

    def known(self, name: str) -> bool:
        """True for the FQN of a registered module."""
        return name in self._shapes

    def parameter_shapes(self, name: str = "") -> frozenset[Shape]:
        """Shapes, as operators see them, of the parameters of a module and everything below it."""
        below = f"{name}." if name else ""
        return frozenset(
            shape
            for owner, shapes in self._shapes.items()
            if owner == name or owner.startswith(below)
            for shape in shapes
        )

    def roots(self) -> Iterator[nn.Module]:
        """Roots that are still alive, in the order seen."""
        for reference in self._roots:
            root = reference()
            if root is not None:
                yield root


def _stripped(root: nn.Module, path: str) -> str:
    """FQN of `path` below `root`, leaving out a part only where the module above it is a wrapper."""
    kept: list[str] = []
    module = root
    for part in path.split(".") if path else ():
        child = module.get_submodule(part)
        if not (part in _WRAPPERS and _wraps(module, part)):
            kept.append(part)
        module = child
    return ".".join(kept)


def _wraps(module: nn.Module, part: str) -> bool:
    return part != "module" or isinstance(module, nn.parallel.DistributedDataParallel | nn.DataParallel)


def _join(prefix: str, name: str) -> str:
    return f"{prefix}.{name}" if prefix and name else prefix or name
