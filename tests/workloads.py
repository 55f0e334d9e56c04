"""A small workload, profile and clusters written by hand: two matmuls a block, so that expectations fit on paper."""

from __future__ import annotations

from llmprof.schema.cluster import Cluster, Device, LinkLevel, Price
from llmprof.schema.profile import Manifest, Profile, SourceRow, StepRow
from llmprof.schema.workload import (
    ClassTrace,
    LayerSpec,
    LayerTrace,
    OpSpec,
    OptimizerSpec,
    ParameterSpec,
    Poly,
    TensorSpec,
    Workload,
)

HIDDEN, WIDE, VOCAB = 64, 256, 128
TOKENS = Poly(cbs=1)


def spec(*dims: int | Poly, dtype: str = "float32") -> TensorSpec:
    """A float32 tensor."""
    return TensorSpec(tuple(dims), dtype)


def matmul(phase: str, module: str, m: int | Poly, k: int | Poly, n: int | Poly) -> OpSpec:
    """(m, k) x (k, n)."""
    return OpSpec(
        op="aten::mm", phase=phase, module=module, inputs=(spec(m, k), spec(k, n)), outputs=(spec(m, n),)
    )


def linear(module: str, inside: int, outside: int) -> tuple[list[OpSpec], list[OpSpec], list[OpSpec]]:
    """Forward, backward and optimizer of a linear layer without bias, weight (outside, inside)."""
    forward = [
        OpSpec(op="aten::t", phase="forward", module=module, inputs=(spec(outside, inside),)),
        matmul("forward", module, TOKENS, inside, outside),
    ]
    backward = [
        matmul("backward_weight", module, outside, TOKENS, inside),
        matmul("backward_input", module, TOKENS, outside, inside),
    ]
    return forward, backward, [update(module, outside, inside)]


def update(module: str, *shape: int) -> OpSpec:
    """A single-tensor optimizer operator over a parameter."""
    return OpSpec(
        op="aten::addcdiv_",
        phase="optimizer",
        module=module,
        inputs=(spec(*shape), spec(*shape), spec(*shape)),
        outputs=(spec(*shape),),
        count=4,
    )


def block(tp: int, *, sp: bool) -> LayerTrace:
    """up: (hidden, wide / tp), gelu, down: (wide / tp, hidden), then an all-reduce (or its two halves under sp)."""
    wide = WIDE // tp
    up_f, up_b, up_o = linear("up", HIDDEN, wide)
    down_f, down_b, down_o = linear("down", wide, HIDDEN)
    gelu = OpSpec(
        op="aten::gelu",
        phase="forward",
        module="act",
        inputs=(spec(TOKENS, wide),),
        outputs=(spec(TOKENS, wide),),
    )
    gelu_backward = OpSpec(
        op="aten::gelu_backward",
        phase="backward_input",
        module="act",
        inputs=(spec(TOKENS, wide), spec(TOKENS, wide)),
        outputs=(spec(TOKENS, wide),),
    )
    forward = [*up_f, gelu, *down_f]
    backward = [*down_b, gelu_backward, *up_b]
    local = Poly(cbs=1, div=tp) if sp else TOKENS
    if tp > 1 and not sp:
        forward.append(collective("all_reduce", "forward"))
        backward.append(collective("all_reduce", "backward_input"))
    elif tp > 1:
        forward = [collective("all_gather", "forward"), *forward, collective("reduce_scatter", "forward")]
        backward = [
            collective("all_gather", "backward_input"),
            *backward,
            collective("reduce_scatter", "backward_input"),
        ]
    return LayerTrace(
        ops=(*forward, *backward, *up_o, *down_o),
        saved=(spec(local, HIDDEN), spec(TOKENS, wide), spec(TOKENS, wide)),
        boundary=spec(local, HIDDEN),
        parameters=((wide, HIDDEN), (HIDDEN, wide)),
    )


def collective(kind: str, phase: str) -> OpSpec:
    """A tensor-parallel collective of one activation (the full buffer)."""
    full = spec(TOKENS, HIDDEN)
    return OpSpec(
        op=f"_c10d_functional::{kind}",
        phase=phase,
        inputs=(full,),
        outputs=(full,),
        collective=kind,
        axis="tp",
    )


def head(tp: int) -> LayerTrace:
    """The output projection, its columns sharded over tp."""
    forward, backward, optimizer = linear("out", HIDDEN, VOCAB // tp)
    return LayerTrace(
        ops=(*forward, *backward, *optimizer),
        saved=(spec(TOKENS, HIDDEN),),
        boundary=spec(TOKENS, VOCAB // tp),
        parameters=((VOCAB // tp, HIDDEN),),
    )


def embedding() -> LayerTrace:
    """A lookup of (b, s) indices in a (vocab, hidden) table."""
    index = spec(Poly(cb=1), Poly(cs=1), dtype="int64")
    return LayerTrace(
        ops=(
            OpSpec(
                op="aten::embedding",
                phase="forward",
                module="tok",
                inputs=(spec(VOCAB, HIDDEN), index),
                outputs=(spec(TOKENS, HIDDEN),),
            ),
            OpSpec(
                op="aten::embedding_dense_backward",
                phase="backward_weight",
                module="tok",
                inputs=(spec(TOKENS, HIDDEN), index),
                outputs=(spec(VOCAB, HIDDEN),),
            ),
            update("tok", VOCAB, HIDDEN),
        ),
        saved=(index,),
        boundary=spec(TOKENS, HIDDEN),
        parameters=((VOCAB, HIDDEN),),
    )


def loss() -> LayerTrace:
    """Log-softmax over the vocabulary."""
    logits = spec(TOKENS, VOCAB)
    return LayerTrace(
        ops=(
            OpSpec(op="aten::_log_softmax", phase="forward", inputs=(logits,), outputs=(logits,)),
            OpSpec(
                op="aten::_log_softmax_backward_data",
                phase="backward_input",
                inputs=(logits, logits),
                outputs=(logits,),
            ),
        ),
        saved=(logits,),
    )


def workload(
    *, blocks: int = 4, batch: int = 2, seq: int = 32, accum: int = 1, tied: bool = False
) -> Workload:
    """The whole model, traced at tp 1, 2 and 4 and at tp=2 with sp."""
    weights = (
        ParameterSpec(name="up.weight", shape=(WIDE, HIDDEN), dtype="float32"),
        ParameterSpec(name="down.weight", shape=(HIDDEN, WIDE), dtype="float32"),
    )
    table = ParameterSpec(name="tok.weight", shape=(VOCAB, HIDDEN), dtype="float32", matmul=False)
    out = ParameterSpec(
        name="out.weight", shape=(VOCAB, HIDDEN), dtype="float32", tied_to="tok.weight" if tied else ""
    )
    return Workload(
        name="two matmuls",
        layers=(
            LayerSpec(name="prologue", kind="prologue", parameters=(table,)),
            LayerSpec(name="block0", kind="block", module="layers.0", class_name="Block", parameters=weights),
            LayerSpec(name="epilogue", kind="epilogue", parameters=(out,)),
            LayerSpec(name="loss", kind="loss"),
        ),
        sequence=(("prologue", 1), ("block0", blocks), ("epilogue", 1), ("loss", 1)),
        classes=tuple(
            ClassTrace(
                tp=tp,
                sp=sp,
                traced_at=((2, 32), (3, 64)),
                layers={
                    "prologue": embedding(),
                    "block0": block(tp, sp=sp),
                    "epilogue": head(tp),
                    "loss": loss(),
                },
            )
            for tp, sp in ((1, False), (2, False), (4, False), (2, True))
        ),
        optimizer=OptimizerSpec(name="AdamW", state_slots=2, launch="single"),
        batch=batch,
        seq=seq,
        accum=accum,
    )


def profile(work: Workload | None = None, *, step_us: float = 10_000.0) -> Profile:
    """A measured profile without operator rows: everything is priced by the device's roofline."""
    return Profile(
        manifest=Manifest(name="two matmuls", layout="dp=1", world_size=1),
        steps=tuple(
            StepRow(rank=0, step=i, start_us=i * step_us, duration_us=step_us, tokens=64, sequences=2)
            for i in range(10)
        ),
        sources=(
            SourceRow(
                rank=0,
                hostname="",
                device="cpu",
                device_name="test cpu",
                device_count=2,
                threads=1,
                memory_bytes=8_000_000_000,
                backend="gloo",
                clock="perf_counter",
                software="",
            ),
        ),
        workload=work or workload(),
    )


def gpu_cluster(
    *,
    bandwidth: float = 100e9,
    outer: float = 10e9,
    memory: int = 80_000_000_000,
    max_devices: int | None = None,
) -> Cluster:
    """Nodes of 8 GPUs, round numbers."""
    return Cluster(
        name="8xtest",
        device=Device(
            name="test gpu",
            kind="cuda",
            peak_flops={"bfloat16": 100e12, "float32": 20e12},
            memory_bytes=memory,
            usable_memory_bytes=memory,
            bandwidth_bytes_per_s=1e12,
            power_w=500.0,
        ),
        devices_per_node=8,
        links=(
            LinkLevel(name="inner", span=8, bandwidth_bytes_per_s=bandwidth, latency_s=2e-6),
            LinkLevel(name="outer", span=0, bandwidth_bytes_per_s=outer, latency_s=5e-6),
        ),
        max_devices=max_devices,
        price=Price(currency="USD", per_device_hour=2.0, date="2026-01-01", source="test"),
    )


def cpu_cluster(*, bandwidth: float = 1e9, latency: float = 1e-4) -> Cluster:
    """Two ranks of one host over gloo."""
    return Cluster(
        name="local",
        device=Device(
            name="test cpu",
            kind="cpu",
            peak_flops={"float32": 20e9},
            memory_bytes=8_000_000_000,
            usable_memory_bytes=7_000_000_000,
            bandwidth_bytes_per_s=5e9,
        ),
        devices_per_node=2,
        links=(LinkLevel(name="shared-memory", span=0, bandwidth_bytes_per_s=bandwidth, latency_s=latency),),
        backend="gloo",
    )
