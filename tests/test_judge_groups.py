"""Which rows calibrate, which compete, and which are fitted."""

from __future__ import annotations

from hashlib import sha256

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmprof.errors import RequestError
from llmprof.judge.groups import calibration_group, choice_set, precision_class, split_group
from llmprof.judge.splits import Fit, parse_fit, split_rows


def test_rows_at_the_fewest_gpus_calibrate_in_the_order_of_a_hash() -> None:
    gpus = {"a": 8, "b": 8, "c": 8, "d": 64}
    chosen = split_group(gpus, 2)
    assert chosen == tuple(sorted("abc", key=lambda r: sha256(r.encode()).hexdigest())[:2])
    assert "d" not in split_group(gpus, 9)


def test_a_lone_row_stays_cold_and_one_row_is_always_left() -> None:
    assert split_group({"a": 8}, 4) == ()
    assert len(split_group({"a": 8, "b": 8}, 4)) == 1
    assert split_group({"a": 8, "b": 8}, 0) == ()


def test_groups_hold_all_model_sizes_of_one_software() -> None:
    base = {
        "source": "s",
        "gpu": "g",
        "framework": "f",
        "framework_version": "1",
        "precision": "bf16",
        "model": "7B",
    }
    assert calibration_group(base) == calibration_group(base | {"model": "70B", "precision": "fp16"})
    assert calibration_group(base) != calibration_group(base | {"precision": "fp8"})
    assert choice_set(base) != choice_set(base | {"model": "70B"})
    assert choice_set(base) != choice_set(base | {"n_experts": "8"})
    assert choice_set(base) == choice_set(base | {"tp": "8", "recompute": "full"}), "layouts compete"
    assert [precision_class(p) for p in ("mxfp8", "fp8-rowwise", "fp32")] == ["fp8", "fp8", "fp32"]
    spelled = ("BF16", "bfloat16", "float16", "fp16-mixed")
    assert {precision_class(p) for p in spelled} == {"16 bit"}
    assert [precision_class(p) for p in ("float32", "float8", "nvfp4")] == ["fp32", "fp8", "fp4"]


def split(rows: list[tuple[str, str, float]], fit: Fit, seed: int = 0) -> list[str]:
    found = split_rows(
        rows,
        fit,
        stratum=lambda r: r[1],
        row_id=lambda r: r[0],
        size=lambda r: r[2],
        nodes=lambda r: int(r[2]),
        seed=seed,
    )
    assert sorted((*found.fitted, *found.scored)) == list(range(len(rows)))
    return [rows[i][0] for i in found.fitted]


def test_a_random_share_of_each_stratum_is_fitted() -> None:
    rows = [(f"r{i}", "even" if i % 2 else "odd", float(i)) for i in range(20)]
    fitted = split(rows, Fit("random", 0.3))
    assert len(fitted) == 6
    assert sum(int(name[1:]) % 2 for name in fitted) == 3
    assert fitted != split(rows, Fit("random", 0.3), seed=1)
    assert fitted == split(rows, Fit("random", 0.3))


def test_the_smaller_half_and_the_fewest_nodes() -> None:
    rows = [("a", "x", 4.0), ("b", "x", 1.0), ("c", "x", 3.0), ("d", "x", 2.0)]
    assert sorted(split(rows, Fit("smaller", 0.5))) == ["b", "d"]
    assert sorted(split(rows, Fit("nodes", 2))) == ["b", "d"]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "random",
        "random:0",
        "random:1",
        "random:x",
        "random:nan",
        "smaller:inf",
        "nodes:0.5",
        "nodes:inf",
        "nodes:nan",
        "other:1",
    ],
)
def test_what_is_no_fit_is_refused(text: str) -> None:
    with pytest.raises(RequestError) as caught:
        parse_fit(text)
    assert repr(text) in caught.value.message


def test_a_long_fit_is_cut_in_the_message() -> None:
    with pytest.raises(RequestError) as caught:
        parse_fit("x" * 9000)
    assert len(caught.value.message) < 200


@given(
    rows=st.lists(st.tuples(st.integers(0, 10**6), st.sampled_from("xyz")), max_size=40, unique=True),
    fit=st.sampled_from([Fit("random", 0.3), Fit("smaller", 0.5), Fit("nodes", 1)]),
    seed=st.integers(0, 4),
)
def test_a_split_does_not_depend_on_the_order_of_rows(
    rows: list[tuple[int, str]], fit: Fit, seed: int
) -> None:
    named = [(f"{key}{stratum}", stratum, 1.0 + key % 7) for key, stratum in rows]
    assert set(split(named, fit, seed)) == set(split(named[::-1], fit, seed))


def test_the_larger_part_is_never_smaller_than_what_was_fitted() -> None:
    rows = [(f"r{i}", "ab"[i % 2], float((7 * i) % 13)) for i in range(26)]
    fitted = set(split(rows, Fit("smaller", 0.5)))
    for stratum in "ab":
        mine = [r for r in rows if r[1] == stratum]
        low, high = ([r[2] for r in mine if (r[0] in fitted) == inside] for inside in (True, False))
        assert max(low) <= min(high)


def test_fits_are_read() -> None:
    assert parse_fit("smaller:0.5") == Fit("smaller", 0.5)
    assert parse_fit("nodes:1") == Fit("nodes", 1)
