"""From events to owners and exclusive time: a partition against brute force, hand-made device events, real traces."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmprof.hooks.aggregate import Aggregator, Tables
from llmprof.hooks.attribute import MODULE_SCOPE, STEP_SCOPE, attribute
from llmprof.hooks.calls import Attribution, Call, Owner, Range, attributes
from llmprof.hooks.events import COLLECTIVE, COPY, KERNEL, NODE, OPERATOR, SCOPE, DeviceEvent, Event, Events
from llmprof.hooks.groups import Groups, match_transfers
from llmprof.hooks.intervals import COMMUNICATION, COMPUTE, IDLE, INPUT, Interval, partition
from llmprof.hooks.modules import ModuleNames
from llmprof.hooks.phases import is_weight_gradient
from llmprof.hooks.recorder import steps_of
from llmprof.schema.operators import Tensor
from tests.kineto_json import read_trace

TRACES = Path(__file__).parents[2] / "shared" / "traces"
TRACE_FILES = {
    "one H100, a forward pass": "tracelens/h100__gaunernst_bert-small-uncased__1016001.json.gz",
    "V100, data-parallel ResNet": "kineto_tb/resnet50_num_workers_0_worker0.pt.trace.json.gz",
    "8 GPUs, DLRM": "param_dlrm/worker0_step_12.1694128201545.pt.trace.json.gz",
    "MI250, training": "hta/amd_trace__mi250_minitoy_train_ROCm6_2_kineto.json.gz",
}

LINEAR = Tensor((4, 8), "float32"), Tensor((8, 16), "float32")

interval_sets = st.lists(
    st.tuples(st.integers(-5, 30), st.integers(0, 20), st.integers(COMPUTE, IDLE)), max_size=12
)
boundary_sets = st.lists(st.integers(0, 30), min_size=2, max_size=5, unique=True).map(sorted)


@settings(max_examples=200, deadline=None)
@given(interval_sets, boundary_sets)
def test_partition_agrees_with_a_count_of_unit_cells(
    drawn: list[tuple[int, int, int]], boundaries: list[int]
) -> None:
    intervals = [Interval(s, s + d, priority, owner) for owner, (s, d, priority) in enumerate(drawn)]
    owned, free = partition(intervals, boundaries, len(intervals))
    expected = np.zeros((len(intervals), len(boundaries) - 1))
    for step, (begin, end) in enumerate(pairwise(boundaries)):
        for cell in range(begin, end):
            claims = [i for i in intervals if i.start_us <= cell and cell + 1 <= i.end_us]
            if claims:
                expected[min(claims, key=lambda i: (i.priority, i.start_us, i.owner)).owner, step] += 1
    np.testing.assert_allclose(owned, expected)
    np.testing.assert_allclose(owned.sum(axis=0) + free, np.diff(boundaries))


@settings(max_examples=100, deadline=None)
@given(
    st.lists(
        st.tuples(st.floats(0, 1e6), st.floats(0, 1e5), st.integers(COMPUTE, IDLE)), min_size=1, max_size=40
    )
)
def test_partition_sums_to_the_interval_for_any_times(drawn: list[tuple[float, float, int]]) -> None:
    intervals = [Interval(s, s + d, priority, owner) for owner, (s, d, priority) in enumerate(drawn)]
    owned, free = partition(intervals, [10.0, 4e5, 9e5], len(intervals))
    np.testing.assert_allclose(owned.sum(axis=0) + free, [4e5 - 10.0, 5e5], rtol=1e-6)
    assert all(
        owned[i].sum() <= interval.end_us - interval.start_us + 1e-6 for i, interval in enumerate(intervals)
    )


def test_computation_hides_communication_and_communication_hides_waiting() -> None:
    claims = [
        Interval(0, 10, COMPUTE, 0),
        Interval(5, 20, COMMUNICATION, 1),
        Interval(15, 30, INPUT, 2),
        Interval(28, 40, IDLE, 3),
    ]
    owned, free = partition(claims, [0, 50], 4)
    assert owned[:, 0].tolist() == [10, 10, 10, 10] and free.tolist() == [10]


def device_event(name: str, start_us: float, duration_us: float, kind: str = KERNEL) -> DeviceEvent:
    return DeviceEvent(name=name, kind=kind, start_us=start_us, duration_us=duration_us, stream=7)


def host(name: str, start_us: float, duration_us: float, **more: object) -> Event:
    kind = OPERATOR if "::" in name else SCOPE
    values = {
        "name": name,
        "kind": kind,
        "start_us": start_us,
        "duration_us": duration_us,
        "thread": 1,
    } | more
    return Event(**values)  # type: ignore[arg-type]


def tables_of(events: Events, *, device: str, groups: Groups | None = None) -> tuple[Tables, Attribution]:
    found = attribute(events, ModuleNames(), [("fc", True)])
    aggregator = Aggregator(found, steps_of(found), groups or Groups(), rank=0, device=device)
    return aggregator.tables(), found


def cuda_step() -> Events:
    """One 100 us step of a CUDA run: a matmul, its gradient on another thread, an overlapped all-reduce, a copy."""
    forward = host(
        f"{MODULE_SCOPE}0",
        5,
        20,
        children=(host("aten::mm", 6, 8, sequence=3, inputs=LINEAR, device=(device_event("gemm", 20, 20),)),),
    )
    node = Event(
        name="MmBackward0",
        kind=NODE,
        start_us=30,
        duration_us=10,
        thread=2,
        sequence=3,
        forward_thread=1,
        children=(
            Event(
                name="aten::mm",
                kind=OPERATOR,
                start_us=31,
                duration_us=5,
                thread=2,
                inputs=LINEAR,
                device=(device_event("gemm", 45, 15),),
            ),
        ),
    )
    metadata = {
        "Collective name": "allreduce",
        "Group size": "8",
        "In msg nelems": "1024",
        "Out msg nelems": "1024",
        "dtype": "BFloat16",
        "Process Group Description": "mesh_dp",
    }
    reduce = host(
        "c10d::allreduce_",
        41,
        4,
        metadata=metadata,
        device=(device_event("ncclDevKernel_AllReduce_Sum_bf16_RING_LL", 50, 20, COLLECTIVE),),
    )
    copy = host("aten::copy_", 46, 3, device=(device_event("Memcpy DtoH", 80, 5, COPY),))
    marks = (host(f"{STEP_SCOPE}0", 0, 0), host(f"{STEP_SCOPE}1", 100, 0))
    orphan = device_event("spin", 90, 4)
    return Events(
        roots=(marks[0], forward, node, reduce, copy, marks[1]), orphans=(orphan,), waits_us=((50.0, 84.0),)
    )


def test_device_time_follows_kernels_and_owners_follow_the_forward_thread() -> None:
    tables, _ = tables_of(cuda_step(), device="cuda")
    rows = {(row.op, row.phase): row for row in tables.operators}
    forward, backward = rows["aten::mm", "forward"], rows["aten::mm", "backward_input"]
    assert (forward.module, forward.time_us, forward.exclusive_us, forward.host_us) == ("fc", 20, 20, 8)
    assert (backward.module, backward.time_us, backward.exclusive_us, backward.host_us) == ("fc", 15, 15, 5)
    assert rows["aten::copy_", "other"].exclusive_us == 5
    assert not rows["spin", "other"].attributed
    (collective,) = tables.collectives
    assert (collective.kind, collective.axis, collective.group_size) == ("all_reduce", "dp", 8)
    assert (collective.size_bytes, collective.dtype) == (2048, "bfloat16")
    assert (collective.time_us, collective.exposed_us) == (20, 10)  # 50..60 is under the gradient's matmul
    phases = {row.phase: row.exclusive_us for row in tables.phases}
    assert phases["idle"] == 10 and phases["communication"] == 10  # the host waits from 70 to 80
    assert sum(phases.values()) == 100
    assert {span.stream for span in tables.spans} == {"main", "autograd", "stream 7"}


def test_attributed_fraction_counts_orphans_against_us() -> None:
    tables, _ = tables_of(cuda_step(), device="cuda")
    assert tables.attributed_fraction == pytest.approx(1 - 4 / 44)


def test_gloo_transfers_pair_with_calls_by_size_and_order() -> None:
    def call(op: str, start_us: float, *sizes: int) -> Call:
        inputs = tuple(Tensor((size,), "float32") for size in sizes)
        return Call(
            op=op, owner=Owner(""), phase="communication", thread=1, start_us=start_us, duration_us=1,
            kind="all_reduce", inputs=inputs,
        )  # fmt: skip

    calls = [
        call("c10d::_reduce_scatter_base_", 0, 4, 8),
        call("c10d::allreduce_", 5, 6, 4),
        call("c10d::x", 60, 3),
    ]
    transfers = [
        Range("gloo:all_reduce", 20, 30, 9, (Tensor((10,), "float32"),)),
        Range("gloo:all_reduce", 10, 18, 9, (Tensor((8,), "float32"),)),
        Range("gloo:all_reduce", 40, 50, 9, (Tensor((3,), "float32"),)),
    ]
    first, second, third = match_transfers(calls, transfers)
    assert first is not None and (first.start_us, first.end_us) == (0, 18)
    assert second is not None and (second.start_us, second.end_us) == (18, 30)  # the thread was busy until 18
    assert third is None  # nothing of that size began after it


@pytest.mark.parametrize(
    ("op", "scalars", "expected"),
    [
        ("aten::_scaled_dot_product_flash_attention_for_cpu", (0.0, True), {"causal"}),
        ("aten::_scaled_dot_product_flash_attention_for_cpu", (0.1, False), set()),
        ("aten::_scaled_dot_product_efficient_attention", (True, 0.0, False), set()),
        ("aten::_scaled_dot_product_efficient_attention", (False, 0.0, True), {"causal"}),
        ("aten::_scaled_dot_product_flash_attention_backward", (512, 512, 0.0, True), {"causal"}),
        ("aten::dropout", (0.1, True), set()),
    ],
)
def test_causal_is_the_flag_after_the_dropout_probability(
    op: str, scalars: tuple[float, ...], expected: set[str]
) -> None:
    assert attributes(op, scalars) == expected


def test_weight_gradients_by_shape_and_by_layout() -> None:
    weight = {(176, 64)}
    assert is_weight_gradient("aten::mm", [(176, 96), (96, 64)], weight)
    assert is_weight_gradient("aten::mm", [(64, 96), (96, 176)], weight)  # transposed
    assert not is_weight_gradient("aten::mm", [(96, 176), (176, 64)], weight)
    assert not is_weight_gradient("aten::add", [(176, 64), (176, 64)], weight)
    assert is_weight_gradient("aten::embedding_dense_backward", [(8, 64), (8,)], ())
    square = {(64, 64)}
    assert is_weight_gradient("aten::mm", [(64, 64), (64, 64)], square, transposed=True)
    assert not is_weight_gradient("aten::mm", [(64, 64), (64, 64)], square, transposed=False)


@pytest.mark.parametrize("name", TRACE_FILES)
def test_real_gpu_traces_are_conserved(name: str) -> None:
    path = TRACES / TRACE_FILES[name]
    if not path.exists():
        pytest.skip("recorded GPU traces are not here")
    events = read_trace(path)
    found = attribute(events, ModuleNames(), [])
    steps = steps_of(found)
    if not steps:
        last = max(root.end_us for root in events.roots)
        found.marks = [(0, 0.0), (1, last)]
        steps = steps_of(found)
    tables = Aggregator(found, steps, Groups(), rank=0, device="cuda").tables()
    for step in steps:
        total = sum(row.exclusive_us for row in tables.phases if row.step == step.number)
        assert total == pytest.approx(step.duration_us, rel=1e-6)
    busy = sum(row.exclusive_us for row in tables.operators) + sum(
        row.exposed_us for row in tables.collectives
    )
    assert 0 < busy * len(steps) <= sum(step.duration_us for step in steps) * (1 + 1e-9)
    activities = [a for call in found.calls for a in call.device]
    inside = [a for a in activities if steps[0].start_us <= a.start_us < steps[-1].end_us]
    assert inside
    union = _union([(a.start_us, min(a.start_us + a.duration_us, steps[-1].end_us)) for a in inside])
    assert busy * len(steps) == pytest.approx(union, rel=0.02)


def test_collectives_of_a_recorded_eight_gpu_run() -> None:
    path = TRACES / TRACE_FILES["8 GPUs, DLRM"]
    if not path.exists():
        pytest.skip("recorded GPU traces are not here")
    tables, found = tables_of(read_trace(path), device="cuda")
    assert found.threads == {1: "main", 2: "autograd"}
    assert tables.attributed_fraction is not None and tables.attributed_fraction > 0.95
    kinds = {row.kind for row in tables.collectives}
    assert "all_to_all" in kinds
    exchanges = [row for row in tables.collectives if row.kind == "all_to_all" and row.time_us]
    # a forward exchange of 49,152 bytes of embeddings and its gradient; both are longer than any overlap
    assert {row.size_bytes for row in exchanges} >= {49152, 16640, 3072, 384}
    for row in exchanges:
        assert 0 < row.exposed_us <= row.count * (row.time_us + row.time_iqr_us) * 1.001


def _union(intervals: list[tuple[float, float]]) -> float:
    total, covered = 0.0, -np.inf
    for start, end in sorted(intervals):
        total += max(0.0, end - max(start, covered))
        covered = max(covered, end)
    return float(total)
