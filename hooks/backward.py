"""Recorded autograd graphs run backward without torch's engine, which refuses to work in a fork of a process that used a GPU.

A walk calls the same nodes with the same gradients in the same order as the engine, in this thread, so that the
operators are the same. Left out: hooks on nodes themselves, `retain_grad` of tensors that are not leaves, and
callbacks at the end of a pass (FSDP's), which need the engine; asking for the last ends in an error. One known
difference: of the two bias gradients of a fused CPU LSTM the engine copies one (it shares the other's memory).
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import torch

Edge = tuple[Any, int]
"""An autograd node and the number of one of its inputs."""


class Walk:
    """Stands in for the engine.

    Attributes:
        node: the node that runs now, None outside a backward pass.
    """

    def __init__(self) -> None:
        self.node: Any = None
        self._tensor_hooks: dict[Edge, Any] = {}
        self._keep_undefined: set[Any] = set()

    def current_node(self) -> Any:
        """The node that runs now, None outside a backward pass."""
        return self.node

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        """Let `Tensor.backward`, `torch.autograd.backward` and `torch.autograd.grad` walk meanwhile.

        Graphs must be recorded inside as well: what torch keeps of hooks on tensors cannot be read afterwards.
        """
        autograd: Any = torch.autograd
        context: Any = torch.autograd.function.FunctionCtx
        tensor: Any = torch.Tensor
        saved = (autograd._engine_run_backward, context.set_materialize_grads, tensor.register_hook)

        def register_hook(owner: torch.Tensor, hook: Any) -> Any:
            handle = saved[2](owner, hook)
            if owner.grad_fn is not None:
                self._tensor_hooks[owner.grad_fn, owner.output_nr] = owner._backward_hooks
            return handle

        def set_materialize_grads(node: Any, value: bool) -> None:
            saved[1](node, value)
            (self._keep_undefined.discard if value else self._keep_undefined.add)(node)

        autograd._engine_run_backward = self.run
        context.set_materialize_grads = set_materialize_grads
        tensor.register_hook = register_hook
        try:
            yield
        finally:
            autograd._engine_run_backward, context.set_materialize_grads, tensor.register_hook = saved
            self._tensor_hooks.clear()
            self._keep_undefined.clear()

    def run(
        self,
        outputs: Sequence[Any],
        gradients: Sequence[torch.Tensor | None],
        keep_graph: bool,
        create_graph: bool,
        inputs: Sequence[Any] = (),
        allow_unreachable: bool = True,
        accumulate_grad: bool = True,
    ) -> tuple[torch.Tensor | None, ...]:
        """Same arguments and results as the engine's `run_backward`; a graph is always kept."""
        task = _Task(self, [_edge(o) for o in outputs], inputs, accumulate=accumulate_grad)
        before = self.node
        try:
            with torch.set_grad_enabled(create_graph):
                task.run(gradients)
        finally:
            self.node = before
        found = tuple(task.captured.get(i) for i in range(len(inputs)))
        if not allow_unreachable and not accumulate_grad and any(g is None for g in found):
            raise RuntimeError("One of the differentiated Tensors was not used in the graph.")
        return found if not accumulate_grad else ()

    def call(self, node: Any, given: list[torch.Tensor | None]) -> list[torch.Tensor | None]:
        """Gradients of a node's inputs; `given` is emptied, for a node may take over what nobody else holds."""
        self._run_tensor_hooks(node, given)
        if _is_stealable(node, given):
            _steal(node.variable, given)
            return []
        if hasattr(node, "apply"):
            self._materialise(node, given)
            result = node.apply(*_taken(given))
        else:
            result = node(*_taken(given))
        found = list(result) if isinstance(result, (tuple, list)) else [result]
        del result
        edges = node.next_functions
        del found[len(edges) :]
        for index, (target, number) in enumerate(edges):
            if target is not None and found[index] is not None:
                found[index] = _as_recorded(found[index], target._input_metadata[number])
        return found

    def _run_tensor_hooks(self, node: Any, given: list[torch.Tensor | None]) -> None:
        variable = getattr(node, "variable", None)
        for index in range(len(given)):
            own = variable._backward_hooks if variable is not None else self._tensor_hooks.get((node, index))
            for hook in tuple((own or {}).values()):
                changed = hook(given[index]) if given[index] is not None else None
                if changed is not None:
                    given[index] = changed

    def _materialise(self, node: Any, given: list[torch.Tensor | None]) -> None:
        """Zeros for undefined gradients of a function written in Python, unless it asked for None."""
        if node in self._keep_undefined:
            return
        for index, meta in enumerate(node._input_metadata):
            if given[index] is None:
                given[index] = torch.zeros(tuple(meta.shape), dtype=meta.dtype, device=meta.device)


class _Task:
    """One backward pass.

    Args:
        walk: calls the nodes.
        roots: where it starts.
        inputs: tensors whose gradients are wanted; empty for all leaves.
        accumulate: put the gradients of leaves into `.grad`.
    """

    def __init__(self, walk: Walk, roots: list[Edge], inputs: Sequence[Any], *, accumulate: bool) -> None:
        self._walk, self._roots = walk, roots
        self._waiting: dict[Any, int] = {}
        self._buffers: dict[Any, list[torch.Tensor | None]] = {}
        self._ready = ReadyNodes()
        self.captured: dict[int, torch.Tensor | None] = {}
        order = self._count_dependencies()
        self._wanted: dict[Any, list[tuple[int, int]]] = {}
        for position, tensor in enumerate(inputs):
            node, number = _edge_in(order, tensor)
            self._wanted.setdefault(node, []).append((number, position))
        self._needed = self._nodes_to_run(order, accumulate) if inputs else None

    def _count_dependencies(self) -> list[Any]:
        """Number of edges into each node; all nodes, each before those that it leads to in no particular order."""
        nodes: dict[Any, None] = {}
        stack = []
        for node, _ in self._roots:
            self._waiting[node] = self._waiting.get(node, 0) + 1
            stack.append(node)
        while stack:
            node = stack.pop()
            if node in nodes:
                continue
            nodes[node] = None
            for target, _ in node.next_functions:
                if target is not None:
                    self._waiting[target] = self._waiting.get(target, 0) + 1
                    stack.append(target)
        return list(nodes)

    def _nodes_to_run(self, nodes: list[Any], accumulate: bool) -> set[Any]:
        """Nodes on the way to an input; leaves themselves when they accumulate."""
        sources: dict[Any, list[Any]] = {}
        for node in nodes:
            for target, _ in node.next_functions:
                sources.setdefault(target, []).append(node)
        needed = {node for node in self._wanted if accumulate and hasattr(node, "variable")}
        stack = [source for node in self._wanted for source in sources.get(node, ())]
        while stack:
            node = stack.pop()
            if node not in needed:
                needed.add(node)
                stack.extend(sources.get(node, ()))
        return needed

    def run(self, gradients: Sequence[torch.Tensor | None]) -> None:
        """From the roots until nothing is left."""
        for (node, number), gradient in zip(self._roots, gradients, strict=True):
            checked = None if gradient is None else _as_recorded(gradient, node._input_metadata[number])
            self._deliver(node, number, checked)
        while self._ready:
            node = self._ready.pop()
            given = self._buffers.pop(node)
            for number, position in self._wanted.get(node, ()):
                self.captured[position] = given[number]
            if self._needed is None or node in self._needed:
                self._walk.node = node
                self._run_node(node, given)
                self._walk.node = None

    def _run_node(self, node: Any, given: list[torch.Tensor | None]) -> None:
        found = self._walk.call(node, given)
        for index, (target, number) in enumerate(node.next_functions):
            if target is not None:
                gradient, found[index] = found[index], None
                self._deliver(target, number, gradient)
                del gradient

    def _deliver(self, node: Any, number: int, gradient: torch.Tensor | None) -> None:
        """Add a gradient to those that a node waits for; the node is ready with the last one."""
        if self._needed is not None and node not in self._needed and node not in self._wanted:
            return
        buffer = self._buffers.setdefault(node, [None] * max(len(node._input_metadata), 1))
        if gradient is not None:
            before = buffer[number]
            buffer[number] = gradient if before is None else before + gradient
        self._waiting[node] -= 1
        if not self._waiting[node]:
            self._ready.push(node)


class ReadyNodes:
    """Nodes that can run, highest sequence number first; equal ones in the order of the engine's binary heap."""

    def __init__(self) -> None:
        self._heap: list[tuple[int, Any]] = []

    def __len__(self) -> int:
        return len(self._heap)

    def push(self, node: Any) -> None:
        """Add a node."""
        self._heap.append((node._sequence_nr(), node))
        self._rise(len(self._heap) - 1)

    def pop(self) -> Any:
        """Take out the next node: the gap goes down to a leaf, the last node fills it and rises."""
        heap = self._heap
        top, last = heap[0], heap.pop()
        if heap:
            hole = 0
            while (child := 2 * hole + 2) <= len(heap):
                if child == len(heap) or heap[child][0] < heap[child - 1][0]:
                    child -= 1
                heap[hole] = heap[child]
                hole = child
            heap[hole] = last
            self._rise(hole)
        return top[1]

    def _rise(self, index: int) -> None:
        heap = self._heap
        item = heap[index]
        while index and heap[(index - 1) // 2][0] < item[0]:
            heap[index] = heap[(index - 1) // 2]
            index = (index - 1) // 2
        heap[index] = item


def _taken(given: list[torch.Tensor | None]) -> tuple[torch.Tensor | None, ...]:
    """The list's content, which it gives up."""
    taken = tuple(given)
    given.clear()
    return taken


def _is_stealable(node: Any, given: list[torch.Tensor | None]) -> bool:
    """A leaf takes a gradient over that nobody else holds and that lies in memory like the leaf, else it copies it.

    The node itself cannot see that when it is called from Python, because the call holds the gradient.
    """
    variable = getattr(node, "variable", None)
    if variable is None or variable.grad is not None or given[0] is None or torch.is_grad_enabled():
        return False
    uses = sys.getrefcount(given[0]) - 1  # the call's own
    gradient: Any = given[0]
    if uses > 1 or gradient._use_count() > 1 or {gradient.layout, variable.layout} != {torch.strided}:
        return False
    if not _is_dense(variable):
        return bool(gradient.is_contiguous())
    return all(
        mine == other if size != 1 else mine != 0
        for size, mine, other in zip(gradient.shape, gradient.stride(), variable.stride(), strict=True)
    )


def _is_dense(tensor: torch.Tensor) -> bool:
    """True when the elements fill a block of memory without gaps, in any order of dimensions."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1:
            if stride != expected:
                return False
            expected *= size
    return True


def _steal(variable: Any, given: list[torch.Tensor | None]) -> None:
    gradient = given.pop()
    assert gradient is not None
    variable.grad = gradient.detach()
    for hook in tuple((variable._post_accumulate_grad_hooks or {}).values()):
        hook(variable)


def _edge(output: Any) -> Edge:
    """Where the gradient of an output goes."""
    if not isinstance(output, torch.Tensor) or output.grad_fn is None:
        edge = (
            output if not isinstance(output, torch.Tensor) else torch.autograd.graph.get_gradient_edge(output)
        )
        return edge.node, edge.output_nr
    return output.grad_fn, output.output_nr


def _edge_in(nodes: list[Any], tensor: Any) -> Edge:
    """The same for an input; of a leaf the node that accumulates its gradient, when the graph has it."""
    if not isinstance(tensor, torch.Tensor) or tensor.grad_fn is not None:
        return _edge(tensor)
    return next((n for n in nodes if getattr(n, "variable", None) is tensor), None), 0


def _as_recorded(gradient: Any, meta: Any) -> torch.Tensor:
    """A gradient with the shape and dtype that the forward pass recorded: summed over what was broadcast, cast."""
    shape = tuple(meta.shape)
    if tuple(gradient.shape) != shape:
        gradient = _summed_to(gradient, shape)
    if gradient.dtype != meta.dtype:
        gradient = gradient.to(meta.dtype)
    return gradient  # type: ignore[no-any-return]


def _summed_to(gradient: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    if not shape:
        return gradient.sum()
    leading = gradient.dim() - len(shape)
    broadcast = [
        d for d, size in enumerate(gradient.shape) if d < leading or (shape[d - leading] == 1 and size != 1)
    ]
    if broadcast:
        gradient = gradient.sum(broadcast, keepdim=True)
    return gradient.view(shape) if leading > 0 else gradient
