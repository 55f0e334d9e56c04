"""The decorator and the session around real training loops: what is written, when, and what the user notices."""

from __future__ import annotations

import asyncio
import inspect
import logging
import os
import signal
import subprocess
import sys
from collections.abc import AsyncGenerator, Iterator
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import nn

import llmprof
from llmprof.errors import RequestError
from llmprof.hooks import session as session_module
from llmprof.schema.operators import MATMUL_FAMILIES

VOCAB, SEQ, BATCH = 32, 8, 4


class Model(nn.Module):
    """Embedding, two equal blocks, head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, 16)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(16, 16), nn.ReLU()) for _ in range(2))
        self.head = nn.Linear(16, VOCAB)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


def steps(count: int) -> Iterator[int]:
    """A training loop without a DataLoader; yields after each optimizer step."""
    torch.manual_seed(0)
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters())
    for number in range(count):
        tokens = torch.randint(0, VOCAB, (BATCH, SEQ))
        loss = nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        yield number


def train(count: int = 17) -> None:
    for _ in steps(count):
        pass


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, llmprof.Profile]:
    """One run of 17 steps with a window of 3 and a workload."""
    directory = tmp_path_factory.mktemp("runs") / "a"
    with llmprof.session(logdir=directory, wait=3, warmup=1, active=3, trace=True):
        train()
    return directory, llmprof.load_profile(directory)


def test_run_is_complete_and_says_what_it_is(run: tuple[Path, llmprof.Profile]) -> None:
    manifest = run[1].manifest
    assert (manifest.status, manifest.kind, manifest.world_size) == ("complete", "measured", 1)
    assert manifest.layout == f"dp=1,mb={BATCH}"
    assert manifest.window == (4, 5, 6)
    assert manifest.precision == "float32"
    assert manifest.warnings == ()
    matmuls = [r for r in run[1].operators if r.family in MATMUL_FAMILIES and r.dtype == "float32"]
    assert manifest.peak_flops == pytest.approx(max(r.flops / (r.time_us * 1e-6) for r in matmuls))
    assert any("fastest matmul" in line for line in manifest.assumptions)
    kept = [row.size_bytes for row in run[1].memory if row.category == "activations"]
    assert run[1].workload is not None and len(kept) == 1 and kept[0] > 0
    (source,) = run[1].sources
    assert source.device == "cpu" and source.threads == torch.get_num_threads() and source.backend == ""


def test_steps_are_labelled(run: tuple[Path, llmprof.Profile]) -> None:
    rows = run[1].steps
    assert [row.step for row in rows] == list(range(17))
    assert [row.kind for row in rows] == ["warmup"] * 3 + ["train"] * 13 + ["outlier"]
    assert [row.step for row in rows if row.instrumented] == [4, 5, 6]
    assert {row.tokens for row in rows[2:]} == {BATCH * SEQ}
    assert {row.sequences for row in rows[2:]} == {BATCH}
    starts = [row.start_us for row in rows]
    assert starts == sorted(starts)
    plain = [(a, b) for a, b in pairwise(rows) if not a.instrumented and not b.instrumented]
    assert len(plain) == 12 and all(a.start_us + a.duration_us <= b.start_us + 1 for a, b in plain)


def test_phases_partition_each_step_of_the_window(run: tuple[Path, llmprof.Profile]) -> None:
    profile = run[1]
    for row in profile.steps:
        if row.instrumented:
            parts = [p.exclusive_us for p in profile.phases if p.step == row.step]
            assert sum(parts) == pytest.approx(row.duration_us, rel=1e-9)


def test_model_flops_follow_from_the_shapes(run: tuple[Path, llmprof.Profile]) -> None:
    """Each matmul parameter costs 2 FLOPs forward and 4 backward for each token; the embedding costs none."""
    parameters = 2 * 16 * 16 + 16 * VOCAB
    assert run[1].manifest.model_flops_per_step == 6 * parameters * BATCH * SEQ


def test_memory_is_that_of_the_model(run: tuple[Path, llmprof.Profile]) -> None:
    rows = {row.category: row.size_bytes for row in run[1].memory}
    assert rows["parameters"] == 4 * sum(p.numel() for p in Model().parameters())
    assert 0 < rows["framework"] <= rows["peak"]


def test_workload_and_raw_trace_are_beside_the_run(run: tuple[Path, llmprof.Profile]) -> None:
    workload = run[1].workload
    assert workload is not None
    assert (workload.batch, workload.seq, workload.accum, workload.dp) == (BATCH, SEQ, 1, 1)
    assert (run[0] / "rank-00000" / "trace.json.gz").stat().st_size > 100


def test_scalars_are_in_the_run_directory(run: tuple[Path, llmprof.Profile]) -> None:
    events = EventAccumulator(str(run[0]))
    events.Reload()
    times = events.Scalars("llmprof/step_time_ms")
    assert [event.step for event in times] == list(range(17))
    plain = next(row for row in run[1].steps if row.step == 10)
    assert times[10].value == pytest.approx(plain.duration_us / 1e3, rel=1e-5)
    tokens = {event.step: event.value for event in events.Scalars("llmprof/tokens_per_s")}
    assert tokens[10] == pytest.approx(BATCH * SEQ / plain.duration_us * 1e6, rel=1e-5)


def test_decorator_keeps_signature_result_and_exception(tmp_path: Path) -> None:
    @llmprof.profile(logdir=tmp_path, workload=False)
    def fit(count: int, *, fail: bool = False) -> str:
        """Trains."""
        train(count)
        if fail:
            raise KeyError("mine")
        return "done"

    assert str(inspect.signature(fit)) == "(count: 'int', *, fail: 'bool' = False) -> 'str'"
    assert (fit.__name__, fit.__doc__) == ("fit", "Trains.")
    assert fit(4) == "done"
    with pytest.raises(KeyError, match="mine"):
        fit(6, fail=True)
    profile = llmprof.load_profile(tmp_path)
    assert len(profile.steps) == 6 and profile.manifest.status == "complete"


def test_bare_decorator_writes_into_the_default_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)

    @llmprof.profile
    def fit() -> None:
        train(2)

    fit()
    assert len(llmprof.load_profile("runs/llmprof").steps) == 2


def test_coroutines_and_generators_are_captured_while_they_run(tmp_path: Path) -> None:
    @llmprof.profile(logdir=tmp_path / "generator", workload=False)
    def generate() -> Iterator[int]:
        yield from steps(3)

    @llmprof.profile(logdir=tmp_path / "coroutine", workload=False)
    async def fit() -> None:
        train(3)

    assert list(generate()) == [0, 1, 2]
    asyncio.run(fit())
    for name in ("generator", "coroutine"):
        assert len(llmprof.load_profile(tmp_path / name).steps) == 3


def test_nested_use_joins_the_outer_session(tmp_path: Path) -> None:
    @llmprof.profile(logdir=tmp_path / "inner")
    def fit() -> None:
        with llmprof.session(logdir=tmp_path / "innermost") as innermost:
            assert innermost.path == tmp_path / "outer"
            for _ in innermost.data(steps(3)):
                pass

    with llmprof.session(logdir=tmp_path / "outer", workload=False):
        fit()
        fit()
    assert len(llmprof.load_profile(tmp_path / "outer").steps) == 6
    assert [p.name for p in tmp_path.iterdir()] == ["outer"]


def test_switched_off_it_does_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLMPROF", "0")

    def fit() -> None:
        train(2)

    assert llmprof.profile(logdir=tmp_path / "a")(fit) is fit
    with llmprof.session(logdir=tmp_path / "a") as session, session.region("x"):
        batches = [1, 2]
        assert list(session.data(batches)) == batches
        session.step()
    assert not (tmp_path / "a").exists()


def test_without_a_step_the_run_says_how_to_mark_them(tmp_path: Path) -> None:
    with llmprof.session(logdir=tmp_path):
        pass
    profile = llmprof.load_profile(tmp_path)
    assert profile.steps == ()
    assert "no step was seen" in profile.manifest.warnings[0]
    assert "session.step()" in profile.manifest.warnings[0]


def test_a_run_that_is_too_short_says_so(tmp_path: Path) -> None:
    with llmprof.session(logdir=tmp_path, wait=5, warmup=2, workload=False):
        train(6)
    warnings = llmprof.load_profile(tmp_path).manifest.warnings
    assert any("ended after 6 steps, before the profiled window at step 7" in text for text in warnings)


def test_explicit_steps_and_regions(tmp_path: Path) -> None:
    with llmprof.session(logdir=tmp_path, wait=1, warmup=0, active=2, workload=False) as session:
        for number in steps(12):
            if number == 8:
                with session.region("checkpoint"):
                    pass
            with session.region("logging"):
                pass
            session.step(tokens=77)
    profile = llmprof.load_profile(tmp_path)
    assert [row.tokens for row in profile.steps] == [77] * 12
    assert [row.step for row in profile.steps if row.kind == "checkpoint"] == [8]
    (region,) = [row for row in profile.host if row.name == "region.logging_us"]
    assert region.n == 12


def test_windows_repeat_and_the_median_one_is_kept(tmp_path: Path) -> None:
    with llmprof.session(logdir=tmp_path, wait=2, warmup=1, active=2, repeat=2, workload=False):
        train(14)
    profile = llmprof.load_profile(tmp_path)
    assert [row.step for row in profile.steps if row.instrumented] == [3, 4, 8, 9]
    assert profile.manifest.window in ((3, 4), (8, 9))


def test_another_profiler_is_left_alone(tmp_path: Path) -> None:
    other = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU])
    with other, llmprof.session(logdir=tmp_path, wait=3, warmup=0, active=1, workload=False):
        train(6)
    assert any(event.key == "aten::mm" or event.key == "aten::addmm" for event in other.key_averages())
    profile = llmprof.load_profile(tmp_path)
    assert profile.operators == () and len(profile.steps) == 6
    assert any("another profiler was active" in text for text in profile.manifest.warnings)


def test_an_exception_ends_the_run_and_keeps_what_was_captured(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), llmprof.session(logdir=tmp_path, wait=1, warmup=0, active=2):
        for number in steps(9):
            if number == 7:
                raise ZeroDivisionError
    profile = llmprof.load_profile(tmp_path)
    assert profile.manifest.status == "complete" and len(profile.steps) == 8
    assert profile.operators and profile.workload is None
    assert any("ended with an exception" in text for text in profile.manifest.warnings)


def test_a_larger_earlier_run_leaves_nothing_behind(tmp_path: Path) -> None:
    for name in ("rank-00001", "rank-00002"):
        (tmp_path / name).mkdir()
    (tmp_path / "workload.json").write_text("{}")
    (tmp_path / "events.out.tfevents.1.mine").write_text("of the user")
    with llmprof.session(logdir=tmp_path, workload=False):
        train(2)
    assert sorted(p.name for p in tmp_path.glob("rank-*")) == ["rank-00000"]
    assert not (tmp_path / "workload.json").exists()
    assert (tmp_path / "events.out.tfevents.1.mine").exists()


@pytest.mark.parametrize(
    ("options", "message"), [({"wait": -1}, "wait=-1"), ({"active": 1.5}, "active=1.5"), ({"steps": 3}, "unknown option 'steps'")]
)  # fmt: skip
def test_wrong_options_are_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        llmprof.session(**options)  # type: ignore[arg-type]
    with pytest.raises(RequestError, match=message):
        llmprof.profile(**options)  # type: ignore[call-overload]


def test_closing_twice_and_stepping_after_it_are_harmless(tmp_path: Path) -> None:
    session = llmprof.session(logdir=tmp_path, workload=False)
    session.open()
    train(2)
    session.close()
    session.close()
    session.step()
    assert len(llmprof.load_profile(tmp_path).steps) == 2


KILLED = """
import os, signal, sys
sys.path.insert(0, {tests!r})
import llmprof
from test_session import steps
with llmprof.session(logdir={logdir!r}, wait=1, warmup=0, active=2):
    for number in steps(100):
        if number == {at}:
            os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize(("at", "has_operators"), [(3, False), (12, True)])
def test_a_killed_run_stays_readable(tmp_path: Path, at: int, has_operators: bool) -> None:
    code = KILLED.format(tests=str(Path(__file__).parent), logdir=str(tmp_path), at=at)
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, check=False, capture_output=True)
    assert done.returncode == -signal.SIGKILL, done.stderr
    profile = llmprof.load_profile(tmp_path)
    assert profile.manifest.status == "partial"
    assert [row.step for row in profile.steps] == list(range(at))
    assert bool(profile.operators) == has_operators


def test_errors_of_ours_are_counted_logged_once_and_switch_us_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from llmprof.hooks.steplog import StepLog

    def fail(self: StepLog) -> None:
        raise RuntimeError("disk full")

    monkeypatch.setattr(StepLog, "flush", fail)
    session = llmprof.session(logdir=tmp_path, workload=False)
    with caplog.at_level(logging.WARNING, logger="llmprof"), session:
        train(8)
    messages = [record.getMessage() for record in caplog.records]
    assert sum("disk full" in text for text in messages) == 1
    assert any("switched off after 3 errors" in text for text in messages)


def test_a_full_disk_at_the_end_does_not_reach_the_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(self: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("llmprof.schema.store.RunWriter.close", fail)
    with llmprof.session(logdir=tmp_path, workload=False):
        pass


def test_asynchronous_generators_are_captured_while_they_run(tmp_path: Path) -> None:
    @llmprof.profile(logdir=tmp_path, workload=False)
    async def train() -> AsyncGenerator[object, int]:
        sent = yield session_module._current.get() is not None
        try:
            yield sent + 1
        except ValueError as error:
            yield str(error)

    async def main() -> list[object]:
        items = train()
        found = [await anext(items), await items.asend(7), await items.athrow(ValueError("thrown in"))]
        with pytest.raises(StopAsyncIteration):
            await anext(items)
        return found

    assert asyncio.run(main()) == [True, 8, "thrown in"]
