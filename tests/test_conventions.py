"""Formulas of model FLOPs, and the MFU columns of published tables recomputed from their own step times."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from llmprof.judge.cells import Reject
from llmprof.judge.conventions import (
    Sizes,
    flops_per_step,
    formula_of,
    hf_nanotron,
    mosaic,
    nvidia_dgxc,
    nvidia_model_flops,
    palm,
    recomputed_mfu,
    recomputed_tflops,
    stas,
)
from llmprof.judge.conventions import megatron_2021_hardware as hardware
from llmprof.judge.conventions import megatron_2022 as megatron
from llmprof.judge.table import read_table

TABLES = Path(__file__).resolve().parents[2] / "shared" / "validation" / "e2e"
TINY = Sizes(
    layers=2,
    hidden=4,
    ffn=16,
    heads=2,
    kv_heads=1,
    vocab=10,
    seq=8,
    gated=True,
    params=1000.0,
    logged_params=2000.0,
)


@pytest.mark.parametrize(
    ("formula", "flops"),
    [
        (palm, 6 * 1000 + 12 * 2 * 4 * 8),  # 768 of attention
        (mosaic, 6 * 1000 + 768),
        (stas, 6 * 1000 + 384),
        (hf_nanotron, 6 * 2000 + 768),
        (nvidia_model_flops, 6 * (480 + 40) + 384),
        (megatron, 72 * 2 * 16 * (1 + 8 / 24 + 10 / 96)),
        (hardware, 96 * 2 * 16 * (1 + 8 / 24 + 10 / 128)),
        # blocks: 2 x (2 x 16 x 1.5 + 3 x 4 x 16) = 480; the head 40
        (nvidia_dgxc, 6 * (480 + 40) + 768),
    ],
)
def test_flops_per_token_by_hand(formula: Callable[[Sizes], float], flops: float) -> None:
    assert formula(TINY) == pytest.approx(flops)


def test_a_cell_names_the_longest_key() -> None:
    assert formula_of("megatron-2021-hardware (counts recompute)") is hardware
    assert formula_of("palm (6N all parameters)") is palm
    assert formula_of("palm with the reported parameter count (hf-nanotron)") is hf_nanotron
    assert formula_of("nvidia model-FLOPs (TFLOP/s/GPU reported)") is nvidia_dgxc
    assert formula_of("nvidia model-FLOPs (TFLOP/s/GPU reported, no MFU)") is nvidia_model_flops
    assert formula_of("logged by the framework") is None
    assert formula_of("palms, counted") is None
    assert formula_of("megatron-2022b") is None


@pytest.mark.parametrize(
    ("key", "formula"),
    [
        ("palm", palm),
        ("megatron-2022", megatron),
        ("megatron-2021-hardware", hardware),
        ("mosaic", mosaic),
        ("nvidia-dgxc", nvidia_dgxc),
        ("nvidia model TFLOP/s", nvidia_model_flops),
        ("stas", stas),
        ("hf-nanotron", hf_nanotron),
    ],
)
def test_each_key_by_its_own_name(key: str, formula: Callable[[Sizes], float]) -> None:
    assert formula_of(key) is formula
    assert formula_of(f"{key} (more words)") is formula


def test_parameters_from_the_shape_where_the_table_has_none() -> None:
    bare = replace(TINY, params=0.0, logged_params=0.0)  # blocks 480, an embedding 40, positions 8 x 4
    assert palm(bare) == pytest.approx(6 * (480 + 2 * 40) + 768)
    assert stas(bare) == pytest.approx(6 * (480 + 2 * 40) + 384)
    assert mosaic(bare) == pytest.approx(6 * (480 + 40 + 32) + 768)
    with pytest.raises(Reject, match="params_reported"):
        hf_nanotron(bare)
    with pytest.raises(Reject, match="ffn_hidden"):
        palm(replace(bare, ffn=0))


def test_mfu_of_a_row() -> None:
    row = {
        "mfu_formula": "palm", "layers": "2", "hidden": "4", "heads": "2", "vocab": "10", "seq_len": "8",
        "params_B": "0.000001", "step_time_s": "0.5", "global_batch": "3", "n_gpus": "4", "peak_tflops_ref": "0.001",
    }  # fmt: skip
    # 6768 FLOPs a token x 24 tokens over 0.5 s x 4 x 1e9
    assert recomputed_mfu(row) == pytest.approx(6768 * 24 / 2e9)
    assert flops_per_step(row, palm) == pytest.approx(6768 * 24)
    assert recomputed_mfu(row | {"step_time_s": ""}) is None
    assert recomputed_mfu(row | {"params_B": "-1"}) is None
    assert recomputed_mfu(row | {"params_B": "", "gated_mlp": "1"}) is None
    assert recomputed_mfu(row | {"peak_tflops_ref": ""}) is None
    assert recomputed_mfu(row | {"mfu_formula": "ours"}) is None
    assert recomputed_mfu(row | {"layers": "many"}) is None


def test_models_with_experts_have_no_formula() -> None:
    row = {
        "mfu_formula": "palm",
        "layers": "2",
        "hidden": "4",
        "heads": "2",
        "vocab": "10",
        "seq_len": "8",
        "n_experts": "4",
    }
    with pytest.raises(Reject, match="experts"):
        Sizes.of(row)
    assert recomputed_tflops(row | {"step_time_s": "1", "global_batch": "1", "n_gpus": "1"}) is None


@pytest.mark.parametrize(("cell", "params"), [("", 0.0), ("1.34G", 1.34e9), ("80B", 80e9), ("12", 12.0)])
def test_parameters_as_logged(cell: str, params: float) -> None:
    row = {"layers": "2", "hidden": "4", "heads": "2", "vocab": "10", "seq_len": "8", "params_reported": cell}
    assert Sizes.of(row).logged_params == pytest.approx(params)


def published(name: str) -> list[dict[str, str]]:
    """Rows of a published table."""
    path = TABLES / f"{name}.csv"
    if not path.is_file():
        pytest.skip(f"the published table {name}.csv is not at hand")
    return read_table(path).rows


def errors_of(name: str, key: str = "") -> dict[str, float]:
    """Relative error of the recomputed MFU of each row that prints one, by row_id."""
    rows = [r for r in published(name) if r["mfu"] and r["step_time_s"] and r["mfu_formula"].startswith(key)]
    found = {r["row_id"]: (recomputed_mfu(r), float(r["mfu"])) for r in rows}
    assert all(ours for ours, _ in found.values()), "every row is recomputed"
    return {row: (ours or 0.0) / printed - 1 for row, (ours, printed) in found.items()}


@pytest.mark.parametrize(
    ("name", "most"),
    [
        ("mosaic_llm_foundry", 0.001),  # its documents say 1 %, at most 3.6 %: no such row is among these
        ("hf_nanotron", 0.001),  # with the parameters as logged; printed with five decimals
        ("kempnerforge", 0.003),
        ("torchtitan", 0.001),
        ("stas_ml_engineering", 0.001),  # derived by the same formula
    ],
)
def test_tables_without_exceptions(name: str, most: float) -> None:
    errors = errors_of(name)
    rows = {r["row_id"]: r for r in published(name)}
    assert len(errors) >= 5
    last_digit = {row: 0.6e-5 / float(rows[row]["mfu"]) for row in errors}
    assert all(abs(e) <= most + last_digit[row] for row, e in errors.items())


def test_aleph_alpha_means_of_ratios() -> None:
    """The source averages the MFU of single steps, so a run with uneven steps differs from its mean step time.

    The documents of the table say 0.1 % for most rows and up to 3 % in a few of 8k tokens. Two of 165 are beyond 1 %,
    and neither is quite as documented: one of 8k tokens is 3.08 % off, one of 2k tokens 1.76 %.
    """
    errors = {row: abs(e) for row, e in errors_of("aleph_alpha_want2023").items()}
    beyond = {row: round(e, 4) for row, e in errors.items() if e > 0.01}
    assert len(errors) == 165
    assert sum(e <= 0.001 for e in errors.values()) == 144
    assert beyond == {"aleph_alpha_want2023:0307": 0.0308, "aleph_alpha_want2023:0778": 0.0176}


@pytest.mark.parametrize(
    ("name", "formula"),
    [
        ("aleph_alpha_want2023", palm),
        ("kempnerforge", palm),
        ("torchtitan", palm),
        ("mosaic_llm_foundry", mosaic),
        ("stas_ml_engineering", stas),
    ],
)
def test_the_shape_alone_gives_the_same_flops(name: str, formula: Callable[[Sizes], float]) -> None:
    """N counted from the shape, without norms and biases, is at most 0.1 % below the one in the table."""
    rows = [r for r in published(name) if formula_of(r["mfu_formula"]) is formula]
    assert rows
    for row in rows:
        bare = flops_per_step(row | {"params_B": ""}, formula)
        assert bare == pytest.approx(flops_per_step(row, formula), rel=0.0011)


def test_megatron_2022() -> None:
    """The selective-recompute table within 0.5 %; the H100 table prints whole percents, which ours round to.

    Seven of the eight are within 1 %; the last, 46.47 % printed as 46 %, is 1.02 % off.
    """
    errors = errors_of("megatron_tables", "megatron-2022")
    rows = {r["row_id"]: r for r in published("megatron_tables")}
    whole_percents = {row for row in errors if row.startswith("megatron_weak_scaling_h100_2024")}
    assert len(errors) == 8
    assert len(whole_percents) == 4
    assert all(abs(e) <= 0.005 for row, e in errors.items() if row not in whole_percents)
    assert all(round(recomputed_mfu(rows[r]) or 0, 2) == float(rows[r]["mfu"]) for r in whole_percents)
    beyond = {row: round(e, 4) for row, e in errors.items() if abs(e) > 0.01}
    assert beyond == {"megatron_weak_scaling_h100_2024:0004": 0.0102}


def test_megatron_2021_prints_hardware_utilization() -> None:
    """TFLOP/s with the recomputed forward as printed; the MFU column, derived, is that of the formula of 2022."""
    rows = [r for r in published("megatron_tables") if r["mfu_formula"].startswith("megatron-2021-hardware")]
    assert rows
    for row in rows:
        assert recomputed_tflops(row) == pytest.approx(float(row["tflops_per_gpu"]), rel=0.001)
        assert recomputed_mfu(row) == pytest.approx(float(row["mfu"]), rel=1e-5)


@pytest.mark.parametrize(
    ("name", "most"),
    [("nvidia_nemo_2407", 0.001), ("nvidia_megatron_bridge", 0.01), ("megatron_tables", 0.005)],
)
def test_printed_tflops(name: str, most: float) -> None:
    """One row of Megatron-Bridge prints a throughput and TFLOP/s that do not belong together (2.3 %)."""
    rows = [r for r in published(name) if r["qc"] == "ok" and r["tflops_per_gpu"]]
    found = [(recomputed_tflops(r), float(r["tflops_per_gpu"])) for r in rows]
    errors = [abs(ours / printed - 1) for ours, printed in found if ours]
    assert len(errors) >= 5
    assert sum(e > most for e in errors) <= (1 if name == "nvidia_megatron_bridge" else 0)
    assert max(errors) <= 0.025


def test_nvidia_dgxc_but_for_the_nemotron_constant() -> None:
    """Nemotron-4 15B used a constant 13 % too high before the tag v25.04: 4.345e14 instead of 3.85e14 a sequence.

    That is 32 of 108 rows, all 11.4 % below the printed MFU; the other 76 are within 0.3 %.
    """
    errors = errors_of("nvidia_dgxc")
    rows = {r["row_id"]: r for r in published("nvidia_dgxc")}
    old_tags = ("v24.11.1", "v25.02.02")
    constant = {
        row
        for row in errors
        if rows[row]["model"].startswith("Nemotron4 15b") and rows[row]["framework_version"] in old_tags
    }
    assert (len(errors), len(constant)) == (108, 32)
    assert constant == {row for row, e in errors.items() if abs(e) > 0.003}
    assert all(errors[row] == pytest.approx(-0.114, abs=0.001) for row in constant)
    corrected = [(1 + errors[row]) * 4.345 / 3.85 - 1 for row in constant]
    assert max(map(abs, corrected)) <= 0.002
