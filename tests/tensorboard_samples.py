"""Profiles with made-up but consistent numbers, for the tests of the TensorBoard tab."""

from __future__ import annotations

from typing import Any

from llmprof.schema.layout import Layout
from llmprof.schema.profile import (
    CollectiveRow,
    Manifest,
    MemoryRow,
    OperatorRow,
    PhaseRow,
    Profile,
    RankClass,
    SourceRow,
    StepRow,
)

NUM_STEPS = 24
WINDOW = (7, 8, 9)
NUM_LAYERS = 4
PHASE_US = {
    "forward": 118_000.0,
    "backward_input": 96_000.0,
    "backward_weight": 104_000.0,
    "optimizer": 31_000.0,
    "communication": 22_000.0,
    "input": 1_500.0,
    "host": 9_000.0,
    "idle": 2_500.0,
    "other": 16_000.0,
}


def measured_profile(*, ranks: int = 2, name: str = "demo") -> Profile:
    """A captured run: phases of each rank sum to its step, operators lie in modules of four equal layers."""
    members = range(ranks)
    return Profile(
        manifest=Manifest(
            name=name,
            created="2026-11-30T10:00:00+00:00",
            llmprof_version="0.1.0",
            world_size=ranks,
            rank_classes=tuple(RankClass(rank=r, count=1) for r in members),
            layout=f"dp={ranks}",
            precision="bfloat16",
            window=WINDOW,
            model_flops_per_step=0.40 * 0.4 * 989e12 * ranks,
            peak_flops=989e12,
            attributed_fraction=0.987,
            root_fraction=0.004,
            warnings=("the profiled steps were 9 % slower than the others",),
        ),
        steps=tuple(_step(rank, step) for rank in members for step in range(NUM_STEPS)),
        phases=tuple(
            PhaseRow(rank=rank, step=step, phase=phase, exclusive_us=us * (1 + 0.02 * rank))
            for rank in members
            for step in WINDOW
            for phase, us in PHASE_US.items()
        ),
        operators=tuple(row for rank in members for row in _operators(rank)),
        collectives=tuple(_all_reduce(rank, size) for rank in members for size in (26_214_400, 4_096)),
        memory=tuple(row for rank in members for row in _memory(rank)),
        sources=tuple(_source(rank) for rank in members),
    )


def _step(rank: int, step: int) -> StepRow:
    kind = "compile" if step == 0 else "warmup" if step < 3 else "train"
    duration_us = 2_400_000.0 if step == 0 else 400_000.0 + 6_000 * ((step * 7) % 5) + 1_000 * rank
    return StepRow(
        rank=rank,
        step=step,
        start_us=step * 410_000.0,
        duration_us=duration_us * (1.09 if step in WINDOW else 1.0),
        tokens=8192,
        sequences=4,
        instrumented=step in WINDOW,
        kind=kind,
        peak_memory_bytes=41_300_000_000,
    )


def _operators(rank: int) -> list[OperatorRow]:
    kinds = (
        ("aten::mm", "matmul", "mlp.up", "forward", "[8192,4096];[4096,14336]", 9_500.0),
        ("aten::mm", "matmul", "mlp.up", "backward_weight", "[4096,8192];[8192,14336]", 12_000.0),
        ("aten::mm", "matmul", "mlp.up", "backward_input", "[8192,14336];[14336,4096]", 11_000.0),
        ("aten::mm", "matmul", "attention.qkv", "forward", "[8192,4096];[4096,6144]", 4_800.0),
        (
            "aten::_scaled_dot_product_flash_attention",
            "attention",
            "attention",
            "forward",
            "[4,32,2048,128]",
            7_000.0,
        ),
        (
            "aten::_scaled_dot_product_flash_attention_backward",
            "attention",
            "attention",
            "backward_input",
            "",
            13_000.0,
        ),
        ("aten::mul", "elementwise", "mlp", "forward", "[8192,14336]", 2_100.0),
        ("aten::native_layer_norm", "norm", "norm1", "forward", "[4,2048,4096]", 1_900.0),
    )
    layers = [
        _operator(rank, op, family, f"layers.{layer}.{module}", phase, shapes, us)
        for layer in range(NUM_LAYERS)
        for op, family, module, phase, shapes, us in kinds
    ]
    head = _operator(rank, "aten::mm", "matmul", "head", "forward", "[8192,4096];[4096,128256]", 21_000.0)
    step = _operator(rank, "aten::_foreach_addcmul_", "optimizer", "optimizer", "optimizer", "", 31_000.0)
    return [*layers, head, step]


def _operator(
    rank: int, op: str, family: str, module: str, phase: str, shapes: str, exclusive_us: float
) -> OperatorRow:
    return OperatorRow(
        rank=rank,
        op=op,
        family=family,
        module=module,
        phase=phase,
        shapes=shapes,
        dtype="bfloat16",
        device="cuda",
        count=1,
        time_us=exclusive_us,
        time_iqr_us=exclusive_us * 0.02,
        time_n=3,
        exclusive_us=exclusive_us,
        flops=960_000_000_000 if family == "matmul" else 0,
        bytes=300_000_000,
    )


def _all_reduce(rank: int, size_bytes: int) -> CollectiveRow:
    return CollectiveRow(
        rank=rank,
        kind="all_reduce",
        axis="dp",
        group_size=2,
        size_bytes=size_bytes,
        dtype="bfloat16",
        backend="nccl",
        count=12,
        time_us=2_100.0,
        time_iqr_us=90.0,
        time_n=36,
        exposed_us=11_000.0,
    )


def _memory(rank: int) -> list[MemoryRow]:
    sizes = {
        "parameters": 4_800_000_000,
        "gradients": 4_800_000_000,
        "optimizer": 19_200_000_000,
        "activations": 11_400_000_000,
        "buffers": 50_000_000,
        "peak": 41_300_000_000,
        "peak_reserved": 44_000_000_000,
    }
    return [MemoryRow(rank=rank, category=category, size_bytes=size) for category, size in sizes.items()]


def _source(rank: int) -> SourceRow:
    return SourceRow(
        rank=rank,
        hostname="node0",
        device="cuda",
        device_name="NVIDIA H100 80GB HBM3",
        device_count=2,
        threads=8,
        memory_bytes=80_000_000_000,
        backend="nccl",
        clock="cuda events",
        software="torch 2.13.0",
    )


def predicted_profile(layout: str, *, cluster: str = "8xH100-SXM", assumed: float = 0.2) -> Profile:
    """A forecast whose breakdown sums to its median; more replicas lose a little efficiency."""
    parsed = Layout.parse(layout)
    compute = 0.36 * 64 / (parsed.tp * parsed.pp) / 8
    parts = {
        "compute": compute,
        "tp": 0.02 * (parsed.tp - 1),
        "dp": 0.004 * parsed.dp**0.6,
        "pp": 0.003 * (parsed.pp - 1),
        "bubble": compute * (parsed.pp - 1) / (parsed.accum + parsed.pp - 1),
        "optimizer": 0.03,
        "host": 0.004,
        "straggler": 0.002 * parsed.dp**0.3,
    }
    p50 = sum(parts.values())
    tokens = parsed.global_batch * 2048
    forecast: dict[str, Any] = {
        "layout": str(parsed),
        "gpus": parsed.gpus,
        "global_batch": parsed.global_batch,
        "step_time_s": {"p10": p50 * 0.92, "p50": p50, "p90": p50 * 1.11},
        "tokens_per_s": {"p10": tokens / p50 / 1.11, "p50": tokens / p50, "p90": tokens / p50 / 0.92},
        "naive_step_time_s": compute * 1.05,
        "second_baseline_step_time_s": (compute + parts["bubble"]) * 1.12,
        "bound_step_time_s": compute * 0.62,
        "breakdown_s": {"recompute": 0.0, "cp": 0.0, "ep": 0.0, "input": 0.0, **parts},
        "mfu": 0.44 * compute / p50,
        "peak_memory_bytes": {"p50": 480e9 / parsed.gpus + 22e9, "p90": 560e9 / parsed.gpus + 25e9},
        "verdict": "oom" if parsed.gpus <= 8 else "tight" if parsed.gpus <= 16 else "fits",
        "oom_probability": 0.81 if parsed.gpus <= 8 else 0.22 if parsed.gpus <= 16 else 0.01,
        "measured_fraction": 0.8 * (1 - assumed),
        "interpolated_fraction": 0.2 * (1 - assumed),
        "assumed_fraction": assumed,
        "assumptions": ["NCCL ring over 400 Gbit/s links per GPU", "host time per launch 7 us, assumed"],
        "cost": {"currency": "USD", "per_step": parsed.gpus * 2.5 * p50 / 3600, "per_1e9_tokens": 412.0},
        "energy_j_per_step": {"p10": 9e3, "p50": 1.1e4, "p90": 1.3e4},
    }
    manifest = Manifest(
        kind="predicted",
        name="demo",
        world_size=parsed.gpus,
        layout=str(parsed),
        cluster=cluster,
        precision="bfloat16",
        forecast=forecast,
    )
    return Profile(manifest=manifest)


def forecasts() -> list[Profile]:
    """Two families on two clusters, six sizes each, and one pipeline layout."""
    sizes = (1, 2, 4, 8, 16, 32)
    return [
        *(predicted_profile(f"dp={dp},tp=8,mb=2,accum=8") for dp in sizes),
        *(
            predicted_profile(f"dp={dp},zero=3,tp=4,mb=2,accum=8", cluster="8xA100-80GB", assumed=0.6)
            for dp in sizes
        ),
        predicted_profile("dp=4,tp=4,pp=4,mb=1,accum=16"),
    ]
