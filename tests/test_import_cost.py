"""What may be imported when: the command line starts fast, and forecasting works without torch and pandas."""

from __future__ import annotations

import os
import resource
import subprocess
import sys

import pytest

HEAVY = ("torch", "pandas", "tensorboard", "torch_tb_profiler")
LIMIT_S = 0.3


def python(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run code in a new interpreter."""
    return subprocess.run(
        [sys.executable, "-c", code, *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "COLUMNS": "80"},
        check=False,
    )


@pytest.mark.parametrize(
    "module",
    [
        "llmprof",
        "llmprof.cli",
        "llmprof.schema.store",
        "llmprof.schema.catalogue",
        "llmprof.report.breakdown",
        "llmprof.report.text",
        "llmprof.report.forecast_text",
        "llmprof.report.compare",
        "llmprof.extrapolate.predict",
    ],
)
def test_importing_does_not_load_what_is_heavy(module: str) -> None:
    code = f"import sys, {module}; print([m for m in {HEAVY!r} if m in sys.modules])"
    done = python(code)
    assert (done.stdout.strip(), done.stderr) == ("[]", "")


def test_the_version_loads_nothing_but_the_command_line() -> None:
    code = (
        "import sys; from llmprof.cli import main; code = main(['--version']);"
        "print([m for m in ('numpy', 'rich', 'msgspec', *sys.argv[1:]) if m in sys.modules]); sys.exit(code)"
    )
    done = python(code, *HEAVY)
    assert done.returncode == 0
    version, loaded = done.stdout.splitlines()
    assert version.startswith("llmprof ")
    assert loaded == "[]"


def test_the_version_takes_little_cpu_time() -> None:
    def cpu_s() -> float:
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run([sys.executable, "-m", "llmprof", "--version"], check=True, capture_output=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        return after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime

    assert min(cpu_s() for _ in range(3)) < LIMIT_S
