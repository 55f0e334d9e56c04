"""Operator tables scored with the product's own operator prices: what was fitted is a measured profile to them."""

from __future__ import annotations

from collections.abc import Sequence

from llmprof.errors import ClusterError
from llmprof.extrapolate.compute import OperatorPrices, peak_flops
from llmprof.judge.cells import Reject, positive, text
from llmprof.judge.op_rows import OpCall, read_calls
from llmprof.judge.priced import Item, score_items
from llmprof.judge.result import TableScores
from llmprof.judge.splits import Fit
from llmprof.judge.table import Table
from llmprof.schema.cluster import Device
from llmprof.schema.devices import find_device
from llmprof.schema.operators import MATMUL_FAMILIES, bytes_moved, family, flops, format_shapes
from llmprof.schema.priors import load_priors
from llmprof.schema.profile import Manifest, OperatorRow, Profile, SourceRow

RESOLUTIONS_US = {"vidur_compute": 1.0}
"""Smallest step of a source's clock, where its documentation says one (microseconds)."""


def score_operators(table: Table, *, fit: Fit | None = None) -> TableScores:
    """Score a table of operators. Times are kernel times: launches and host time are not part of them.

    The naive forecast is the roofline at the median share that the fitted rows of a stratum reach of it, at the prior
    MFU where nothing is fitted; the second is the nearest fitted row of the stratum, scaled by its work.
    """
    return score_items(table, _read, _price, fit=fit, naive_share=load_priors().mfu)


def _read(index: int, row: dict[str, str]) -> Item:
    calls = read_calls(row)
    time_us = positive(row, "time_us")
    if time_us is None:
        raise Reject("no time")
    try:
        device = find_device(text(row, "gpu"))
    except ClusterError as error:
        raise Reject(f"unknown device: {text(row, 'gpu') or 'empty'}") from error
    matmul = family(calls[0].op) in MATMUL_FAMILIES
    work = sum(flops(*call) if matmul else bytes_moved(*call[:3]) for call in calls)
    return Item(
        index=index,
        row_id=text(row, "row_id"),
        stratum=" ".join(filter(None, (text(row, key) for key in ("gpu", "op", "phase", "dtype", "kernel")))),
        time_us=time_us,
        size=float(max(work, 1)),
        roofline_us=sum(_roofline_us(call, device) for call in calls),
        resolution_us=RESOLUTIONS_US.get(text(row, "source"), 0.0),
        nodes=1,
        work=(device, calls),
    )


def _roofline_us(call: OpCall, device: Device) -> float:
    memory_s = bytes_moved(*call[:3]) / device.bandwidth_bytes_per_s
    compute_s = flops(*call) / peak_flops(device, call.inputs[0].dtype)
    return 1e6 * max(memory_s, compute_s)


def _price(fitted: Sequence[Item], asked: Sequence[Item]) -> list[tuple[float, float]]:
    prices: dict[str, OperatorPrices] = {}
    for item in asked:
        device = item.work[0]
        if device.name not in prices:
            rows = [_measured(f) for f in fitted if f.work[0].name == device.name and len(f.work[1]) == 1]
            prices[device.name] = OperatorPrices(
                _profile(device, rows), device, same_device=bool(rows), priors=load_priors()
            )
    found = []
    for item in asked:
        device, calls = item.work
        parts = [prices[device.name].price(*call) for call in calls]
        time_s = sum(p.time_s for p in parts)
        # parts of one row share their error
        spread = sum(p.time_s * p.spread for p in parts) / time_s if time_s else 0.0
        found.append((time_s * 1e6, spread))
    return found


def _profile(device: Device, rows: list[OperatorRow]) -> Profile:
    source = SourceRow(
        rank=0, hostname="", device=device.kind, device_name=device.name, device_count=1, threads=0,
        memory_bytes=None, backend="", clock="table", software="",
    )  # fmt: skip
    return Profile(manifest=Manifest(name="table"), operators=tuple(rows), sources=(source,))


def _measured(item: Item) -> OperatorRow:
    device, (call,) = item.work
    return OperatorRow(
        rank=0,
        op=call.op,
        family=family(call.op),
        module="",
        phase="other",
        shapes=format_shapes(call.inputs),
        dtype=call.inputs[0].dtype,
        attributes=",".join(sorted(call.attributes)),
        device=device.kind,
        count=1.0,
        time_us=item.time_us,
        time_iqr_us=0.0,
        time_n=1,
        exclusive_us=item.time_us,
        flops=flops(*call),
        bytes=bytes_moved(*call[:3]),
    )
