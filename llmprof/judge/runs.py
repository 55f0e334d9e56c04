"""A row of published training runs becomes a Case, which can be forecast, or the reason why it is left out."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache

from llmprof.errors import ClusterError, LayoutError
from llmprof.extrapolate.request import check_supported
from llmprof.judge.cells import Reject, Row, flag, note_of_derived, number, positive, required, text, whole
from llmprof.judge.frameworks import conventions, implementation_of, is_causal
from llmprof.judge.layouts import Weighted, combine, read_layouts, read_precision
from llmprof.judge.shapes import read_shape
from llmprof.schema.cluster import Cluster
from llmprof.schema.fabric import build_cluster
from llmprof.schema.layout import Layout
from llmprof.schema.model import ModelShape
from llmprof.schema.reference import tensor_parallel_problem

NETWORK_SHARES = {1.0: 0.7, 0.5: 0.15, 0.25: 0.15}
"""Weights of shares of the usual machine's network where a row does not state its own: assumed; published clusters of one
device differ by such factors (AWS p4d has half of what DGX A100 has)."""
_GB = 1e9


@dataclass(frozen=True, kw_only=True, slots=True)
class Alternative:
    """One reading of a row, and how likely it is."""

    weight: float
    layout: Layout
    cluster: Cluster


@dataclass(frozen=True, kw_only=True, slots=True)
class MeasuredMemory:
    """Peak memory of a run.

    Attributes:
        size_bytes: decimal bytes.
        allocated: tensors alone, without what the allocator and libraries hold beside them.
        stage: pipeline stage it was read on: 0, -1 for the last, None for the largest.
    """

    size_bytes: float
    allocated: bool
    stage: int | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """A run that can be forecast, and what was measured.

    Attributes:
        alternatives: readings of the row; several where cells are empty.
        global_batch: sequences per step; `seq` tokens in each.
        gradients: dtype in which they are kept and reduced, "" for float32.
        implementation, attention: how it is programmed, as `apply_implementation` names it.
        optimizer: False where only forward and backward were timed.
        step_time_s: measured seconds; None where the run has no time.
        out_of_memory: True or False, None where it is not known.
        columns: the row.
        notes: what was assumed to read it.
    """

    row_id: str
    shape: ModelShape
    alternatives: tuple[Alternative, ...]
    global_batch: int
    seq: int
    precision: str
    implementation: str
    gradients: str
    attention: str
    optimizer: bool
    step_time_s: float | None
    memory: MeasuredMemory | None
    out_of_memory: bool | None
    columns: dict[str, str]
    notes: tuple[str, ...]


def read_case(row: Row) -> Case | Reject:
    """A Case, or why there is none.

    Cells of the row override the catalogue; an empty cell of the layout or the network is unknown, never "none".
    """
    try:
        check_quality(row)
        return _read(row)
    except Reject as reject:
        return reject


def is_countable(row: Row) -> bool:
    """True for rows that should be scored: a time or a throughput was reported, and nothing is wrong with them."""
    try:
        check_quality(row)
        return measured_step_time_s(row) is not None
    except Reject as reject:
        return reject.reason.startswith("empty cell")


def check_quality(row: Row) -> None:
    """Refuse rows whose own check found something.

    Raises:
        Reject: with what the table says.
    """
    said = text(row, "qc")
    if said and said != "ok" and not said.startswith("ok "):
        raise Reject(f"qc: {re.split(r'[:;(,]', said)[0].strip()}")


def measured_step_time_s(row: Row) -> float | None:
    """Seconds of a step as measured; from a throughput where that is what was reported. None where there is no time.

    A derived time counts when it is an exact inverse of a reported figure or a statistic of the measured times.

    Raises:
        Reject: a time that is not a positive number, or derived from something else.
    """
    time_s = positive(row, "step_time_s")
    rate_reported = note_of_derived(row, "tokens_per_s_per_gpu") is None
    if time_s is not None:
        note = note_of_derived(row, "step_time_s")
        if note == "" and not (rate_reported and text(row, "tokens_per_s_per_gpu")):
            raise Reject("no time: step_time_s is derived")
        return time_s
    rate = positive(row, "tokens_per_s_per_gpu")
    sizes = [whole(row, key) for key in ("global_batch", "seq_len", "n_gpus")]
    if rate is None or not rate_reported:
        return None
    for key, size in zip(("global_batch", "seq_len", "n_gpus"), sizes, strict=True):
        if size is None:
            raise Reject(f"empty cell: {key}")
    batch, seq, gpus = (size or 0 for size in sizes)
    return batch * seq / (rate * gpus)


def _read(row: Row) -> Case:
    time_s = measured_step_time_s(row)
    out_of_memory = flag(row, "oom") if time_s is None else False
    if time_s is None and not out_of_memory:
        raise Reject("no time")
    precision = read_precision(row)
    seq = required(row, "seq_len")
    shape, notes = read_shape(row, seq=seq, causal=is_causal(row))
    cluster = _cluster(row)
    layouts, global_batch = read_layouts(row, precision=precision, devices_per_node=cluster.devices_per_node)
    problem = tensor_parallel_problem(shape, layouts[0].value.tp)
    if problem:
        raise Reject(f"not supported yet: {problem}", defect=True)
    implementation = implementation_of(row)
    attention = {"0": "math", "1": "first"}.get(text(row, "flash_attention"), "flash")
    return Case(
        row_id=text(row, "row_id"),
        shape=shape,
        alternatives=_alternatives(row, layouts, cluster, timed=time_s is not None),
        global_batch=global_batch,
        seq=seq,
        precision=precision,
        implementation=implementation,
        gradients=conventions(text(row, "framework")).gradients,
        attention=attention,
        optimizer="no optimizer" not in text(row, "notes").lower(),
        step_time_s=time_s,
        memory=_memory(row),
        out_of_memory=out_of_memory,
        columns=dict(row),
        notes=(*notes, f"implementation {implementation}, attention {attention}"),
    )


def _alternatives(
    row: Row, layouts: list[Weighted], cluster: Cluster, *, timed: bool
) -> tuple[Alternative, ...]:
    """Readings that are modelled; the row is refused when none is. Memory does not depend on the network."""
    gpus = layouts[0].value.gpus
    networks = _networks(row, cluster, gpus) if timed else [Weighted(1.0, {"cluster": cluster})]
    found = combine([[Weighted(w, {"layout": v}) for w, v in layouts], networks])
    refused: LayoutError | None = None
    kept = []
    for weight, choice in found:
        try:
            check_supported(choice["layout"], choice["cluster"])
        except LayoutError as error:
            refused = refused or error
            continue
        kept.append(Alternative(weight=weight, **choice))
    if not kept:
        assert refused is not None, "something was refused"
        raise Reject(refused.message, defect=True)
    total = sum(a.weight for a in kept)
    return tuple(Alternative(weight=a.weight / total, layout=a.layout, cluster=a.cluster) for a in kept)


def _cluster(row: Row) -> Cluster:
    """The machine of a row; what is not stated is the device's usual machine."""
    gpu = text(row, "gpu")
    if not gpu:
        raise Reject("empty cell: gpu")
    return _built(
        gpu,
        whole(row, "gpus_per_node"),
        positive(row, "intra_GBps_per_gpu"),
        positive(row, "inter_GBps_per_gpu"),
        (text(row, "intra_link"), text(row, "inter_link")),
    )


@lru_cache(maxsize=256)
def _built(
    gpu: str, per_node: int | None, intra_gb: float | None, inter_gb: float | None, names: tuple[str, str]
) -> Cluster:
    try:
        return build_cluster(
            gpu,
            devices_per_node=per_node,
            intra_bytes_per_s=intra_gb and intra_gb * _GB,
            inter_bytes_per_s=inter_gb and inter_gb * _GB,
            intra_name=names[0],
            inter_name=names[1],
        )
    except ClusterError as error:
        raise Reject(f"not supported yet: {error.message}", defect=True) from error


def _networks(row: Row, cluster: Cluster, gpus: int) -> list[Weighted]:
    """The cluster, or several where the run spans nodes over links that are not stated."""
    inner = cluster.links[-2].span if len(cluster.links) > 1 else 1
    if (
        text(row, "inter_GBps_per_gpu")
        or cluster.links[-1].span
        or gpus <= max(inner, cluster.devices_per_node)
    ):
        return [Weighted(1.0, {"cluster": cluster})]
    usual = cluster.links[-1].bandwidth_bytes_per_s / _GB
    names = (text(row, "intra_link"), text(row, "inter_link"))
    per_node, intra_gb = whole(row, "gpus_per_node"), positive(row, "intra_GBps_per_gpu")
    return [
        Weighted(w, {"cluster": _built(text(row, "gpu"), per_node, intra_gb, usual * share, names)})
        for share, w in NETWORK_SHARES.items()
    ]


def _memory(row: Row) -> MeasuredMemory | None:
    size = number(row, "peak_mem_GB")
    note = note_of_derived(row, "peak_mem_GB")
    if not size or size <= 0 or (note is not None and "unit change" not in note):
        return None
    rank = text(row, "mem_rank").lower()
    stage = 0 if "first stage" in rank or "rank 0" in rank else -1 if "last rank" in rank else None
    return MeasuredMemory(size_bytes=size * _GB, allocated="allocated" in text(row, "mem_kind"), stage=stage)
