"""Model FLOPs, MFU, and the plain forecasts that stand beside ours: naive, naive with bubble and all-reduce, bound.

One convention of model FLOPs: 6 x active matmul parameters per token (frozen weights 4, or 2 where no gradient flows
through them; the head once, an input embedding never) + causal attention 6 L h s (12 for the full square), never
recomputation. Read from the traced forward operators of the unsharded class, whose matmul FLOPs per token are
2 x active matmul parameters.
"""

from __future__ import annotations

from collections import Counter
from functools import lru_cache
from math import prod
from typing import NamedTuple

from llmprof.errors import WorkloadError
from llmprof.extrapolate.compute import is_same_device
from llmprof.extrapolate.experts import experts_of
from llmprof.extrapolate.peaks import peak_flops
from llmprof.extrapolate.precision import choose_precision
from llmprof.schema.cluster import Cluster, Device
from llmprof.schema.layout import Layout
from llmprof.schema.operators import ITEM_BYTES, Tensor, family, flops
from llmprof.schema.priors import load_priors
from llmprof.schema.profile import Profile
from llmprof.schema.workload import LayerSpec, LayerTrace, OpSpec, TensorSpec, Workload

_PASSES = 3
"""Forward, gradient of the input, gradient of the weight: each has the forward's matmul FLOPs."""
_WEIGHT_FAMILIES = ("matmul", "convolution")
_ATTENTION_FAMILIES = ("attention", "batched_matmul")


def model_flops_per_token(workload: Workload, seq: int) -> float:
    """Model FLOPs of one token, forward and backward, at a sequence length (tokens).

    Raises:
        WorkloadError: the unsharded class was not traced.
    """
    return _flops_per_token(_Same(workload), seq)


class _Same:
    """A workload as a key: equal to itself alone, since comparing contents costs more than what is kept."""

    def __init__(self, workload: Workload) -> None:
        self.workload = workload

    def __hash__(self) -> int:
        return id(self.workload)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and other.workload is self.workload


@lru_cache(maxsize=64)
def _flops_per_token(same: _Same, seq: int) -> float:
    workload = same.workload
    trace = workload.find_class(1, sp=False)
    if trace is None:
        raise WorkloadError("the workload has no unsharded trace (tp=1)", hint="capture the run again")
    batch = trace.batch or workload.batch
    seq = trace.seq or seq
    total = 0.0
    for name, repeats in layer_counts(workload).items():
        layer = trace.layers.get(name)
        if layer is not None:
            total += repeats * _layer_flops(workload.layer(name), layer, batch, seq)
    return total / (batch * seq)


def layer_counts(workload: Workload) -> dict[str, int]:
    """How often each layer runs in one forward pass."""
    counts: Counter[str] = Counter()
    for name, repeats in workload.sequence:
        counts[name] += repeats
    return dict(counts)


def _layer_flops(spec: LayerSpec, trace: LayerTrace, batch: int, seq: int) -> float:
    weights = attention = 0
    for op in trace.ops:
        if op.phase == "forward" and not op.collective:
            kind = family(op.op)
            if kind in _WEIGHT_FAMILIES:
                weights += op.count * _op_flops(op, batch, seq)
            elif kind in _ATTENTION_FAMILIES:
                attention += op.count * _op_flops(op, batch, seq)
    return weights * _passes(spec, trace) + attention * _PASSES


def _op_flops(op: OpSpec, batch: int, seq: int) -> int:
    inputs, outputs = tensors_at(op.inputs, batch, seq), tensors_at(op.outputs, batch, seq)
    executed = flops(op.op, inputs, outputs, frozenset(op.attributes))
    masked = "causal" in op.attributes and family(op.op) == "batched_matmul"
    # scores behind a causal mask are computed, but are not the model's
    return executed // 2 if masked else executed


def tensors_at(specs: tuple[TensorSpec, ...], batch: int, seq: int) -> tuple[Tensor, ...]:
    """Tensors of a traced operator at a batch (sequences) and a sequence length (tokens)."""
    return tuple(Tensor(t.shape_at(batch, seq), t.dtype, t.group) for t in specs)


def _passes(spec: LayerSpec, trace: LayerTrace) -> float:
    """Passes over the layer's weights: 3, but 2 for frozen ones, or 1 when no gradient flows through the layer."""
    matmul = [p for p in spec.parameters if p.matmul]
    total = sum(prod(p.shape) for p in matmul)
    frozen = sum(prod(p.shape) for p in matmul if not p.trainable)
    if not frozen:
        return _PASSES
    flows = any(op.phase == "backward_input" and family(op.op) in _WEIGHT_FAMILIES for op in trace.ops)
    return (_PASSES * (total - frozen) + (2 if flows else 1) * frozen) / total


def mfu(model_flops_per_step: float, step_time_s: float, *, gpus: int, peak: float) -> float:
    """Model FLOPs utilization: model FLOPs of a step over what `gpus` devices of `peak` FLOP/s could do in its time."""
    return model_flops_per_step / (step_time_s * gpus * peak)


def captured_mfu(profile: Profile, device: Device, precision: str) -> float | None:
    """MFU of the captured run when it ran on this kind of device in this precision, else None."""
    manifest, peak = profile.manifest, device.peak_flops.get(precision)
    if not (is_same_device(profile, device) and manifest.precision == precision and peak):
        return None
    step_us = step_time_us(profile)
    if not (manifest.model_flops_per_step and step_us):
        return None
    return mfu(manifest.model_flops_per_step, step_us * 1e-6, gpus=manifest.world_size, peak=peak)


def step_time_us(profile: Profile) -> float | None:
    """Median over steps of the slowest rank's duration, instrumented steps only when there are no others."""
    rows = [r for r in profile.steps if r.kind == "train"]
    rows = [r for r in rows if not r.instrumented] or rows
    slowest: dict[int, float] = {}
    for row in rows:
        slowest[row.step] = max(slowest.get(row.step, 0.0), row.duration_us)
    times = sorted(slowest.values())
    if not times:
        return None
    middle = len(times) // 2
    return times[middle] if len(times) % 2 else (times[middle - 1] + times[middle]) / 2


def precision_of(workload: Workload, layout: Layout, device: Device) -> str:
    """Compute dtype of a layout on a device kind, as a forecast chooses it."""
    rule = choose_precision(captured=workload.precision, asked=layout.precision, device_kind=device.kind)
    return rule.target


def model_flops_per_step(workload: Workload, layout: Layout, seq: int) -> float:
    """Model FLOPs of one optimizer step over all devices."""
    return model_flops_per_token(workload, seq) * layout.global_batch * seq


def naive_step_time_s(
    workload: Workload, layout: Layout, cluster: Cluster, *, seq: int, mfu: float | None = None
) -> float:
    """Model FLOPs over devices x MFU x peak (seconds); MFU of the captured run, else the cold prior."""
    peak = peak_flops(cluster.device, precision_of(workload, layout, cluster.device))
    utilization = mfu or load_priors().mfu
    return model_flops_per_step(workload, layout, seq) / (layout.gpus * utilization * peak)


def second_baseline_step_time_s(
    workload: Workload, layout: Layout, cluster: Cluster, *, naive_s: float
) -> float:
    """Naive x pipeline bubble, plus the ring all-reduce of gradients over the link at catalogue bandwidth (seconds).

    Bubble: see `bubble_factor`. All-reduce: 2 (n - 1) / n x gradient bytes of one device over n = dp x cp ranks, of which
    n / ep hold the same experts, never overlapped.
    """
    link = _link(cluster, layout.replicas * layout.tp)
    sent_bytes = 0.0
    for shape, item, count, expert in trainable_shapes(workload):
        ranks = layout.expert_replicas if expert else layout.replicas
        held = count * prod(shape) * item / (layout.ep if expert else 1)
        sent_bytes += 2 * (ranks - 1) / ranks * held / (layout.tp * layout.pp)
    return naive_s * bubble_factor(layout) + sent_bytes / link


def bubble_factor(layout: Layout) -> float:
    """Step over work of an even pipeline: 1 + (pp - 1) / (vpp x accum), Narayanan et al. 2021."""
    return 1 + (layout.pp - 1) / (layout.vpp * layout.accum)


def _link(cluster: Cluster, span: int) -> float:
    level = cluster.level(span)
    return level.bandwidth_bytes_per_s / level.oversubscription


class Trainable(NamedTuple):
    """One kind of trainable parameter: its whole shape, bytes per element, how many there are, whether it is of experts."""

    shape: tuple[int, ...]
    item_bytes: int
    number: int
    expert: bool


def trainable_shapes(workload: Workload) -> list[Trainable]:
    """Every kind of trainable parameter, ties counted once."""
    return _trainable_shapes(_Same(workload))


@lru_cache(maxsize=64)
def _trainable_shapes(same: _Same) -> list[Trainable]:
    workload = same.workload
    counts = layer_counts(workload)
    trace = workload.find_class(1, sp=False)
    traced = trace.layers if trace else {}
    return [
        Trainable(p.shape, ITEM_BYTES.get(p.dtype, 4), counts.get(layer.name, 0), p.name in experts)
        for layer in workload.layers
        for experts in [experts_of(layer, traced.get(layer.name))]
        for p in layer.parameters
        if p.trainable and not p.tied_to
    ]


def bound_step_time_s(workload: Workload, layout: Layout, cluster: Cluster, *, seq: int) -> float:
    """No step can be faster: model FLOPs at peak without communication, or the optimizer's bytes at full bandwidth.

    The optimizer reads the parameter, the gradient and its state and writes the parameter and the state, once per
    step, sharded over every device at best.
    """
    peak = peak_flops(cluster.device, precision_of(workload, layout, cluster.device))
    compute_s = model_flops_per_step(workload, layout, seq) / (layout.gpus * peak)
    state = 2 * workload.optimizer.state_slots * ITEM_BYTES.get(workload.optimizer.state_dtype, 4)
    moved = sum(
        count * prod(shape) * (3 * item + state) for shape, item, count, _ in trainable_shapes(workload)
    )
    memory_s = moved / (layout.gpus * cluster.device.bandwidth_bytes_per_s)
    return max(compute_s, memory_s)
