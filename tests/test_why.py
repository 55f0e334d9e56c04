"""`--why OP`: which rows a price comes from, as an object and on 80 columns, and one line for what is not there."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from llmprof import cli
from llmprof.errors import RequestError
from llmprof.extrapolate.why import Asked, read_asked
from llmprof.schema.store import save_profile
from tests.profiles import measured, operator, workload

ON_H100 = ["--cluster", "8xH100-SXM", "--layout", "dp=4"]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    rows = [
        operator(
            shapes=f"{m}x128,128x256", time_us=0.5 * m, flops=2 * m * 128 * 256, bytes=4 * 128 * (3 * m + 256)
        )
        for m in (64, 128, 256, 512)
    ]
    rows += [
        operator(module="other", count=24.0, time_us=40.0),
        operator(op="aten::mul", family="elementwise"),
    ]
    profile = msgspec.structs.replace(
        measured(ranks=1, layout="dp=1"), workload=workload(), operators=tuple(rows)
    )
    save_profile(profile, tmp_path / "run")
    return tmp_path / "run"


def why(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert cli.main([*arguments, "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_names_and_shapes_are_read() -> None:
    assert read_asked(" aten::mm ") == Asked("aten::mm", "")
    assert read_asked("mm 64x128, 128x32") == Asked("mm", "64x128,128x32")
    assert read_asked("_foreach_add_ [4,5]") == Asked("_foreach_add_", "[4,5]")


@pytest.mark.parametrize(
    "text", ["", "  ", "mm 3xx", "mm [4", "mm 0x3", "mm -2x3", "mm 3x99999999999999999", "a b c"]
)
def test_anything_else_is_refused(text: str) -> None:
    with pytest.raises(RequestError, match="--why"):
        read_asked(text)


def test_a_measured_shape_names_the_modules_that_called_it(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = why(capsys, "show", str(run), "--why", "mm 64x128,128x256")
    (call,) = found["calls"]
    assert (call["kind"], call["method"], call["count"]) == ("measured", "row", 32)
    # 8 calls of 32 us and 24 of 40 us
    assert call["time_us"] == pytest.approx(38.0)
    assert call["p10_us"] < 38.0 < call["p90_us"]
    rows = [(row["name"].split(",")[0], row["time_us"], row["weight"]) for row in call["neighbours"]]
    assert rows == [("other", 40.0, 0.75), ("layers.0.mlp.up", 32.0, 0.25)]


def test_a_shape_that_was_not_measured_names_those_it_resembles(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = why(capsys, "show", str(run), "--why", "aten::mm 200x128,128x256")
    (call,) = found["calls"]
    assert (call["kind"], call["method"], call["count"]) == ("interpolated", "surface", None)
    assert call["time_us"] == pytest.approx(100.0, rel=0.2)
    names = {row["name"] for row in call["neighbours"]}
    assert names == {f"aten::mm {m}x128,128x256 float32" for m in (64, 128, 256, 512)}
    assert call["flops"] == 2 * 200 * 128 * 256


def test_a_forecast_elsewhere_rests_on_the_roofline(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = why(capsys, "forecast", str(run), "--cluster", "8xB200", "--layout", "dp=4", "--why", "mm")
    calls = found["calls"]
    assert isinstance(calls, list) and calls
    assert {(call["kind"], call["method"]) for call in calls} == {("assumed", "roofline")}
    assert calls[0]["source"].startswith("matmul: ")
    totals = [call["time_us"] * call["count"] for call in calls]
    assert totals == sorted(totals, reverse=True)


def test_a_forecast_on_a_device_with_a_table_names_its_rows(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    call, *_ = why(capsys, "forecast", str(run), *ON_H100, "--why", "mm")["calls"]
    assert (call["kind"], call["method"]) == ("table", "table")
    assert call["neighbours"] and "Apache-2.0" in call["source"]
    call, *_ = why(capsys, "forecast", str(run), "--cluster", "8xH200", "--layout", "dp=4", "--why", "mm")[
        "calls"
    ]
    assert (call["kind"], call["method"]) == ("transferred", "transferred")
    assert "rooflines of H200-SXM5-141GB and it" in call["basis"]


def test_several_layouts_answer_one_by_one(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = why(capsys, "forecast", str(run), *ON_H100, "--layout", "dp=2,pp=2", "--why", "mm")
    assert [answer["layout"] for answer in found["why"]] == ["dp=4", "dp=2,pp=2"]


@pytest.mark.parametrize(
    "arguments",
    [["show", "RUN", "--top", "3"], ["forecast", "RUN", "--cluster", "local", "--layout", "dp=2"]],
)
def test_the_text_fits_80_columns(
    run: Path, arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    typed = [str(run) if part == "RUN" else part for part in arguments]
    assert cli.main([*typed, "--why", "aten::mm"]) == 0
    text = capsys.readouterr().out
    assert "weight" in text and "spread" in text
    assert max(len(line) for line in text.splitlines()) <= 80


def test_an_unknown_operator_is_one_line_with_near_names(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["show", str(run), "--why", "aten::mum"]) == 2
    message, hint = capsys.readouterr().err.splitlines()
    assert message == "llmprof: the run has no operator 'aten::mum'"
    assert "aten::mm" in hint and "aten::mul" in hint


def test_a_saved_forecast_says_where_to_ask(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    saved = tmp_path / "saved"
    assert cli.main(["forecast", str(run), *ON_H100, "--save", str(saved)]) == 0
    assert cli.main(["show", str(saved), "--why", "mm"]) == 2
    assert "llmprof forecast" in capsys.readouterr().err
