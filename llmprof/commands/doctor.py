"""`llmprof doctor`: what is installed, what the machine has, and what will not work and why."""

from __future__ import annotations

import argparse
import platform
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import Any

import msgspec

SUMMARY = "versions, devices and backends of this machine, and what will not work"
PACKAGES = ("torch", "torch-tb-profiler", "numpy", "pandas", "tensorboard", "msgspec", "rich")
MIN_TORCH, MIN_TENSORBOARD = (2, 9), (2, 21)
_TIMEOUT_S = 60

_PROBE = """
import json, torch, torch.distributed as dist
cuda = torch.cuda.is_available()
print(json.dumps({
    "device": torch.cuda.get_device_name(0) if cuda else "cpu",
    "device_count": torch.cuda.device_count() if cuda else 0,
    "threads": torch.get_num_threads(),
    "backends": [n for n in ("nccl", "gloo", "mpi") if dist.is_available() and dist.is_backend_available(n)],
    "kineto": torch.profiler.kineto_available(),
}))
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def execute(args: argparse.Namespace) -> int:
    """Print what was found; the exit code is 0 whatever it is."""
    from llmprof.commands.output import console, print_json

    found = examine()
    if args.json:
        print_json(found)
        return 0
    from llmprof.report.text import checks_text

    console().print(checks_text(found))
    return 0


def examine() -> dict[str, Any]:
    """Versions, what torch sees, and checks with a hint where something will not work."""
    versions = {name: _version(name) for name in ("llmprof-torch", *PACKAGES)}
    torch, devices = _probe_torch(), _devices()
    checks = [
        _check_torch(versions["torch"], torch),
        _check_cuda(torch),
        _check_distributed(torch),
        _check_nvml(torch),
        _check_tensorboard(versions["tensorboard"]),
        _check_torch_tb(versions["torch-tb-profiler"]),
        _check_tables(devices),
    ]
    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "versions": versions,
        "device": torch.get("device"),
        "device_count": torch.get("device_count"),
        "threads": torch.get("threads"),
        "backends": torch.get("backends", []),
        "devices": devices,
        "checks": checks,
    }


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _probe_torch() -> dict[str, Any]:
    """What torch sees, asked in another process: a broken installation must not take this one down."""
    try:
        done = subprocess.run(
            [sys.executable, "-c", _PROBE], capture_output=True, text=True, timeout=_TIMEOUT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return {"error": str(error)}
    if done.returncode != 0:
        lines = done.stderr.strip().splitlines()
        return {"error": lines[-1] if lines else f"exit code {done.returncode}"}
    found: dict[str, Any] = msgspec.json.decode(done.stdout)
    return found


def _check(name: str, ok: bool, detail: str, hint: str = "") -> dict[str, Any]:
    return {"name": name, "ok": ok, "detail": detail, "hint": "" if ok else hint}


def _check_torch(installed: str | None, torch: dict[str, Any]) -> dict[str, Any]:
    if "error" in torch:
        return _check(
            "capture",
            False,
            f"torch cannot be imported: {torch['error']}",
            "forecast, show and compare still work",
        )
    ok = _at_least(installed, MIN_TORCH) and bool(torch["kineto"])
    detail = f"torch {installed}, kineto {'there' if torch['kineto'] else 'missing'}"
    return _check("capture", ok, detail, "capturing needs torch 2.9 or newer, built with kineto")


def _check_cuda(torch: dict[str, Any]) -> dict[str, Any]:
    count = torch.get("device_count") or 0
    if count:
        return _check("GPU", True, f"{count} x {torch['device']}")
    return _check(
        "GPU", False, "none", "captures give shapes and structure; GPU prices come from the catalogue"
    )


def _check_distributed(torch: dict[str, Any]) -> dict[str, Any]:
    backends = torch.get("backends", [])
    return _check(
        "distributed",
        bool(backends),
        ", ".join(backends) or "no backend",
        "torch.distributed is not available",
    )


def _check_nvml(torch: dict[str, Any]) -> dict[str, Any]:
    if find_spec("pynvml") is None:
        return _check(
            "power meter",
            False,
            "nvidia-ml-py is not installed",
            "pip install 'llmprof-torch[nvml]' for energy",
        )
    ok = bool(torch.get("device_count"))
    return _check(
        "power meter", ok, "nvidia-ml-py" if ok else "no NVIDIA device", "energy needs an NVIDIA device"
    )


def _check_tensorboard(installed: str | None) -> dict[str, Any]:
    ok = _at_least(installed, MIN_TENSORBOARD)
    return _check(
        "LLMPROF tab",
        ok,
        f"tensorboard {installed or 'is not installed'}, needs nothing from the internet",
        "pip install 'tensorboard>=2.21'",
    )


def _check_torch_tb(installed: str | None) -> dict[str, Any]:
    if installed is None:
        return _check(
            "PyTorch Profiler tab", False, "torch-tb-profiler is not installed", "use the LLMPROF tab"
        )
    return _check(
        "PyTorch Profiler tab",
        False,
        f"torch-tb-profiler {installed} loads its charts from the internet",
        "offline it shows only a spinner: use the LLMPROF tab; on GPU traces its device times are unreliable",
    )


def _check_tables(devices: dict[str, list[str]]) -> dict[str, Any]:
    """Which devices have published times of operators; all others are priced by their specification."""
    found = ", ".join(devices["table"])
    others = f"{len(devices['same_chip'])} with the same chip, {len(devices['spec_sheet'])} by their spec sheet alone"
    return _check("device tables", True, f"operators measured on {found}; {others} (--json lists them)")


def _devices() -> dict[str, list[str]]:
    """Devices of the catalogue by what prices operators that were not captured on them."""
    from llmprof.schema.device_tables import table_names
    from llmprof.schema.devices import device_entry, device_names

    own = set(table_names())
    found: dict[str, list[str]] = {"table": sorted(own), "same_chip": [], "spec_sheet": []}
    for name in device_names():
        if name not in own:
            found["same_chip" if own.intersection(device_entry(name).same_chip) else "spec_sheet"].append(
                name
            )
    return found


def _at_least(installed: str | None, wanted: tuple[int, int]) -> bool:
    if installed is None:
        return False
    numbers = [int("".join(c for c in part if c.isdigit()) or 0) for part in installed.split(".")[:2]]
    return tuple(numbers) >= wanted
