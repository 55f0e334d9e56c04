"""Private torch APIs behind one door: each is looked up once, feature-tested, and has a public fallback."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from types import CodeType
from typing import Any, ParamSpec, Protocol, cast

import torch

P = ParamSpec("P")


_KINETO_LOG_LEVEL = "KINETO_LOG_LEVEL"


class Scope(Protocol):
    """A named interval on the profiler's timeline, opened by `__enter__` and closed by `__exit__`."""

    def __enter__(self) -> Any: ...

    def __exit__(self, *exc_info: object) -> Any: ...


_COMPOSITES = frozenset(
    (
        "aten::linear",
        "aten::matmul",
        "aten::reshape",
        "aten::contiguous",
        "aten::to",
        "aten::flatten",
        "aten::unflatten",
        "aten::dropout",
        "aten::layer_norm",
        "aten::embedding_bag",
        "aten::softmax",
        "aten::log_softmax",
        "aten::cross_entropy_loss",
        "aten::scaled_dot_product_attention",
        "aten::chunk",
        "aten::narrow",
        "aten::tensor_split",
        "aten::einsum",
        "aten::type_as",
        "aten::view_as",
        "aten::expand_as",
        "aten::group_norm",
        "aten::batch_norm",
        "aten::nll_loss_nd",
        "aten::conv1d",
        "aten::conv2d",
        "aten::conv3d",
        "aten::rms_norm",
        "aten::item",
        "aten::silu_backward",
        "aten::movedim",
        "aten::swapaxes",
    )
)
"""Composite operators to look through when the dispatcher cannot be asked."""


def scope_type() -> Callable[[str], Scope]:
    """The cheapest context manager that names an interval in a profile (4.5 us; the public one costs 26)."""
    fast = getattr(getattr(torch._C, "_profiler", None), "_RecordFunctionFast", None)
    return cast("Callable[[str], Scope]", fast or torch.profiler.record_function)


def in_backward() -> bool:
    """True inside a node of the autograd engine, which is where activation checkpoints recompute."""
    current: Callable[[], object] | None = getattr(torch._C, "_current_autograd_node", None)
    return current is not None and current() is not None


def profiler_active() -> bool:
    """True when any torch profiler records in this process; two at once corrupt each other."""
    enabled: Callable[[], bool] | None = getattr(torch.autograd, "_profiler_enabled", None)
    if enabled is None:
        enabled = getattr(getattr(torch._C, "_autograd", None), "_profiler_enabled", None)
    return bool(enabled()) if enabled is not None else False


def uncompiled(function: Callable[P, None]) -> Callable[P, None]:
    """The same function, which torch.compile, where it is in use, neither compiles nor follows.

    A graph that calls it breaks there: callers test `torch.compiler.is_compiling()` first.
    """
    if "torch._dynamo" not in sys.modules:
        return function
    return cast("Callable[P, None]", torch.compiler.disable(function))


def skip_frame(function: Callable[..., Any]) -> None:
    """Tells torch.compile, where it is in use, not to compile a function that it meets as a frame of its own."""
    eval_frame = sys.modules.get("torch._dynamo.eval_frame")
    skip_code: Callable[[CodeType], None] | None = getattr(eval_frame, "skip_code", None)
    if skip_code is not None:
        skip_code(function.__code__)


@cache
def is_composite(op: str, overload: str, device: str) -> bool:
    """True for an operator that only calls other operators (CompositeImplicitAutograd), so its children count.

    Args:
        op: full name without overload, such as "aten::linear".
        overload: overload name, "" for the default one or when it was not recorded.
        device: device type; an operator with a kernel of its own there is no composite.
    """
    has_kernel: Callable[[str, str], bool] | None = getattr(
        torch._C, "_dispatch_has_kernel_for_dispatch_key", None
    )
    if has_kernel is None:
        return op in _COMPOSITES
    names = [f"{op}.{overload}"] if overload else _overloads(op)
    try:
        return bool(names) and all(
            has_kernel(name, "CompositeImplicitAutograd") and not has_kernel(name, device.upper())
            for name in names
        )
    except RuntimeError:  # not an operator of this build
        return op in _COMPOSITES


def _overloads(op: str) -> list[str]:
    """The default overload's name if there is one, else those of all overloads; empty for an unknown operator."""
    namespace, _, name = op.partition("::")
    packet = getattr(getattr(torch.ops, namespace, None), name, None)
    overloads: list[str] = packet.overloads() if packet is not None else []
    return [op] if "default" in overloads else [f"{op}.{overload}" for overload in overloads]


@contextmanager
def quiet_kineto() -> Iterator[None]:
    """Around a profiler's start: Kineto, which reads its log level at the first one, prints nothing of its own.

    A level that the user has set is left alone, and the environment is as before afterwards.
    """
    if _KINETO_LOG_LEVEL in os.environ:
        yield
        return
    os.environ[_KINETO_LOG_LEVEL] = "99"
    try:
        yield
    finally:
        os.environ.pop(_KINETO_LOG_LEVEL, None)


def window_profiler(activities: Sequence[torch.profiler.ProfilerActivity]) -> torch.profiler.profile:
    """A profiler that records shapes and, where this torch can, the overloads of operators."""
    config_type: Callable[..., Any] | None = getattr(
        getattr(torch._C, "_profiler", None), "_ExperimentalConfig", None
    )
    config = None
    if config_type is not None:
        try:
            config = config_type(capture_overload_names=True)
        except TypeError:
            config = config_type()
    return torch.profiler.profile(activities=list(activities), record_shapes=True, experimental_config=config)


def kineto_results(profiler: torch.profiler.profile) -> Any:
    """The raw results of a stopped profiler, or None when this torch does not expose them."""
    return getattr(getattr(profiler, "profiler", None), "kineto_results", None)


def flat_parameter_shapes(parameter: torch.Tensor) -> tuple[tuple[str, tuple[int, ...]], ...]:
    """(module name, shape) of each original parameter inside an FSDP1 flat parameter; empty for any other."""
    infos: Iterable[Any] = getattr(parameter, "_param_infos", ())
    shapes: Iterable[Any] = getattr(parameter, "_shapes", ())
    return tuple((str(info.module_name), tuple(shape)) for info, shape in zip(infos, shapes, strict=False))


def is_fsdp2(module: torch.nn.Module) -> bool:
    """True for a module that `torch.distributed.fsdp.fully_shard` turned into an FSDP module."""
    return any(base.__name__ == "FSDPModule" for base in type(module).__mro__)


def is_fsdp1(module: torch.nn.Module) -> bool:
    """True for a `torch.distributed.fsdp.FullyShardedDataParallel` wrapper."""
    return any(base.__name__ == "FullyShardedDataParallel" for base in type(module).__mro__)


def group_sizes() -> tuple[int, ...]:
    """Number of ranks of each process group of this process; only the default group's without the private table."""
    dist = torch.distributed
    world = getattr(dist.distributed_c10d, "_world", None)
    ranks: dict[Any, dict[int, int]] = getattr(world, "pg_group_ranks", {})
    if ranks:
        return tuple(len(members) for members in ranks.values())
    return (dist.get_world_size(),)
