"""Fake tensors, a fake process group and eager checkpoints: the private torch APIs that tracing needs."""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed import distributed_c10d as c10d
from torch.utils import checkpoint


def fake_mode() -> FakeTensorMode:
    """A mode in which tensors have shapes and no data; real constants that a model holds become fake in it."""
    return FakeTensorMode(allow_non_fake_inputs=True)


@contextlib.contextmanager
def fake_world(rank: int, world_size: int) -> Iterator[None]:
    """A default process group of any size whose collectives do nothing; what was there before comes back.

    Args:
        rank: the rank that this process plays.
        world_size: ranks in the default group.
    """
    from torch.testing._internal.distributed.fake_pg import FakeStore

    module: Any = c10d
    world, default = module._world, module.GroupMember.WORLD
    module._world = module._World()
    module.GroupMember.WORLD = None
    forget_sharding_rules()
    try:
        dist.init_process_group("fake", rank=rank, world_size=world_size, store=FakeStore())
        yield
    finally:
        module._world = world
        module.GroupMember.WORLD = default
        forget_sharding_rules()


def forget_sharding_rules() -> None:
    """Empty DTensor's caches: they answer for equal meshes, whose groups in another world have other members.

    Without this, a process that trained with DTensors, or that traced before, would hand stale groups to a trace.
    """
    from torch.distributed.tensor import debug

    for name in ("_clear_python_sharding_prop_cache", "_clear_fast_path_sharding_prop_cache"):
        clear = getattr(debug, name, None)  # private: older torch has one cache or none
        if clear is not None:
            clear()


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Failed shape rules and torch's advice to the user are no news: what does not work ends in an error of ours."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)


@contextlib.contextmanager
def no_checkpointing() -> Iterator[None]:
    """Calls to `torch.utils.checkpoint` run their function plainly: recomputation is a layout's choice."""
    module: Any = checkpoint
    names = ("CheckpointFunction", "_checkpoint_without_reentrant_generator")
    saved = {name: getattr(module, name) for name in names}

    class _Plain:
        @staticmethod
        def apply(function: Any, preserve: Any, *args: Any) -> Any:
            return function(*args)

    def _once(*args: Any, **kwargs: Any) -> Iterator[None]:
        yield

    module.CheckpointFunction = _Plain
    module._checkpoint_without_reentrant_generator = _once
    try:
        yield
    finally:
        for name, value in saved.items():
            setattr(module, name, value)


@contextlib.contextmanager
def sharding_rules_inside(pause: Callable[[], contextlib.AbstractContextManager[None]]) -> Iterator[None]:
    """Enter `pause` while DTensor derives a global result's shape: it runs the operator on fake tensors for that."""
    from torch.distributed.tensor import _sharding_prop

    owner: Any = _sharding_prop.ShardingPropagator
    name = "_propagate_tensor_meta_non_cached"
    original = getattr(owner, name)

    def paused(*args: Any, **kwargs: Any) -> Any:
        with pause():
            return original(*args, **kwargs)

    setattr(owner, name, paused)
    try:
        yield
    finally:
        setattr(owner, name, original)


def clear_global_hooks() -> None:
    """Forget every global module and optimizer hook of this process; only for a child that will end."""
    from torch.nn.modules import module as modules
    from torch.optim import optimizer as optimizers

    for owner, prefix in ((modules, "_global_"), (optimizers, "_global_optimizer_")):
        for name, value in vars(owner).items():
            if name.startswith(prefix) and "hooks" in name and hasattr(value, "clear"):
                value.clear()


def next_sequence_number() -> int:
    """Number that the next autograd node of this thread will get."""
    number: int = torch._C._autograd._get_sequence_nr()
    return number


def current_node() -> Any:
    """The autograd node that runs now, None outside a backward pass."""
    return torch._C._current_autograd_node()


def local_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """The plain tensor of this rank behind a distributed or asynchronous one."""
    value: Any = tensor
    while True:
        if hasattr(value, "_local_tensor"):
            value = value._local_tensor
        elif type(value).__name__ == "AsyncCollectiveTensor":
            value = value.elem
        else:
            return value  # type: ignore[no-any-return]


def storage_key(tensor: torch.Tensor) -> int:
    """Identity of a tensor's storage while it lives (fake tensors have no address)."""
    key: int = local_tensor(tensor).untyped_storage()._cdata
    return key


def is_shared(tensor: torch.Tensor) -> bool:
    """True when another tensor uses the same storage."""
    storage = tensor.untyped_storage()  # this wrapper is one of the users
    uses: int = torch._C._storage_Use_Count(storage._cdata)
    return uses > 2


def group_name(argument: Any) -> str:
    """Name of the process group in an operator's argument, "" when it is none."""
    if isinstance(argument, str):
        return argument
    if type(argument).__name__ in ("ProcessGroup", "ScriptObject"):
        with contextlib.suppress(Exception):
            group: Any = argument
            if not isinstance(group, dist.ProcessGroup):
                group = dist.ProcessGroup.unbox(group)
            return str(group.group_name)
    return ""
