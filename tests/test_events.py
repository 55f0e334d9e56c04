"""Reading the profiler's raw results: linking device work to operators, collective metadata, threads, odd inputs."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from llmprof.hooks.events import COLLECTIVE, COMPOSITE, COPY, KERNEL, NODE, OPERATOR, SCOPE, Events, read
from llmprof.schema.operators import Tensor


class _ExtraFields_TorchOp(SimpleNamespace):
    """Stands for the class of that name, which tells operators from other entries of the tree."""


@dataclass
class Node:
    """One entry of a profiler's event tree."""

    name: str
    start_time_ns: int
    duration_time_ns: int
    correlation_id: int
    start_tid: int = 1
    overload_name: str = ""
    children: list[Any] = field(default_factory=list)
    extra_fields: Any = None

    def __post_init__(self) -> None:
        if self.extra_fields is None:
            self.extra_fields = fields()


def fields(*inputs: Any, scope: str = "FUNCTION", sequence: int = -1) -> _ExtraFields_TorchOp:
    return _ExtraFields_TorchOp(
        inputs=list(inputs), scope=SimpleNamespace(name=scope), sequence_number=sequence
    )


def metadata(*sizes: int, pointer: int | None = 64, strides: list[int] | None = None) -> SimpleNamespace:
    contiguous = [1]
    for size in reversed(sizes[1:]):
        contiguous.insert(0, contiguous[0] * size)
    return SimpleNamespace(
        sizes=list(sizes), strides=strides or contiguous, dtype="torch.float32", storage_data_ptr=pointer
    )


def activity(name: str, kind: str, linked: int, start_ns: int, **more: Any) -> SimpleNamespace:
    """One of Kineto's flat events."""
    values = {
        "name": name,
        "activity_type": kind,
        "start_ns": start_ns,
        "duration_ns": 1000,
        "correlation_id": linked,
        "linked_correlation_id": linked,
        "fwd_thread_id": 0,
        "device_resource_id": 7,
        "extra_meta": {},
    } | more
    device = "CPU" if kind in ("cpu_op", "cuda_runtime") else "CUDA"
    event = {key: (lambda value=value: value) for key, value in values.items()}
    return SimpleNamespace(device_type=lambda: SimpleNamespace(name=device), **event)


def read_all(roots: list[Node], flat: list[SimpleNamespace], device: str = "cuda") -> Events:
    results = SimpleNamespace(experimental_event_tree=lambda: roots, events=lambda: flat)
    return read(results, look_through=lambda name, overload: name == "aten::linear", device=device)


def test_kernels_belong_to_the_operator_that_encloses_their_launch() -> None:
    mm = Node("aten::mm", 2000, 3000, 2, extra_fields=fields(metadata(4, 8), metadata(8, 2)))
    inner = Node("aten::copy_", 6000, 500, 4)
    clone = Node("aten::clone", 5500, 1500, 3, children=[inner])
    linear = Node("aten::linear", 1000, 8000, 1, children=[mm, clone])
    flat = [
        activity("gemm", "kernel", 2, 9000),
        activity("Memcpy DtoD", "gpu_memcpy", 4, 11000, device_resource_id=9),
        activity("a range", "gpu_user_annotation", 2, 9000),
        activity("spin", "concurrent_kernel", 99, 14000),
        activity("cudaStreamSynchronize", "cuda_runtime", 0, 15000),
    ]
    events = read_all([linear], flat)
    (root,) = events.roots
    assert root.kind == COMPOSITE and [child.name for child in root.children] == ["aten::mm", "aten::clone"]
    first, second = root.children
    assert first.inputs == (Tensor((4, 8), "float32"), Tensor((8, 2), "float32"))
    assert [(a.name, a.kind, a.start_us, a.stream) for a in first.device] == [("gemm", KERNEL, 8.0, 7)]
    assert [(a.name, a.kind, a.stream) for a in second.device] == [("Memcpy DtoD", COPY, 9)]
    assert second.children == ()
    assert [a.name for a in events.orphans] == ["spin"]
    assert events.waits_us == ((14.0, 15.0),)


def test_a_collective_carries_the_metadata_of_its_record() -> None:
    record = Node("record_param_comms", 2000, 500, 6)
    reduce = Node("c10d::allreduce_", 1000, 3000, 5, children=[record])
    alone = Node("record_param_comms", 5000, 500, 7)
    flat = [
        activity("record_param_comms", "cpu_op", 6, 2000, extra_meta={"Group size": "8"}),
        activity("record_param_comms", "cpu_op", 7, 5000, extra_meta={"Group size": "4"}),
        activity("ncclDevKernel_AllReduce_Sum_f32_RING_LL", "kernel", 6, 7000),
    ]
    first, second = read_all([reduce, alone], flat).roots
    assert first.metadata == {"Group size": "8"} and [a.kind for a in first.device] == [COLLECTIVE]
    assert second.kind == SCOPE and second.metadata == {"Group size": "4"}


def test_nodes_know_their_forward_thread_and_their_inner_event_creates_nothing() -> None:
    inner = Node("MmBackward0", 2000, 500, 2, 4, extra_fields=fields(scope="BACKWARD_FUNCTION", sequence=9))
    node = Node(
        "autograd::engine::evaluate_function: MmBackward0",
        1000,
        3000,
        1,
        4,
        children=[inner],
        extra_fields=fields(sequence=9),
    )
    (found,) = read_all([node], [activity("x", "cpu_op", 1, 0, fwd_thread_id=1)]).roots
    assert (found.kind, found.name, found.sequence, found.forward_thread) == (NODE, "MmBackward0", 9, 1)
    assert (found.children[0].kind, found.children[0].sequence) == (SCOPE, -1)


def test_inputs_lists_scalars_results_and_subclasses() -> None:
    listed = [metadata(3), metadata(5)]
    mixed = Node("aten::_foreach_add_", 0, 10, 1, extra_fields=fields(listed, listed, 1.5, None, True))
    out = Node("aten::mm", 20, 10, 2, overload_name="out", extra_fields=fields(*[metadata(2, 2)] * 3))
    local = Node("aten::mm", 42, 4, 4, extra_fields=fields(metadata(4, 2, strides=[1, 4]), metadata(2, 4)))
    sharded = Node("aten::mm", 40, 10, 3, children=[local], extra_fields=fields(metadata(8, 8, pointer=None)))
    first, second, third = read_all([mixed, out, sharded], [], "cpu").roots
    assert [(t.shape, t.group) for t in first.inputs] == [((3,), 1), ((5,), 1), ((3,), 2), ((5,), 2)]
    assert first.scalars == (1.5, True)
    assert len(second.inputs) == 2
    assert third.kind == COMPOSITE and third.wrapper
    assert third.children[0].kind == OPERATOR and third.children[0].transposed


def test_a_sparse_tensor_has_a_shape_and_no_strides() -> None:
    sparse = metadata(4, 2)
    sparse.strides = []
    (event,) = read_all([Node("aten::add", 0, 10, 1, extra_fields=fields(sparse, sparse))], [], "cpu").roots
    assert [t.shape for t in event.inputs] == [(4, 2), (4, 2)] and event.transposed is None


def test_names_that_are_no_operators_are_scopes() -> None:
    names = [
        "torch::autograd::AccumulateGrad",
        "FSDP::all_gather (0)",
        "torch.distributed.ddp.reducer::mul_out",
    ]
    names += ["MyFunction", "Torch-Compiled Region: 0/0"]
    events = read_all([Node(name, i, 1, i) for i, name in enumerate(names)], [], "cpu")
    assert {event.kind for event in events.roots} == {SCOPE}
    other = SimpleNamespace(name="python", extra_fields=SimpleNamespace(), start_time_ns=0, start_tid=1)
    assert read_all([other], [], "cpu") == Events(roots=())  # type: ignore[list-item]
