"""Operator tables scored with the product's own operator prices: what was fitted is a measured profile to them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple

from llmprof.errors import ClusterError
from llmprof.extrapolate.compute import OperatorPrices
from llmprof.extrapolate.measured import MEDIAN_ERROR, NORMAL_IQR
from llmprof.extrapolate.peaks import peak_flops
from llmprof.judge.cells import Reject, text
from llmprof.judge.op_calls import OpCall
from llmprof.judge.op_rows import read_calls
from llmprof.judge.priced import SEEDS, Item, Scoring, read_time_us, score_items
from llmprof.judge.result import TableScores
from llmprof.judge.splits import Fit
from llmprof.judge.table import Table
from llmprof.schema.cluster import Device
from llmprof.schema.devices import find_device
from llmprof.schema.operators import MATMUL_FAMILIES, bytes_moved, family, flops, format_shapes, size_bytes
from llmprof.schema.priors import load_priors
from llmprof.schema.profile import Manifest, OperatorRow, Profile, SourceRow

RESOLUTIONS_US = {"vidur_compute": 1.0, "estimate_train_time_ops": 0.2, "neusight_train_ops": 1.024}
"""Smallest step of a source's clock, where its times show one (microseconds)."""
EAGER = "eager"
"""In the cell `framework`: the host launched one operator after another while the clock ran."""

_ROUNDS = 3
"""How often the time of a sum is shared out."""


class _Share(NamedTuple):
    """What one call has of a row's time, and the spread of its logarithm: 0 where the row is that call alone."""

    part: float
    spread: float


class _Work(NamedTuple):
    """What a row timed.

    Attributes:
        calls: whose times add up to the row's.
        shares: of each call in the row's time, by their assumed prices.
        whole: a chain of operators without a matmul as one operator, to measure it by; None for anything else.
        launched: the row's time has the launches in it.
    """

    device: Device
    calls: tuple[OpCall, ...]
    shares: tuple[_Share, ...]
    whole: OpCall | None
    launched: bool


def score_operators(table: Table, *, fit: Fit | None = None, seeds: int = SEEDS) -> TableScores:
    """Score a table of operators.

    Times are kernel times. Where the source says that it ran eagerly and looked at the wall clock or at single small
    calls, a row takes its kernels or their launches, whichever is longer.

    A row of several calls is the sum of their prices. When it is fitted, both gradients of a matmul, or the operators
    of a block, share its time by their assumed prices. Of a chain without a matmul the parts stay unknown: it is
    fitted as one operator, by which other rows of that chain are priced.

    The naive forecast is the roofline at the median share that the fitted rows of a stratum reach of it, at the prior
    MFU where nothing is fitted; the second is the nearest fitted row of the stratum, scaled by its work.
    """
    scoring = Scoring(read=_read, price=_price, naive_share=load_priors().mfu, seeds=seeds)
    return score_items(table, scoring, fit=fit)


def _read(index: int, row: dict[str, str]) -> Item:
    calls = tuple(read_calls(row))
    time_us = read_time_us(row)
    try:
        device = find_device(text(row, "gpu"))
    except ClusterError as error:
        raise Reject(f"unknown device: {text(row, 'gpu') or 'empty'}") from error
    kinds = {family(call.op) for call in calls}
    matmul = not kinds.isdisjoint(MATMUL_FAMILIES)
    work = sum(flops(*call) if matmul else bytes_moved(*call[:3]) for call in calls)
    return Item(
        index=index,
        row_id=text(row, "row_id"),
        stratum=" ".join(filter(None, (text(row, key) for key in ("gpu", "op", "phase", "dtype", "kernel")))),
        time_us=time_us,
        size=float(max(work, 1)),
        roofline_us=sum(_roofline_us(call, device) for call in calls),
        resolution_us=RESOLUTIONS_US.get(text(row, "source"), 0.0),
        kind=f"{device.name} {_main_family(calls, device)}",
        work=_Work(
            device=device,
            calls=calls,
            shares=_shares(calls, device),
            whole=None if matmul or len(calls) == 1 else _whole(row, calls),
            launched=EAGER in text(row, "framework").lower(),
        ),
    )


def _roofline_us(call: OpCall, device: Device) -> float:
    memory_s = bytes_moved(*call[:3]) / device.bandwidth_bytes_per_s
    compute_s = flops(*call) / peak_flops(device, _dtype(call))
    return 1e6 * max(memory_s, compute_s)


def _main_family(calls: Sequence[OpCall], device: Device) -> str:
    """Family of the call that takes most of a row at the device's peaks."""
    return family(max(calls, key=lambda call: _roofline_us(call, device)).op)


def _dtype(call: OpCall) -> str:
    return (call.inputs or call.outputs)[0].dtype


def _whole(row: dict[str, str], calls: tuple[OpCall, ...]) -> OpCall:
    """One operator that moves as many bytes as the chain: it reads the chain's first operand so many times."""
    operand = calls[0].inputs[0]
    moved = sum(bytes_moved(*call[:3]) for call in calls)
    reads = max(1, round(moved / max(1, size_bytes(operand))) - 1)
    name = f"fused::{text(row, 'op')}{'_backward' if text(row, 'phase') == 'bwd' else ''}"
    return OpCall(name, (operand,) * reads, (operand,))


def _shares(calls: tuple[OpCall, ...], device: Device) -> tuple[_Share, ...]:
    if len(calls) == 1:
        return (_Share(1.0, 0.0),)
    prices = [_assumed_prices(device.name).price(*call) for call in calls]
    total = sum(price.time_s for price in prices)
    return tuple(_Share(price.time_s / total if total else 0.0, price.spread) for price in prices)


@lru_cache(maxsize=64)
def _assumed_prices(name: str) -> OperatorPrices:
    device = find_device(name)
    return OperatorPrices(_profile(device, []), device, same_device=False, tables=False)


def _price(fitted: Sequence[Item], asked: Sequence[Item]) -> list[tuple[float, float]]:
    prices = _fitted_prices(fitted)
    for item in asked:
        name = item.work.device.name
        prices.setdefault(name, _assumed_prices(name))
    wholes = {(item.work.device.name, item.work.whole.op) for item in fitted if item.work.whole}
    calls: list[tuple[OpCall, ...]] = []
    for item in asked:
        work: _Work = item.work
        known = work.whole is not None and (work.device.name, work.whole.op) in wholes
        calls.append((work.whole,) if work.whole and known else work.calls)
    for name, own in prices.items():
        own.prepare(c for i, of in zip(asked, calls, strict=True) if i.work.device.name == name for c in of)
    return [
        _calls_price(of, prices[item.work.device.name], launched=item.work.launched)
        for item, of in zip(asked, calls, strict=True)
    ]


def _fitted_prices(fitted: Sequence[Item]) -> dict[str, OperatorPrices]:
    """Prices by device; sums are shared out by assumed prices first, then by what these prices say of the parts."""
    shares = {item.index: item.work.shares for item in fitted}
    sums = [item for item in fitted if len(item.work.calls) > 1 and item.work.whole is None]
    for _ in range(_ROUNDS if sums else 1):
        measured: dict[str, list[OperatorRow]] = defaultdict(list)
        for item in fitted:
            measured[item.work.device.name].extend(_measured(item, shares[item.index]))
        devices = {item.work.device.name: item.work.device for item in fitted}
        prices = {
            name: OperatorPrices(_profile(device, measured[name]), device, same_device=True, tables=False)
            for name, device in devices.items()
        }
        for name, own in prices.items():
            own.prepare(c for item in sums if item.work.device.name == name for c in item.work.calls)
        for item in sums:
            parts = [prices[item.work.device.name].nearby(*call).time_s for call in item.work.calls]
            total = sum(parts)
            shares[item.index] = tuple(
                share._replace(part=part / total if total else 0.0)
                for share, part in zip(item.work.shares, parts, strict=True)
            )
    return prices


def _calls_price(calls: Sequence[OpCall], prices: OperatorPrices, *, launched: bool) -> tuple[float, float]:
    """Microseconds of some calls, and the spread of the logarithm: of what takes the time."""
    parts = [prices.price(*call) for call in calls]
    time_s = sum(p.time_s for p in parts)
    host_s = sum(p.host_s for p in parts) if launched else 0.0
    if host_s > time_s:
        return host_s * 1e6, load_priors().launch_spread
    # errors of one family are shared, so that spreads do not average out
    return time_s * 1e6, sum(p.time_s * p.spread for p in parts) / time_s if time_s else 0.0


def _profile(device: Device, rows: Sequence[OperatorRow]) -> Profile:
    source = SourceRow(
        rank=0, hostname="", device=device.kind, device_name=device.name, device_count=1, threads=0,
        memory_bytes=None, backend="", clock="table", software="",
    )  # fmt: skip
    return Profile(manifest=Manifest(name="table"), operators=tuple(rows), sources=(source,))


def _measured(item: Item, shares: tuple[_Share, ...]) -> Iterator[OperatorRow]:
    """Rows as a capture writes them: it sees the inputs of a call, not its outputs."""
    work: _Work = item.work
    whole = [(work.whole, _Share(1.0, 0.0))] if work.whole else None
    for call, share in whole or zip(work.calls, shares, strict=True):
        time_us = item.time_us * share.part
        yield OperatorRow(
            rank=0,
            op=call.op,
            family=family(call.op),
            module="",
            phase="other",
            shapes=format_shapes(call.inputs),
            dtype=_dtype(call),
            attributes=",".join(sorted(call.attributes)),
            device=work.device.kind,
            count=1.0,
            time_us=time_us,
            time_iqr_us=share.spread * NORMAL_IQR / MEDIAN_ERROR * time_us,  # that gives this spread back
            time_n=1,
            exclusive_us=time_us,
            flops=flops(call.op, call.inputs, (), call.attributes),
            bytes=bytes_moved(call.op, call.inputs),
        )
