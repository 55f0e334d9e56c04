"""`llmprof forecast` of a model that was never captured: its subject, its assumptions, and requests that contradict."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from llmprof import cli
from llmprof.schema.model import ModelShape
from llmprof.schema.store import load_workload
from llmprof.schema.workload import Workload
from tests.programs import objects

MODEL = "llama:layers=4,hidden=64,heads=8,vocab=256"
ASK = ["--cluster", "8xH100-SXM", "--layout", "dp=2,tp=4", "--json"]
CONFIG = {
    "model_type": "llama",
    "num_hidden_layers": 4,
    "hidden_size": 64,
    "intermediate_size": 176,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": 256,
    "max_position_embeddings": 8192,
}


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """A small captured Llama takes the place of the reference decoder; what it is asked for is noted."""
    requests: list[dict[str, Any]] = []

    def reference_workload(shape: ModelShape, *, degrees: Iterable[tuple[int, bool]]) -> Workload:
        requests.append({"shape": shape, "degrees": list(degrees)})
        return load_workload(Path(__file__).parent / "data" / "tiny_llama_workload.json")

    module = ModuleType("llmprof.schema.reference")
    module.reference_workload = reference_workload  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "llmprof.schema.reference", module)
    return requests


def forecast(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    """The forecast printed for a request that has one."""
    assert cli.main(["forecast", *arguments, *ASK]) == 0
    (found,) = objects(capsys)
    return found


def test_a_typed_model_is_forecast_with_its_assumptions(
    asked: list[dict[str, Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    found = forecast(capsys, "--model", MODEL)
    assert found["assumptions"][0].startswith("spec-sheet estimate")
    assert "reference decoder, implementation profile eager, not captured" in found["assumptions"]
    assert "defaults of family llama: ffn=256, kv_heads=8, seq=4096" in found["assumptions"]
    assert asked[0]["degrees"] == [(4, False)]
    assert asked[0]["shape"].layers == 4
    assert not any("as captured" in line for line in found["assumptions"])


def test_a_fused_implementation_is_named_and_faster(
    asked: list[dict[str, Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    eager = forecast(capsys, "--model", MODEL)
    fused = forecast(capsys, "--model", MODEL, "--implementation", "megatron")
    assert "reference decoder, implementation profile megatron, not captured" in fused["assumptions"]
    assert fused["step_time_s"]["p50"] < eager["step_time_s"]["p50"]
    assert fused["naive_step_time_s"] == pytest.approx(eager["naive_step_time_s"], rel=1e-9)


@pytest.mark.parametrize("as_model", [True, False])
def test_a_config_of_hugging_face_is_a_model_too(
    asked: list[dict[str, Any]], capsys: pytest.CaptureFixture[str], tmp_path: Path, as_model: bool
) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(CONFIG))
    found = forecast(capsys, *(["--model", str(path)] if as_model else [str(path)]))
    assert asked[0]["shape"].kv_heads == 4
    assert any("not the 8192 positions" in line for line in found["assumptions"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "neither a run nor --model was given"),
        (["RUN", "--model", MODEL], "both a run and --model were given"),
        (["WORKLOAD", "--implementation", "te"], "--implementation te is for models that were not captured"),
        (["--model", "lama:layers=2"], "model family 'lama'"),
        (["--model", "WORKLOAD"], "has no model_type"),
        (["--model", "MAMBA"], "model_type 'mamba' is not one of"),
        (["--model", MODEL, "--implementation", "fast"], "invalid choice: 'fast'"),
    ],
)
def test_contradicting_requests_are_refused_in_one_line(
    asked: list[dict[str, Any]],
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    arguments: list[str],
    message: str,
) -> None:
    workload = tmp_path / "workload.json"
    workload.write_bytes((Path(__file__).parent / "data" / "tiny_llama_workload.json").read_bytes())
    mamba = tmp_path / "config.json"
    mamba.write_text(json.dumps({**CONFIG, "model_type": "mamba"}))
    places = {"RUN": str(tmp_path), "WORKLOAD": str(workload), "MAMBA": str(mamba)}
    assert cli.main(["forecast", *(places.get(a, a) for a in arguments), *ASK]) == 2
    (found,) = objects(capsys)
    error = found["error"]
    assert isinstance(error, dict)
    assert message in error["message"]
    assert error["hint"]
    assert not asked
