"""The whole forecast: the object's keys, sums and intervals, what each axis adds, and monotonic answers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmprof.errors import LayoutError, RequestError, WorkloadError
from llmprof.extrapolate.predict import BREAKDOWN, predict
from llmprof.schema.cluster import Cluster
from llmprof.schema.layout import Layout
from llmprof.schema.profile import MEMORY_CATEGORIES, HostRow, OperatorRow, Profile
from llmprof.schema.store import load_profile, load_workload, save_profile
from tests.workloads import cpu_cluster, gpu_cluster, profile, workload

KEYS = {
    "layout", "gpus", "global_batch", "step_time_s", "tokens_per_s", "naive_step_time_s",
    "second_baseline_step_time_s", "bound_step_time_s", "breakdown_s", "mfu", "peak_memory_bytes", "verdict",
    "oom_probability", "measured_fraction", "interpolated_fraction", "assumed_fraction", "assumptions", "cost",
    "energy_j_per_step",
}  # fmt: skip
LAYOUTS = (
    "dp=1,mb=2",
    "dp=2,accum=4",
    "dp=2,zero=1,accum=2",
    "dp=2,zero=2,accum=2",
    "dp=2,zero=3,accum=2",
    "dp=4,zero=3,shard=2,tp=2",
    "tp=2,mb=2",
    "tp=2,sp=1,mb=2",
    "pp=2,accum=4",
    "pp=4,accum=8,schedule=gpipe",
    "dp=2,zero=3,pp=2,accum=4,tp=2",
    "dp=2,mb=2,recompute=full",
    "pp=2,vpp=2,accum=4,schedule=interleaved",
    "dp=2,zero=3,pp=2,vpp=2,accum=4,schedule=interleaved",
    "dp=2,pp=2,accum=4,schedule=zero-bubble,recompute=full",
    "dp=2,zero=3,tp=2,pp=4,accum=8,schedule=zero-bubble",
    "dp=2,zero=1,pp=2,vpp=2,accum=4,schedule=zero-bubble",
)


def forecast(layout: str, cluster: Cluster, source: Profile | None = None, **asked: Any) -> dict[str, Any]:
    found = predict(source or profile(), Layout.parse(layout), cluster, **asked).manifest.forecast
    assert found is not None
    return found


def breakdown(layout: str, cluster: Cluster, **asked: Any) -> dict[str, float]:
    found: dict[str, float] = forecast(layout, cluster, **asked)["breakdown_s"]
    return found


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("cluster", [gpu_cluster(), cpu_cluster()], ids=["gpu", "cpu"])
def test_every_forecast_adds_up(layout: str, cluster: Cluster) -> None:
    predicted = predict(profile(), Layout.parse(layout), cluster)
    found = predicted.manifest.forecast
    assert found is not None and found.keys() >= KEYS
    json.dumps(found)
    assert tuple(found["breakdown_s"]) == BREAKDOWN
    assert min(found["breakdown_s"].values()) >= 0.0
    time = found["step_time_s"]
    assert sum(found["breakdown_s"].values()) == pytest.approx(time["p50"], rel=1e-12)
    assert time["p10"] <= time["p50"] <= time["p90"]
    rates = found["tokens_per_s"]
    assert rates["p10"] <= rates["p50"] <= rates["p90"]
    assert rates["p50"] == pytest.approx(found["global_batch"] * 32 / time["p50"])
    shares = [found[f"{kind}_fraction"] for kind in ("measured", "interpolated", "assumed")]
    assert sum(shares) == pytest.approx(1.0) and min(shares) >= 0.0
    assert found["bound_step_time_s"] <= time["p50"]
    assert found["peak_memory_bytes"]["p50"] <= found["peak_memory_bytes"]["p90"]
    assert predicted.manifest.world_size == found["gpus"] == Layout.parse(layout).gpus


@pytest.mark.parametrize("layout", LAYOUTS)
def test_rows_of_every_stage_add_up(layout: str) -> None:
    predicted = predict(profile(), Layout.parse(layout), gpu_cluster())
    found = predicted.manifest.forecast
    assert found is not None
    stages = Layout.parse(layout).pp
    for stage in range(stages):
        phases = [r.exclusive_us for r in predicted.phases if r.rank == stage]
        assert sum(phases) == pytest.approx(found["step_time_s"]["p50"] * 1e6)
        spans = [s for s in predicted.spans if s.rank == stage]
        assert (
            spans
            and max(s.start_us + s.duration_us for s in spans) <= found["step_time_s"]["p50"] * 1e6 + 1e-3
        )
    assert {r.rank for r in predicted.operators} == set(range(stages))
    assert {r.category for r in predicted.memory} <= set(MEMORY_CATEGORIES)
    peaks = [r.size_bytes for r in predicted.memory if r.category == "peak_reserved"]
    assert max(peaks) == found["peak_memory_bytes"]["p50"]
    assert sum(c.count for c in predicted.manifest.rank_classes) == found["gpus"]


def test_operator_rows_do_the_work_of_a_step() -> None:
    # two ranks, two microbatches each: half of the step's matmul FLOPs on one of them
    predicted = predict(profile(), Layout.parse("dp=2,mb=2,accum=2"), cpu_cluster())
    flops = sum(r.flops * r.count for r in predicted.operators)
    tokens = 2 * 2 * 32
    assert flops == 6 * tokens * (4 * 2 * 64 * 256 + 64 * 128)
    modules = {r.module for r in predicted.operators if r.phase == "forward"}
    assert {"layers.0.up", "layers.0.down", "out", "tok"} <= modules


def test_predicted_profile_is_stored_like_a_measured_one(tmp_path: Any) -> None:
    predicted = predict(profile(), Layout.parse("pp=2,accum=4"), gpu_cluster())
    save_profile(predicted, tmp_path / "run")
    again = load_profile(tmp_path / "run")
    assert again.manifest.forecast == predicted.manifest.forecast
    assert len(again.operators) == len(predicted.operators)


def test_same_question_same_answer_and_the_seed_moves_only_the_interval() -> None:
    first, second = forecast("dp=2,mb=2", cpu_cluster()), forecast("dp=2,mb=2", cpu_cluster())
    assert first == second
    other = forecast("dp=2,mb=2", cpu_cluster(), seed=7)
    assert other["step_time_s"]["p50"] == first["step_time_s"]["p50"]
    assert other["peak_memory_bytes"]["p90"] != first["peak_memory_bytes"]["p90"]


def test_tensor_parallelism_adds_its_collectives() -> None:
    work = workload()
    alone = breakdown("tp=1,mb=2", cpu_cluster())
    split = predict(profile(work), Layout.parse("tp=2,mb=2"), cpu_cluster())
    assert alone["tp"] == 0.0
    calls = [r for r in split.collectives if r.axis == "tp"]
    # one all-reduce of an activation in the forward and one in the backward of each of four blocks
    assert [(r.kind, r.count, r.size_bytes) for r in calls] == [("all_reduce", 8.0, 4 * 2 * 32 * 64)]
    found = split.manifest.forecast
    assert found is not None
    assert found["breakdown_s"]["tp"] == pytest.approx(8 * calls[0].time_us * 1e-6)
    assert calls[0].exposed_us == pytest.approx(8 * calls[0].time_us)


def test_one_bucket_is_exposed_after_the_backward() -> None:
    # the model's gradients fit in two buckets; over a very slow link almost nothing hides
    slow = cpu_cluster(bandwidth=1e6)
    found = predict(profile(), Layout.parse("dp=2,mb=2"), slow)
    calls = [r for r in found.collectives if r.axis == "dp"]
    total = 4 * (4 * 2 * 64 * 256 + 2 * 128 * 64)
    assert sum(r.size_bytes * r.count for r in calls) == total
    assert {r.kind for r in calls} == {"all_reduce"}
    parts = found.manifest.forecast["breakdown_s"] if found.manifest.forecast else {}
    moved = sum(r.time_us * r.count for r in calls) * 1e-6
    assert parts["dp"] > 0.95 * moved


def test_gradients_move_with_the_last_microbatch_only() -> None:
    calls = [
        sum(r.count for r in predict(profile(), Layout.parse(layout), gpu_cluster()).collectives)
        for layout in ("dp=2,mb=2,accum=1", "dp=2,mb=2,accum=8")
    ]
    assert calls[0] == calls[1]


def test_sharded_parameters_are_gathered_twice_and_scattered_once() -> None:
    found = predict(profile(), Layout.parse("dp=2,zero=3,accum=3"), gpu_cluster())
    counts: dict[str, float] = {}
    for row in found.collectives:
        counts[row.kind] = counts.get(row.kind, 0.0) + row.count
    # per microbatch: the root once, four blocks before forward and again before backward; each unit is scattered
    assert counts == {"all_gather": 3 * (1 + 4 + 4), "reduce_scatter": 3 * (4 + 1)}


def test_sharded_parameters_in_a_pipeline_stay_gathered() -> None:
    found = predict(profile(), Layout.parse("dp=2,zero=3,pp=2,accum=16"), gpu_cluster())
    first = [r for r in found.collectives if r.rank == 0 and r.axis == "dp"]
    gathers = sum(r.count for r in first if r.kind == "all_gather")
    scatters = sum(r.count for r in first if r.kind == "reduce_scatter")
    # two blocks 16 + 1 times and the root once; gradients once a step: two blocks and the root
    assert (gathers, scatters) == (2 * 17 + 1, 3)


def test_recomputation_repeats_the_forward_of_the_blocks() -> None:
    plain, again = breakdown("mb=2", cpu_cluster()), breakdown("mb=2,recompute=full", cpu_cluster())
    assert plain["recompute"] == 0.0 and again["recompute"] > 0.0
    assert again["compute"] == pytest.approx(plain["compute"])
    assert again["recompute"] < plain["compute"] / 2


@settings(deadline=None, max_examples=25)
@given(
    layout=st.sampled_from(LAYOUTS),
    bandwidth=st.floats(1e8, 1e12),
    faster=st.floats(1.0, 10.0),
    gpu=st.booleans(),
)
def test_more_bandwidth_is_never_slower(layout: str, bandwidth: float, faster: float, gpu: bool) -> None:
    def time(rate: float) -> float:
        cluster = gpu_cluster(bandwidth=rate, outer=rate / 10) if gpu else cpu_cluster(bandwidth=rate)
        seconds: float = forecast(layout, cluster, draws=0)["step_time_s"]["p50"]
        return seconds

    assert time(bandwidth * faster) <= time(bandwidth) * (1 + 1e-9)


def test_waiting_in_a_pipeline_shrinks_with_more_microbatches() -> None:
    def share(accum: int) -> float:
        parts = forecast(f"pp=2,accum={accum}", gpu_cluster(), profile(workload(blocks=16)))["breakdown_s"]
        return float((parts["bubble"] + parts["pp"]) / sum(parts.values()))

    shares = [share(accum) for accum in (1, 2, 4, 8, 16)]
    assert shares == sorted(shares, reverse=True)
    # with one microbatch the other stage works half of the time, the optimizer aside
    assert 0.25 < shares[0] < 0.55 and shares[-1] < 0.2


def test_virtual_stages_and_split_backwards_leave_less_of_a_bubble() -> None:
    cluster = gpu_cluster()
    plain = breakdown("pp=2,accum=8", cluster)
    virtual = breakdown("pp=2,vpp=2,accum=8,schedule=interleaved", cluster)
    split = breakdown("pp=2,accum=8,schedule=zero-bubble", cluster)
    assert virtual["bubble"] < plain["bubble"] and split["bubble"] < plain["bubble"]
    # the same work in smaller pieces
    for other in (virtual, split):
        assert other["compute"] == pytest.approx(plain["compute"], rel=1e-9)


def test_microbatches_fill_the_rounds_of_a_schedule() -> None:
    with pytest.raises(LayoutError, match=r"rounds of 2 microbatches at pp=2, and accum=5 is not a multiple"):
        predict(profile(), Layout.parse("pp=2,vpp=2,accum=5,schedule=interleaved"), gpu_cluster())
    with pytest.raises(LayoutError, match=r"pp=4 x vpp=4 needs at least 16 blocks"):
        predict(profile(), Layout.parse("pp=4,vpp=4,accum=8,schedule=interleaved"), gpu_cluster())


def test_more_ranks_wait_for_a_later_one() -> None:
    few, many = breakdown("dp=2,mb=2", gpu_cluster()), breakdown("dp=64,mb=2", gpu_cluster())
    assert breakdown("mb=2", gpu_cluster())["straggler"] == 0.0
    assert 0.0 < few["straggler"] / sum(few.values()) < many["straggler"] / sum(many.values()) < 0.05


def test_specification_alone_says_so_and_widens() -> None:
    found = forecast("dp=8,mb=2", gpu_cluster())
    assert found["measured_fraction"] == 0.0 and found["assumed_fraction"] > 0.5
    assert found["assumptions"][0].startswith("spec-sheet estimate")
    time = found["step_time_s"]
    assert time["p90"] >= 1.5 * time["p50"] and time["p10"] <= time["p50"] / 1.5
    assert any("precision bfloat16 (captured: float32)" in line for line in found["assumptions"])


def test_measured_rows_price_their_own_device() -> None:
    # steps of a second contradict the rows and are left aside
    source = measured_everything(step_us=1e6)
    found = forecast("mb=2", cpu_cluster(), source)
    assert found["measured_fraction"] > 0.9 and found["assumed_fraction"] < 0.1
    assert not found["assumptions"][0].startswith("spec-sheet")
    assert found["step_time_s"]["p90"] < 1.5 * found["step_time_s"]["p50"]
    # 100 us for each operator that is no view, and a gap of 2 us before each of them and of the views
    calls = sum(r.count for r in source.operators)
    views = 4 * 2 + 1
    assert found["step_time_s"]["p50"] == pytest.approx(calls * 1e-4 + (calls + views) * 2e-6)


def test_prices_agree_with_the_measured_steps() -> None:
    found = forecast("mb=2", cpu_cluster(), measured_everything(step_us=6_000.0))
    assert found["step_time_s"]["p50"] == pytest.approx(6e-3)
    assert any("operator times scaled by 0.74" in line for line in found["assumptions"])


def measured_everything(*, step_us: float) -> Profile:
    """A profile in which every operator of the one-rank layout took 100 us and every gap 2 us."""
    predicted = predict(profile(), Layout.parse("mb=2"), cpu_cluster())
    rows: list[OperatorRow] = []
    for row in predicted.operators:
        if row.family not in ("view", "allocation"):
            rows.append(msgspec.structs.replace(row, time_us=100.0, time_iqr_us=1.0, time_n=9))
    gap = HostRow(rank=0, name="dispatch_us_per_operator", value=2.0, iqr=0.1, n=3)
    return msgspec.structs.replace(profile(step_us=step_us), operators=tuple(rows), host=(gap,))


def test_request_that_cannot_be_answered() -> None:
    bare = msgspec.structs.replace(profile(), workload=None)
    with pytest.raises(WorkloadError, match="no workload"):
        predict(bare, Layout(), cpu_cluster())
    for asked in ({"seq": 10**400}, {"global_batch": 10**300}, {"tokens": 1e300}, {"tokens": float("inf")}):
        with pytest.raises(RequestError, match=r"is more than the 1e\+(09|24) that are forecast"):
            predict(profile(), Layout(dp=2), cpu_cluster(), **asked)
    with pytest.raises(RequestError, match="seq=0 is not positive"):
        predict(profile(), Layout(), cpu_cluster(), seq=0)
    with pytest.raises(LayoutError, match="not the global batch of 7"):
        predict(profile(), Layout(dp=2), cpu_cluster(), global_batch=7)
    with pytest.raises(WorkloadError, match="tp=8 was not traced"):
        predict(profile(), Layout(tp=8), gpu_cluster())


def test_whole_run_when_its_tokens_are_given() -> None:
    found = forecast("dp=2,mb=2", gpu_cluster(), tokens=1e9)
    steps = 1e9 / (4 * 32)
    assert found["run"]["steps"] == pytest.approx(steps)
    assert found["run"]["days"]["p50"] == pytest.approx(steps * found["step_time_s"]["p50"] / 86400)
    assert found["run"]["cost"]["total"] == pytest.approx(found["cost"]["per_step"] * steps)
    assert forecast("dp=2,mb=2", gpu_cluster())["run"] is None


SAMPLE = Path(__file__).parent / "data" / "tiny_llama_workload.json"


def traced_sample() -> Profile:
    return profile(load_workload(SAMPLE))


@pytest.mark.parametrize(
    "layout", ["mb=4", "dp=2,zero=3,mb=2", "dp=2,mb=1,recompute=full", "pp=2,accum=4", "pp=3,accum=2,mb=2"]
)
def test_traced_decoder(layout: str) -> None:
    for cluster in (gpu_cluster(), cpu_cluster()):
        found = forecast(layout, cluster, traced_sample())
        assert sum(found["breakdown_s"].values()) == pytest.approx(found["step_time_s"]["p50"])
        assert found["bound_step_time_s"] <= found["step_time_s"]["p50"]


def test_traced_classes_of_tensor_parallelism_do_the_same_work() -> None:
    source = traced_sample()
    assert source.workload is not None
    work: dict[int, float] = {}
    for trace in source.workload.classes:
        layout = Layout(tp=trace.tp, sp=trace.sp, mb=trace.batch or 4)
        predicted = predict(source, layout, cpu_cluster(), global_batch=4 if not trace.batch else None)
        flops = sum(r.flops * r.count for r in predicted.operators if r.family == "matmul")
        sequences = predicted.manifest.forecast["global_batch"] if predicted.manifest.forecast else 0
        per_sequence = flops * trace.tp / sequences
        assert per_sequence == pytest.approx(work.setdefault(1, per_sequence))
