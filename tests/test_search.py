"""Searches against brute force, bounds against exact steps, what is listed, and the answer of the command."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmprof.cli import main
from llmprof.commands.where import read_condition
from llmprof.errors import LlmprofError, RequestError
from llmprof.extrapolate.answer import knee_of
from llmprof.extrapolate.bound import Bounds
from llmprof.extrapolate.forecast import Forecaster
from llmprof.extrapolate.search import Found, Wish, probability_best, search, searching
from llmprof.extrapolate.space import Space
from llmprof.schema.catalogue import load_cluster
from llmprof.schema.layout import Layout, divisors
from llmprof.schema.model import read_model
from llmprof.schema.profile import unmeasured
from llmprof.schema.reference import reference_workload

MODEL = "llama:layers=4,hidden=512,ffn=1024,heads=8,kv_heads=4,vocab=4096,seq=256"
LARGE = "llama:layers=12,hidden=8192,ffn=28672,heads=64,kv_heads=8,vocab=32000,seq=4096"
MIXTURE = "mixtral:layers=4,hidden=512,ffn=1024,heads=8,kv_heads=4,vocab=4096,seq=256,experts=4,topk=2"
DEGREES = [(1, False), (2, False), (2, True), (4, True)]


def forecaster_of(model: str, cluster: str = "8xH100-SXM", draws: int = 20) -> Forecaster:
    workload = reference_workload(read_model(model).shape, degrees=DEGREES)
    return Forecaster(unmeasured(workload), load_cluster(cluster), draws=draws)


def space_of(forecaster: Forecaster) -> Space:
    workload = forecaster.profile.workload
    assert workload is not None
    return Space.of(workload, forecaster.cluster, seq=workload.seq)


def fitting(forecaster: Forecaster, layouts: list[Layout]) -> Iterator[tuple[float, str]]:
    """Brute force: the exact step of everything that fits."""
    nominal = forecaster.with_draws(0)
    for layout in layouts:
        try:
            if forecaster.memory(layout, global_batch=layout.global_batch).verdict != "oom":
                step = nominal.simulate(layout, global_batch=layout.global_batch).step_s
                yield float(step[0]), str(layout)
        except LlmprofError:
            continue


@pytest.fixture(scope="module")
def forecasters() -> dict[str, Forecaster]:
    return {name: forecaster_of(name) for name in (MODEL, LARGE, MIXTURE)}


@pytest.mark.parametrize("model", [MODEL, LARGE, MIXTURE])
@pytest.mark.parametrize(("gpus", "batch", "seed"), [(8, 16, 0), (6, 12, 1), (16, 32, 2)])
def test_the_winners_are_those_of_brute_force(
    forecasters: dict[str, Forecaster], model: str, gpus: int, batch: int, seed: int
) -> None:
    forecaster = forecasters[model]
    space = list(space_of(forecaster).layouts(gpus, batch))
    some = np.random.default_rng(seed).permutation(len(space))[:80]
    layouts = [space[i] for i in some]
    found = search(forecaster, layouts, Wish(top=3))
    expected = sorted(fitting(forecaster, layouts))[:3]
    assert [(time, str(layout)) for time, layout in found.layouts] == expected
    assert found.proven and found.considered == len(layouts)
    dealt = found.simulated + found.pruned + found.too_large + sum(found.refused.values())
    assert dealt == found.considered


@pytest.mark.parametrize("model", [MODEL, LARGE, MIXTURE])
def test_no_step_is_shorter_than_its_bound(forecasters: dict[str, Forecaster], model: str) -> None:
    nominal = forecasters[model].with_draws(0)
    bounds = Bounds(nominal)
    space = [
        layout for gpus, batch in ((12, 24), (16, 64)) for layout in space_of(nominal).layouts(gpus, batch)
    ]
    ratios = []
    for i in np.random.default_rng(3).permutation(len(space))[:120]:
        try:
            bound, coarse = bounds.bound_s(space[i]), bounds.coarse_s(space[i])
            step = float(nominal.simulate(space[i], global_batch=space[i].global_batch).step_s[0])
        except LlmprofError:
            continue
        assert coarse <= bound <= step * (1 + 1e-9), str(space[i])
        ratios.append(bound / step)
    assert len(ratios) > 40 and np.median(ratios) > 0.5


def test_every_layout_is_listed_once_and_multiplies_out() -> None:
    space = Space(blocks=4, experts=0, classes=((1, False), (2, True)), seq=256, node=4)
    layouts = list(space.layouts(12, 24))
    assert len(set(layouts)) == len(layouts)
    assert all(layout.gpus == 12 and layout.global_batch == 24 for layout in layouts)
    degrees = {(x.dp, x.tp, x.cp, x.pp) for x in layouts}
    by_hand = {
        (12 // (tp * cp * pp), tp, cp, pp)
        for tp, cp, pp in product((1, 2), range(1, 13), range(1, 5))
        if 12 % (tp * cp * pp) == 0 and (cp == 1 or 256 % (2 * cp) == 0)
    }
    assert degrees == by_hand
    assert {x.shard for x in layouts if x.dp == 12 and x.zero == 3} == {0, 4}  # whole, or inside a node of 4


def test_a_list_and_a_limit_of_time_are_kept(forecasters: dict[str, Forecaster]) -> None:
    layouts = [Layout.parse(f"dp=4,accum=4,zero={zero}") for zero in (0, 1, 3)]
    found = search(forecasters[MODEL], layouts, Wish(top=10))
    assert {str(layout) for _, layout in found.layouts} == {str(layout) for layout in layouts}
    stopped = search(forecasters[MODEL], layouts, Wish(seconds=-1.0))
    assert not stopped.proven and stopped.left == 3 and not stopped.layouts


def test_what_is_interrupted_holds_the_best_so_far(forecasters: dict[str, Forecaster]) -> None:
    layouts = list(space_of(forecasters[MODEL]).layouts(8, 16))
    found = Found()
    for _ in searching(forecasters[MODEL], layouts, Wish(top=50), found):
        if found.layouts:
            break
    assert found.layouts and not found.proven


def test_a_margin_leaves_memory_free(forecasters: dict[str, Forecaster]) -> None:
    forecaster = forecasters[LARGE]
    layouts = list(space_of(forecaster).layouts(8, 8))
    usable = forecaster.cluster.device.usable_memory_bytes
    found = search(forecaster, layouts, Wish(top=5, margin=0.4))
    peaks = [forecaster.memory(layout, global_batch=8).p50 for _, layout in found.layouts]
    assert peaks and max(peaks) <= 0.6 * usable


def test_equal_draws_share_the_first_place(forecasters: dict[str, Forecaster]) -> None:
    slow = forecasters[MODEL].simulate(Layout.parse("dp=4,accum=4"))
    fast = replace(slow, step_s=slow.step_s * 0.9)
    assert probability_best([fast, slow]) == [1.0, 0.0]
    assert probability_best([]) == []


def test_the_knee_is_where_doubling_stops_paying() -> None:
    rows = [{"gpus": g, "tokens_per_s": t} for g, t in ((8, 100.0), (16, 190.0), (64, 400.0))]
    assert knee_of(rows, 1.5) == 16  # 400 / 190 = 2.1, and two doublings should give 1.5 ** 2 = 2.25
    assert knee_of(rows, 1.4) is None
    assert knee_of(rows[:1], 1.5) is None


@given(st.integers(1, 5000))
@settings(deadline=None)
def test_divisors_divide(number: int) -> None:
    assert divisors(number) == [n for n in range(1, number + 1) if number % n == 0]


def test_conditions_hold_as_typed() -> None:
    layout = Layout.parse("dp=4,tp=8,pp=2,schedule=zero-bubble")
    assert read_condition("tp<=8 and pp>1")(layout)
    assert read_condition("1 < pp <= 2 and not zero == 3")(layout)
    assert read_condition("tp*pp == 16 and schedule != '1f1b'")(layout)
    assert not read_condition("gpus == 63 or sp")(layout)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "tp",
        "tp.real",
        "__import__('os')",
        "tp <",
        "nodes>1",
        "[1]",
        "tp<'a'",
        "9**9**9",
        "tp%0",
        "(" * 300,
        "x" * 501,
    ],
)
def test_anything_else_is_refused(text: str) -> None:
    if text == "tp":
        assert read_condition(text)(Layout())  # a degree is true
        return
    with pytest.raises(RequestError, match="--where"):
        read_condition(text)


@given(st.text(max_size=30))
@settings(deadline=None, max_examples=60)
def test_any_text_is_a_condition_or_refused(text: str) -> None:
    try:
        read_condition(text)(Layout())
    except RequestError:
        pass


def run(capsys: pytest.CaptureFixture[str], *args: str) -> tuple[int, str]:
    code = main(["search", "--model", MODEL, "--cluster", "8xH100-SXM", *args])
    return code, capsys.readouterr().out


def test_the_command_answers_in_text_and_json(capsys: pytest.CaptureFixture[str]) -> None:
    asked = (
        "--gpus",
        "4,8",
        "--global-batch",
        "16",
        "--where",
        "cp==1 and zero<2",
        "--top",
        "3",
        "--tokens",
        "1B",
    )
    code, text = run(capsys, *asked)
    assert code == 0 and "Fastest layouts that fit" in text and "proven" in text
    code, text = run(capsys, *asked, "--json")
    found = json.loads(text)
    assert code == 0 and len(found["layouts"]) == 6 and found["proven"] is True
    assert {f["gpus"] for f in found["layouts"]} == {4, 8} == {row["gpus"] for row in found["scaling"]}
    per_sequence = [f["step_time_s"]["p50"] / f["global_batch"] for f in found["layouts"]]
    assert per_sequence == sorted(per_sequence)
    assert sum(f["probability_best"] for f in found["layouts"]) == pytest.approx(1.0)
    assert found["considered"] == found["pruned"] + found["simulated"] + found["too_large"] + found["refused"]
    assert found["layouts"][0]["run"]["tokens"] == 1e9


def test_the_command_picks_what_forecast_calls_best(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    texts = ["dp=8", "dp=4,tp=2", "dp=4,pp=2,mb=2", "dp=8,zero=3"]
    listed = tmp_path / "layouts.txt"
    listed.write_text("# three of them\n" + "\n".join(texts) + "\n")
    code, text = run(capsys, "--gpus", "8", "--global-batch", "16", "--layouts", str(listed), "--json")
    picked = json.loads(text)
    assert code == 0
    args = ["forecast", "--model", MODEL, "--cluster", "8xH100-SXM", "--global-batch", "16", "--json"]
    assert main([*args, *(part for text in texts for part in ("--layout", text))]) == 0
    compared = json.loads(capsys.readouterr().out)
    assert picked["layouts"][0]["layout"] == compared["best"]
    times = {f["layout"]: f["step_time_s"]["p50"] for f in compared["forecasts"]}
    assert {f["layout"]: f["step_time_s"]["p50"] for f in picked["layouts"]} == pytest.approx(times)


def test_nothing_fits_says_what_is_the_least_and_where_it_fits(capsys: pytest.CaptureFixture[str]) -> None:
    code = main(
        ["search", "--model", LARGE, "--cluster", "8xL40S", "--gpus", "2", "--global-batch", "2", "--json"]
    )
    found = json.loads(capsys.readouterr().out)
    assert code == 3 and found["layouts"] == [] and found["probability_best"] is None
    assert found["tightest"]["peak_memory_bytes"] > found["tightest"]["usable_memory_bytes"]
    assert found["fits_on_gpus"] is None or found["fits_on_gpus"] > 2


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (("--gpus", "8"), "no global batch of its own"),
        (("--gpus", "8", "--global-batch", "16", "--where", "tp>99"), "no layout makes up 8 GPUs"),
        (("--gpus", "0", "--global-batch", "16"), "not a whole number"),
        (("--gpus", "9..8", "--global-batch", "16"), "0 numbers of GPUs"),
        (("--gpus", "8", "--global-batch", "16", "--margin", "1"), "not a share"),
        (("--gpus", "8", "--global-batch", "16", "--layouts", "nowhere.txt"), "cannot be read"),
    ],
)
def test_wrong_wishes_are_one_line(
    capsys: pytest.CaptureFixture[str], args: tuple[str, ...], says: str
) -> None:
    code = main(["search", "--model", MODEL, "--cluster", "8xH100-SXM", *args])
    error = capsys.readouterr().err
    assert code == 2 and says in error and "Traceback" not in error


def test_the_config_of_a_model_is_searched_like_its_sizes(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    config = tmp_path / "config.json"
    sizes = {"num_hidden_layers": 4, "hidden_size": 512, "intermediate_size": 1024, "num_attention_heads": 8}
    more = {"num_key_value_heads": 4, "vocab_size": 4096, "max_position_embeddings": 256}
    config.write_text(json.dumps({"model_type": "llama", **sizes, **more}))
    asked = ["--cluster", "8xH100-SXM", "--gpus", "4", "--global-batch", "8", "--where", "tp==4", "--json"]
    assert main(["search", str(config), *asked]) == 0
    found = json.loads(capsys.readouterr().out)
    assert main(["search", "--model", MODEL, *asked]) == 0
    assert found["considered"] == json.loads(capsys.readouterr().out)["considered"] > 0
