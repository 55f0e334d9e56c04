"""Rows of published runs: what they are read as, and why some are left out."""

from __future__ import annotations

import csv
from typing import Any

import pytest

from llmprof.extrapolate.uncertainty import Interval
from llmprof.judge.cells import Reject
from llmprof.judge.frameworks import conventions, implementation_of
from llmprof.judge.layouts import MOST_ALTERNATIVES
from llmprof.judge.outcomes import Bench, Outcome
from llmprof.judge.runs import Case, is_countable, read_case
from tests.made_up import PUBLISHED, case, made_up_rows, needs_published, reason, row


def layouts(**cells: object) -> list[str]:
    return [str(a.layout) for a in case(**cells).alternatives]


def test_a_full_row_is_one_reading() -> None:
    found = case(dp=2, tp=2, pp=2, n_gpus=8, micro_batch=4, global_batch=64, sequence_parallel=1)
    (reading,) = found.alternatives
    assert reading.weight == 1.0
    assert str(reading.layout) == "dp=2,zero=1,tp=2,sp=1,pp=2,mb=4,accum=8,precision=bfloat16"
    assert reading.cluster.device.name == "A100-SXM4-80GB"
    assert [link.bandwidth_bytes_per_s for link in reading.cluster.links] == [300e9, 25e9]
    assert (found.global_batch, found.seq, found.step_time_s) == (64, 2048, 1.0)
    assert (found.implementation, found.attention) == ("megatron", "flash")
    assert found.out_of_memory is False


@pytest.mark.parametrize(
    ("cells", "said"),
    [
        ({"qc": "n_gpus unknown (release run)"}, "qc: n_gpus unknown"),
        ({"step_time_s": ""}, "no time"),
        ({"step_time_s": "nan"}, "not a number: step_time_s"),
        ({"step_time_s": "-1"}, "not above 0: step_time_s"),
        ({"step_time_s": "0"}, "not above 0: step_time_s"),
        ({"step_time_s": "inf"}, "not a number: step_time_s"),
        ({"derived": "step_time_s"}, "no time: step_time_s is derived"),
        ({"layers": ""}, "empty cell: layers"),
        ({"vocab": ""}, "empty cell: vocab"),
        ({"gpu": ""}, "empty cell: gpu"),
        ({"tp": ""}, "empty cell: tp"),
        ({"precision": ""}, "empty cell: precision"),
        ({"layers": "2.5"}, "not a whole number: layers"),
        ({"n_gpus": "16"}, "n_gpus is not dp x tp x pp x cp"),
        ({"global_batch": "60"}, "global_batch is not dp x micro_batch x accumulation"),
        ({"kv_heads": "5"}, "sizes contradict each other: heads is not a multiple of kv_heads=5"),
        ({"recompute": "selective"}, "not supported yet: recompute=selective"),
        ({"precision": "nvfp4"}, "not supported yet: precision nvfp4"),
        ({"dp_mode": "zero3 + optimizer offload"}, "not supported yet: offload=optimizer"),
        ({"gpu": "Z9000"}, "not supported yet: unknown device 'Z9000'"),
        ({"tp": 3, "n_gpus": 24}, "not supported yet: heads=16 is not a multiple of tp=3"),
    ],
)
def test_a_row_is_left_out_for_a_reason_with_a_name(cells: dict[str, object], said: str) -> None:
    assert reason(**cells) == said


def test_only_techniques_that_we_lack_are_defects() -> None:
    lacking, empty = read_case(row(precision="nvfp4")), read_case(row(layers=""))
    assert isinstance(lacking, Reject) and lacking.defect
    assert isinstance(empty, Reject) and not empty.defect


def test_derived_times_count_when_they_are_exact_inverses() -> None:
    assert case(derived="step_time_s(=global batch tokens / throughput);mfu").step_time_s == 1.0
    assert case(derived="step_time_s", tokens_per_s_per_gpu="16384").step_time_s == 1.0
    assert case(derived="mfu;step_time_s and tokens_per_s_per_gpu from tflops").step_time_s == 1.0
    found = case(step_time_s="", tokens_per_s_per_gpu="8192")
    assert found.step_time_s == pytest.approx(64 * 2048 / (8192 * 8))


def test_a_run_out_of_memory_is_a_case_without_time() -> None:
    found = case(step_time_s="", oom="1")
    assert (found.out_of_memory, found.step_time_s) == (True, None)
    assert not is_countable(row(step_time_s="", oom="1"))


def test_empty_cells_of_the_layout_are_unknown_not_none() -> None:
    readings = case(zero_stage="", sequence_parallel="", recompute="", tp=2, n_gpus=16).alternatives
    assert 1 < len(readings) <= MOST_ALTERNATIVES
    assert sum(a.weight for a in readings) == pytest.approx(1.0)
    assert len({a.layout.zero for a in readings}) > 1
    weights = [a.weight for a in readings]
    assert weights == sorted(weights, reverse=True)


def test_an_unknown_network_is_several_only_where_it_is_used() -> None:
    assert len(case(inter_GBps_per_gpu="").alternatives) == 1
    several = case(inter_GBps_per_gpu="", dp=16, n_gpus=16).alternatives
    assert len({a.cluster.links[-1].bandwidth_bytes_per_s for a in several}) == len(several) > 1
    assert len(case(inter_GBps_per_gpu="", dp=16, n_gpus=16, step_time_s="", oom=1).alternatives) == 1


def test_microbatches_that_are_not_stated() -> None:
    assert layouts(micro_batch="", global_batch=16) == ["dp=8,zero=1,mb=2,precision=bfloat16"]
    sizes = {a.layout.mb for a in case(micro_batch="", global_batch=256).alternatives}
    assert sizes == {1, 2, 4, 8}
    assert layouts(micro_batch="", grad_accum=4, global_batch=64) == [
        "dp=8,zero=1,mb=2,accum=4,precision=bfloat16"
    ]


def test_one_replica_shards_nothing_and_one_rank_has_no_sequence_parallelism() -> None:
    assert layouts(dp=1, tp=1, n_gpus=1, zero_stage=3, sequence_parallel=1, global_batch=1) == [
        "dp=1,precision=bfloat16"
    ]


def test_hybrid_sharding_shards_over_a_node() -> None:
    shards = {a.layout.shard for a in case(dp=32, n_gpus=32, zero_stage=3, dp_mode="fsdp/hsdp").alternatives}
    assert shards == {8, 0}
    (grouped,) = case(dp=32, n_gpus=32, zero_stage=3, dp_mode="megatron-fsdp group 16").alternatives
    assert grouped.layout.shard == 16


def test_sizes_that_are_not_stated_are_derived_and_said() -> None:
    found = case(kv_heads="", ffn_hidden="")
    assert (found.shape.kv_heads, found.shape.ffn) == (16, 5632)
    assert any(note.startswith("kv_heads=16: not stated") for note in found.notes)
    assert any(note.startswith("ffn_hidden=5632: not stated") for note in found.notes)


def test_the_reported_parameters_tell_a_tied_head() -> None:
    assert not case().shape.tied
    assert case(params_B="0.477").shape.tied
    plain = case(gated_mlp=0, params_B="").shape
    assert (plain.norm, plain.positions, plain.bias, plain.tied) == ("layernorm", "learned", True, True)


def test_experts_have_the_width_that_gives_the_reported_parameters() -> None:
    found = case(n_experts=8, topk=2, ffn_hidden=5632, params_B="2.48").shape
    assert found.experts == 8
    assert found.expert_ffn == 0, "as wide as a dense one"
    narrow = case(n_experts=8, topk=2, ffn_hidden=5632, params_B="0.66").shape
    assert 0 < narrow.expert_ffn < 2048
    assert narrow.parameters == pytest.approx(0.66e9, rel=0.05)


@pytest.mark.parametrize(
    ("cells", "expected"),
    [
        ({"framework": "Megatron-LM"}, "megatron"),
        ({"framework": "Megatron-LM", "precision": "fp8"}, "te"),
        ({"framework": "Megatron-LM", "flash_attention": "FA via TE"}, "te"),
        ({"framework": "NeMo/Megatron-Core"}, "te"),
        ({"framework": "torchtitan", "compile": "1"}, "compile"),
        ({"framework": "torchtitan", "compile": "0"}, "eager"),
        ({"framework": "something new"}, "eager"),
    ],
)
def test_frameworks_are_programmed_in_different_ways(cells: dict[str, str], expected: str) -> None:
    assert implementation_of(row(**cells)) == expected


def test_likely_values_of_every_framework_are_shares() -> None:
    for name in ("Megatron-LM", "NeMo", "nanotron", "unheard of"):
        for weights in (
            conventions(name).zero_stage,
            conventions(name).sequence_parallel,
            conventions(name).recompute,
        ):
            assert sum(weights.values()) == pytest.approx(1.0)


def test_attention_is_written_out_where_the_row_says_so() -> None:
    assert case(flash_attention=0).attention == "math"
    assert case(flash_attention="").attention == "flash"
    assert not case(model="bert large").shape.causal


def test_memory_is_read_with_what_it_counts() -> None:
    found = case(
        peak_mem_GB=30, mem_kind="max allocated", mem_rank="tensorboard writer rank (last rank)"
    ).memory
    assert found is not None
    assert (found.size_bytes, found.allocated, found.stage) == (30e9, True, -1)
    assert case(peak_mem_GB=30, derived="peak_mem_GB").memory is None
    assert case(peak_mem_GB=30, derived="peak_mem_GB(unit change)").memory is not None


def test_forward_and_backward_alone() -> None:
    assert case().optimizer
    assert not case(notes="fw 1 ms, bw 2 ms; no optimizer step in the label unless stated").optimizer


def test_made_up_rows_are_all_readable() -> None:
    found = [read_case(r | {"step_time_s": "1"}) for r in made_up_rows()]
    assert len(found) == 13
    assert all(isinstance(c, Case) for c in found)


@needs_published
def test_published_rows_are_read_or_left_out_for_an_allowed_reason() -> None:
    allowed = ("qc: ", "no time", "empty cell: ", "not supported yet: ")
    files = [
        f
        for f in sorted((PUBLISHED / "e2e").glob("*.csv"))
        if f.stem not in ("power_zeus", "mist_aceso_phases")
    ]
    assert files
    for file in files:
        with file.open(encoding="utf-8", newline="") as lines:
            rows = list(csv.DictReader(lines))
        for found in map(read_case, rows):
            assert isinstance(found, Case) or found.reason.startswith(allowed), (file.stem, found.reason)
        lacking = [
            r
            for r, c in zip(rows, map(read_case, rows), strict=True)
            if is_countable(r) and isinstance(c, Reject)
        ]
        assert all(
            c.defect or c.reason.startswith("empty cell")
            for c in map(read_case, lacking)
            if isinstance(c, Reject)
        )


@pytest.mark.parametrize(
    "cells",
    [
        {"time_s": Interval(float("nan"), 1.0, 2.0)},
        {"time_s": Interval(0.5, 1.0, float("inf"))},
        {"time_s": Interval(0.5, 1.0, 2.0), "oom_probability": float("nan")},
        {"time_s": Interval(0.5, 1.0, 2.0), "oom_probability": 1.5},
        {"time_s": Interval(0.5, 1.0, 2.0), "memory_bytes": float("nan")},
        {"time_s": Interval(-0.5, 1.0, 2.0)},
    ],
)
def test_a_forecast_that_is_no_number_is_a_defect_and_never_scored(
    cells: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    case = read_case(row())
    assert isinstance(case, Case)
    broken = Outcome(row_id=case.row_id, breakdown_s={}, **cells)
    monkeypatch.setattr(Bench, "_forecast", lambda *_: broken)
    found = Bench([case]).forecast(case)
    assert found.time_s is None and found.problem == "the forecast is no finite time and memory"
