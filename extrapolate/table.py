"""Published measurements of a device, or of one with the same chip, as prices of operators that nobody captured there."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from math import hypot
from typing import NamedTuple

import msgspec

from llmprof.extrapolate.curves import Evidence, Work
from llmprof.extrapolate.measured import MeasuredOperators
from llmprof.extrapolate.peaks import peak_flops
from llmprof.extrapolate.surface import Call
from llmprof.schema.cluster import Device
from llmprof.schema.device_tables import DeviceTable, TablePart, load_device_table
from llmprof.schema.devices import find_device, known_entry
from llmprof.schema.operators import MATMUL_FAMILIES, bytes_moved, family, flops, parse_shapes, split_name
from llmprof.schema.priors import load_priors
from llmprof.schema.profile import Manifest, OperatorRow, Profile

HALF = ("float16", "bfloat16")
"""Run at one rate: rows of either price both."""
TABLE_KINDS = ("table", "transferred")
"""Kinds of prices: published times of the device itself, and of one with the same chip."""
_MOST_KNOWN = 50_000


class TablePrice(NamedTuple):
    """Time of a call, standard deviation of its logarithm, and "table" or "transferred"."""

    time_s: float
    spread: float
    kind: str


class TablePrices:
    """Prices from one device's table.

    Args:
        table: of published rows.
        device: what is priced: the table's own, or one with the same chip, whose roofline scales the times.
    """

    def __init__(self, table: DeviceTable, device: Device) -> None:
        self.table, self.device = table, device
        self._source = find_device(table.device)
        self.own = self._source.name == device.name
        self.kind = TABLE_KINDS[0 if self.own else 1]
        rows = tuple(row for part in table.parts for row in _rows(part))
        profile = Profile(manifest=Manifest(name=table.device), operators=rows)
        self._measured = MeasuredOperators(profile, device=self._source)
        self._ops = {(part.op, _dtype(part.dtype)) for part in table.parts}
        self._known: dict[tuple[str, str, Call], TablePrice | None] = {}

    def price(self, op: str, dtype: str, call: Call) -> TablePrice | None:
        """Price of a call, None where the table has no operator of its kind."""
        key = (op, dtype, call)
        if key not in self._known:
            if len(self._known) >= _MOST_KNOWN:
                self._known.clear()
            self._known[key] = self._price(op, dtype, call)
        return self._known[key]

    def evidence(self, op: str, dtype: str, call: Call) -> Evidence:
        """What `price` rests on."""
        asked = self._asked(op, dtype)
        found = self._measured.evidence(*asked, call) if asked else None
        assert found is not None, "a call that is priced has rows"
        ratio = self._ratio(dtype, call.work)
        scaled = "" if self.own else f", times {ratio:.3f}: the rooflines of {self.device.name} and it"
        return found._replace(
            method=self.kind,
            basis=f"{self.table.device}: {found.basis}{scaled}",
            source=self.sentence(),
        )

    def sentence(self) -> str:
        """For a list of assumptions: operators, rows, sources and the errors of rows that were left out."""
        parts = self.table.parts
        rows = sum(len(part.shapes) for part in parts)
        sources = dict.fromkeys(f"{part.source.repository} ({part.source.licence})" for part in parts)
        kinds = dict.fromkeys(family(part.op) for part in parts)
        errors = sorted(
            {f"{part.left_out.median:.1%}": part.left_out.median for part in parts}.items(),
            key=lambda e: e[1],
        )
        off = " to ".join(dict.fromkeys((errors[0][0], errors[-1][0])))
        scaled = (
            "" if self.own else f", scaled to {self.device.name}, which has the same chip, by their rooflines"
        )
        return (
            f"table of {self.table.device}: {rows} published times of {', '.join(kinds)} from {', '.join(sources)}; "
            f"rows left out are off by {off} (median){scaled}"
        )

    def _price(self, op: str, dtype: str, call: Call) -> TablePrice | None:
        asked = self._asked(op, dtype)
        found = self._measured.interpolate(*asked, call) if asked else None
        if found is None:
            return None
        spread = hypot(found.spread, load_priors().table_spread)
        return TablePrice(found.time_s * self._ratio(dtype, call.work), spread, self.kind)

    def _asked(self, op: str, dtype: str) -> tuple[str, str, str] | None:
        """Operator, family and dtype by which the table has a call, None where it has none like it."""
        kind = family(op)
        name = _stand_in(op, kind, dtype)
        if (name, _dtype(dtype)) in self._ops:
            return name, kind, _dtype(dtype)
        if kind == "elementwise":  # by bytes alone, which no dtype changes
            dtypes = [d for o, d in sorted(self._ops) if family(o) == kind]
            return (op, kind, dtypes[0]) if dtypes else None
        return None

    def _ratio(self, dtype: str, work: Work) -> float:
        """Time at the peaks of the device over that of the table's."""
        if self.own:
            return 1.0
        return _peak_s(self.device, dtype, work) / _peak_s(self._source, dtype, work)


def table_prices(device: Device) -> tuple[TablePrices, ...]:
    """Tables that price a device: its own, then those of devices with the same chip; made once for each device."""
    return _table_prices(msgspec.json.encode(device))


@lru_cache(maxsize=32)
def _table_prices(encoded: bytes) -> tuple[TablePrices, ...]:
    device = msgspec.json.decode(encoded, type=Device)
    entry = known_entry(device.name)
    if entry is None:
        return ()
    found = (load_device_table(name) for name in (entry.device.name, *entry.same_chip))
    return tuple(TablePrices(table, device) for table in found if table is not None)


def _peak_s(device: Device, dtype: str, work: Work) -> float:
    compute_s = work.flops / peak_flops(device, dtype) if work.flops else 0.0
    return max(compute_s, max(work.bytes, 1) / device.bandwidth_bytes_per_s)


def _dtype(dtype: str) -> str:
    return HALF[1] if dtype in HALF else dtype


def _stand_in(op: str, kind: str, dtype: str) -> str:
    """The operator whose rows price another of its kind: any product, any fused attention."""
    if kind == "matmul":
        return "aten::_scaled_mm" if dtype.startswith("float8") else "aten::mm"
    if kind == "batched_matmul":
        return "aten::bmm"
    if kind == "attention":
        return f"aten::_scaled_dot_product_flash_attention{'_backward' if 'backward' in op else ''}"
    return f"aten::{split_name(op)[1].removesuffix('_')}"


def _rows(part: TablePart) -> Iterator[OperatorRow]:
    """Rows of a part as a capture writes them."""
    kind, dtype = family(part.op), _dtype(part.dtype)
    attributes = frozenset(filter(None, part.attributes.split(",")))
    for shapes, time_us in zip(part.shapes, part.time_us, strict=True):
        inputs = parse_shapes(shapes, dtype)
        yield OperatorRow(
            rank=0, op=part.op, family=kind, module="", phase="other", shapes=shapes, dtype=dtype,
            attributes=part.attributes, device="", count=1.0, time_us=time_us, time_iqr_us=0.0, time_n=1,
            exclusive_us=time_us, flops=flops(part.op, inputs, (), attributes) if kind in MATMUL_FAMILIES else 0,
            bytes=bytes_moved(part.op, inputs),
        )  # fmt: skip
