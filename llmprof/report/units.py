"""Numbers in, short text for people out: times, bytes, counts and shares with their unit."""

from __future__ import annotations

from bisect import bisect_right
from math import isfinite

UNKNOWN = "unknown"
_TIME_UNITS = (
    (1e-9, "ns"),
    (1e-6, "us"),
    (1e-3, "ms"),
    (1.0, "s"),
    (60.0, "min"),
    (3600.0, "h"),
    (86400.0, "days"),
)
_TIME_LIMITS_S = (1e-6, 1e-3, 1.0, 120.0, 7200.0, 172800.0)
_DECIMAL_UNITS = ((1.0, ""), (1e3, "k"), (1e6, "M"), (1e9, "G"), (1e12, "T"), (1e15, "P"), (1e18, "E"))


def time_text(duration_us: float | None) -> str:
    """Three digits and a unit: "142 ms", "3.1 us", "2.4 days"."""
    return seconds_text(None if duration_us is None else duration_us / 1e6)


def seconds_text(duration_s: float | None) -> str:
    """As `time_text`, from seconds."""
    if duration_s is None or not isfinite(duration_s):
        return UNKNOWN
    factor, unit = _TIME_UNITS[bisect_right(_TIME_LIMITS_S, abs(duration_s))]
    return f"{three_digits(duration_s / factor)} {unit}"


def range_text(low_s: float, high_s: float) -> str:
    """Two times in the unit of the higher one: "[98.2 .. 131 ms]"."""
    factor, unit = _TIME_UNITS[bisect_right(_TIME_LIMITS_S, abs(high_s))]
    return f"[{three_digits(low_s / factor)} .. {three_digits(high_s / factor)} {unit}]"


def bytes_text(size_bytes: float | None) -> str:
    """Decimal bytes: "1.21 GB"."""
    return UNKNOWN if size_bytes is None else f"{_scaled(size_bytes, gap=' ')}B"


def count_text(value: float | None) -> str:
    """A count: "14,391" below a million, else "1.52 M"."""
    if value is None:
        return UNKNOWN
    if abs(value) >= 1e6:
        return _scaled(value, gap=" ")
    return f"{value:,.0f}" if abs(value) >= 100 or float(value).is_integer() else three_digits(value)


def flops_text(value: float) -> str:
    """Floating-point operations: "1.3 T", "" for none."""
    return _scaled(value, gap=" ") if value else ""


def energy_text(energy_j: float) -> str:
    """Joules: "3.21 kJ"."""
    return f"{_scaled(energy_j, gap=' ')}J"


def percent_text(fraction: float | None) -> str:
    """A share: "29.0 %"."""
    if fraction is None:
        return UNKNOWN
    percent = 100 * fraction
    if percent >= 1000:
        return f"{percent:,.0f} %"
    return "<0.1 %" if 0 < percent < 0.05 else f"{percent:.1f} %"


def three_digits(value: float) -> str:
    """Three significant digits: 0.123, 1.23, 12.3, 123, 1,234; below a thousandth with an exponent: 2.5e-05."""
    size = abs(value)
    if size >= 99.95:
        return f"{value:,.0f}"
    if size >= 9.995:
        return f"{value:.1f}"
    if size >= 0.995 or size == 0:
        return f"{value:.2f}" if size else "0"
    return f"{value:.3f}" if size >= 0.0005 else f"{value:.2g}"


def _scaled(value: float, *, gap: str) -> str:
    factor, unit = next(
        ((f, u) for f, u in reversed(_DECIMAL_UNITS) if abs(value) >= f * 0.9995), _DECIMAL_UNITS[0]
    )
    return f"{three_digits(value / factor)}{gap}{unit}"
