"""Rows of operator tables become the calls they timed: shapes, FLOPs and bytes by hand, and reasons against a row."""

from __future__ import annotations

from math import prod

import pytest

from llmprof.judge.cells import Reject
from llmprof.judge.op_rows import read_calls
from llmprof.judge.op_shapes import Block, Fields, Matrix, Traced, Vocabulary, read_shape_cell
from llmprof.schema.operators import bytes_moved, flops
from tests.made_up import GEMM


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
        ({"op": "kfac_inversion_block"}, "not an operator that is priced: kfac_inversion_block"),
        ({"op": "moe_layer"}, "holds collectives on links that are not stated: moe_layer"),
        ({"m": ""}, "empty cell: m"),
    ],
)
def test_reasons(change: dict[str, str], reason: str) -> None:
    with pytest.raises(Reject) as caught:
        read_calls(GEMM | change)
    assert caught.value.reason == reason


SCORES = "mp=2; b=2; h=4; l=8"
FIELDS = "mp=2; b=2; h=4; l=8; dim=16; head_dim 4"


@pytest.mark.parametrize(
    ("text", "read"),
    [
        ("8x16", Matrix(8, 16, False)),
        ("8x16 gated (silu*mul)", Matrix(8, 16, True)),
        ("vocab 100/3", Vocabulary(100, 3)),
        (
            "one bert-base block, batch 1 x seq 128, hidden 768, ffn 3072",
            Block("bert-base", 1, 128, 768, 3072),
        ),
        ("[[2, 8], [1], [8, 4]]->(2, 4)", Traced(((2, 8), (8, 4)), (2, 4))),
        ("[[1], [1]]->(7,)", Traced((), (7,))),
        ("mp=2; b=2; l=8; dim=16; width 32", Fields({"mp": 2, "b": 2, "l": 8, "dim": 16, "width": 32}, "")),
        (
            "first pipeline stage; mp=1; dim=8; encoders=3",
            Fields({"mp": 1, "dim": 8, "encoders": 3}, "first"),
        ),
        ("num_layers=2; params=2.73357e+07", Fields({"num_layers": 2, "params": 27335700}, "")),
        ("", None),
        ("0x5", None),
        ("8x", None),
        ("[[2, -8]]->(2,)", None),
        ("9" * 400 + "x1", None),
        ("b=two", None),
    ],
)
def test_shape_cells(text: str, read: object) -> None:
    assert read_shape_cell(text) == read


def test_scores_are_the_share_of_one_device() -> None:
    (fwd,) = read_calls({"op": "softmax", "phase": "fwd", "dtype": "fp16", "qc": "ok", "shape": SCORES})
    assert fwd.inputs[0].shape == (2 * 4 // 2 * 8, 8)
    (masked,) = read_calls(
        {"op": "masked_fill", "phase": "fwd", "dtype": "fp16", "qc": "ok", "shape": SCORES}
    )
    assert bytes_moved(*masked[:3]) == 4 * 2 * 2 * 8 * 8 + 8 * 8


def test_rope_of_queries_and_keys_as_torch_operators() -> None:
    calls = read_calls({"op": "rope", "phase": "fwd", "dtype": "fp16", "qc": "ok", "shape": FIELDS})
    elements = 2 * 8 * 2 * 4  # b l h/mp head_dim, of one tensor
    # two products (2 E each), neg of a half (E), cat (2 E), sum (3 E); queries and keys
    assert sum(bytes_moved(*call[:3]) for call in calls) == 2 * 2 * (2 + 1 + 2 + 2 + 3) * elements


@pytest.mark.parametrize(
    ("shape", "parameters"),
    [
        ("num_layers=2; hidden_size=8; param_tensors=28; params=2.5e+07", 25_000_000),
        ("middle pipeline stage; mp=1; dim=8; encoders=3", 3 * (12 * 64 + 13 * 8)),
        ("last pipeline stage; mp=4; dim=8; encoders=3", 3 * (12 * 64 + 13 * 8) // 4 + 12672 * 8),
    ],
)
def test_an_optimizer_step_moves_28_bytes_for_each_parameter(shape: str, parameters: int) -> None:
    (step,) = read_calls({"op": "adam_step", "phase": "any", "dtype": "fp16", "qc": "ok", "shape": shape})
    assert bytes_moved(*step[:3]) == 28 * parameters


def traced(op: str, shape: str, phase: str = "fwd", notes: str = "") -> dict[str, str]:
    return {"op": op, "phase": phase, "dtype": "fp32", "qc": "ok", "shape": shape, "notes": notes}


def test_linear_modules_do_not_list_their_weight() -> None:
    forward = read_calls(traced("module:fc1", "[[2, 8, 16]]->(2, 8, 32)"))
    backward = read_calls(traced("module:fc1", "[[2, 8, 16]]->(2, 8, 32)", "bwd"))
    assert [flops(*c) for c in forward] == [2 * 16 * 16 * 32]
    assert [flops(*c) for c in backward] == [2 * 16 * 16 * 32] * 2


@pytest.mark.parametrize(
    ("row", "moved"),
    [
        (traced("where", "[[1, 1, 8, 8], [1, 2, 8, 8], [1]]->(1, 2, 8, 8)"), 64 + 8 * 128),
        (traced("masked_fill", "[[1, 2, 8, 8], [1, 1, 8, 8], [1]]->(1, 2, 8, 8)"), 64 + 8 * 128),
        (traced("dropout", "[[4, 8]]->(4, 8)"), 9 * 32),
        (traced("dropout", "[[4, 8]]->(4, 8)", "bwd"), 9 * 32),
        (traced("softmax", "[[4, 8]]->(4, 8)", "bwd"), 12 * 32),
        (traced("truediv", "[[4, 8], [1]]->(4, 8)", "bwd"), 8 * 32),
        (traced("lt", "[[8], [8, 1]]->(8, 8)"), 4 * 16 + 64),
        (traced("mul", "[[4, 8]]->(4, 8)"), 8 * 32),
        (traced("mul", "[[4, 8], [4, 8]]->(4, 8)", "bwd"), 2 * 12 * 32),
        (traced("full", "[[1], [1]]->(4, 8)"), 4 * 32),
        (traced("reshape", "[[4, 2, 4], [1]]->(4, 8)"), 8 * 32),
        (traced("split", "[[4, 8]]->(1,)"), 0),
        (
            traced("embedding", "[[2, 8]]->(2, 8, 16)", "bwd", "run; module:wte; bwd"),
            16 * 8 + 4 * 256 + 4 * 50257 * 16,
        ),
        (
            traced("embedding", "[[2, 8]]->(2, 8, 16)", "bwd", "run; module:wpe; bwd"),
            16 * 8 + 4 * 256 + 4 * 8 * 16,
        ),
    ],
)
def test_bytes_of_traced_operators(row: dict[str, str], moved: int) -> None:
    assert sum(bytes_moved(*call[:3]) for call in read_calls(row)) == moved


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        (traced("add", "[[4, 8], [4, 8]]->(4, 8)", "bwd"), "no kernel of its own: add bwd"),
        (traced("masked_fill", SCORES, "bwd"), "not timed as one kernel: masked_fill bwd"),
        (traced("embedding", "[[2, 8]]->(2, 8, 16)"), "rows of the embedding table are not stated"),
        (traced("softmax", "[[4, 8]"), "shape is not read: softmax"),
        (traced("module:head", "[[4, 8]]->(4, 8)"), "not an operator that is priced: module:head"),
        (traced("layernorm", "[[4, 8]]->(4, 8)") | {"dtype": ""}, "unknown dtype: empty"),
    ],
)
def test_reasons_against_a_traced_row(row: dict[str, str], reason: str) -> None:
    with pytest.raises(Reject) as caught:
        read_calls(row)
    assert caught.value.reason == reason


@pytest.mark.parametrize(("phase", "times"), [("fwd", 1), ("bwd", 2)])
def test_a_block_does_what_its_source_counts(phase: str, times: int) -> None:
    row = {
        "op": "transformer_block", "phase": phase, "dtype": "fp32", "qc": "ok", "heads": "4",
        "shape": "one bert-base block, batch 3 x seq 16, hidden 64, ffn 128",
    }  # fmt: skip
    calls = read_calls(row)
    tokens, hidden, ffn, seq = 3 * 16, 64, 128, 16
    forward = 2 * tokens * (4 * hidden**2 + 2 * hidden * ffn) + 4 * tokens * seq * hidden
    assert sum(flops(*call) for call in calls) == times * forward
    assert all(prod(t.shape) > 0 for call in calls for t in call.inputs)


def test_sizes_of_a_block_that_contradict_each_other() -> None:
    row = {
        "op": "transformer_block", "phase": "fwd", "dtype": "fp32", "qc": "ok", "heads": "5",
        "shape": "one made-up block, batch 3 x seq 16, hidden 64, ffn 128",
    }  # fmt: skip
    with pytest.raises(Reject, match="sizes contradict each other"):
        read_calls(row)


@pytest.mark.parametrize(
    ("op", "work"),
    [
        # factors of 4 layers h x h and of both layers of the MLP: n x n over 48 tokens, n = 64 ten times, 128 twice
        ("kfac_curvature_block", 2 * 48 * (10 * 64**2 + 2 * 128**2)),
        # out x out x in and out x in x in for each of the six layers
        ("kfac_precondition_block", 2 * (4 * 2 * 64**3 + 2 * (128**2 * 64 + 128 * 64**2))),
    ],
)
def test_matmuls_of_kronecker_factors(op: str, work: int) -> None:
    row = {
        "op": op, "phase": "any", "dtype": "fp32", "qc": "ok", "heads": "4",
        "shape": "one bert-base block, batch 3 x seq 16, hidden 64, ffn 128",
    }  # fmt: skip
    assert sum(flops(*call) for call in read_calls(row)) == work
