"""Exit code 0 when this interpreter has what constraints.txt pins and an editable llmprof of this checkout."""

from __future__ import annotations

import sys
from importlib.metadata import PackageNotFoundError, distribution, version
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def main() -> int:
    """Compares what is installed with what is asked for; says nothing."""
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pins = [
        line.split("==") for line in lines if "==" in line and ";" not in line and not line.startswith("#")
    ]
    try:
        if any(version(name.strip()).split("+")[0] != pin.strip() for name, pin in pins):
            return 1
        origin = distribution("llmprof-torch").read_text("direct_url.json") or ""
    except PackageNotFoundError:
        return 1
    return 0 if f'"file://{ROOT}"' in origin else 1


if __name__ == "__main__":
    sys.exit(main())
