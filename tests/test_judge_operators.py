"""Operator and collective tables: rows become the calls they timed, and what is fitted prices the rest."""

from __future__ import annotations

import pytest

from llmprof.judge.cells import Reject
from llmprof.judge.collectives import score_collectives
from llmprof.judge.op_rows import read_calls
from llmprof.judge.operators import score_operators
from llmprof.judge.splits import Fit
from llmprof.judge.table import Table
from llmprof.schema.operators import bytes_moved, flops

GEMM = {
    "op": "gemm",
    "phase": "fwd",
    "dtype": "bf16",
    "gpu": "A100-SXM4-80GB",
    "qc": "ok",
    "m": "512",
    "n": "64",
    "k": "32",
}


def table(kind: str, rows: list[dict[str, str]]) -> Table:
    return Table(name="made_up", kind=kind, columns=tuple(rows[0]), rows=rows)


def test_a_product_and_its_gradients() -> None:
    (call,) = read_calls(GEMM)
    assert flops(*call) == 2 * 512 * 64 * 32
    assert bytes_moved(*call[:3]) == 2 * (512 * 32 + 32 * 64 + 512 * 64)
    both = read_calls(GEMM | {"phase": "bwd"})
    assert [flops(*c) for c in both] == [2 * 512 * 64 * 32] * 2
    (batched,) = read_calls(GEMM | {"batch": "3"})
    assert flops(*batched) == 3 * 2 * 512 * 64 * 32


@pytest.mark.parametrize("phase", ["fwd", "dgrad", "wgrad"])
def test_experts_do_the_same_in_every_phase(phase: str) -> None:
    (call,) = read_calls(GEMM | {"op": "grouped_gemm", "experts": "4", "phase": phase})
    assert flops(*call) == 4 * 2 * 512 * 64 * 32


def test_causal_attention_is_half_the_square() -> None:
    row = {
        "op": "attention", "phase": "fwd", "dtype": "bf16", "qc": "ok", "batch": "2", "heads": "8", "kv_heads": "2",
        "seq_q": "128", "seq_kv": "128", "head_dim": "64",
    }  # fmt: skip
    (full,) = read_calls(row)
    (causal,) = read_calls(row | {"causal": "1"})
    assert flops(*full) == 4 * 2 * 8 * 128 * 128 * 64
    assert flops(*causal) * 2 == flops(*full)
    (backward,) = read_calls(row | {"phase": "bwd"})
    assert flops(*backward) == flops(*full) * 5 // 2


@pytest.mark.parametrize(
    ("row", "moved"),
    [
        ({"op": "residual_add", "shape": "8x16"}, 6 * 128),
        ({"op": "gelu", "shape": "b=2; l=4; dim=8; width 16"}, 4 * 128),
        ({"op": "activation", "shape": "8x16 gated (silu*mul)"}, 6 * 128),
        ({"op": "embedding", "shape": "vocab 100/2", "tokens": "8", "hidden": "16"}, 4 * 128 + 8 * 8),
    ],
)
def test_bytes_of_what_only_moves(row: dict[str, str], moved: int) -> None:
    (call,) = read_calls({"phase": "fwd", "dtype": "fp16", "qc": "ok", **row})
    assert bytes_moved(*call[:3]) == moved


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"qc": "below 2 us"}, "qc: below 2 us"),
        ({"dtype": "int3"}, "unknown dtype: int3"),
        ({"op": "moe_layer"}, "not an operator that is priced: moe_layer"),
        ({"m": ""}, "empty cell: m"),
    ],
)
def test_reasons(change: dict[str, str], reason: str) -> None:
    with pytest.raises(Reject) as caught:
        read_calls(GEMM | change)
    assert caught.value.reason == reason


def gemms() -> list[dict[str, str]]:
    """Products that run at exactly 100 TFLOP/s."""
    sizes = [512 * i for i in range(1, 41)]
    return [
        GEMM
        | {
            "row_id": f"r{m}",
            "m": str(m),
            "n": "4096",
            "k": "4096",
            "time_us": repr(2 * m * 4096 * 4096 / 1e8),
        }
        for m in sizes
    ]


def test_fitted_rows_price_the_others() -> None:
    cold = score_operators(table("operators", gemms()))
    fitted = score_operators(table("operators", gemms()), fit=Fit("random", 0.5))
    assert cold.fitted == 0
    assert fitted.fitted == 20
    assert sum(r.scored for r in fitted.rows) == 20
    assert fitted.extra["median_ape"] < 0.01 < cold.extra["median_ape"]
    smaller = score_operators(table("operators", gemms()), fit=Fit("smaller", 0.5))
    assert {r.row_id for r in smaller.rows if r.scored} == {f"r{512 * i}" for i in range(21, 41)}


def test_times_that_are_none_are_never_scored() -> None:
    rows = [row | {"time_us": time} for row, time in zip(gemms(), ("nan", "-1", "0", "", "x"), strict=False)]
    scored = score_operators(
        table("operators", [*rows, gemms()[0], gemms()[0], gemms()[9] | {"gpu": "what"}])
    )
    assert sum(r.scored for r in scored.rows) == 1
    assert {r.reason for r in scored.rows} >= {
        "no time",
        "not a number: time_us",
        "row_id stands in the table twice",
    }
    assert any(r.reason == "unknown device: what" for r in scored.rows)


def collectives() -> list[dict[str, str]]:
    """All-reduces over 8 devices of one node at a bus bandwidth of 200 GB/s after 20 us, and one over two nodes."""
    base = {
        "gpu": "A100-SXM4-80GB",
        "op": "all_reduce",
        "qc": "ok",
        "n_gpus": "8",
        "n_nodes": "1",
        "gpus_per_node": "8",
    }
    rows = [
        base | {"row_id": f"c{e}", "size_bytes": str(1 << e), "time_us": repr(20 + 1.75 * (1 << e) / 200e3)}
        for e in range(12, 32)
    ]
    return [
        *rows,
        base | {"row_id": "two", "n_gpus": "16", "n_nodes": "2", "size_bytes": "1000000", "time_us": "90"},
    ]


def test_a_sweep_prices_the_sizes_between() -> None:
    cold = score_collectives(table("collectives", collectives()))
    fitted = score_collectives(table("collectives", collectives()), fit=Fit("random", 0.5))
    assert sum(r.scored for r in cold.rows) == 21
    assert fitted.extra["median_ape"] < cold.extra["median_ape"]
    nodes = score_collectives(table("collectives", collectives()), fit=Fit("nodes", 1))
    assert [r.row_id for r in nodes.rows if r.scored] == ["two"]
