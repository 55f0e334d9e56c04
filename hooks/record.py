"""Operators that run under a dispatch mode become rows with local shapes, phase, module and block visit."""

from __future__ import annotations

import bisect
import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from llmprof.hooks.fake import (
    current_node,
    group_name,
    is_shared,
    local_tensor,
    next_sequence_number,
    storage_key,
)
from llmprof.hooks.phases import is_weight_gradient
from llmprof.schema.operators import MATMUL_FAMILIES, Tensor, collective_kind, family

LOSS_SEGMENT = 1 << 30
"""Segment of what runs after the root module returned."""

_IGNORED = ("prim::device", "profiler::_record_function_enter_new", "profiler::_record_function_exit")


_MADE_OF_OTHERS = ("aten::chunk", "aten::__or__", "aten::__and__")
"""Operators without a kernel that reach a dispatch mode whole when nothing above it records gradients."""


class TracedOp(NamedTuple):
    """One call of an operator or collective, with local shapes.

    `segment` is 0 before the first block, 2k + 1 inside the k-th visit of a block, 2k + 2 after that visit, and
    LOSS_SEGMENT after the root module; `module` is an FQN from the root.
    """

    op: str
    phase: str
    module: str
    segment: int
    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]
    attributes: tuple[str, ...]
    collective: str
    axis: str


class ModuleClock:
    """Which module and which block visit is running, now and at any autograd sequence number of the forward pass.

    Args:
        names: FQN of each module by its `id`.
        blocks: FQNs of the blocks.
        running: the autograd node that runs now, None outside a backward pass.
    """

    def __init__(
        self, names: Mapping[int, str], blocks: Sequence[str], running: Callable[[], Any] = current_node
    ) -> None:
        self.names = names
        self.running = running
        self.blocks = frozenset(blocks)
        self.stack: list[str] = []
        self.segment = 0
        self.visits: list[str] = []
        self.first_segment: dict[str, int] = {}
        self.block_outputs: dict[int, Any] = {}
        self.block_input: Any = None
        self._numbers: list[int] = []
        self._states: list[tuple[str, int]] = []

    def attach(self, root: nn.Module) -> list[torch.utils.hooks.RemovableHandle]:
        """Follow the modules of `root`; the handles end it. Hooks that others put there run inside the module's time."""
        handles = []
        for module in root.modules():
            handles.append(module.register_forward_pre_hook(self._enter, with_kwargs=True, prepend=True))
            handles.append(module.register_forward_hook(self._leave))
        return handles

    def begin(self) -> None:
        """Forget the last pass."""
        self.stack, self.segment, self.visits = [], 0, []
        self.first_segment, self.block_outputs, self.block_input = {}, {}, None
        self._numbers, self._states = [], []
        self._note()

    def enter_loss(self) -> None:
        """The root module has returned; what follows is the loss."""
        self.segment = LOSS_SEGMENT
        self._note()

    def at(self, sequence_number: int) -> tuple[str, int]:
        """Module and segment in which the forward pass made the autograd node of a number."""
        index = bisect.bisect_right(self._numbers, sequence_number) - 1
        return self._states[max(index, 0)]

    @property
    def current(self) -> str:
        """FQN of the innermost module that runs now."""
        return self.stack[-1] if self.stack else ""

    def _enter(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        if self.running() is not None:
            return
        name = self.names.get(id(module), "")
        self.stack.append(name)
        if name in self.blocks:
            self.visits.append(name)
            self.segment = 2 * len(self.visits) - 1
            if len(self.visits) == 1:
                self.block_input = (args, kwargs)
        self.first_segment.setdefault(name, self.segment)
        self._note()

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        if self.running() is not None:
            return
        name = self.stack.pop()
        if name in self.blocks:
            self.block_outputs[self.segment] = output
            self.segment += 1
        self._note()

    def _note(self) -> None:
        state = (self.current, self.segment)
        number = next_sequence_number()
        if self._numbers and self._numbers[-1] == number:
            self._states[-1] = state
        else:
            self._numbers.append(number)
            self._states.append(state)


class OpTracer(TorchDispatchMode):
    """Records each operator below autograd and below distributed tensors.

    Args:
        clock: follows the modules.
        parameters: (FQN of the owner, parameter) pairs; their local shapes tell weight gradients.
        axes: mesh axis by process group name.
    """

    def __init__(
        self,
        clock: ModuleClock,
        parameters: Sequence[tuple[str, torch.Tensor]],
        axes: Mapping[str, str],
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.clock = clock
        self.axes = axes
        self.phase = "forward"
        self.rows: list[TracedOp] = []
        self.matmul_uses: set[tuple[int, str]] = set()
        self.created_in: dict[int, int] = {}
        self._alive: list[torch.Tensor] = []
        self._shapes: dict[str, list[tuple[int, ...]]] = {}
        self._owner: dict[int, str] = {}
        self.parameter_storages: dict[int, int] = {}
        for owner, parameter in parameters:
            self._shapes.setdefault(owner, []).append(tuple(local_tensor(parameter).shape))
            self._owner[id(parameter)] = owner
            key = storage_key(parameter)
            self.parameter_storages[key] = key
        self._all_shapes = [shape for shapes in self._shapes.values() for shape in shapes]
        self.segment_of_owner: dict[str, int] = {}
        self._last_output = 0
        self._paused = False
        self._wrapped_add = False
        self._collectives: dict[int, int] = {}
        self._waits: list[tuple[int, TracedOp]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = str(func._schema.name)
        if any(_unwraps_itself(t) for t in types):
            self._wrapped_add = name == "aten::add"
            return NotImplemented
        if name in _MADE_OF_OTHERS and not self._paused:
            with self:  # its parts are what runs
                return func.decompose(*args, **kwargs)
        out = func(*args, **kwargs)
        if name in _IGNORED or self._paused:
            return out
        inputs = tuple(operator_tensors((*_profiled(func, args), *kwargs.values())))
        outputs = tuple(operator_tensors(out if isinstance(out, (list, tuple)) else (out,), scalars=True))
        phase, module, segment = self._where(name, inputs, args)
        kind = collective_kind(name)
        self._follow_parameters(name, args, kwargs, out, module, segment)
        self._last_output = id(out)
        if name == "aten::add":
            name = self._name_of_sum(inputs, args[0])
        row = TracedOp(
            op=name,
            phase=phase,
            module=module,
            segment=segment,
            inputs=inputs,
            outputs=outputs,
            attributes=_attributes(func, args, kwargs),
            collective=kind,
            axis=self._axis(args) if kind else "",
        )
        if kind and isinstance(out, torch.Tensor):
            self._collectives[storage_key(out)] = len(self.rows)
            self._alive.append(out)
        if name.endswith("::wait_tensor") and storage_key(args[0]) in self._collectives:
            self._waits.append((self._collectives[storage_key(args[0])], row))
        else:
            self.rows.append(row)
        return out

    def _name_of_sum(self, inputs: tuple[Tensor, ...], first: torch.Tensor) -> str:
        """autograd sums the gradients of a tensor used twice in place when nobody else holds the first one.

        It does not for fake tensors, so the name is mended; nor for distributed ones.
        """
        wrapped, self._wrapped_add = self._wrapped_add, False
        if self.phase != "backward" or wrapped or len(inputs) != 2 or inputs[0] != inputs[1]:
            return "aten::add"
        return "aten::add" if is_shared(first) else "aten::add_"

    def finished_rows(self) -> list[TracedOp]:
        """Rows in execution order, but each wait right after its collective: torch waits at the first use, wherever it is."""
        waits: dict[int, list[TracedOp]] = {}
        for index, row in self._waits:
            start = self.rows[index]
            waits.setdefault(index, []).append(
                row._replace(phase=start.phase, module=start.module, segment=start.segment)
            )
        return [r for index, row in enumerate(self.rows) for r in (row, *waits.get(index, ()))]

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Record nothing meanwhile."""
        before, self._paused = self._paused, True
        try:
            yield
        finally:
            self._paused = before

    def _where(self, name: str, inputs: tuple[Tensor, ...], args: Any) -> tuple[str, str, int]:
        """Phase, module and segment of the operator that runs now.

        Where shapes alone leave it open, the matmul that reads the parameter gives the input's gradient.
        """
        if self.phase != "backward":
            return self.phase, self.clock.current, self.clock.segment
        node = self.clock.running()
        if node is None:
            return "backward_input", "", self.clock.segment
        variable = getattr(node, "variable", None)
        if variable is not None:
            owner = self._owner.get(id(variable), "")
            return "backward_weight", owner, self._segment_of(owner)
        module, segment = self.clock.at(node._sequence_nr())
        shapes = self._shapes.get(module, self._all_shapes)
        weight = is_weight_gradient(name, [t.shape for t in inputs if t.shape], shapes) and not any(
            isinstance(a, torch.Tensor) and storage_key(a) in self.parameter_storages for a in args
        )
        return ("backward_weight" if weight else "backward_input"), module, segment

    def _segment_of(self, owner: str) -> int:
        """Segment in which the owner of a parameter, or else the nearest module around it, ran first."""
        while owner and owner not in self.segment_of_owner:
            owner = owner.rpartition(".")[0]
        return self.segment_of_owner.get(owner, 0)

    def _follow_parameters(
        self, name: str, args: Any, kwargs: Any, out: Any, module: str, segment: int
    ) -> None:
        """Notes which parameters (or casts of them) a matmul uses, and where storages come from."""
        if self.phase != "forward":
            return  # nothing of the backward pass is kept: autograd takes gradients over only when nobody else has them
        for value in pytree.tree_leaves(out):
            if isinstance(value, torch.Tensor):
                self.created_in.setdefault(storage_key(value), segment)
                self._alive.append(value)  # an address is only an identity while the storage lives
        if family(name) in MATMUL_FAMILIES:
            for value in pytree.tree_leaves((args, kwargs)):
                if isinstance(value, torch.Tensor):
                    source = self.parameter_storages.get(storage_key(value))
                    if source is not None:
                        self.matmul_uses.add((source, module))
        elif name == "aten::_to_copy":
            source = self.parameter_storages.get(storage_key(args[0]))
            if source is not None:
                self.parameter_storages[storage_key(out)] = source

    def _axis(self, args: Any) -> str:
        """Mesh axis of a collective. torch caches sharding rules with an equal mesh of an earlier trace, so a single
        axis needs no name."""
        axes = set(self.axes.values())
        if len(axes) == 1:
            return next(iter(axes))
        for argument in reversed(args):
            name = group_name(argument)
            if name:
                return self.axes.get(name, "")
        return ""

    def forget_detach(self, tensor: torch.Tensor) -> None:
        """Drop the `detach` that autograd made only because a saved-tensor hook is there."""
        if self.rows and self.rows[-1].op == "aten::detach" and self._last_output == id(local_tensor(tensor)):
            self.rows.pop()


@contextlib.contextmanager
def attached(clock: ModuleClock, root: nn.Module) -> Iterator[None]:
    """Module hooks of a clock, for the length of a `with`."""
    handles = clock.attach(root)
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def dtype_name(dtype: torch.dtype) -> str:
    """ "float32" for torch.float32."""
    return str(dtype).removeprefix("torch.")


def describe(tensor: torch.Tensor, group: int = 0) -> Tensor:
    """Local shape and dtype of a tensor."""
    local = local_tensor(tensor)
    return Tensor(tuple(int(n) for n in local.shape), dtype_name(local.dtype), group)


def operator_tensors(values: Sequence[Any], *, scalars: bool = False) -> Iterator[Tensor]:
    """Tensors among arguments; a list of tensors becomes members of one group; 0-dim ones are left out."""
    groups = 0
    for value in values:
        if isinstance(value, torch.Tensor):
            if value.dim() or scalars:
                yield describe(value)
        elif isinstance(value, (list, tuple)) and any(isinstance(v, torch.Tensor) for v in value):
            groups += 1
            for member in value:
                if isinstance(member, torch.Tensor) and (member.dim() or scalars):
                    yield describe(member, groups)


def _attributes(func: Any, args: Any, kwargs: Any) -> tuple[str, ...]:
    for position, argument in enumerate(func._schema.arguments):
        if argument.name == "is_causal":
            value = args[position] if position < len(args) else kwargs.get("is_causal")
            return ("causal",) if value is True else ()
    return ()


def _profiled(func: Any, args: Sequence[Any]) -> Iterator[Any]:
    """Arguments whose shapes the profiler records: not lists of optional tensors (the indices of `index_put_`)."""
    for argument, value in zip(func._schema.arguments, args, strict=False):
        if "Optional[Tensor]" not in str(argument.type) or not isinstance(value, (list, tuple)):
            yield value


def _unwraps_itself(cls: type) -> bool:
    """True for tensors that run other operators on the tensors inside them: those are recorded instead."""
    return cls.__name__ in ("DTensor", "AsyncCollectiveTensor")
