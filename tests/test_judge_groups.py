"""Which rows calibrate, which compete, and which are fitted."""

from __future__ import annotations

from hashlib import sha256

import pytest

from llmprof.errors import RequestError
from llmprof.judge.groups import calibration_group, choice_set, precision_class, split_group
from llmprof.judge.splits import Fit, parse_fit, split_rows


def test_rows_at_the_fewest_gpus_calibrate_in_the_order_of_a_hash() -> None:
    gpus = {"a": 8, "b": 8, "c": 8, "d": 64}
    chosen, small = split_group(gpus, 2)
    assert chosen == tuple(sorted("abc", key=lambda r: sha256(r.encode()).hexdigest())[:2])
    assert not small
    assert "d" not in split_group(gpus, 9)[0]


def test_a_lone_row_stays_cold_and_one_row_is_always_left() -> None:
    assert split_group({"a": 8}, 4) == ((), True)
    assert len(split_group({"a": 8, "b": 8}, 4)[0]) == 1
    assert split_group({"a": 8, "b": 8}, 0) == ((), False)


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
    assert [precision_class(p) for p in ("mxfp8", "fp8-rowwise", "fp32")] == ["fp8", "fp8", "fp32"]


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
    "text", ["", "random", "random:0", "random:1", "random:x", "random:nan", "nodes:0.5", "other:1"]
)
def test_what_is_no_fit_is_refused(text: str) -> None:
    with pytest.raises(RequestError) as caught:
        parse_fit(text)
    assert repr(text) in caught.value.message


def test_fits_are_read() -> None:
    assert parse_fit("smaller:0.5") == Fit("smaller", 0.5)
    assert parse_fit("nodes:1") == Fit("nodes", 1)
