"""The catalogue: published numbers, user files, refusals, and the local machine from a profile."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from llmprof.errors import ClusterError
from llmprof.schema.catalogue import catalogue_names, load_cluster
from llmprof.schema.local import ASSUMED_CPU_BANDWIDTH_BYTES_PER_S, ASSUMED_CPU_FLOPS_PER_THREAD
from llmprof.schema.priors import load_priors
from llmprof.schema.profile import CollectiveRow, Manifest, OperatorRow, Profile, SourceRow

SHIPPED = catalogue_names()[1:]


def test_names() -> None:
    assert catalogue_names()[0] == "local"
    assert {"8xA100-80GB", "8xB200", "8xH100-SXM", "8xH200", "GB200-NVL72", "16xV100"} <= set(SHIPPED)
    assert all(load_cluster(name).name == name for name in SHIPPED)


@pytest.mark.parametrize(
    ("name", "bf16", "bandwidth", "nvlink", "nic", "power"),
    [
        # dense bfloat16, HBM, NVLink and NIC per GPU and direction, board power: the vendors' data sheets
        ("8xA100-80GB", 312e12, 2039e9, 300e9, 25e9, 400),
        ("8xH100-SXM", 989.4e12, 3350e9, 450e9, 50e9, 700),
        ("8xH200", 989.4e12, 4800e9, 450e9, 50e9, 700),
        ("8xB200", 2250e12, 8000e9, 900e9, 50e9, 1000),
        ("8xA100-40GB", 312e12, 1555e9, 300e9, 25e9, 400),
        ("8xL40S", 362.05e12, 864e9, 32e9, 6.25e9, 350),
        ("8xMI300X", 1307.4e12, 5300e9, 448e9, 50e9, 750),
    ],
)
def test_published_numbers(
    name: str, bf16: float, bandwidth: float, nvlink: float, nic: float, power: float
) -> None:
    cluster = load_cluster(name)
    assert cluster.device.peak_flops["bfloat16"] == bf16
    assert cluster.device.bandwidth_bytes_per_s == bandwidth
    assert [link.bandwidth_bytes_per_s for link in cluster.links] == [nvlink, nic]
    assert cluster.device.power_w == power
    assert cluster.devices_per_node == 8


@pytest.mark.parametrize("name", SHIPPED)
def test_every_number_names_its_source(name: str) -> None:
    cluster = load_cluster(name)
    unsourced = ("name", "kind", "aliases", "sources", "sustained_clock_hz")
    for key in cluster.device.__struct_fields__:
        value = getattr(cluster.device, key)
        if key not in unsourced and value is not None:
            assert cluster.device.sources.get(key), f"device.{key} has no source"
    for link in cluster.links:
        for key in ("bandwidth_bytes_per_s", "latency_s"):
            assert cluster.sources.get(f"links.{link.name}.{key}")
    for key in ("failures_per_device_day", "host_memory_bytes"):
        assert getattr(cluster, key) is None or cluster.sources.get(key)
    assert cluster.price is None or (cluster.price.source and cluster.price.date)


@pytest.mark.parametrize("name", SHIPPED)
def test_some_memory_is_taken_but_most_is_left(name: str) -> None:
    device = load_cluster(name).device
    assert 0.9 < device.usable_memory_bytes / device.memory_bytes < 1


def test_case_does_not_matter() -> None:
    assert load_cluster("8xh100-sxm") == load_cluster("8xH100-SXM")


def test_unknown_name_lists_names_and_the_closest() -> None:
    with pytest.raises(ClusterError) as caught:
        load_cluster("8xH100-SMX")
    assert "did you mean 8xH100-SXM" in caught.value.hint
    assert all(name in caught.value.hint for name in catalogue_names())
    assert caught.value.exit_code == 2


def test_backends_fit_the_vendor() -> None:
    for name in SHIPPED:
        cluster = load_cluster(name)
        assert cluster.backend == {"cuda": "nccl", "rocm": "rccl"}[cluster.device.kind], name


@pytest.mark.parametrize("name", ["GB200-NVL72", "GB300-NVL72"])
def test_a_rack_is_one_scale_up_domain_of_many_nodes(name: str) -> None:
    cluster = load_cluster(name)
    assert cluster.devices_per_node == 4
    assert [(link.name, link.span) for link in cluster.links] == [("nvlink", 72), ("infiniband", 0)]
    assert cluster.links[0].bandwidth_bytes_per_s == 900e9


def test_a_node_by_number_and_device() -> None:
    cluster = load_cluster("4xL40S")
    assert (cluster.devices_per_node, cluster.device.name) == (4, "L40S")
    assert [link.span for link in cluster.links] == [4, 0]
    assert load_cluster("2xrtx-4090").links[0].name == "pcie"
    for text in ("0xL40S", "4xNothing", "4x", "x", "-1xL40S"):
        with pytest.raises(ClusterError):
            load_cluster(text)


def description(**changes: Any) -> dict[str, Any]:
    """A user's cluster file; `changes` replace keys, "device.x" and "links.0.x" reach inside."""
    raw: dict[str, Any] = msgspec.to_builtins(load_cluster("8xH100-SXM"))
    for path, value in changes.items():
        *parents, last = path.split("__")
        target: Any = raw
        for parent in parents:
            target = target[int(parent)] if parent.isdigit() else target[parent]
        target[last] = value
    return raw


def test_a_user_file_may_name_a_device(tmp_path: Path) -> None:
    file = write(tmp_path / "mine.json", description(device="NVIDIA_L4"))
    assert load_cluster(file).device == load_cluster("8xL4").device


def write(path: Path, raw: object) -> Path:
    path.write_text(json.dumps(raw))
    return path


def test_a_user_file_is_read(tmp_path: Path) -> None:
    cluster = load_cluster(write(tmp_path / "mine.json", description(name="mine", max_devices=64)))
    assert (cluster.name, cluster.max_devices) == ("mine", 64)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"device__bandwidth_bytes_per_s": 0}, "bandwidth_bytes_per_s=0.0 is not positive"),
        ({"device__peak_flops": {"bfloat16": -1.0}}, "peak_flops.bfloat16"),
        ({"device__peak_flops": {}}, "no peak_flops"),
        ({"device__usable_memory_bytes": 10**12}, "is more than memory_bytes"),
        ({"devices_per_node": 0}, "devices_per_node=0"),
        ({"max_devices": 0}, "max_devices=0"),
        ({"links": []}, "no link level"),
        ({"links__0__bandwidth_bytes_per_s": -1.0}, "not positive"),
        ({"links__1__latency_s": -1e-6}, "negative"),
        ({"links__1__oversubscription": 0.5}, "oversubscription 0.5"),
        ({"links__1__span": 64}, "end with 0"),
        ({"links__0__span": 0}, "end with 0"),
        # the figure of a whole node, 8 x 400 GB/s
        ({"links__1__bandwidth_bytes_per_s": 3.2e12}, "faster per device than an inner one"),
        ({"price": {"currency": "USD", "per_device_hour": 0, "date": "d", "source": "s"}}, "per_device_hour"),
        ({"node_bandwidth_bytes_per_s": 4e11}, "per device, one direction"),
        ({"links__0__bandwidth_gbps": 400}, "per device, one direction"),
        ({"links__0__bandwidth_bytes_per_s_per_node": 400}, "per device, one direction"),
        ({"surprise": 1}, "surprise"),
        ({"device": "H100-SMX"}, "unknown device 'H100-SMX'"),
        ({"device": ""}, "unknown device ''"),
        ({"device": 7}, "not a cluster description"),
        ({"device": {"name": "H100-SXM5-80GB"}}, "not a cluster description"),
        ({"device__memory_bytes": -1}, "memory_bytes=-1"),
        ({"links__1__name": "nvlink"}, "a name of its own"),
        ({"name": None}, "not a cluster description"),
    ],
)
def test_inconsistent_files_are_refused_with_the_rule(
    tmp_path: Path, changes: dict[str, Any], expected: str
) -> None:
    with pytest.raises(ClusterError, match=expected):
        load_cluster(write(tmp_path / "bad.json", description(**changes)))


@pytest.mark.parametrize("content", ["", "{", "[]", "null", "[[[[", '{"name": 1}'])
def test_foreign_files_are_refused(tmp_path: Path, content: str) -> None:
    file = tmp_path / "bad.json"
    file.write_text(content)
    with pytest.raises(ClusterError):
        load_cluster(file)


def test_a_missing_file_and_a_folder_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ClusterError, match="cannot be read"):
        load_cluster(tmp_path / "none.json")
    with pytest.raises(ClusterError):
        load_cluster(tmp_path)


def test_a_changed_file_is_read_again(tmp_path: Path) -> None:
    file = write(tmp_path / "mine.json", description(name="one"))
    assert load_cluster(file).name == "one"
    file.unlink()
    write(file, description(name="another"))
    assert load_cluster(file).name == "another"


def source(**changes: Any) -> SourceRow:
    values: dict[str, Any] = {
        "rank": 0,
        "hostname": "host",
        "device": "cpu",
        "device_name": "A CPU",
        "device_count": 2,
        "threads": 1,
        "memory_bytes": 10_000_000_000,
        "backend": "gloo",
        "clock": "perf_counter",
        "software": "",
    }
    return SourceRow(**(values | changes))


def row(op: str, family: str, *, time_us: float, flops: int = 0, bytes: int = 0) -> OperatorRow:
    return OperatorRow(
        rank=0, op=op, family=family, module="", phase="forward", shapes="1", dtype="float32", device="cpu",
        count=1, time_us=time_us, time_iqr_us=0, time_n=1, exclusive_us=time_us, flops=flops, bytes=bytes,
    )  # fmt: skip


def test_local_is_built_from_the_best_measured_rates() -> None:
    operators = (
        row("aten::mm", "matmul", time_us=1000, flops=30_000_000),
        row("aten::mm", "matmul", time_us=1000, flops=50_000_000),
        row("aten::add", "elementwise", time_us=1000, bytes=8_000_000),
        row("aten::add", "elementwise", time_us=1, bytes=3_000_000),
        row("aten::add", "elementwise", time_us=2000, bytes=8_000_000),
        row("aten::add", "elementwise", time_us=1, bytes=3_900_000),
    )
    cluster = load_cluster(
        "local", profile=Profile(manifest=Manifest(), operators=operators, sources=(source(),))
    )
    device = cluster.device
    assert device.peak_flops["float32"] == pytest.approx(50e9)
    assert device.bandwidth_bytes_per_s == pytest.approx(8e9), (
        "an operator that fits in a cache does not count"
    )
    assert (device.kind, cluster.backend, cluster.devices_per_node) == ("cpu", "gloo", 2)
    assert (device.memory_bytes, device.usable_memory_bytes) == (10_000_000_000, 9_000_000_000)
    assert "measured" in device.sources["peak_flops"]
    assert device.sources["usable_memory_bytes"].startswith("assumed")


def test_local_names_what_it_assumes() -> None:
    profile = Profile(manifest=Manifest(), sources=(source(threads=3, memory_bytes=None),))
    cluster = load_cluster("local", profile=profile)
    assert cluster.device.peak_flops["float32"] == 3 * ASSUMED_CPU_FLOPS_PER_THREAD
    assert cluster.device.bandwidth_bytes_per_s == ASSUMED_CPU_BANDWIDTH_BYTES_PER_S
    for key in ("peak_flops", "bandwidth_bytes_per_s", "memory_bytes"):
        assert cluster.device.sources[key] == "assumed"
    assert set(cluster.sources.values()) == {"assumed"}


def test_local_link_comes_from_measured_all_reduces() -> None:
    collectives = tuple(
        CollectiveRow(
            rank=0, kind="all_reduce", axis="dp", group_size=2, size_bytes=size, dtype="float32", backend="gloo",
            count=1, time_us=time_us, time_iqr_us=0, time_n=1, exposed_us=0,
        )
        for size, time_us in ((1024, 400.0), (4_000_000, 2000.0))
    )  # fmt: skip
    profile = Profile(manifest=Manifest(), collectives=collectives, sources=(source(),))
    (link,) = load_cluster("local", profile=profile).links
    # two ranks send 2 x 1/2 of the message: 4 MB in 2 ms; a small one takes two steps
    assert link.bandwidth_bytes_per_s == pytest.approx(2e9)
    assert link.latency_s == pytest.approx(200e-6)
    small = Profile(manifest=Manifest(), collectives=collectives[:1], sources=(source(),))
    cluster = load_cluster("local", profile=small)
    assert cluster.sources["links.shared-memory.bandwidth_bytes_per_s"] == "assumed", "1 kB shows no rate"


def test_local_on_a_known_gpu_keeps_its_specification() -> None:
    gpu = source(device="cuda", device_name="NVIDIA H200", device_count=4, backend="nccl")
    cluster = load_cluster("local", profile=Profile(manifest=Manifest(), sources=(gpu,)))
    assert cluster.device == load_cluster("8xH200").device
    assert (cluster.name, cluster.devices_per_node) == ("local", 4)
    cards = source(device="cuda", device_name="NVIDIA GeForce RTX 4090", device_count=4, backend="nccl")
    cluster = load_cluster("local", profile=Profile(manifest=Manifest(), sources=(cards,)))
    assert (cluster.device.name, cluster.devices_per_node, cluster.links[0].span) == ("RTX-4090", 4, 4)


def test_local_without_a_profile_or_a_machine_is_refused() -> None:
    with pytest.raises(ClusterError, match="built from a measured run"):
        load_cluster("local")
    with pytest.raises(ClusterError, match="does not say what it was measured on"):
        load_cluster("local", profile=Profile(manifest=Manifest()))
    unknown = source(device="cuda", device_name="GPU of tomorrow")
    with pytest.raises(ClusterError, match="not in the catalogue"):
        load_cluster("local", profile=Profile(manifest=Manifest(), sources=(unknown,)))


def test_priors_are_positive_and_name_their_source() -> None:
    priors = load_priors()
    for link in priors.links.values():
        assert link.source and 0 < link.spread < 2 and 0 < link.bandwidth_efficiency <= 1
    for prior in priors.families.values():
        assert prior.source and 0 < prior.spread < 2
        assert 0 < prior.flops_efficiency <= 1 and 0 < prior.bandwidth_efficiency <= 1
    numbers = {f for f in priors.__struct_fields__ if isinstance(getattr(priors, f), float)}
    assert numbers == set(priors.sources)
    assert priors.link("nccl", "infiniband") != priors.link("nccl", "nvlink") == priors.link("nccl")
    assert all(priors.link("nccl", name) == priors.links["nccl:network"] for name in priors.networks)
    assert priors.link("gloo", "ethernet") == priors.link("gloo")
    assert priors.link("rccl") == priors.links["default"]
