"""What a device can do at most in a dtype that it may not list."""

from __future__ import annotations

from math import inf

from llmprof.errors import ClusterError
from llmprof.schema.cluster import Device


def peak_flops(device: Device, dtype: str) -> float:
    """Dense peak of a dtype; one that the device does not list runs at the rate of the next wider one listed.

    Raises:
        ClusterError: no listed dtype can stand in.
    """
    for candidate in (dtype, *_WIDER.get(dtype, ()), "float32"):
        if candidate in device.peak_flops:
            return device.peak_flops[candidate]
    best = max(device.peak_flops.values(), default=-inf)
    if best <= 0:
        raise ClusterError(
            f"device {device.name!r} lists no peak for {dtype}",
            hint="add it to peak_flops in its description",
        )
    return best


_WIDER = {
    "float8": ("bfloat16", "float16"),
    "float8_e4m3fn": ("float8", "bfloat16", "float16"),
    "float8_e5m2": ("float8", "bfloat16", "float16"),
    "bfloat16": ("float16",),
    "float16": ("bfloat16",),
}
