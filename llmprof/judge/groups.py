"""Rows of published runs fall into calibration groups, and into sets of layouts that compete for the same work."""

from __future__ import annotations

from collections.abc import Mapping
from hashlib import sha256

GROUP_COLUMNS = ("source", "gpu", "framework", "framework_version", "software_variant")
CHOICE_COLUMNS = (
    "source", "model", "layers", "hidden", "ffn_hidden", "heads", "kv_heads", "vocab", "gated_mlp", "n_experts",
    "topk", "n_gpus", "seq_len", "global_batch", "precision", "framework_version", "software_variant",
)  # fmt: skip
FEWEST_SCORABLE = 2
"""Groups with fewer rows are forecast cold."""
_PRECISION_CLASSES = (
    ("mxfp8", "fp8"),
    ("fp8", "fp8"),
    ("nvfp4", "fp4"),
    ("fp4", "fp4"),
    ("float8", "fp8"),
    ("bf16", "16 bit"),
    ("bfloat16", "16 bit"),
    ("fp16", "16 bit"),
    ("float16", "16 bit"),
    ("half", "16 bit"),
    ("float32", "fp32"),
    ("tfloat32", "tf32"),
)


def precision_class(text: str) -> str:
    """Precisions that run on the same units: "fp8", "fp4", "16 bit", else as written."""
    lowered = text.strip().lower()
    for start, name in _PRECISION_CLASSES:
        if lowered.startswith(start):
            return name
    return lowered


def calibration_group(row: Mapping[str, str]) -> str:
    """Key of the group in which rows calibrate each other; all model sizes together."""
    cells = [row.get(column, "").strip() for column in GROUP_COLUMNS]
    return " | ".join([c for c in (*cells, precision_class(row.get("precision", ""))) if c])


def choice_set(row: Mapping[str, str]) -> str:
    """Key of the layouts between which a person would choose: same work, devices and software."""
    return " | ".join(row.get(column, "").strip() for column in CHOICE_COLUMNS)


def calibration_order(row_id: str, num_gpus: int) -> tuple[int, str]:
    """Sort key in which rows of a group are taken for calibration: fewest GPUs, then a hash that nobody chose."""
    return num_gpus, sha256(row_id.encode()).hexdigest()


def split_group(gpus_by_row: Mapping[str, int], count: int) -> tuple[str, ...]:
    """The rows of a group that calibrate it.

    Args:
        gpus_by_row: number of GPUs of each row that has a time, by row_id.
        count: how many rows calibrate; 0 for a cold forecast.

    Returns:
        Up to `count` row_ids, all at the smallest number of GPUs; none where the group is too small, so that it is cold.
    """
    if count <= 0 or len(gpus_by_row) < FEWEST_SCORABLE:
        return ()
    least = min(gpus_by_row.values())
    smallest = [row for row, gpus in gpus_by_row.items() if gpus == least]
    smallest.sort(key=lambda row: calibration_order(row, least))
    # one row at least is left to score
    return tuple(smallest[: min(count, len(gpus_by_row) - 1)])
