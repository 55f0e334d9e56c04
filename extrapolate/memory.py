"""Peak memory of one rank of every stage: state by ZeRO stage, activations in flight, buffers, temporaries."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import numpy as np

from llmprof.extrapolate.partition import Plan, held_bytes
from llmprof.extrapolate.simulate import Array
from llmprof.extrapolate.uncertainty import Factors, interval
from llmprof.extrapolate.work import LayerWork, Parameter, Shards, parameter_bytes
from llmprof.schema.cluster import Cluster
from llmprof.schema.operators import ITEM_BYTES
from llmprof.schema.profile import Profile

FRAMEWORK_BYTES = {"cpu": 330e6, "cuda": 300e6, "rocm": 300e6}
"""Process (CPU) or libraries' workspaces (GPU) beside the tensors: assumed where not measured. Driver and context
are not in a device's usable memory to begin with."""
COLLECTIVE_LIBRARY_BYTES = {"nccl": 400e6, "rccl": 400e6, "gloo": 20e6}
"""Buffers of the collective library when there is more than one rank: assumed."""
SLACK = {"cpu": 0.02, "cuda": 0.06, "rocm": 0.06}
"""Reserved but unused by the allocator, as a share of everything that is not state: assumed."""
SPREADS = {"activations": 0.06, "temporary": 0.3, "framework": 0.3, "slack": 0.5}
TIGHT_FRACTION = 0.92
"""Usable share above which a fit is called tight."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryForecast:
    """Peak memory of the stage that needs the most.

    Attributes:
        stages: nominal bytes by category, for each stage.
        p50, p90: bytes of the largest stage.
        usable: of one device.
    """

    stages: tuple[dict[str, int], ...]
    p50: int
    p90: int
    usable: int
    oom_probability: float

    @property
    def verdict(self) -> str:
        """ "oom" when it is at least as likely as not, "tight" when it could be, else "fits"."""
        if self.oom_probability >= 0.5:
            return "oom"
        return "tight" if self.p90 > self.usable or self.p50 > TIGHT_FRACTION * self.usable else "fits"


@dataclass(frozen=True, kw_only=True, slots=True)
class Capacity:
    """The device that must hold it.

    Attributes:
        framework_bytes: measured bytes of the process beside its tensors, None when they are not known.
    """

    cluster: Cluster
    framework_bytes: int | None = None


def measured_framework(profile: Profile) -> int | None:
    """Bytes of the process beside its tensors, as measured on one rank."""
    sizes = [r.size_bytes for r in profile.memory if r.category == "framework"]
    return max(sizes, default=None)


def forecast_memory(
    plan: Plan, capacity: Capacity, *, factors: Factors, in_flight: Sequence[float]
) -> MemoryForecast:
    """Memory of every stage.

    Args:
        in_flight: for each stage, the most microbatches whose activations are held at once; those of one of its chunks
            are a part of a microbatch.
    """
    stages = tuple(
        stage_memory(plan, capacity, stage=s, in_flight=in_flight[s]) for s in range(len(plan.stages))
    )
    draws = [_sample(categories, factors) for categories in stages]
    peak: Array = np.maximum.reduce(draws)
    usable = capacity.cluster.device.usable_memory_bytes
    found = interval(peak)
    sampled = peak[1:] if len(peak) > 1 else peak
    return MemoryForecast(
        stages=stages,
        p50=round(found.p50),
        p90=round(found.p90),
        usable=usable,
        oom_probability=float(np.mean(sampled > usable)),
    )


def _sample(categories: dict[str, int], factors: Factors) -> Array:
    total = np.zeros(1 + factors.draws)
    for category, size in categories.items():
        spread = SPREADS.get(category, 0.0)
        total += size * (factors.factor(f"memory:{category}", spread) if spread else 1.0)
    return total


def stage_memory(plan: Plan, capacity: Capacity, *, stage: int, in_flight: float) -> dict[str, int]:
    """Nominal bytes by category on one rank of a stage; the peak is their sum."""
    cluster = capacity.cluster
    kind = cluster.device.kind
    state = state_bytes(plan, stage)
    layers = [(plan.layers[name], count) for name, count in plan.stages[stage]]
    live = backward_peak(layers, in_flight=in_flight, recompute=plan.layout.recompute == "full")
    activations, temporary = round(live.activations), live.temporary
    communication = buffer_bytes(plan, cluster, stage)
    framework = capacity.framework_bytes or FRAMEWORK_BYTES.get(kind, 300e6)
    library = COLLECTIVE_LIBRARY_BYTES.get(cluster.backend, 0.0) if plan.layout.gpus > 1 else 0.0
    return {
        **state,
        "activations": activations,
        "temporary": temporary,
        "communication": communication,
        "slack": round(SLACK.get(kind, 0.05) * (activations + temporary + communication)),
        "framework": round(framework + library),
    }


def state_bytes(plan: Plan, stage: int) -> dict[str, int]:
    """Parameters, gradients and optimizer state of one rank.

    A narrower working copy beside float32 masters (mixed precision) counts as parameters, the masters as optimizer
    state; with zero=3 the sharded parameters are the masters and working copies exist only while gathered.
    """
    shards = Shards.of(plan.layout)
    common, routed = (
        _state_of(plan, partial(held_bytes, plan, stage, experts=experts), shard)
        for experts, shard in ((False, shards.common), (True, shards.experts))
    )
    return {category: size + routed[category] for category, size in common.items()}


def _state_of(plan: Plan, held: Callable[..., int], shard: int) -> dict[str, int]:
    """State of the parameters whose bytes `held` tells, divided over a number of ranks."""
    layout, optimizer = plan.layout, plan.workload.optimizer
    slots = optimizer.state_slots * held(optimizer.state_dtype, trainable=True)
    gradients, parameters = held(plan.precision.gradients, trainable=True), held()
    if plan.precision.mixed and layout.zero < 3:
        slots += held("float32", trainable=True)
        parameters = held(plan.precision.activation)
    if layout.zero == 3 and layout.pp > 1:
        gradients += held(plan.precision.activation, trainable=True) * shard
    return {
        "parameters": _share(parameters, shard if layout.zero == 3 else 1),
        "gradients": _share(gradients, shard if layout.zero >= 2 else 1),
        "optimizer": _share(slots, shard if layout.zero >= 1 else 1),
    }


def _share(size: int, shard: int) -> int:
    return -(-size // shard)


class Live(NamedTuple):
    """Bytes at one moment: kept for backwards to come, and of the operators that run."""

    activations: float
    temporary: int


def backward_peak(layers: Sequence[tuple[LayerWork, int]], *, in_flight: float, recompute: bool) -> Live:
    """The largest moment of a microbatch's backward, with those of all others in flight.

    Backwards free what their layer kept, the last layer first: the loss has freed its logits when the last block begins.
    With recomputation a block keeps what it was given, and what it saves is there again while its own backward runs.

    Args:
        layers: of the stage, in the order of the forward, with how often each runs.
    """
    kept = [
        layer.boundary_bytes if recompute and layer.kind == "block" else layer.saved_bytes
        for layer, _ in layers
    ]
    total = in_flight * sum(size * count for size, (_, count) in zip(kept, layers, strict=True))
    best, freed = Live(total, 0), 0
    for size, (layer, count) in reversed([*zip(kept, layers, strict=True)]):
        again = layer.saved_bytes if recompute and layer.kind == "block" else 0
        here = Live(total - freed, layer.temporary_bytes + again)
        best = max(best, here, key=sum)
        freed += size * count
    return best


def buffer_bytes(plan: Plan, cluster: Cluster, stage: int) -> int:
    """Communication buffers: buckets (zero=0 to 2), or gathered parameters and unsharded gradients (zero=3)."""
    layout = plan.layout
    if layout.replicas == 1:
        return 0
    if layout.zero == 0:
        return held_bytes(plan, stage, trainable=True)
    if layout.zero < 3:
        return min(held_bytes(plan, stage, trainable=True), 25 << 20)
    working = plan.precision.working
    units = {name: plan.layers[name].parameters for name, _ in plan.stages[stage] if _is_block(plan, name)}
    block = max(units.values(), key=parameter_bytes, default=())
    root = tuple(
        p
        for name, count in plan.stages[stage]
        if not _is_block(plan, name)
        for p in plan.held(stage, name) * count
    )
    reduced = _unit_gradients(block, working)
    if layout.pp > 1:
        return held_bytes(plan, stage, working) + reduced
    ahead = 1 if cluster.device.kind == "cpu" else 2
    return parameter_bytes(root, working) + ahead * parameter_bytes(block, working) + reduced


def _unit_gradients(block: tuple[Parameter, ...], working: str) -> int:
    """Gradients of one unit before they are reduced: as computed, and packed in the dtype that is reduced."""
    return sum(p.numel * (ITEM_BYTES.get(working or p.dtype, 4) + ITEM_BYTES.get(p.dtype, 4)) for p in block)


def _is_block(plan: Plan, name: str) -> bool:
    return plan.layers[name].kind == "block"
