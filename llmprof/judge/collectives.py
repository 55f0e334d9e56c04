"""Collective tables scored with the product's own collective prices: what was fitted is a measured sweep to them."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

from llmprof.errors import ClusterError
from llmprof.extrapolate.collective import CollectivePrices
from llmprof.extrapolate.links import POINT_TO_POINT, wire_share
from llmprof.judge.cells import Reject, required, text, whole
from llmprof.judge.priced import SEEDS, Item, Scoring, read_time_us, score_items
from llmprof.judge.result import TableScores
from llmprof.judge.splits import Fit
from llmprof.judge.table import Table
from llmprof.schema.cluster import Cluster
from llmprof.schema.fabric import build_cluster, usual_machine
from llmprof.schema.priors import load_priors
from llmprof.schema.profile import CollectiveRow, Manifest, Profile

KINDS = {"send_recv": "send"}
PRICED = frozenset({"all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", *POINT_TO_POINT})
PROVENANCE = ("size convention as logged", "gpu unstated", "gpu and message size unstated", "n_gpus=")
"""Remarks of `qc` that say where a figure comes from, not that it is wrong."""
SMALL_PROBE_BYTES, LARGE_PROBE_BYTES = 1 << 16, 1 << 26
RESOLUTIONS_US = {"vidur_network": 1.0, "estimate_train_time_nccl": 0.2}
"""Smallest step of a source's clock (microseconds)."""
NAIVE_SHARE = 0.7
"""Of the link's bandwidth: the usual share in a back-of-envelope estimate, assumed."""


class _Work(NamedTuple):
    """What a row timed; `machine` names the cluster, `span` is over devices of it."""

    machine: tuple[str, int, str]
    cluster: Cluster
    kind: str
    size_bytes: int
    ranks: int
    span: int


def score_collectives(table: Table, *, fit: Fit | None = None, seeds: int = SEEDS) -> TableScores:
    """Score a table of collectives, back-to-back calls on otherwise idle links.

    A row's group takes `gpus_per_node` devices of `n_nodes` machines as they are usual for the device, evenly spread;
    the cell `link` names what joins them. Fitted rows of one machine are a sweep measured there.

    `--fit nodes:1` takes the groups inside a node, and of pairs across two nodes the latency (64 KiB or less) and
    the bandwidth (64 MiB or more), which anyone measures before a large job.

    The naive forecast moves what each rank sends at a share of the link's bandwidth: what the largest fitted message
    of a stratum reaches, else NAIVE_SHARE; the second is the nearest fitted row of the stratum, scaled by its size.
    """
    scoring = Scoring(
        read=_read, price=_price, naive_share=NAIVE_SHARE, fitted_share=_largest_share, seeds=seeds
    )
    return score_items(table, scoring, fit=fit)


def _largest_share(fitted: Sequence[Item]) -> float:
    largest = max(fitted, key=lambda item: (item.size, item.row_id))
    return largest.roofline_us / largest.time_us


def _read(index: int, row: dict[str, str]) -> Item:
    said = text(row, "qc")
    if said != "ok" and not said.startswith(PROVENANCE):
        raise Reject(f"qc: {re.split(r'[:;(,]', said)[0].strip() or 'empty'}")
    time_us = read_time_us(row)
    work = _work(row)
    link = work.cluster.level(work.span)
    moved = work.size_bytes * wire_share(work.kind, work.ranks)
    nodes = whole(row, "n_nodes") or 1
    layout = f"{nodes}x{whole(row, 'gpus_per_node') or work.ranks}"
    stratum = (text(row, "gpu"), work.kind, text(row, "dtype"), layout, text(row, "algo"))
    return Item(
        index=index,
        row_id=text(row, "row_id"),
        stratum=" ".join(filter(None, stratum)),
        time_us=time_us,
        size=float(work.size_bytes),
        roofline_us=1e6 * moved / (link.bandwidth_bytes_per_s / link.oversubscription),
        resolution_us=RESOLUTIONS_US.get(text(row, "source"), 0.0),
        nodes=1 if _is_probe(work, nodes) else nodes,
        work=work,
    )


def _is_probe(work: _Work, nodes: int) -> bool:
    """Whether a row is a pair of neighbouring nodes that shows latency or bandwidth alone."""
    pair = nodes == 2 and work.ranks == 2
    return pair and (work.size_bytes <= SMALL_PROBE_BYTES or work.size_bytes >= LARGE_PROBE_BYTES)


def _work(row: dict[str, str]) -> _Work:
    size, ranks = required(row, "size_bytes"), required(row, "n_gpus")
    kind = KINDS.get(text(row, "op"), text(row, "op"))
    if kind not in PRICED:
        raise Reject(f"not a collective that is priced: {kind}", defect=True)
    if ranks < 2:
        raise Reject("one GPU moves nothing: n_gpus=1")
    nodes = whole(row, "n_nodes") or 1
    machine = (text(row, "gpu"), whole(row, "gpus_per_node") or 0, text(row, "link"))
    try:
        cluster = _cluster(*machine)
    except ClusterError as error:
        raise Reject(f"unknown device: {text(row, 'gpu') or 'empty'}") from error
    span = ranks if nodes == 1 else nodes * cluster.devices_per_node
    return _Work((machine[0], cluster.devices_per_node, machine[2]), cluster, kind, size, ranks, span)


@lru_cache(maxsize=256)
def _cluster(gpu: str, group_per_node: int, link: str) -> Cluster:
    """The machine of a group: as `link` says ("4-GPU node"), else the usual one.

    A node that is too small for the group is one of as many devices as the group has in it.
    """
    stated = re.search(r"\b([1-9]\d{0,3})-GPU node", link)
    usual = int(stated.group(1)) if stated else usual_machine(gpu).devices_per_node
    per_node = max(group_per_node, usual)
    return build_cluster(gpu, devices_per_node=per_node, intra_name=link, inter_name=link)


def _price(fitted: Sequence[Item], asked: Sequence[Item]) -> list[tuple[float, float]]:
    sweeps: dict[tuple[str, int, str], list[Item]] = defaultdict(list)
    for item in fitted:
        sweeps[item.work.machine].append(item)
    prices: dict[tuple[str, int, str], CollectivePrices] = {}
    found = []
    for item in asked:
        work: _Work = item.work
        if work.machine not in prices:
            prices[work.machine] = _prices(work.cluster, sweeps[work.machine])
        price = prices[work.machine].price(work.kind, work.size_bytes, work.ranks, work.span)
        found.append((price.time_s * 1e6, price.spread))
    return found


def _prices(cluster: Cluster, sweep: Sequence[Item]) -> CollectivePrices:
    world = max((item.work.span for item in sweep), default=1)
    profile = Profile(
        manifest=Manifest(name="table", world_size=world), collectives=tuple(map(_measured, sweep))
    )
    return CollectivePrices(profile, cluster, same_device=bool(sweep), priors=load_priors())


def _measured(item: Item) -> CollectiveRow:
    work: _Work = item.work
    return CollectiveRow(
        rank=0,
        kind=work.kind,
        axis="",
        group_size=work.ranks,
        size_bytes=work.size_bytes,
        dtype="",
        backend=work.cluster.backend,
        count=1.0,
        time_us=item.time_us,
        time_iqr_us=0.0,
        time_n=1,
        exposed_us=item.time_us,
        in_situ=False,
        span=work.span,
    )
