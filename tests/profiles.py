"""Profiles built by hand, small enough to check every number on paper."""

from __future__ import annotations

from llmprof.schema.profile import (
    CollectiveRow,
    Manifest,
    MemoryRow,
    OperatorRow,
    PhaseRow,
    Profile,
    RankClass,
    SourceRow,
    SpanRow,
    StepRow,
)
from llmprof.schema.workload import (
    ClassTrace,
    LayerSpec,
    LayerTrace,
    OpSpec,
    ParameterSpec,
    Poly,
    TensorSpec,
    Workload,
)

STEP_US = 1000.0
WINDOW_US = 1250.0
PHASE_SHARES = {
    "forward": 0.30,
    "backward_input": 0.24,
    "backward_weight": 0.16,
    "optimizer": 0.10,
    "communication": 0.12,
    "host": 0.06,
    "idle": 0.02,
}
"""Shares of the step of every rank; they sum to 1."""


def operator(rank: int = 0, **changes: object) -> OperatorRow:
    """A matmul of the MLP in the forward pass; 8 calls of 30 us each."""
    values: dict[str, object] = {
        "rank": rank,
        "op": "aten::mm",
        "family": "matmul",
        "module": "layers.0.mlp.up",
        "phase": "forward",
        "shapes": "64x128,128x256",
        "dtype": "float32",
        "device": "cpu",
        "count": 8.0,
        "time_us": 30.0,
        "time_iqr_us": 1.0,
        "time_n": 24,
        "exclusive_us": 240.0,
        "host_us": 2.0,
        "flops": 2 * 64 * 128 * 256,
        "bytes": 4 * (64 * 128 + 128 * 256 + 64 * 256),
    }
    return OperatorRow(**{**values, **changes})  # type: ignore[arg-type]


def _operators(rank: int) -> tuple[OperatorRow, ...]:
    return (
        operator(rank),
        operator(rank, module="layers.1.mlp.up", exclusive_us=200.0, time_us=25.0),
        operator(rank, op="aten::mul", family="elementwise", module="layers.0.norm", exclusive_us=10.0, flops=0),
        operator(rank, phase="backward_weight", exclusive_us=150.0),
        operator(rank, op="aten::_fused_adamw_", family="optimizer", module="optimizer", phase="optimizer",
                 count=1.0, time_us=125.0, exclusive_us=125.0, flops=0),
    )  # fmt: skip


def measured(
    *, ranks: int = 2, steps: int = 12, slow_us: float = 0.0, layout: str = "dp=2", tokens: int | None = 512
) -> Profile:
    """A run: `steps` plain steps of 1000 us, then a window of 3 steps of 1250 us.

    Rank r is r us slower; `slow_us` is added to every second step.
    """
    last = steps + 3
    rows = [
        StepRow(
            rank=rank,
            step=step,
            start_us=1300.0 * step,
            duration_us=WINDOW_US if step >= steps else STEP_US + rank + slow_us * (step % 2),
            tokens=tokens,
            sequences=4,
            instrumented=step >= steps,
        )
        for rank in range(ranks)
        for step in range(last)
    ]
    phases = [
        PhaseRow(rank=rank, step=step, phase=phase, exclusive_us=share * WINDOW_US)
        for rank in range(ranks)
        for step in range(steps, last)
        for phase, share in PHASE_SHARES.items()
    ]
    return Profile(
        manifest=Manifest(
            name="tiny",
            created="2026-01-02T03:04:05Z",
            world_size=ranks,
            rank_classes=tuple(RankClass(rank=rank, count=1) for rank in range(ranks)),
            layout=layout,
            window=tuple(range(steps, last)),
            model_flops_per_step=4e6,
            peak_flops=1e10,
            attributed_fraction=0.985,
            root_fraction=0.004,
        ),
        steps=tuple(rows),
        phases=tuple(phases),
        operators=tuple(row for rank in range(ranks) for row in _operators(rank)),
        collectives=tuple(collective(rank) for rank in range(ranks) if ranks > 1),
        spans=tuple(span(rank) for rank in range(ranks)),
        memory=tuple(
            MemoryRow(rank=rank, category=category, size_bytes=size + rank)
            for rank in range(ranks)
            for category, size in (("parameters", 4_000_000), ("optimizer", 8_000_000), ("peak", 21_000_000))
        ),
        sources=tuple(source(rank) for rank in range(ranks)),
    )


def collective(rank: int = 0) -> CollectiveRow:
    """Two all-reduces of 4 MB, 100 us each, of which 150 us a step are exposed."""
    return CollectiveRow(
        rank=rank, kind="all_reduce", axis="dp", group_size=2, size_bytes=4_000_000, dtype="float32",
        backend="gloo", count=2.0, time_us=100.0, time_iqr_us=4.0, time_n=6, exposed_us=150.0,
    )  # fmt: skip


def span(rank: int = 0) -> SpanRow:
    """The forward matmul of the first operator row."""
    return SpanRow(
        rank=rank, stream="main", name="aten::mm", phase="forward", start_us=10.0, duration_us=30.0,
        table="operators", row=0,
    )  # fmt: skip


def source(rank: int = 0) -> SourceRow:
    """A CPU rank."""
    return SourceRow(
        rank=rank, hostname="node0", device="cpu", device_name="AMD EPYC 7R13", device_count=1, threads=1,
        memory_bytes=16_000_000_000, backend="gloo", clock="perf_counter", software="torch 2.13.0",
    )  # fmt: skip


VOCAB, BLOCKS = 256, 4


def workload(*, hidden: int = 64) -> Workload:
    """A model of four blocks of one square matmul each, between an embedding and a head."""
    weight = ParameterSpec(name="weight", shape=(hidden, hidden), dtype="float32")
    table = ParameterSpec(name="embedding.weight", shape=(VOCAB, hidden), dtype="float32", matmul=False)
    head = ParameterSpec(name="head.weight", shape=(VOCAB, hidden), dtype="float32")
    layers = {
        "prologue": _layer(_embedding(hidden), (VOCAB, hidden)),
        "block0": _layer(_matmuls(hidden, hidden), (hidden, hidden)),
        "epilogue": _layer(_matmuls(hidden, VOCAB), (VOCAB, hidden)),
        "loss": LayerTrace(),
    }
    return Workload(
        name="tiny",
        layers=(
            LayerSpec(name="prologue", kind="prologue", parameters=(table,)),
            LayerSpec(name="block0", kind="block", module="layers.0", parameters=(weight,)),
            LayerSpec(name="epilogue", kind="epilogue", parameters=(head,)),
            LayerSpec(name="loss", kind="loss"),
        ),
        sequence=(("prologue", 1), ("block0", BLOCKS), ("epilogue", 1), ("loss", 1)),
        classes=(ClassTrace(layers=layers),),
        tp_refusal="the model has no tensor-parallel plan",
        batch=2,
        seq=32,
    )


_TOKENS = Poly(cbs=1)


def _matmuls(hidden: int, num_outputs: int) -> tuple[OpSpec, ...]:
    """Forward, input gradient and weight gradient of a linear layer, and its optimizer."""
    x = TensorSpec((_TOKENS, hidden), "float32")
    w = TensorSpec((hidden, num_outputs), "float32")
    y = TensorSpec((_TOKENS, num_outputs), "float32")
    transposed = TensorSpec((num_outputs, hidden), "float32"), TensorSpec((hidden, _TOKENS), "float32")
    return (
        OpSpec(op="aten::mm", phase="forward", inputs=(x, w), outputs=(y,)),
        OpSpec(op="aten::mm", phase="backward_input", inputs=(y, transposed[0]), outputs=(x,)),
        OpSpec(op="aten::mm", phase="backward_weight", inputs=(transposed[1], y), outputs=(w,)),
        OpSpec(op="aten::_fused_adamw_", phase="optimizer", inputs=(w, w, w, w), outputs=(w,)),
    )


def _embedding(hidden: int) -> tuple[OpSpec, ...]:
    table, ids = TensorSpec((VOCAB, hidden), "float32"), TensorSpec((_TOKENS,), "int64")
    rows = TensorSpec((_TOKENS, hidden), "float32")
    return (OpSpec(op="aten::embedding", phase="forward", inputs=(table, ids), outputs=(rows,)),)


def _layer(ops: tuple[OpSpec, ...], parameter: tuple[int, ...]) -> LayerTrace:
    saved = TensorSpec((_TOKENS, parameter[-1]), "float32")
    return LayerTrace(ops=ops, saved=(saved,), boundary=saved, parameters=(parameter,))
