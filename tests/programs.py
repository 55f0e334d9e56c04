"""Runs the command line in a process of its own, and reads what it prints."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest


def start(*arguments: str, code: str = "") -> subprocess.CompletedProcess[str]:
    """Run the command line, or other code with the same arguments, in a process of its own."""
    program = ["-c", code] if code else ["-m", "llmprof"]
    return subprocess.run(
        [sys.executable, *program, *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "COLUMNS": "80"},
        check=False,
    )


def objects(capsys: pytest.CaptureFixture[str]) -> list[dict[str, object]]:
    """Every JSON object on stdout; nothing else may be there."""
    text, found = capsys.readouterr().out, []
    decoder = json.JSONDecoder()
    while text.strip():
        value, end = decoder.raw_decode(text.lstrip())
        found.append(value)
        text = text.lstrip()[end:]
    return found
