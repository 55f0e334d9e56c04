"""The name of a training framework becomes how it is programmed, and what is likely where a row does not say."""

from __future__ import annotations

import re
from functools import lru_cache
from pathlib import Path

import msgspec

from llmprof.judge.cells import Row, flag, text

_FILE = Path(__file__).parent / "frameworks.json"


class Conventions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a framework usually does.

    Attributes:
        match: regular expression on its name, any case.
        implementation: a profile of `llmprof.extrapolate.implementation`.
        gradients: dtype in which they are kept and reduced, "" for float32.
        kernels: profiles of runs whose notes name a kernel, by regular expression on the notes.
        zero_stage, sequence_parallel, recompute: weights of the values of a cell that is empty; {} for those of the
            default.
        source: where that is published, and what is assumed.
    """

    match: str = ""
    implementation: str
    gradients: str = ""
    kernels: dict[str, str] = {}
    zero_stage: dict[str, float] = {}
    sequence_parallel: dict[str, float] = {}
    recompute: dict[str, float] = {}
    source: str


class _Pattern(msgspec.Struct, frozen=True, kw_only=True):
    match: str
    source: str


class _File(msgspec.Struct, frozen=True, kw_only=True):
    frameworks: tuple[Conventions, ...]
    default: Conventions
    not_causal: _Pattern


@lru_cache(maxsize=1)
def _load() -> _File:
    return msgspec.json.decode(_FILE.read_bytes(), type=_File)


def conventions(framework: str) -> Conventions:
    """What is usual in a framework; the default's weights where it has none of its own."""
    file = _load()
    found = next((f for f in file.frameworks if re.search(f.match, framework, re.IGNORECASE)), file.default)
    missing = {
        key: getattr(file.default, key)
        for key in ("zero_stage", "sequence_parallel", "recompute")
        if not getattr(found, key)
    }
    return msgspec.structs.replace(found, **missing)


def implementation_of(row: Row) -> str:
    """The implementation profile of a row's run: as its framework is programmed, or as torch.compile fuses it."""
    usual, notes = conventions(text(row, "framework")), text(row, "notes")
    noted = (name for kernel, name in usual.kernels.items() if re.search(kernel, notes, re.IGNORECASE))
    found = next(noted, usual.implementation)
    if found == "eager" and flag(row, "compile"):
        return "compile"
    te = found == "megatron" and (
        text(row, "precision").startswith("fp8") or re.search(r"\bTE\b", text(row, "flash_attention"))
    )
    return "te" if te else found


def is_causal(row: Row) -> bool:
    """False for encoders, by the name of the model."""
    return not re.search(_load().not_causal.match, text(row, "model"), re.IGNORECASE)
