"""Windows never harm the run: errors, hooks, compiled code, other profilers, and what a window leaves behind."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch import nn

from llmprof.hooks import private
from llmprof.hooks.modules import ModuleNames
from llmprof.hooks.recorder import Recorder, Recording
from tests.models import TinyLlama
from tests.recorded_loops import LAYERS, LINEARS, Loop, decoder_recording
from tests.recording import STEPS, calls, record, recorder_of, rows


def test_an_exception_reaches_the_user_and_leaves_no_scope_open() -> None:
    class Fragile(nn.Module):
        fail = False

        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y: torch.Tensor = self.inner(x)
            if self.fail:
                raise ValueError("bad batch")
            return y.tanh()

    fragile = Fragile()
    model = nn.Sequential(fragile, nn.Linear(8, 2))
    x = torch.randn(4, 8)
    recorder = recorder_of(model)
    recorder.start()
    recorder.mark_step(0)
    fragile.fail = True
    with pytest.raises(ValueError, match="bad batch"):
        model(x)
    fragile.fail = False
    x.sigmoid()
    model(x).sum().backward()
    recorder.mark_step(1)
    recording = recorder.stop()
    assert {row.module for row in rows(recording, "sigmoid")} == {""}
    assert {(row.module, row.count) for row in rows(recording, "addmm")} == {("0.inner", 2), ("1", 1)}


def test_hook_errors_are_counted_and_never_reach_the_model() -> None:
    class Broken(ModuleNames):
        def label(self, module: nn.Module) -> tuple[str, bool]:
            raise KeyError(type(module).__name__)

    model, x = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)), torch.randn(4, 8)
    recorder = Recorder(Broken(), rank=0, device="cpu")
    recorder.start()
    recorder.mark_step(0)
    expected = model(x)
    recorder.mark_step(1)
    recording = recorder.stop()
    assert torch.equal(expected, model(x))
    assert recording.warnings == ("module hooks failed 3 times, the first time with KeyError: 'Sequential'",)
    assert calls(rows(recording, "addmm")) == 3


def test_training_is_bit_identical_and_the_users_hooks_stay() -> None:
    def losses(recorded: bool) -> list[float]:
        torch.manual_seed(1)
        model = TinyLlama(layers=1)
        loop = Loop(model)
        if recorded:
            record(loop, model)
        else:
            for _ in range(1 + STEPS):
                loop()
        return loop.losses

    seen: list[str] = []
    handle = nn.modules.module.register_module_forward_pre_hook(lambda m, a: seen.append(type(m).__name__))
    try:
        assert losses(True) == losses(False)
        assert seen.count("TinyLlama") == 2 * (1 + STEPS)
    finally:
        handle.remove()
    hooks = nn.modules.module
    assert not hooks._global_forward_pre_hooks and not hooks._global_forward_hooks
    assert not hooks._global_forward_hooks_always_called


def test_nothing_is_kept_alive_after_the_window() -> None:
    model = TinyLlama(layers=1)
    names = ModuleNames()
    names.add(model)
    recorder = Recorder(names, rank=0, device="cpu")
    recorder.start()
    recorder.mark_step(0)
    model(torch.zeros(1, 4, dtype=torch.long)).sum().backward()
    recorder.mark_step(1)
    recorder.stop()
    reference = weakref.ref(model)
    del model
    gc.collect()
    assert reference() is None


def test_a_window_inside_another_profiler_is_refused() -> None:
    model, x = nn.Linear(4, 4), torch.randn(2, 4)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        assert private.profiler_active()
        recorder = recorder_of(model)
        recorder.start()
        recorder.mark_step(0)
        model(x)
        recording = recorder.stop()
    assert not recorder.active and recording.operators == ()
    assert "another torch profiler" in recording.warnings[0]
    assert any(event.name == "aten::addmm" for event in profiler.events())
    assert not private.profiler_active()


def test_windows_without_a_step_or_a_start_say_so() -> None:
    assert recorder_of().stop() == Recording()
    recorder = recorder_of()
    recorder.start()
    assert recorder.active
    recording = recorder.stop()
    assert recording.warnings == ("no operators recorded: the window holds no complete step",)


def test_spans_show_the_median_step_and_point_at_their_rows() -> None:
    recording = decoder_recording()
    durations = dict(recording.steps)
    limit = max(durations.values())
    assert recording.spans
    for span in recording.spans:
        assert span.stream == "main" and span.table == "operators"
        assert recording.operators[span.row].op == span.name
        assert 0 <= span.start_us <= limit
    assert len(recording.spans) == sum(row.count for row in recording.operators)


def test_host_rows_hold_the_dispatch_cost() -> None:
    found = {row.name: row for row in decoder_recording().host}
    assert found["dispatch_us_per_operator"].n == STEPS
    assert found["dispatch_us_per_operator"].value > 0
    assert found["profiler_stop_us"].value > 0
    assert "dtensor_dispatch_us_per_op" not in found


@pytest.mark.filterwarnings("ignore:Using `torch.compile")
def test_a_window_breaks_no_graph_and_compiles_nothing() -> None:
    counters = torch._dynamo.utils.counters
    torch._dynamo.reset()
    counters.clear()
    model = TinyLlama(layers=LAYERS)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    loop = Loop(compiled)  # type: ignore[arg-type]
    loop()
    frames = dict(counters["frames"])
    recording = record(loop, model)
    assert dict(counters["frames"]) == frames and not counters["graph_break"]
    assert len(loop.losses) == 2 + STEPS
    assert any("compiled regions are opaque" in warning for warning in recording.warnings)
    assert calls(rows(recording, "mm")) == 3 * LINEARS
    assert not any(row.attributed for row in rows(recording, "mm"))
    assert recording.attributed_fraction is not None and recording.attributed_fraction < 0.97
