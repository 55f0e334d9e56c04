"""The parallelism cells of a row of published runs become layouts: one, or a few weighted ones where a cell is empty."""

from __future__ import annotations

import re
from collections.abc import Iterable
from itertools import product
from typing import Any, NamedTuple

from llmprof.errors import LayoutError
from llmprof.judge.cells import Reject, Row, flag, required, text, whole
from llmprof.judge.frameworks import conventions
from llmprof.schema.layout import Layout

MOST_ALTERNATIVES = 4
"""Forecasts of one row at most: more than that blurs little further and costs time."""
MICROBATCHES = {8: 1.0, 4: 2.0, 2: 2.0, 1: 2.0}
"""Weights of microbatch sizes (sequences) where none is stated: assumed; small ones are usual for large models."""
LARGEST_WHOLE_BATCH = 8
"""A replica's batch up to this size (sequences) is taken as one microbatch where none is stated: nothing is gained by
splitting it unless memory is short."""
SHARD_GROUPS = {"node": 0.5, "all": 0.5}
"""Weights of the group that hybrid sharding shards over, where it is not stated: assumed."""
_PRECISIONS = (
    (r"bf16|bfloat16", "bfloat16"),
    (r"fp16|float16|half", "float16"),
    (r"tf32|tfloat32", "tfloat32"),
    (r"fp32|float32", "float32"),
    (r"(mx)?fp8.*|float8.*", "float8"),
)
_SCHEDULES = {
    "1f1b": "1f1b", "gpipe": "gpipe", "interleaved": "interleaved", "interleaved-1f1b": "interleaved",
    "zero-bubble": "zero-bubble", "dualpipe": "dualpipe",
}  # fmt: skip
_OFFLOADED = r"(optimizer|adamw?)( states?)? offload(ed)?"
Choice = dict[str, Any]
"""Arguments of a Layout."""


class Weighted(NamedTuple):
    """A value and how likely it is."""

    weight: float
    value: Any


def read_precision(row: Row) -> str:
    """A row's compute dtype by its name in a layout.

    Raises:
        Reject: the cell is empty, or no such precision is modelled.
    """
    cell = text(row, "precision").lower()
    if not cell:
        raise Reject("empty cell: precision")
    for pattern, name in _PRECISIONS:
        if re.fullmatch(pattern, cell):
            return name
    raise Reject(f"not supported yet: precision {cell}", defect=True)


def read_layouts(row: Row, *, precision: str, devices_per_node: int) -> tuple[list[Weighted], int]:
    """Layouts that a row may mean, and its global batch (sequences).

    An empty cell means that we do not know, so its likely values are all tried.

    Raises:
        Reject: degrees that do not multiply out, an empty cell without likely values, or a technique without a name here.
    """
    fixed = _degrees(row)
    gpus = whole(row, "n_gpus")
    if gpus is not None and fixed["dp"] * fixed["tp"] * fixed["pp"] * fixed["cp"] != gpus:
        raise Reject("n_gpus is not dp x tp x pp x cp")
    global_batch = required(row, "global_batch")
    fixed |= {"precision": precision, "offload": _offload(row)}
    options = (
        _batches(row, global_batch, fixed["dp"]),
        _sharding(row, fixed, devices_per_node),
        _sequence_parallel(row, fixed["tp"]),
        _recompute(row),
        _schedule(row, fixed["pp"], fixed.pop("vpp")),
    )
    found = combine(options)
    return [Weighted(w, _layout({**fixed, **choice})) for w, choice in found], global_batch


def combine(options: Iterable[list[Weighted]]) -> list[Weighted]:
    """The likeliest combinations of independent choices, at most MOST_ALTERNATIVES, weights summing to 1."""
    found = []
    for parts in product(*options):
        weight = 1.0
        choice: Choice = {}
        for part in parts:
            weight *= part.weight
            choice |= part.value
        found.append(Weighted(weight, choice))
    found = sorted(found, key=lambda f: -f.weight)[:MOST_ALTERNATIVES]
    total = sum(f.weight for f in found)
    return [Weighted(f.weight / total, f.value) for f in found]


def spread(key: str, weights: dict[Any, float]) -> list[Weighted]:
    """Choices of one key."""
    return [Weighted(weight, {key: value}) for value, weight in weights.items()]


def _layout(arguments: Choice) -> Layout:
    try:
        return Layout(**arguments)
    except LayoutError as error:
        raise Reject(error.message) from error


def _degrees(row: Row) -> Choice:
    found: Choice = {key: whole(row, key) for key in ("dp", "tp", "pp", "cp", "ep", "vpp")}
    for key in ("cp", "ep"):
        found[key] = found[key] or 1
    for key in ("tp", "pp"):
        if found[key] is None:
            raise Reject(f"empty cell: {key}")
    if found["dp"] is None:
        per_replica = found["tp"] * found["pp"] * found["cp"]
        gpus = required(row, "n_gpus")
        if gpus % per_replica:
            raise Reject("n_gpus is not dp x tp x pp x cp")
        found["dp"] = gpus // per_replica
    return found


def _batches(row: Row, global_batch: int, dp: int) -> list[Weighted]:
    """Microbatch size and number of microbatches."""
    micro, accum = whole(row, "micro_batch"), whole(row, "grad_accum")
    if global_batch % dp or (micro and global_batch % (dp * micro)):
        raise Reject("global_batch is not dp x micro_batch x accumulation")
    replica = global_batch // dp
    if micro is None and accum and replica % accum == 0:
        micro = replica // accum
    if micro is not None:
        return [Weighted(1.0, {"mb": micro, "accum": replica // micro})]
    if replica <= LARGEST_WHOLE_BATCH:
        return [Weighted(1.0, {"mb": replica, "accum": 1})]
    return [
        Weighted(w, {"mb": m, "accum": replica // m}) for m, w in MICROBATCHES.items() if replica % m == 0
    ]


def _sharding(row: Row, fixed: Choice, devices_per_node: int) -> list[Weighted]:
    """ZeRO stage and the group over which state is sharded."""
    dp = fixed["dp"]
    stage = text(row, "zero_stage")
    if dp * fixed["cp"] == 1:
        return [Weighted(1.0, {"zero": 0})]
    if stage and stage not in ("0", "1", "2", "3"):
        raise Reject(f"not supported yet: zero_stage {stage}", defect=True)
    weights = {stage: 1.0} if stage else conventions(text(row, "framework")).zero_stage
    found = []
    for value, weight in weights.items():
        for shard, share in _shard_groups(row, dp, devices_per_node).items():
            zero = int(value)
            found.append(
                Weighted(weight * share, {"zero": zero, **({"shard": shard} if zero and shard else {})})
            )
    return found


def _shard_groups(row: Row, dp: int, devices_per_node: int) -> dict[int, float]:
    """Sizes of the sharding group with their weights; 0 is all replicas."""
    mode = text(row, "dp_mode").lower()
    stated = re.search(r"group (\d+)", mode)
    if stated:
        size = int(stated.group(1))
        return {size if size < dp and dp % size == 0 else 0: 1.0}
    node = devices_per_node // (whole(row, "tp") or 1)
    if "hsdp" not in mode or not 1 < node < dp or dp % node:
        return {0: 1.0}
    return {node: 1.0} if "fsdp" not in mode else {node: SHARD_GROUPS["node"], 0: SHARD_GROUPS["all"]}


def _sequence_parallel(row: Row, tp: int) -> list[Weighted]:
    if tp == 1:
        return [Weighted(1.0, {"sp": False})]
    stated = flag(row, "sequence_parallel")
    if stated is not None:
        return [Weighted(1.0, {"sp": stated})]
    weights = conventions(text(row, "framework")).sequence_parallel
    return spread("sp", {value == "1": weight for value, weight in weights.items()})


def _recompute(row: Row) -> list[Weighted]:
    cell = text(row, "recompute").lower()
    if cell in ("none", "full"):
        return [Weighted(1.0, {"recompute": cell})]
    if cell.startswith("selective"):
        return [Weighted(1.0, {"recompute": "selective"})]
    if "per-layer" in cell:
        raise Reject("not supported yet: recompute by layer", defect=True)
    return spread("recompute", dict(conventions(text(row, "framework")).recompute))


def _schedule(row: Row, pp: int, vpp: int | None) -> list[Weighted]:
    if pp == 1:
        return [Weighted(1.0, {"schedule": "1f1b"})]
    cell = text(row, "schedule").lower().split(" ")[0]
    if cell and cell not in _SCHEDULES:
        raise Reject(f"not supported yet: schedule {cell}", defect=True)
    if (vpp or 1) > 1:
        return [Weighted(1.0, {"schedule": "interleaved", "vpp": vpp})]
    return [Weighted(1.0, {"schedule": _SCHEDULES.get(cell, "1f1b")})]


def _offload(row: Row) -> str:
    """ "optimizer" where the run kept the optimizer's state in host memory."""
    mode = f"{text(row, 'dp_mode')} {text(row, 'offload_policy')}".lower()
    said = "offload" in mode or re.search(_OFFLOADED, text(row, "notes").lower())
    return "optimizer" if said else "none"
