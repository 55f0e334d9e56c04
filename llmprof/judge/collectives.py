"""Collective tables scored with the product's own collective prices: what was fitted is a measured sweep to them."""

from __future__ import annotations

import re
from collections.abc import Sequence

from llmprof.errors import ClusterError
from llmprof.extrapolate.collective import CollectivePrices, wire_share
from llmprof.judge.cells import Reject, number, positive, required, text, whole
from llmprof.judge.priced import Item, score_items
from llmprof.judge.result import TableScores
from llmprof.judge.splits import Fit
from llmprof.judge.table import Table
from llmprof.schema.fabric import build_cluster
from llmprof.schema.priors import load_priors
from llmprof.schema.profile import CollectiveRow, Manifest, Profile

KINDS = {"send_recv": "send"}
PROVENANCE = ("size convention as logged", "gpu unstated", "gpu and message size unstated", "n_gpus=")
"""Remarks of `qc` that say where a figure comes from, not that it is wrong."""
NAIVE_SHARE = 0.7
"""Of the link's bandwidth: the usual share in a back-of-envelope estimate, assumed."""


def score_collectives(table: Table, *, fit: Fit | None = None) -> TableScores:
    """Score a table of collectives.

    The naive forecast moves what each rank sends at a share of the link's bandwidth: the median share that fitted rows
    reach, else NAIVE_SHARE; the second is the nearest fitted row of the stratum, scaled by its size.
    """
    return score_items(table, _read, _price, fit=fit, naive_share=NAIVE_SHARE)


def _read(index: int, row: dict[str, str]) -> Item:
    said = text(row, "qc")
    if said != "ok" and not said.startswith(PROVENANCE):
        raise Reject(f"qc: {re.split(r'[:;(,]', said)[0].strip() or 'empty'}")
    time_us, size = positive(row, "time_us"), number(row, "size_bytes")
    if time_us is None:
        raise Reject("no time")
    if not size or size < 1:
        raise Reject("empty cell: size_bytes")
    kind = KINDS.get(text(row, "op"), text(row, "op"))
    ranks, per_node = required(row, "n_gpus"), whole(row, "gpus_per_node")
    nodes = whole(row, "n_nodes") or 1
    try:
        cluster = build_cluster(text(row, "gpu"), devices_per_node=per_node)
    except ClusterError as error:
        raise Reject(f"unknown device: {text(row, 'gpu') or 'empty'}") from error
    span = ranks if nodes == 1 else nodes * cluster.devices_per_node
    link = next((k for k in cluster.links if k.span == 0 or k.span >= span), cluster.links[-1])
    moved = size * wire_share(kind, ranks)
    return Item(
        index=index,
        row_id=text(row, "row_id"),
        stratum=" ".join(
            filter(None, (text(row, "gpu"), kind, text(row, "dtype"), f"{nodes}x{per_node or ranks}"))
        ),
        time_us=time_us,
        size=size,
        roofline_us=1e6 * moved / link.bandwidth_bytes_per_s,
        resolution_us=1.0 if text(row, "source") == "vidur_network" else 0.0,
        nodes=nodes,
        work=(cluster, kind, int(size), ranks, span),
    )


def _price(fitted: Sequence[Item], asked: Sequence[Item]) -> list[tuple[float, float]]:
    keys: dict[str, CollectivePrices] = {}
    found = []
    for item in asked:
        cluster, kind, size, ranks, span = item.work
        key = repr(cluster)
        if key not in keys:
            rows = [_measured(f) for f in fitted if repr(f.work[0]) == key]
            world = max((f.work[4] for f in fitted if repr(f.work[0]) == key), default=1)
            profile = Profile(manifest=Manifest(name="table", world_size=world), collectives=tuple(rows))
            keys[key] = CollectivePrices(profile, cluster, same_device=bool(rows), priors=load_priors())
        price = keys[key].price(kind, size, ranks, span)
        found.append((price.time_s * 1e6, price.spread))
    return found


def _measured(item: Item) -> CollectiveRow:
    cluster, kind, size, ranks, _ = item.work
    return CollectiveRow(
        rank=0,
        kind=kind,
        axis="",
        group_size=ranks,
        size_bytes=size,
        dtype="",
        backend=cluster.backend,
        count=1.0,
        time_us=item.time_us,
        time_iqr_us=0.0,
        time_n=1,
        exposed_us=item.time_us,
        in_situ=False,
    )
