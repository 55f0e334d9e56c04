"""Tables of published operators: what ships, what it prices, what it must not price, and how it is made."""

from __future__ import annotations

import csv
from pathlib import Path

import msgspec
import pytest

from benchmarks import device_tables as maker
from llmprof.extrapolate.compute import OperatorPrices
from llmprof.extrapolate.predict import predict
from llmprof.judge.op_calls import OpCall
from llmprof.judge.operators import score_operators
from llmprof.judge.table import Table
from llmprof.schema.catalogue import load_cluster
from llmprof.schema.device_tables import DeviceTable, load_device_table, table_names
from llmprof.schema.devices import device_entry, device_names, find_device
from llmprof.schema.layout import Layout
from llmprof.schema.operators import Tensor, family, parse_shapes
from llmprof.schema.priors import load_priors
from llmprof.schema.profile import Manifest, Profile, SourceRow
from tests.made_up import GEMM
from tests.profiles import measured, operator, workload

NOTHING = Profile(manifest=Manifest())
LICENCES = {"Apache-2.0", "MIT"}
EVALUATION_ONLY = ("Aleph-Alpha", "stas00", "mauryaavinash95", "kazukiosawa", "nanotron", "Rapid-LLM")
LARGEST_BYTES = 120_000


def t(*shape: int, dtype: str = "bfloat16") -> Tensor:
    return Tensor(shape, dtype)


def mm(m: int, k: int, n: int, dtype: str = "bfloat16") -> tuple[Tensor, Tensor]:
    return t(m, k, dtype=dtype), t(k, n, dtype=dtype)


def prices(device: str, *, tables: bool = True) -> OperatorPrices:
    return OperatorPrices(NOTHING, find_device(device), same_device=False, tables=tables)


@pytest.mark.parametrize("name", table_names())
def test_a_table_says_where_it_is_from_and_how_far_it_is_off(name: str) -> None:
    table = load_device_table(name)
    assert table is not None and table.device == name == find_device(name).name
    for part in table.parts:
        assert part.source.licence in LICENCES
        assert "@" in part.source.repository and not part.source.repository.startswith(EVALUATION_ONLY)
        assert maker.FEWEST_ROWS <= len(part.shapes) <= min(maker.MOST_ROWS, part.source.published)
        assert 0 <= part.left_out.median <= part.left_out.p90 < 0.6 and part.left_out.median < 0.15
        assert part.left_out.rows >= maker.FEWEST_ROWS
        assert min(part.time_us) >= maker.SHORTEST_US
        assert all(parse_shapes(shapes) for shapes in part.shapes)


def test_files_are_small_and_an_unknown_device_has_none() -> None:
    folder = maker.DIRECTORY
    assert {file.stem for file in folder.iterdir()} == set(table_names())
    assert max(file.stat().st_size for file in folder.iterdir()) < LARGEST_BYTES
    assert load_device_table("B200-SXM-180GB") is None
    assert load_device_table("../devices/T4") is None


def test_devices_with_the_same_chip_exist_and_have_tables() -> None:
    for name in device_names():
        assert set(device_entry(name).same_chip) <= set(table_names()) - {name}


def test_a_published_row_is_met() -> None:
    table = load_device_table("H100-SXM5-80GB")
    assert table is not None
    (part,) = table.parts
    large = [i for i, time_us in enumerate(part.time_us) if time_us > 100][::9]
    found = prices("H100-SXM5-80GB")
    off = []
    for i in large:
        left, right = parse_shapes(part.shapes[i], "bfloat16")
        price = found.price("aten::addmm", (t(right.shape[1]), left, right))
        assert price.kind == "table" and price.spread > load_priors().table_spread
        off.append(abs(price.time_s * 1e6 / part.time_us[i] - 1))
    assert sorted(off)[len(off) // 2] < 0.05


def test_dtypes_of_one_rate_share_rows_and_others_do_not() -> None:
    found = prices("A100-SXM4-80GB")
    half = [found.price("aten::mm", mm(4096, 4096, 4096, dtype)) for dtype in ("bfloat16", "float16")]
    assert half[0].time_s == half[1].time_s
    assert found.price("aten::mm", mm(4096, 4096, 4096, "float8")).kind == "assumed"
    wide = found.price("aten::mm", mm(4096, 4096, 4096, "float32"))
    assert wide.kind == "transferred" and wide.time_s > 8 * half[0].time_s


def test_the_same_chip_with_other_memory_scales_by_what_limits_it() -> None:
    h100, h200 = prices("H100-SXM5-80GB"), prices("H200-SXM5-141GB")
    large, flat = mm(8192, 8192, 8192), mm(8192, 32, 8192)
    assert h200.price("aten::mm", large).kind == "transferred"
    assert h200.price("aten::mm", large).time_s == pytest.approx(h100.price("aten::mm", large).time_s)
    assert h200.price("aten::mm", flat).time_s == pytest.approx(
        h100.price("aten::mm", flat).time_s * 3.35 / 4.8, rel=1e-3
    )


def test_elementwise_operators_are_priced_by_their_bytes() -> None:
    x = t(4096, 8192)
    found = prices("A100-SXM4-80GB")
    price = found.price("fused::elementwise", (x, x, x), (x,))
    assert price.kind == "table"
    assert price.time_s == pytest.approx(4 * 2 * 4096 * 8192 / 1.75e12, rel=0.2)


def test_without_a_table_or_where_none_is_allowed_it_is_the_roofline() -> None:
    shapes = mm(4096, 4096, 4096)
    assert prices("B200-SXM-180GB").price("aten::mm", shapes).kind == "assumed"
    assert prices("H100-SXM5-80GB", tables=False).price("aten::mm", shapes).kind == "assumed"
    (line,) = [line for line in prices("B200-SXM-180GB").assumptions() if "roofline" in line]
    assert "spec sheet" in line


def test_what_the_run_measured_goes_before_any_table() -> None:
    row = operator(dtype="bfloat16", device="cuda", shapes="512x512,512x512", time_us=77.0, flops=2 * 512**3)
    source = SourceRow(
        rank=0, hostname="", device="cuda", device_name="A100-SXM4-80GB", device_count=1, threads=0, memory_bytes=None,
        backend="nccl", clock="", software="",
    )  # fmt: skip
    profile = Profile(manifest=Manifest(), operators=(row,), sources=(source,))
    found = OperatorPrices(profile, find_device("A100-SXM4-80GB"), same_device=True)
    assert found.price("aten::mm", mm(512, 512, 512)).kind == "measured"
    assert found.price("aten::mm", mm(640, 512, 512)).kind == "interpolated"
    query = t(1, 16, 2048, 128)
    flash = found.price("aten::_scaled_dot_product_flash_attention", (query, query, query))
    assert flash.kind == "table"
    assert any(line.startswith("table of A100-SXM4-80GB") for line in found.assumptions())


def test_a_forecast_counts_table_time_as_interpolated_and_names_the_sources() -> None:
    profile = msgspec.structs.replace(measured(ranks=1, layout="dp=1"), workload=workload(hidden=2048))
    found = predict(profile, Layout(dp=4), load_cluster("8xA100-80GB")).manifest.forecast
    assert found is not None
    assert 0 < found["table_fraction"] <= found["interpolated_fraction"]
    shares = [found[f"{kind}_fraction"] for kind in ("measured", "interpolated", "assumed")]
    assert sum(shares) == pytest.approx(1.0)
    (line,) = [line for line in found["assumptions"] if line.startswith("table of")]
    assert "Apache-2.0" in line and "left out" in line


def test_operator_tables_are_judged_without_the_tables_made_of_them() -> None:
    row = GEMM | {
        "row_id": "r",
        "gpu": "H100-SXM5-80GB",
        "m": "4096",
        "n": "4096",
        "k": "4096",
        "time_us": "200",
    }
    (scored,) = score_operators(Table(name="t", kind="operators", columns=tuple(row), rows=[row])).rows
    by_roofline = prices("H100-SXM5-80GB", tables=False).price("aten::mm", mm(4096, 4096, 4096))
    assert scored.predicted_p50 == pytest.approx(by_roofline.time_s * 1e6, rel=1e-3)


def test_rows_are_chosen_far_from_each_other() -> None:
    calls = [maker.Row(OpCall("aten::mm", mm(m, 64, 64), ()), 10.0, "s", "r@c") for m in (64, 65, 66, 1024)]
    assert 3 in maker.choose(calls, 2) and len(maker.choose(calls, 2)) == 2
    assert maker.choose(calls, 9) == [0, 1, 2, 3]
    assert family(calls[0].call.op) == "matmul"


def test_a_table_is_made_of_published_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Products at 100 TFLOP/s plus 5 us, on one card; rows that are flagged or short are left out."""
    sizes = [256 * i for i in range(1, 61)]
    rows = [
        GEMM
        | {
            "row_id": f"r{m}",
            "source_ref": "owner/name@abc:a/file.csv",
            "m": str(m),
            "n": "4096",
            "k": "4096",
            "time_us": repr(5 + 2 * m * 4096 * 4096 / 1e8),
        }
        for m in sizes
    ]
    rows += [rows[0] | {"qc": "flagged"}, rows[0] | {"m": "1", "time_us": "2.0"}]
    for name in maker.SOURCES:
        with (tmp_path / f"{name}.csv").open("w", newline="", encoding="utf-8") as out:
            writer = csv.DictWriter(out, list(rows[0]))
            writer.writeheader()
            writer.writerows(rows if name == "vidur_compute" else [])
    monkeypatch.setattr(maker, "DIRECTORY", tmp_path / "tables")
    monkeypatch.setattr(maker, "MOST_ROWS", 30)
    monkeypatch.setattr("sys.argv", ["device_tables.py", str(tmp_path)])
    assert maker.main() == 0
    (made,) = (tmp_path / "tables").iterdir()
    table = msgspec.json.decode(made.read_bytes(), type=DeviceTable)
    (part,) = table.parts
    assert (part.op, part.source.repository, part.source.published) == ("aten::mm", "owner/name@abc", 60)
    assert len(part.shapes) == 30 and part.left_out.rows == 30
    assert part.left_out.how == "published rows that the table leaves out"
    assert part.left_out.p90 < 0.05
    assert "30 kept" in capsys.readouterr().out
