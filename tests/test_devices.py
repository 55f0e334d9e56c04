"""The catalogue of devices and the fabric built around one: names, published numbers, stated and assumed links."""

from __future__ import annotations

import csv
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from llmprof.errors import ClusterError
from llmprof.schema.devices import (
    device_assumption,
    device_entry,
    device_names,
    find_device,
    known_device,
    normal_name,
)
from llmprof.schema.fabric import Links, build_cluster, fabric_assumptions, usual_machine

TABLES = Path(__file__).resolve().parents[2] / "shared" / "validation"
UNKNOWN = {"unstated (2 x 8)", "unstated (8-GPU node)", "unstated (8-GPU nodes)"}
DTYPES = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16", "fp8": "float8"}
ORDER = ("float4", "float8", "bfloat16", "tfloat32", "float32")
ITEM_BYTES = {"fp32": 4, "fp16": 2, "bf16": 2, "fp8": 1}
LARGER_THAN_CACHES_BYTES = 2e8
"""The largest second-level cache of the tables' devices has 100 MB; what fits in it is read faster than the memory."""

needs_tables = pytest.mark.skipif(
    not TABLES.is_dir(), reason="the tables of published measurements are not here"
)


@pytest.mark.parametrize("name", device_names())
def test_numbers_of_a_device(name: str) -> None:
    device = find_device(name)
    peaks = [device.peak_flops[dtype] for dtype in ORDER if dtype in device.peak_flops]
    assert peaks == sorted(peaks, reverse=True) and device.peak_flops["float32"] > 0
    assert device.peak_flops["float16"] >= device.peak_flops.get("bfloat16", 0)
    assert 0.9 < device.usable_memory_bytes / device.memory_bytes < 1
    assert 1e11 < device.bandwidth_bytes_per_s < 1e13
    for key in device.__struct_fields__:
        if key not in ("name", "kind", "aliases", "sources") and getattr(device, key) is not None:
            assert device.sources.get(key), f"{key} has no source"
    assert usual_machine(name).device == device


def test_no_two_devices_share_a_name() -> None:
    owners: dict[str, str] = {}
    for name in device_names():
        entry = device_entry(name)
        for alias in (name, *entry.device.aliases, *entry.assumed_names):
            assert owners.setdefault(normal_name(alias), name) == name, alias


@pytest.mark.parametrize(
    ("reported", "name"),
    [
        ("NVIDIA H100 80GB HBM3", "H100-SXM5-80GB"),
        ("NVIDIA H100 PCIe", "H100-PCIE-80GB"),
        ("NVIDIA H100 NVL", "H100-NVL-94GB"),
        ("NVIDIA A100-SXM4-40GB", "A100-SXM4-40GB"),
        ("NVIDIA_A100_80GB_PCIe", "A100-PCIE-80GB"),
        ("Tesla_V100-PCIE-32GB", "V100-PCIE-32GB"),
        ("  tesla  t4 ", "T4"),
        ("AMD Instinct MI300X", "MI300X"),
    ],
)
def test_names_that_runtimes_report(reported: str, name: str) -> None:
    assert find_device(reported).name == name
    assert device_assumption(reported) is None


def test_open_form_factors_are_assumed_and_said() -> None:
    assert find_device("A100-80GB").name == "A100-SXM4-80GB"
    assert "form factor of A100-80GB is not stated" in (device_assumption("a100-80gb") or "")
    assert find_device("MI250").memory_bytes == 64 * 2**30
    assert "two devices" in (device_assumption("MI250") or "")
    assert device_assumption("GPU of tomorrow") is None


@pytest.mark.parametrize("name", ["unstated (8-GPU node)", "", "H100-SMX", "GPU of\ntomorrow", "x" * 5000])
def test_unknown_devices_are_refused_in_one_line(name: str) -> None:
    assert known_device(name) is None
    with pytest.raises(ClusterError) as caught:
        find_device(name)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 2000


def test_close_names_are_offered() -> None:
    with pytest.raises(ClusterError) as caught:
        find_device("H100-SMX5-80GB")
    assert "did you mean H100-SXM5-80GB" in caught.value.hint


def spans(cluster: Any) -> list[tuple[str, int, float]]:
    return [(link.name, link.span, link.bandwidth_bytes_per_s) for link in cluster.links]


def test_without_any_statement_it_is_the_usual_machine() -> None:
    assert build_cluster("A100-SXM4-80GB") is usual_machine("NVIDIA A100-SXM4-80GB")
    assert build_cluster(find_device("A100-SXM4-80GB")).name == "8xA100-80GB"
    assert build_cluster("H100-SXM5-80GB", devices_per_node=8).price is not None


def test_stated_links_win() -> None:
    cluster = build_cluster(
        "H100-SXM5-80GB",
        devices_per_node=8,
        intra_bytes_per_s=400e9,
        inter_bytes_per_s=50e9,
        intra_name="NVLink4/NVSwitch",
        inter_name="EFA (3200 Gb/s per node)",
    )
    assert spans(cluster) == [("nvlink", 8, 400e9), ("efa", 0, 50e9)]
    assert cluster.sources["links.nvlink.bandwidth_bytes_per_s"] == "stated"
    assert cluster.price is None, "the price was that of another machine"


def test_what_is_not_stated_is_assumed_and_said() -> None:
    stated = Links(intra_bytes_per_s=300e9)
    assert build_cluster("A100-SXM4-80GB", **stated._asdict()) == usual_machine("A100-SXM4-80GB")
    notes = fabric_assumptions("A100-80GB", stated)
    assert [
        bool(re.search(text, note))
        for text, note in zip(("form factor", "8 of", "25 GB/s"), notes, strict=True)
    ]
    assert len(fabric_assumptions("A100-80GB", stated, gpus=8)) == 2, "one node needs no network"
    assert fabric_assumptions("A100-SXM4-80GB", stated, gpus=1) == ()


def test_nodes_of_another_size() -> None:
    four = build_cluster("A100-SXM4-40GB", devices_per_node=4)
    assert four.name == "4xA100-40GB", "the catalogue has such a node"
    assert spans(four)[1] == ("slingshot", 0, 25e9)
    assert spans(build_cluster("H100-SXM5-80GB", devices_per_node=4)) == [
        ("nvlink", 4, 450e9),
        ("infiniband", 0, 50e9),
    ]
    assert build_cluster("V100-SXM3-32GB").links[0].span == 16
    assert [link.span for link in build_cluster("H100-SXM5-80GB", devices_per_node=1).links] == [0]


def test_a_tray_keeps_the_domain_of_its_rack() -> None:
    cluster = build_cluster("GB200", devices_per_node=4, intra_name="NVLink5 (NVL72)", inter_bytes_per_s=45e9)
    assert spans(cluster) == [("nvlink", 72, 900e9), ("infiniband", 0, 45e9)]
    notes = fabric_assumptions("GB200", Links(devices_per_node=4), gpus=64)
    assert not any("between nodes" in note for note in notes)


def test_cards_joined_in_pairs() -> None:
    box = build_cluster("A100-80GB", devices_per_node=4, intra_name="mixed PCIe and NVLink pairs")
    assert spans(box)[:2] == [("nvlink", 2, 300e9), ("pcie", 4, 32e9)]
    pair = build_cluster("A40-48GB", devices_per_node=2, intra_name="pairwise NVLink bridge")
    assert spans(pair)[0] == ("nvlink", 2, 56.25e9)
    assert spans(build_cluster("H100-SXM5-80GB", intra_name="PCIe"))[0] == ("pcie", 8, 64e9)
    assert spans(build_cluster("A100-PCIE-80GB", devices_per_node=4))[:2] == [
        ("nvlink", 2, 300e9),
        ("pcie", 4, 32e9),
    ]


def test_a_closed_box_has_no_network() -> None:
    box = build_cluster("L40S", devices_per_node=4, inter_name="none (one node)")
    assert spans(box) == [("pcie", 0, 32e9)]
    assert box.max_devices == 4
    assert build_cluster("L40S", devices_per_node=1, inter_name="none").max_devices == 1


def test_an_assumption_gives_way_to_a_statement_that_contradicts_it() -> None:
    slow = build_cluster("A100-SXM4-80GB", intra_bytes_per_s=10e9, intra_name="PCIe")
    assert spans(slow) == [("pcie", 8, 10e9), ("infiniband", 0, 10e9)]
    fast = build_cluster("L40S", inter_bytes_per_s=50e9)
    assert [link.bandwidth_bytes_per_s for link in fast.links] == [50e9, 50e9]
    assert any("raised" in note for note in fabric_assumptions("L40S", Links(inter_bytes_per_s=50e9)))


@pytest.mark.parametrize(
    ("stated", "expected"),
    [
        ({"intra_bytes_per_s": 10e9, "inter_bytes_per_s": 50e9}, "faster per device than an inner one"),
        ({"inter_bytes_per_s": 0.0}, "not positive"),
        ({"inter_bytes_per_s": -1.0}, "not positive"),
        ({"intra_bytes_per_s": float("nan")}, "not positive"),
        ({"intra_bytes_per_s": float("inf")}, "not between"),
        ({"inter_bytes_per_s": 0.5}, "not between"),
        ({"devices_per_node": 0}, "is not 1 or more"),
        ({"devices_per_node": -8}, "is not 1 or more"),
    ],
)
def test_impossible_links_are_refused_in_one_line(stated: dict[str, Any], expected: str) -> None:
    with pytest.raises(ClusterError, match=expected) as caught:
        build_cluster("A100-SXM4-80GB", **stated)
    assert "\n" not in str(caught.value)


def test_a_device_of_ones_own_gets_its_host_link() -> None:
    import msgspec

    mine = msgspec.structs.replace(find_device("L4"), name="mine", host_link_bytes_per_s=None)
    assert spans(build_cluster(mine, devices_per_node=2))[0][0] == "pcie"
    assert build_cluster(mine).name == "1xmine"
    assert build_cluster(find_device("MI210"), devices_per_node=2).backend == "rccl"


def table_rows(*folders: str) -> Iterator[dict[str, str]]:
    for folder in folders:
        for path in sorted((TABLES / folder).glob("*.csv")):
            with path.open(newline="") as file:
                for row in csv.DictReader(file):
                    yield row | {"table": path.stem}


def number(text: str | None) -> float | None:
    return float(text) if text else None


@needs_tables
def test_every_gpu_of_the_tables_is_known() -> None:
    names = {row["gpu"] for row in table_rows("e2e", "ops", "collectives")}
    assert {name for name in names if known_device(name) is None} == UNKNOWN


@needs_tables
def test_every_fabric_of_the_tables_is_a_cluster() -> None:
    fabrics = set()
    for row in table_rows("e2e"):
        nodes, intra, inter = (
            number(row.get(key)) for key in ("gpus_per_node", "intra_GBps_per_gpu", "inter_GBps_per_gpu")
        )
        names = (row.get("intra_link") or "", row.get("inter_link") or "")
        fabrics.add((row["gpu"], nodes, intra, inter, *names))
    for gpu, nodes, intra, inter, intra_name, inter_name in fabrics:
        cluster = build_cluster(
            gpu,
            devices_per_node=int(nodes) if nodes else None,
            intra_bytes_per_s=intra * 1e9 if intra else None,
            inter_bytes_per_s=inter * 1e9 if inter else None,
            intra_name=intra_name,
            inter_name=inter_name,
        )
        assert cluster.devices_per_node == (nodes or cluster.devices_per_node)
        assert inter is None or cluster.links[-1].bandwidth_bytes_per_s == inter * 1e9


@needs_tables
def test_no_measured_rate_exceeds_a_peak() -> None:
    above = [
        f"{row['row_id']}: {row['tflops']} TFLOP/s"
        for row in table_rows("ops")
        if row["qc"] == "ok" and row["dtype"] in DTYPES and row["tflops"]
        if float(row["tflops"]) * 1e12 > find_device(row["gpu"]).peak_flops[DTYPES[row["dtype"]]]
    ]
    assert above == []


def streamed_bytes(row: dict[str, str]) -> float:
    """Least traffic of a forward matmul (rows k x n and m x k in, m x n out) or fp32 elementwise operator; 0 for others."""
    item = ITEM_BYTES.get(row["dtype"], 0)
    if row["op"] in ("gemm", "bmm") and row["phase"] == "fwd":
        m, n, k, batch = (float(row[key] or 1) for key in ("m", "n", "k", "batch"))
        return batch * (item * (m * k + k * n) + max(2, item) * m * n)
    if row["table"] == "neusight_ops":
        tensors = 3 if row["op"] in ("add", "mul") else 2
        return tensors * item * float(row["tokens"]) * float(row["hidden"])
    return 0.0


@needs_tables
def test_no_operator_streams_faster_than_the_memory() -> None:
    checked, above = 0, []
    for row in table_rows("ops"):
        size_bytes = streamed_bytes(row) if row["qc"] == "ok" else 0.0
        if size_bytes < LARGER_THAN_CACHES_BYTES:
            continue
        checked += 1
        device = find_device(row["gpu"])
        if size_bytes / (float(row["time_us"]) * 1e-6) > device.bandwidth_bytes_per_s:
            above.append(row["row_id"])
    assert checked > 1000
    assert above == []


@needs_tables
def test_no_peak_memory_exceeds_the_capacity() -> None:
    for row in table_rows("e2e"):
        if row.get("peak_mem_GB"):
            assert float(row["peak_mem_GB"]) * 1e9 < find_device(row["gpu"]).memory_bytes, row["row_id"]
