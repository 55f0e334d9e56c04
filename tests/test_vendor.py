"""The chart library in the wheel is the published one, unchanged, with its licences."""

from __future__ import annotations

import hashlib
import re
from importlib.resources import files

VENDOR = files("llmprof.tensorboard") / "static" / "vendor"
LIBRARY = "echarts.esm.min.js"


def test_library_has_the_recorded_hash() -> None:
    recorded = re.search(rf"sha256 {re.escape(LIBRARY)}\s+([0-9a-f]{{64}})", (VENDOR / "VERSION").read_text())
    assert recorded is not None
    assert hashlib.sha256((VENDOR / LIBRARY).read_bytes()).hexdigest() == recorded[1]


def test_recorded_version_is_that_of_the_library() -> None:
    recorded = re.search(r"^version\s+(\S+)$", (VENDOR / "VERSION").read_text(), re.MULTILINE)
    assert recorded is not None
    assert f'"{recorded[1]}"' in (VENDOR / LIBRARY).read_text(encoding="utf-8")


def test_licences_lie_beside_it() -> None:
    assert "Apache License" in (VENDOR / "LICENSE").read_text()
    assert "Apache ECharts" in (VENDOR / "NOTICE").read_text()
    for name in ("LICENSE-d3", "LICENSE-zrender"):
        assert "Redistribution and use in source and binary forms" in (VENDOR / name).read_text()


def test_our_front_end_names_no_other_machine() -> None:
    static = files("llmprof.tensorboard") / "static"
    for entry in static.iterdir():
        if entry.is_file():
            text = entry.read_text(encoding="utf-8")
            assert "http://" not in text and "https://" not in text, entry.name
            assert "innerHTML" not in text and "insertAdjacentHTML" not in text, entry.name
