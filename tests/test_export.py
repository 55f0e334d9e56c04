"""`llmprof export`: timelines and raw traces for other viewers."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import msgspec
import pytest

from llmprof import cli
from llmprof.report import torch_tb
from llmprof.report.torch_tb import export_torch_tb
from llmprof.schema.store import save_profile
from tests.profiles import measured, workload


@pytest.fixture
def run(tmp_path: Path) -> Path:
    profile = msgspec.structs.replace(measured(ranks=1, layout="dp=1"), workload=workload())
    save_profile(profile, tmp_path / "run")
    return tmp_path / "run"


def test_export_writes_a_timeline_compressed_by_suffix(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plain, packed = tmp_path / "sub" / "t.json", tmp_path / "t.json.gz"
    assert cli.main(["export", str(run), "--chrome", str(plain)]) == 0
    assert cli.main(["export", str(run), "--chrome", str(packed)]) == 0
    assert f"wrote {packed}" in capsys.readouterr().out
    assert json.loads(gzip.decompress(packed.read_bytes())) == json.loads(plain.read_bytes())


def test_export_rewrites_raw_traces_for_torch_tb_profiler(run: Path, tmp_path: Path) -> None:
    events = [
        {"ph": "X", "cat": "cuda_runtime", "name": "cudaLaunchKernel", "ts": 1, "dur": 2},
        {"ph": "X", "cat": "user_annotation", "name": "nccl:_all_gather_base", "ts": 1, "dur": 2},
        {"ph": "X", "cat": "kernel", "name": "gemm", "ts": 1, "dur": 2},
    ]
    raw = run / "rank-00000" / "trace.json.gz"
    raw.write_bytes(gzip.compress(json.dumps({"traceEvents": events}).encode()))
    before = raw.read_bytes()
    assert cli.main(["export", str(run), "--torch-tb", str(tmp_path / "tb")]) == 0
    (file,) = (tmp_path / "tb" / "tiny").iterdir()
    assert file.name.startswith("node0_00000.")
    assert file.name.endswith(".pt.trace.json.gz")
    written = json.loads(gzip.decompress(file.read_bytes()))["traceEvents"]
    assert [(e["cat"], e["name"]) for e in written] == [
        ("Runtime", "cudaLaunchKernel"),
        ("user_annotation", "nccl:all_gather"),
        ("kernel", "gemm"),
    ]
    assert raw.read_bytes() == before
    assert cli.main(["export", str(run), "--torch-tb", str(tmp_path / "tb")]) == 2


def test_only_telling_ranks_are_exported_to_torch_tb_profiler(tmp_path: Path) -> None:
    profile = measured(ranks=4, layout="dp=4")  # rank r is r us slower
    save_profile(profile, tmp_path / "run")
    packed = gzip.compress(b'{"traceEvents": []}')
    for rank in range(4):
        (tmp_path / "run" / f"rank-{rank:05d}" / "trace.json.gz").write_bytes(packed)
    files = export_torch_tb(tmp_path / "run", profile, tmp_path / "tb")
    assert [f.name.split(".")[0] for f in files] == ["node0_00000", "node0_00003"]


def test_a_trace_too_large_for_the_tab_is_refused(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch_tb, "MAX_TRACE_BYTES", 100)
    packed = gzip.compress(json.dumps({"traceEvents": [{}] * 100}).encode())
    (run / "rank-00000" / "trace.json.gz").write_bytes(packed)
    assert cli.main(["export", str(run), "--torch-tb", str(tmp_path / "tb")]) == 2
    assert "too much for the tab" in capsys.readouterr().err
    assert not list((tmp_path / "tb").iterdir())
