"""Logs of nccl-tests and rccl-tests: the group, the kind and the times are found, or one error says what is missing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmprof import cli
from llmprof.errors import TableError
from llmprof.schema.measurements import read_measurements
from llmprof.schema.nccl_tests import read_test_log

HEAD = "# nThread 1 nGpus 1 minBytes 1024 maxBytes 1048576 step: 2(factor) warmup iters: 5 iters: 20\n#\n# Using devices\n"
COLUMNS = """#
#                                                              out-of-place                       in-place
#       size         count      type   redop    root     time   algbw   busbw #wrong     time   algbw   busbw #wrong
#        (B)    (elements)                               (us)  (GB/s)  (GB/s)            (us)  (GB/s)  (GB/s)
"""


def ranks(hosts: int, per_host: int, device: str = "NVIDIA H100 80GB HBM3") -> str:
    return "".join(
        f"#  Rank {h * per_host + d:2d} Group  0 Pid   {1800 + d} on   node-{h} device  {d} [0x8d] {device}\n"
        for h in range(hosts)
        for d in range(per_host)
    )


def line(
    size: int, time_us: float, factor: float, *, redop: str = "sum", root: int = -1, inside: str = ""
) -> str:
    alg = size / time_us / 1e3
    last = inside or f"{time_us + 1:.2f}  {alg:.2f}  {alg * factor:.2f}      0"
    return (
        f"{size:12d} {size // 4:13d}     float {redop:>7s} {root:7d} {time_us:8.2f} {alg:7.2f} {alg * factor:7.2f}"
        f"      0 {last}\n"
    )


def log(group: str, *lines: str, name: str = "") -> str:
    started = f"# Collective test starting: {name}\n" if name else ""
    return (
        HEAD
        + group
        + started
        + COLUMNS
        + "".join(lines)
        + "# Out of bounds values : 0 OK\n# Avg bus bandwidth : 9\n"
    )


ALL_REDUCE = log(ranks(1, 8), line(1048576, 50.0, 1.75), line(268435456, 1200.0, 1.75))


def test_an_all_reduce_is_known_by_its_bandwidths_and_taken_in_place() -> None:
    found = read_test_log(ALL_REDUCE)
    assert found.device_name == "NVIDIA H100 80GB HBM3"
    assert found.devices_per_node == 8
    assert not found.left_out
    first, second = found.rows
    assert (first.kind, first.group_size, first.span, first.backend) == ("all_reduce", 8, 8, "nccl")
    assert (first.size_bytes, first.time_us, first.dtype, first.in_situ) == (1048576, 51.0, "float32", False)
    assert second.time_us == 1201.0


@pytest.mark.parametrize(
    ("name", "kind", "factor", "redop", "root"),
    [
        ("all_gather_perf", "all_gather", 0.875, "none", -1),
        ("reduce_scatter_perf", "reduce_scatter", 0.875, "sum", -1),
        ("alltoall_perf", "all_to_all", 0.875, "none", -1),
        ("broadcast_perf", "broadcast", 1.0, "none", 0),
        ("sendrecv_perf", "send", 1.0, "none", -1),
    ],
)
def test_the_name_of_the_program_tells_the_kind(
    name: str, kind: str, factor: float, redop: str, root: int
) -> None:
    text = log(
        ranks(1, 8), line(1048576, 50.0, factor, redop=redop, root=root, inside="N/A N/A N/A N/A"), name=name
    )
    (row,) = read_test_log(text).rows
    assert (row.kind, row.time_us) == (kind, 50.0)
    assert row.group_size == (2 if kind == "send" else 8)


def test_without_a_name_what_only_one_kind_can_show_is_taken_and_the_rest_is_asked_for() -> None:
    scatter = log(ranks(1, 8), line(1048576, 50.0, 0.875))
    assert read_test_log(scatter).rows[0].kind == "reduce_scatter"
    either = log(ranks(1, 8), line(1048576, 50.0, 0.875, redop="none"))
    with pytest.raises(TableError, match=r"0\.87\d of the algorithm's") as error:
        read_test_log(either)
    assert "--kind" in error.value.hint
    assert read_test_log(either, kind="all_gather").rows[0].kind == "all_gather"
    assert read_test_log(either, fallback="all_to_all").rows[0].kind == "all_to_all"


def test_the_group_spreads_over_whole_nodes() -> None:
    two_nodes = read_test_log(log(ranks(2, 8), line(1048576, 50.0, 1.875)))
    assert (two_nodes.rows[0].group_size, two_nodes.rows[0].span) == (16, 16)
    part = read_test_log(log(ranks(1, 4), line(1048576, 50.0, 1.5)))
    assert (part.rows[0].group_size, part.rows[0].span) == (4, 4)


def test_tests_behind_each_other_have_their_own_groups_and_kinds() -> None:
    gather = log(ranks(1, 4), line(4096, 9.0, 0.75, redop="none"), name="all_gather_perf")
    found = read_test_log(ALL_REDUCE + gather + "bash: done\n" + ALL_REDUCE)
    assert [(r.kind, r.group_size) for r in found.rows] == [
        ("all_reduce", 8), ("all_reduce", 8), ("all_gather", 4), ("all_reduce", 8), ("all_reduce", 8),
    ]  # fmt: skip


def test_rccl_and_launcher_prefixes() -> None:
    amd = log(ranks(1, 8, "AMD Instinct MI300X"), line(1048576, 50.0, 1.75))
    prefixed = "".join(f"[1,0]<stdout>:{part}\n" for part in amd.splitlines())
    for text in (amd, prefixed):
        assert read_test_log(text).rows[0].backend == "rccl"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "no line of results"),
        ("hello\nworld\n", "no line of results"),
        (HEAD + ranks(1, 8) + COLUMNS, "no line of results"),
        (HEAD + COLUMNS + line(1024, 5.0, 1.75), "does not list its ranks"),
        (log(ranks(1, 1), line(1024, 5.0, 0.0)), "of a single rank"),
        (log(ranks(1, 8, "NVIDIA A100") + ranks(1, 4), line(1024, 5.0, 1.75)), "A100 and NVIDIA H100"),
        (log(ranks(1, 8), line(0, 5.0, 1.75)), "tells no kind"),
    ],
)
def test_logs_that_cannot_be_used_say_why(text: str, said: str) -> None:
    with pytest.raises(TableError, match=said):
        read_test_log(text)


@given(st.integers(0, len(ALL_REDUCE)))
def test_a_torn_log_gives_its_whole_lines_or_one_error(cut: int) -> None:
    try:
        found = read_test_log(ALL_REDUCE[:cut])
    except TableError:
        return
    assert 1 <= len(found.rows) <= 2
    assert all(row.time_us > 0 for row in found.rows)


@given(st.text())
def test_any_text_gives_one_error_at_most(text: str) -> None:
    with pytest.raises(TableError):
        read_test_log(text)


def test_the_command_writes_a_table_that_prices_a_forecast(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, table = tmp_path / "nccl.log", tmp_path / "links.jsonl"
    sizes = [2**p for p in range(10, 31, 2)]

    def lines(slow: float) -> list[str]:
        return [line(size, slow * (20 + size / 4e5), 1.75) for size in sizes]

    model = [
        "--model",
        "llama:layers=4,hidden=1024,heads=16,vocab=32000",
        "--global-batch",
        "8",
        "--seq",
        "512",
    ]
    asked = ["forecast", *model, "--cluster", "8xH100-SXM", "--layout", "dp=1,tp=8,mb=8", "--json"]
    exposed = []
    for slow in (1.0, 10.0):
        table.unlink(missing_ok=True)
        source.write_text(log(ranks(1, 8), *lines(slow)))
        assert cli.main(["import", "--nccl-tests", str(source), "-o", str(table)]) == 0
        assert "11 times on NVIDIA H100 80GB HBM3" in capsys.readouterr().out
        assert len(read_measurements(table).collectives) == len(sizes)
        assert cli.main([*asked, "--measured", str(table)]) == 0
        printed = json.loads(capsys.readouterr().out)
        assert printed["interpolated_fraction"] > 0
        exposed.append(printed["breakdown_s"]["tp"])
    assert exposed[1] > 5 * exposed[0]
    other = ["8xA100-80GB" if word == "8xH100-SXM" else word for word in asked[:-1]]
    assert cli.main([*other, "--measured", str(table)]) == 2
    assert "never price another" in capsys.readouterr().err


@pytest.mark.parametrize("content", [None, b"", b"\x00\xff\xfe" * 100, b"just words\n"])
def test_files_that_are_no_logs_are_refused_and_nothing_is_written(
    tmp_path: Path, content: bytes | None, capsys: pytest.CaptureFixture[str]
) -> None:
    source, table = tmp_path / "nccl.log", tmp_path / "links.jsonl"
    if content is not None:
        source.write_bytes(content)
    assert cli.main(["import", "--nccl-tests", str(source), "-o", str(table)]) == 2
    assert str(source) in capsys.readouterr().err
    assert not table.exists()
