"""A Profile becomes a report, and a report survives what can happen to it on disk."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmprof.errors import RequestError, RunError
from llmprof.report.breakdown import Group
from llmprof.schema.profile import PHASES, Manifest, PhaseRow, Profile, StepRow
from llmprof.schema.store import save_profile
from llmprof.tensorboard.data import (
    MAX_REPORT_BYTES,
    add_forecasts,
    build_report,
    clean,
    decode_report,
    encode_report,
    fold_layers,
    scaling_series,
)
from llmprof.tensorboard.writer import newest_report, run_directory, write_report, write_summary
from tests.tensorboard_samples import NUM_LAYERS, NUM_STEPS, forecasts, measured_profile, predicted_profile


def test_report_has_the_numbers_of_show() -> None:
    report = build_report(measured_profile(ranks=2), forecasts())
    show = report["show"]
    # training steps 3..23 without the window 7..9, rank 1 is 1 ms slower: 401 + 6 * {0..4} ms
    assert show["step_time_us"]["n"] == NUM_STEPS - 3 - 3
    assert show["step_time_us"]["median"] == 413_000.0
    assert math.isclose(sum(show["phases"].values()), 413_000.0)
    assert show["memory_bytes"]["optimizer"] == 19_200_000_000
    assert report["run"]["devices"][0]["ranks"] == 2
    assert [s["rank"] for s in report["steps"]] == [0] + [1] * (NUM_STEPS - 1)  # equal in step 0
    assert report["steps"][0]["kind"] == "compile"
    assert len(report["forecasts"]) == 13
    assert report["forecasts"][0]["cluster"] == "8xH100-SXM"


def test_phases_of_the_ranks_average_to_the_step() -> None:
    report = build_report(measured_profile(ranks=2))
    totals = [sum(rank["phases"].values()) for rank in report["ranks"]]
    assert math.isclose(sum(totals) / 2, report["show"]["step_time_us"]["median"])
    assert math.isclose(totals[1] / totals[0], 1.02)


def test_repeated_layers_are_folded_and_nothing_is_lost() -> None:
    show = build_report(measured_profile(ranks=1))["show"]
    folded = {row["key"]: row for row in show["by_layer"]}
    each = {row["key"]: row for row in show["by_module"]}
    assert folded["layers.*.mlp.up"]["count"] == 3 * NUM_LAYERS
    assert each["layers.0.mlp.up"]["count"] == 3
    assert "layers.*.norm1" in folded  # a number inside a name is not a layer number
    for column in ("exclusive_us", "count", "flops"):
        assert math.isclose(sum(r[column] for r in folded.values()), sum(r[column] for r in each.values()))


def test_fold_layers_adds_up() -> None:
    groups = [_group("0.a", 3.0), _group("1.a", 4.0), _group("head", 5.0), _group("blocks.10.2.w1", 1.0)]
    folded = {group.key: group for group in fold_layers(groups)}
    assert folded["*.a"].exclusive_us == 7.0
    assert folded["*.a"].share == 0.7
    assert set(folded) == {"*.a", "head", "blocks.*.*.w1"}


def _group(key: str, us: float) -> Group:
    return Group(key=key, phases=("forward",), count=1, exclusive_us=us, share=us / 10, flops=0, bytes=0)


def test_predicted_profile_shows_as_forecast_alone() -> None:
    report = build_report(predicted_profile("dp=8,tp=8"))
    assert report["show"] is None and report["problem"] is None
    assert [f["layout"] for f in report["forecasts"]] == ["dp=8,tp=8"]


def test_run_without_a_step_says_why() -> None:
    report = build_report(Profile(manifest=Manifest()))
    assert report["show"] is None
    assert "no step" in report["problem"]["message"]


def test_scaling_joins_sizes_of_one_family_on_one_cluster() -> None:
    objects = build_report(measured_profile(), forecasts())["forecasts"]
    series = scaling_series(objects)
    assert [(s["cluster"], s["family"]) for s in series] == [
        ("8xH100-SXM", "tp=8, mb=2"),
        ("8xA100-80GB", "zero=3, tp=4, mb=2"),
    ]
    assert [objects[i]["gpus"] for i in series[0]["points"]] == [8, 16, 32, 64, 128, 256]


def test_scaling_takes_the_fastest_of_one_size_and_skips_what_is_no_layout() -> None:
    def forecast(layout: object, gpus: object, rate: object) -> dict[str, Any]:
        return {"layout": layout, "gpus": gpus, "cluster": "c", "tokens_per_s": {"p50": rate}}

    series = scaling_series(
        [
            forecast("dp=2", 2, 10.0),
            forecast("dp=2,accum=4", 2, 12.0),
            forecast("dp=4", 4, 20.0),
            forecast("nonsense", 8, 1.0),
            forecast("dp=8", None, 1.0),
            forecast("dp=8", 8, None),
            {},
        ]
    )
    assert series == [{"cluster": "c", "family": "data parallel only", "points": [1, 2]}]


def test_expert_parallelism_is_part_of_the_family() -> None:
    objects = [
        {"layout": f"dp={dp},ep={ep}", "gpus": dp, "cluster": "c", "tokens_per_s": {"p50": 1.0 * dp}}
        for dp, ep in ((4, 4), (8, 4), (8, 8), (16, 8))
    ]
    assert [(s["family"], s["points"]) for s in scaling_series(objects)] == [
        ("ep=4", [0, 1]),
        ("ep=8", [2, 3]),
    ]


def test_many_steps_are_thinned_evenly() -> None:
    steps = tuple(StepRow(rank=0, step=i, start_us=0.0, duration_us=10.0) for i in range(5_500))
    phases = tuple(PhaseRow(rank=0, step=0, phase=phase, exclusive_us=1.0) for phase in PHASES)
    report = build_report(Profile(manifest=Manifest(), steps=steps, phases=phases))
    assert [s["step"] for s in report["steps"][:3]] == [0, 6, 12]
    assert len(report["steps"]) == 917


def test_report_survives_encoding() -> None:
    report = build_report(measured_profile(), forecasts())
    data = encode_report(report)
    assert len(data) < 100_000
    assert decode_report(data) == report


def test_report_that_is_too_large_is_thinned_and_says_so() -> None:
    report = build_report(measured_profile())
    line = {**report["show"]["operators"][0], "shapes": "x" * 3_900}
    report["show"]["operators"] = [line] * 1_500
    data = encode_report(report)
    assert len(data) <= MAX_REPORT_BYTES
    thinned = decode_report(data)
    assert thinned["thinned"] == len(thinned["show"]["operators"]) == 300


def test_report_that_cannot_be_thinned_is_refused() -> None:
    with pytest.raises(RequestError, match="MB"):
        encode_report({"version": 1, "run": {f"key{i}": "x" * 4_000 for i in range(1_500)}})


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "torn"),
        (b'{"version": 1, "run"', "torn"),
        (b"\xff\xfe\x00", "torn"),
        (b"[" * 100_000, "torn"),
        (b"[1, 2]", "not a JSON object"),
        (b'{"run": {}}', "no version"),
        (b'{"version": 999}', "format version 999"),
        (b" " * (2 * MAX_REPORT_BYTES + 1), "MB"),
    ],
)
def test_damaged_report_is_a_run_error(data: bytes, message: str) -> None:
    with pytest.raises(RunError, match=message):
        decode_report(data)


def test_hostile_values_are_bounded() -> None:
    report = decode_report(
        json.dumps(
            {"version": 1, "a": math.nan, "b": [math.inf] * 9_000, "c": "x" * 10**6, "d": 10**30}
        ).encode()
    )
    assert report["a"] is None and report["d"] is None
    assert report["b"] == [None] * 5_000
    assert len(report["c"]) == 4_000


@given(
    st.recursive(
        st.none() | st.booleans() | st.floats() | st.integers() | st.text(),
        lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
        max_leaves=20,
    )
)
def test_whatever_is_cleaned_is_strict_json(value: object) -> None:
    cleaned = clean(value)
    assert clean(json.loads(json.dumps(cleaned, allow_nan=False))) == cleaned


def test_forecasts_written_later_are_added(tmp_path: Path) -> None:
    profile = measured_profile()
    write_report(tmp_path, run="demo", profile=profile, forecasts=[predicted_profile("dp=8,tp=8")])
    write_report(
        tmp_path,
        run="demo",
        profile=profile,
        forecasts=[predicted_profile("dp=16,tp=8"), predicted_profile("dp=8,tp=8", assumed=0.9)],
    )
    report = newest_report(tmp_path / "demo")
    assert report is not None
    assert [(f["layout"], f["assumed_fraction"]) for f in report["forecasts"]] == [
        ("dp=16,tp=8", 0.2),
        ("dp=8,tp=8", 0.9),
    ]
    assert [s["points"] for s in report["scaling"]] == [[1, 0]]


def test_forecasts_of_another_capture_are_not_kept(tmp_path: Path) -> None:
    write_report(tmp_path, run="demo", profile=measured_profile(name="old"), forecasts=forecasts())
    write_report(tmp_path, run="demo", profile=measured_profile(name="new"))
    report = newest_report(tmp_path / "demo")
    assert report is not None and report["forecasts"] == []


@pytest.mark.parametrize("name", [".", "a/b c"])
def test_a_capture_below_the_log_directory_keeps_its_name(tmp_path: Path, name: str) -> None:
    save_profile(measured_profile(name="another"), tmp_path / "x")
    save_profile(measured_profile(), tmp_path / name)
    (tmp_path / "torn" / "rank-00000").mkdir(parents=True)
    (tmp_path / "torn" / "rank-00000" / "manifest.json").write_text("{")
    file = write_report(tmp_path, run="demo", profile=measured_profile(), forecasts=forecasts())
    assert file.parent == tmp_path / name


def test_add_forecasts_ignores_what_is_no_forecast() -> None:
    report = build_report(measured_profile())
    junk: list[Any] = [None, 3, "x"]
    assert add_forecasts(report, junk)["forecasts"] == []


def test_damaged_earlier_report_does_not_stop_a_new_one(tmp_path: Path) -> None:
    write_summary(tmp_path, run="demo", report={"version": 1, "forecasts": "none"})
    file = write_report(tmp_path, run="demo", profile=measured_profile(), forecasts=forecasts())
    assert file.is_file()
    report = newest_report(tmp_path / "demo")
    assert report is not None and len(report["forecasts"]) == 13


@pytest.mark.parametrize("run", ["", "  ", "/tmp/x", "../x", "a/../../x"])
def test_run_name_cannot_leave_the_log_directory(tmp_path: Path, run: str) -> None:
    with pytest.raises(RequestError, match="does not name a directory below"):
        write_summary(tmp_path, run=run, report={"version": 1})
    assert list(tmp_path.iterdir()) == []


def test_unusual_run_names_become_plain_directories(tmp_path: Path) -> None:
    assert run_directory(tmp_path, "a b<script>/c") == tmp_path / "a-b-script-" / "c"
    assert run_directory(tmp_path, ".") == tmp_path
