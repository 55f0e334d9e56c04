"""One forward pass tells which projections feed which, where they enter their module, and how attention is cut into heads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from llmprof.errors import WorkloadError
from llmprof.hooks.fake import no_checkpointing, storage_key
from llmprof.hooks.tracer import Subject
from llmprof.schema.operators import family


@dataclass(frozen=True, kw_only=True)
class Entry:
    """How an activation enters a module: as a positional argument or as a keyword.

    Attributes:
        module: FQN of the module.
        position: index among `num_args` positional arguments, None for a keyword.
        keyword: name, "" for a positional argument.
    """

    module: str
    position: int | None
    keyword: str
    num_args: int


@dataclass(frozen=True, kw_only=True)
class LinearUse:
    """The first call of a projection.

    Attributes:
        name: FQN.
        block: FQN of the block around it, "" outside.
        after_blocks: True when it ran after the first block.
        sources: projections whose results reach its input without another projection between.
        entry: set when its input is, unchanged, an argument of the module that holds it.
        in_features, out_features: its weight's shape.
        input_rank: number of dimensions of its input.
    """

    name: str
    block: str
    after_blocks: bool
    sources: frozenset[str]
    entry: Entry | None
    in_features: int
    out_features: int
    input_rank: int


@dataclass(frozen=True, kw_only=True)
class Dataflow:
    """What a forward pass showed.

    Attributes:
        linears: by FQN, in execution order.
        embeddings: rank of the result of each lookup table outside the blocks, by FQN.
        norms: projections that reach each leaf module with vectors as only parameters, by FQN.
        leaks: projections whose result leaves its block (or the model) without another projection.
        heads: (number of heads, head dimension) of the attention that a module computes, by FQN.
    """

    linears: dict[str, LinearUse]
    embeddings: dict[str, int]
    norms: dict[str, frozenset[str]]
    leaks: frozenset[str]
    heads: dict[str, tuple[int, int]]


def trace_dataflow(subject: Subject, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Dataflow:
    """Run the forward pass of an unsharded twin and follow the results of its projections.

    Raises:
        WorkloadError: the model cannot be traced.
    """
    follower = _Follower(subject)
    handles = []
    for module in subject.module.modules():
        handles.append(module.register_forward_pre_hook(follower.enter, with_kwargs=True, prepend=True))
        handles.append(module.register_forward_hook(follower.leave))
    try:
        with subject.mode, no_checkpointing(), torch.no_grad(), follower:
            output = subject.module(*args, **kwargs)
        follower.leaks |= follower.sources_of(output)
    except Exception as error:
        raise WorkloadError(f"the forward pass cannot be traced: {error}") from error
    finally:
        for handle in handles:
            handle.remove()
    return Dataflow(
        linears=follower.linears,
        embeddings=follower.embeddings,
        norms=follower.norms,
        leaks=frozenset(follower.leaks),
        heads=follower.heads,
    )


class _Follower(TorchDispatchMode):
    """Carries the set of last projections along with every storage."""

    def __init__(self, subject: Subject) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._names = subject.names
        self._blocks = frozenset(subject.blocks)
        self._stack: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []
        self._sources: dict[int, frozenset[str]] = {}
        self._alive: list[torch.Tensor] = []
        self._block, self._seen_block = "", False
        self.linears: dict[str, LinearUse] = {}
        self.embeddings: dict[str, int] = {}
        self.norms: dict[str, frozenset[str]] = {}
        self.leaks: set[str] = set()
        self.heads: dict[str, tuple[int, int]] = {}

    def sources_of(self, value: Any) -> frozenset[str]:
        """Projections that reach any tensor in a structure."""
        found: frozenset[str] = frozenset()
        for leaf in pytree.tree_leaves(value):
            if isinstance(leaf, torch.Tensor):
                found |= self._sources.get(storage_key(leaf), frozenset())
        return found

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        sources = self.sources_of((args, kwargs))
        for leaf in pytree.tree_leaves(out):
            if isinstance(leaf, torch.Tensor):
                self._alive.append(leaf)
                if sources:
                    self._sources[storage_key(leaf)] = sources
        kind = family(str(func._schema.name))
        module = self._stack[-1][0] if self._stack else ""
        if kind == "attention" and isinstance(args[0], torch.Tensor) and args[0].dim() == 4:
            self.heads[module] = (int(args[0].shape[1]), int(args[0].shape[3]))
        elif kind == "batched_matmul" and module not in self.heads:
            self.heads[module] = (0, int(args[0].shape[-1]))
        return out

    def enter(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        """Forward pre-hook."""
        name = self._names.get(id(module), "")
        if name in self._blocks:
            self._block, self._seen_block = name, True
        if isinstance(module, nn.Linear) and name not in self.linears and args:
            self.linears[name] = LinearUse(
                name=name,
                block=self._block,
                after_blocks=self._seen_block,
                sources=self.sources_of(args[0]),
                entry=self._entry(args[0]),
                in_features=module.in_features,
                out_features=module.out_features,
                input_rank=args[0].dim(),
            )
        elif _is_norm(module) and args and isinstance(args[0], torch.Tensor) and args[0].dim() == 3:
            self.norms.setdefault(name, self.sources_of(args[0]))
        self._stack.append((name, args, kwargs))

    def leave(self, module: nn.Module, args: Any, output: Any) -> None:
        """Forward hook."""
        name, _, _ = self._stack.pop()
        if isinstance(module, nn.Linear) and isinstance(output, torch.Tensor):
            self._sources[storage_key(output)] = frozenset((name,))
        elif isinstance(module, nn.Embedding) and not self._block and isinstance(output, torch.Tensor):
            self.embeddings.setdefault(name, output.dim())
        if name in self._blocks:
            self.leaks |= self.sources_of(output)
            self._block = ""

    def _entry(self, tensor: torch.Tensor) -> Entry | None:
        """The argument of the module around a projection that is its input."""
        if not self._stack:
            return None
        module, args, kwargs = self._stack[-1]
        if not module or module in self._blocks:
            return None

        def same(value: Any) -> bool:
            return isinstance(value, torch.Tensor) and (
                storage_key(value) == storage_key(tensor) and value.shape == tensor.shape
            )

        for position, value in enumerate(args):
            if same(value):
                return Entry(module=module, position=position, keyword="", num_args=len(args))
        for keyword, value in kwargs.items():
            if same(value):
                return Entry(module=module, position=None, keyword=keyword, num_args=len(args))
        return None


def _is_norm(module: nn.Module) -> bool:
    """A leaf module whose parameters are all vectors."""
    own = [p for p in module._parameters.values() if p is not None]
    return bool(own) and not module._modules and all(p.dim() == 1 for p in own)
