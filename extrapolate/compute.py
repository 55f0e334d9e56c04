"""Operator prices: from an operator with local shapes to seconds on a device, measured, interpolated or assumed.

Four sources, in this order: a measured row with the same operator, shapes, dtype and attributes; measured
neighbours of the same operator (else family) and dtype, interpolated in efficiency space; published measurements of the
device, or of one with the same chip, interpolated likewise; the device's roofline with the efficiencies of
`llmprof.schema.priors`. Rows that a run measured on one device price only that device.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from llmprof.extrapolate.attention import FIRST, NATIVE, attention_kernel, attention_prior
from llmprof.extrapolate.curves import LONE_SPREAD, Evidence, Work
from llmprof.extrapolate.features import call_sizes
from llmprof.extrapolate.measured import MeasuredOperators
from llmprof.extrapolate.peaks import peak_flops
from llmprof.extrapolate.surface import Call
from llmprof.extrapolate.table import TABLE_KINDS, TablePrice, TablePrices, table_prices
from llmprof.schema.cluster import Device
from llmprof.schema.operators import (
    MATMUL_FAMILIES,
    Tensor,
    bytes_moved,
    family,
    flops,
    format_shapes,
    is_free,
)
from llmprof.schema.priors import FamilyPrior, Priors, load_priors
from llmprof.schema.profile import Profile, SourceRow

KINDS = ("measured", "interpolated", *TABLE_KINDS, "assumed")


class OpPrice(NamedTuple):
    """What one call costs.

    Attributes:
        time_s: device time (on a CPU: the operator's own wall time); 0 for views and allocations.
        spread: standard deviation of the natural logarithm of `time_s`.
        kind: one of KINDS.
        family: operator family, or "link:NAME" for a collective; errors of one family are shared.
        neighbours: the measured rows behind it, in text; empty when assumed.
        host_s: host time to launch it (on a CPU: the gap before it, and a view's own time).
    """

    time_s: float
    spread: float
    kind: str
    family: str
    neighbours: tuple[str, ...] = ()
    host_s: float = 0.0


def is_same_device(profile: Profile, device: Device) -> bool:
    """True when a profile was measured on this kind of device, so that its times price it."""
    return any(is_device(source, device) for source in profile.sources)


def is_device(source: SourceRow, device: Device) -> bool:
    """True when what measured is this kind of device."""
    names = {n.lower() for n in (device.name, *device.aliases)}
    return source.device == device.kind and source.device_name.lower() in names


class OperatorPrices:
    """Prices operators on one device.

    Args:
        profile: where measured rows come from.
        device: what is priced.
        same_device: whether the rows were measured on this kind of device; if not, none is used.
        priors: efficiencies and launch times where nothing is measured.
        tables: whether published measurements of the device price what the profile does not; not where those are what
            prices are judged by.
    """

    def __init__(
        self,
        profile: Profile,
        device: Device,
        *,
        same_device: bool,
        priors: Priors | None = None,
        tables: bool = True,
    ) -> None:
        self.device = device
        self.same_device = same_device
        self._priors = priors or load_priors()
        self._measured = MeasuredOperators(profile if same_device else None, device=device)
        self._tables = table_prices(device) if tables else ()
        self._used: dict[TablePrices, None] = {}
        self._cache: dict[tuple[object, ...], OpPrice] = {}
        self._host_us, self._host_kind = self._dispatch(profile)

    def price(
        self,
        op: str,
        inputs: Sequence[Tensor],
        outputs: Sequence[Tensor] = (),
        attributes: frozenset[str] = frozenset(),
    ) -> OpPrice:
        """Cost of one call.

        Args:
            op: full operator name.
            inputs, outputs: tensors with local shapes.
            attributes: what changes the cost beside shapes, such as "causal".
        """
        key = (op, tuple(inputs), tuple(outputs), attributes)
        found = self._cache.get(key)
        if found is None:
            found = self._cache[key] = self._price(op, inputs, outputs, attributes)
        return found

    def prepare(
        self, calls: Iterable[tuple[str, Sequence[Tensor], Sequence[Tensor], frozenset[str]]]
    ) -> None:
        """Interpolate many calls, given as the arguments of `price`, in one go: pricing them is much faster then."""
        self._measured.look_up(
            (op, inputs[0].dtype, _call(op, inputs, attributes))
            for op, inputs, _, attributes in calls
            if inputs and not is_free(op)
        )

    def host_us(self) -> float:
        """Host time between two operators (CPU) or to launch one (GPU), microseconds."""
        return self._host_us

    def host_kind(self) -> str:
        """Whether `host_us` is "measured" or "assumed"."""
        return self._host_kind

    def assumptions(self) -> tuple[str, ...]:
        """What is assumed about the device and the host, one sentence each."""
        lines = [table.sentence() for table in self._used]
        if not self.same_device:
            lines.append(self._unmeasured())
        if self._host_kind == "assumed":
            lines.append(f"host time of {self._host_us:g} us for each launched operator is assumed")
        return tuple(lines)

    def _unmeasured(self) -> str:
        """What prices operators of a device on which the run was not measured, where no table does."""
        roofline = f"its roofline (spec sheet) with {self._priors.source}"
        if self._used:
            return f"operators of {self.device.name} that are in no table take {roofline}"
        return f"no operator was measured on {self.device.name}: times are {roofline}"

    def _dispatch(self, profile: Profile) -> tuple[float, str]:
        if self.same_device:
            rows = [r for r in profile.host if r.name == "dispatch_us_per_operator"]
            if rows:
                return sum(r.value for r in rows) / len(rows), "measured"
        return (self._priors.cpu_gap_us if self.device.kind == "cpu" else self._priors.launch_us), "assumed"

    def _launch_s(self, op: str) -> float:
        """Host time of one call: on a CPU the gap before it and a view's own time, on a GPU the launch."""
        if self.device.kind == "cpu":
            own_s = self._measured.free_time_s(op) if is_free(op) else 0.0
            return self._host_us * 1e-6 + own_s
        measured_s = self._measured.launch_s(op)
        if measured_s is not None:
            return measured_s
        return (min(self._priors.view_us, self._host_us) if is_free(op) else self._host_us) * 1e-6

    def _price(
        self, op: str, inputs: Sequence[Tensor], outputs: Sequence[Tensor], attributes: frozenset[str]
    ) -> OpPrice:
        kind = family(op)
        gap_s = self._launch_s(op)
        if is_free(op):
            return OpPrice(0.0, 0.0, self._host_kind, kind, (), gap_s)
        dtype = _dtype(inputs, outputs)
        shapes = format_shapes(inputs)
        exact = self._measured.exact(op, shapes, dtype, attributes)
        if exact is not None:
            # without shapes (a fill, say) other sizes cannot be told apart
            evidence, spread = ("measured", exact.spread) if shapes else ("interpolated", LONE_SPREAD)
            return OpPrice(exact.time_s, spread, evidence, kind, (f"{op} {shapes} {dtype}",), gap_s)
        return self.nearby(op, inputs, outputs, attributes)

    def nearby(
        self,
        op: str,
        inputs: Sequence[Tensor],
        outputs: Sequence[Tensor] = (),
        attributes: frozenset[str] = frozenset(),
    ) -> OpPrice:
        """Cost of one call by what was measured of its operator, also where the call itself was measured."""
        kind, gap_s = family(op), self._launch_s(op)
        dtype = _dtype(inputs, outputs)
        near = self._measured.interpolate(op, kind, dtype, _call(op, inputs, attributes))
        if near is not None:
            return OpPrice(near.time_s, near.spread, "interpolated", kind, near.rows, gap_s)
        call = _call(op, inputs, attributes, outputs)
        _, published = self._published(op, dtype, call)
        if published is not None:
            return OpPrice(published.time_s, published.spread, published.kind, kind, (), gap_s)
        time_s, spread = self.roofline(op, dtype, call.work, attributes)
        return OpPrice(time_s, spread, "assumed", kind, (), gap_s)

    def _published(self, op: str, dtype: str, call: Call) -> tuple[TablePrices | None, TablePrice | None]:
        """The first table that prices a call, and its price. None has rows of the first FlashAttention."""
        if FIRST in call.attributes:
            return None, None
        call = call._replace(attributes=call.attributes - {NATIVE})
        for table in self._tables:
            found = table.price(op, dtype, call)
            if found is not None:
                self._used[table] = None
                return table, found
        return None, None

    def evidence(
        self,
        op: str,
        inputs: Sequence[Tensor],
        outputs: Sequence[Tensor] = (),
        attributes: frozenset[str] = frozenset(),
    ) -> Evidence:
        """What `price` rests on: the measured rows behind it, or the efficiencies of the roofline."""
        kind = family(op)
        if is_free(op):
            return Evidence("host", "moves no data: host time alone")
        dtype, shapes = _dtype(inputs, outputs), format_shapes(inputs)
        if self._measured.exact(op, shapes, dtype, attributes) is not None:
            rows = self._measured.rows_of(op, shapes, dtype, attributes)
            return Evidence("row", _mean_of(len(rows)), rows)
        near = self._measured.evidence(op, kind, dtype, _call(op, inputs, attributes))
        if near is not None:
            return near
        call = _call(op, inputs, attributes, outputs)
        table, _ = self._published(op, dtype, call)
        if table is not None:
            return table.evidence(op, dtype, call._replace(attributes=call.attributes - {NATIVE}))
        prior, share = self._reached(op, attributes)
        rate = f"{prior.bandwidth_efficiency:.0%} of {self.device.bandwidth_bytes_per_s / 1e12:.3g} TB/s"
        if kind in MATMUL_FAMILIES:
            peak = peak_flops(self.device, dtype)
            rate = f"{prior.flops_efficiency * share:.0%} of {peak / 1e12:.4g} TFLOP/s or {rate}"
        return Evidence("roofline", rate, source=f"{kind}: {prior.source}")

    def roofline(
        self, op: str, dtype: str, work: Work, attributes: frozenset[str] = frozenset()
    ) -> tuple[float, float]:
        """Launch floor plus the slower of arithmetic and memory, and the spread of the efficiency behind it.

        time = floor + max(flops / (e peak), bytes / (e_bw bandwidth)); on a CPU the floor is that of a CPU kernel.
        """
        prior, share = self._reached(op, attributes)
        floor_s = (self._priors.cpu_floor_us if self.device.kind == "cpu" else self._priors.floor_us) * 1e-6
        memory_s = work.bytes / (prior.bandwidth_efficiency * self.device.bandwidth_bytes_per_s)
        compute_s = 0.0
        if work.flops:
            compute_s = work.flops / (prior.flops_efficiency * share * peak_flops(self.device, dtype))
        return floor_s + max(compute_s, memory_s), prior.spread

    def _reached(self, op: str, attributes: frozenset[str]) -> tuple[FamilyPrior, float]:
        """What an operator reaches of the roofline, and the share of the peak that its kernels can use."""
        kind = family(op)
        if kind != "attention":
            return self._priors.family(kind), 1.0
        kernel = attention_kernel(op, attributes)
        share = 1.0 if kernel == NATIVE else self.device.older_kernels_share or 1.0
        return self._priors.family(attention_prior(op, kernel)), share


def _mean_of(count: int) -> str:
    return "one measured row" if count == 1 else f"mean of {count} measured rows, by their calls"


def _dtype(inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> str:
    """Dtype that a call is priced in: that of its first tensor."""
    return inputs[0].dtype if inputs else (outputs[0].dtype if outputs else "float32")


def _call(
    op: str, inputs: Sequence[Tensor], attributes: frozenset[str], outputs: Sequence[Tensor] = ()
) -> Call:
    """A call, by its inputs alone where that is what a capture sees of it."""
    kind = family(op)
    work = Work(
        flops(op, inputs, outputs, attributes) if kind in MATMUL_FAMILIES else 0,
        bytes_moved(op, inputs, outputs),
    )
    return Call(call_sizes(kind, op, inputs), attributes, work)
