"""Operators are rebuilt from their rows, timed within a budget, and price the next forecast."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest
import torch

from llmprof import cli
from llmprof.extrapolate.forecast import Forecaster
from llmprof.extrapolate.lacking import lacking_calls
from llmprof.hooks.measure_arguments import CannotRebuild, rebuild
from llmprof.hooks.measure_run import (
    Budget,
    Skipped,
    measure_all,
    operator_row,
    present_device,
    torch_instrument,
)
from llmprof.hooks.measure_sweep import FAMILIES, sweep_calls
from llmprof.hooks.measure_timing import Effort, OutOfTime, Timing
from llmprof.hooks.measure_values import Values
from llmprof.schema.layout import Layout
from llmprof.schema.measurements import IN_RUN, MeasurementWriter, OpCall, Wanted, read_measurements
from llmprof.schema.operators import Tensor
from llmprof.schema.profile import Profile
from llmprof.schema.store import save_profile
from tests.workloads import cpu_cluster, profile

CAUSAL = frozenset({"causal"})
FLASH = "aten::_scaled_dot_product_flash_attention_for_cpu"


def _t(*shape: int, dtype: str = "float32", group: int = 0) -> Tensor:
    return Tensor(shape, dtype, group)


REBUILT = {
    "linear": OpCall(op="aten::mm", inputs=(_t(6, 4), _t(4, 8)), outputs=(_t(6, 8),)),
    "bias": OpCall(op="aten::addmm", inputs=(_t(8), _t(6, 4), _t(4, 8)), outputs=(_t(6, 8),)),
    "batched": OpCall(op="aten::bmm", inputs=(_t(2, 6, 4), _t(2, 4, 8)), outputs=(_t(2, 6, 8),)),
    "add in place": OpCall(op="aten::add_", inputs=(_t(6, 4), _t(6, 4)), outputs=(_t(6, 4),)),
    "number": OpCall(op="aten::mul", inputs=(_t(6, 4),), outputs=(_t(6, 4),)),
    "square": OpCall(op="aten::pow", inputs=(_t(6, 4),), outputs=(_t(6, 4),)),
    "mean of rows": OpCall(op="aten::mean", inputs=(_t(6, 4),), outputs=(_t(6, 1),)),
    "cast": OpCall(op="aten::_to_copy", inputs=(_t(6, 4),), outputs=(_t(6, 4, dtype="bfloat16"),)),
    "norm": OpCall(
        op="aten::native_layer_norm", inputs=(_t(6, 4), _t(4), _t(4)), outputs=(_t(6, 4), _t(6, 1), _t(6, 1))
    ),
    "lookup": OpCall(
        op="aten::embedding", inputs=(_t(9, 4), _t(2, 3, dtype="int64")), outputs=(_t(2, 3, 4),)
    ),
    "lookup backward": OpCall(
        op="aten::embedding_dense_backward",
        inputs=(_t(2, 3, 4), _t(2, 3, dtype="int64")),
        outputs=(_t(9, 4),),
    ),
    "loss": OpCall(
        op="aten::nll_loss_forward", inputs=(_t(6, 9), _t(6, dtype="int64")), outputs=(_t(), _t())
    ),
    "attention": OpCall(
        op=FLASH, inputs=(_t(2, 3, 8, 4),) * 3, outputs=(_t(2, 3, 8, 4), _t(2, 3, 8)), attributes=CAUSAL
    ),
    "attention backward": OpCall(
        op=f"{FLASH}_backward",
        inputs=(*(_t(2, 3, 8, 4),) * 5, _t(2, 3, 8)),
        outputs=(_t(2, 3, 8, 4),) * 3,
        attributes=CAUSAL,
        phase="backward_input",
    ),
    "optimizer": OpCall(
        op="aten::_fused_adamw_", inputs=tuple(_t(4, 4, group=g) for g in (1, 2, 3, 4) for _ in range(3))
    ),
    "list": OpCall(op="aten::_foreach_mul_", inputs=(_t(4, 4, group=1), _t(8, group=1))),
    "joined": OpCall(op="aten::cat", inputs=(_t(2, 4, group=1), _t(3, 4, group=1)), outputs=(_t(5, 4),)),
    "split": OpCall(op="aten::sum", inputs=(_t(2, 3, 4),), outputs=(_t(4),)),
}


@pytest.mark.parametrize("name", REBUILT)
def test_a_call_is_rebuilt_so_that_it_gives_the_recorded_results(name: str) -> None:
    call = REBUILT[name]
    found = rebuild(call, "cpu")
    args, kwargs = found.make(Values("cpu"))
    with torch.no_grad():
        out = found.run(*args, **kwargs)
    results = [t for t in (out if isinstance(out, (tuple, list)) else [out]) if isinstance(t, torch.Tensor)]
    assert [tuple(t.shape) for t in results][: len(call.outputs)] == [t.shape for t in call.outputs]
    assert all(bool(t.isfinite().all()) for t in results if t.is_floating_point())


def test_an_operand_of_a_linear_layer_is_the_transposed_view_that_it_was() -> None:
    forward, weight_gradient = REBUILT["linear"], _in_phase(REBUILT["linear"], "backward_weight")
    _, weight = rebuild(forward, "cpu").make(Values("cpu"))[0]
    assert weight.stride() == (1, 4)
    gradient, _ = rebuild(weight_gradient, "cpu").make(Values("cpu"))[0]
    assert gradient.stride() == (1, 6)


def _in_phase(call: OpCall, phase: str) -> OpCall:
    return OpCall(
        op=call.op, inputs=call.inputs, outputs=call.outputs, attributes=call.attributes, phase=phase
    )


@pytest.mark.parametrize(
    ("call", "reason"),
    [
        (OpCall(op="c10d::allreduce_", inputs=(_t(4),)), "collective"),
        (OpCall(op="aten::no_such_operator", inputs=(_t(4),)), "torch has no operator"),
        (OpCall(op="nobody::mm", inputs=(_t(4),)), "torch has no operator"),
        (OpCall(op="aten::mm", inputs=(_t(4, 4, dtype="float77"),) * 2), "no dtype float77"),
        (OpCall(op="aten::mm", inputs=(_t(4, 5), _t(4, 5))), "refuses its arguments"),
        (OpCall(op="aten::mm", inputs=(_t(4, 5), _t(5, 6)), outputs=(_t(7, 7),)), "recorded results 7x7"),
        (OpCall(op="aten::mm", inputs=()), "no tensor with a shape"),
        (OpCall(op="aten::index_put_", inputs=(_t(4, 5), _t(2, 5))), "indices"),
    ],
)
def test_what_cannot_be_rebuilt_says_why(call: OpCall, reason: str) -> None:
    with pytest.raises(CannotRebuild, match=reason):
        rebuild(call, "cpu")


class _Clock:
    """Seconds that pass when someone says so."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def _wanted(*estimates_s: float) -> list[Wanted]:
    return [
        Wanted(call=OpCall(op="aten::mm", inputs=(_t(i + 1, 4), _t(4, 8))), estimate_s=s)
        for i, s in enumerate(estimates_s)
    ]


def _takes(clock: _Clock, factor: float) -> object:
    """An instrument that takes what it may, times a factor."""

    def instrument(call: OpCall, effort: Effort) -> Timing:
        clock.now += effort.seconds * factor
        return Timing(10.0, 1.0, 5, 10.0, 10.0)

    return instrument


@pytest.mark.parametrize("factor", [0.5, 1.0, 1.4])
def test_a_budget_is_spent_and_not_overrun(factor: float) -> None:
    clock = _Clock()
    budget = Budget(6.0, clock=clock)
    outcome = measure_all(_wanted(*[0.001] * 100), _takes(clock, factor), budget=budget, device="cpu")  # type: ignore[arg-type]
    assert len(outcome.measured) + len(outcome.remaining) == 100
    assert outcome.remaining
    assert 5.4 <= budget.spent_s <= 6.6


def test_calls_that_would_outlast_the_budget_are_left_and_smaller_ones_behind_them_are_not() -> None:
    clock = _Clock()
    outcome = measure_all(
        _wanted(5.0, 0.001, 4.0, 0.001),
        _takes(clock, 1.0),  # type: ignore[arg-type]
        budget=Budget(2.0, clock=clock),
        device="cpu",
    )
    assert [w.estimate_s for w in outcome.remaining] == [5.0, 4.0]
    assert len(outcome.measured) == 2


def test_one_operator_that_fails_or_comes_too_late_stops_no_other() -> None:
    def instrument(call: OpCall, effort: Effort) -> Timing:
        if call.inputs[0].shape[0] == 1:
            raise CannotRebuild("because")
        if call.inputs[0].shape[0] == 2:
            raise OutOfTime
        return Timing(10.0, 1.0, 5, 11.0, 9.0)

    seen: list[object] = []
    outcome = measure_all(
        _wanted(0.1, 0.1, 0.1), instrument, budget=Budget(None), device="cpu", done=seen.append
    )
    assert [s.reason for s in outcome.skipped] == ["because"]
    assert [w.call.inputs[0].shape[0] for w in outcome.remaining] == [2]
    assert [m.call.inputs[0].shape[0] for m in outcome.measured] == [3]
    assert isinstance(seen[0], Skipped)
    assert len(seen) == 2


def test_a_row_of_a_measured_call_is_no_part_of_the_step() -> None:
    row = operator_row(REBUILT["linear"], Timing(10.0, 1.0, 5, 11.0, 9.0), "cpu")
    assert (row.time_us, row.time_iqr_us, row.time_n, row.count) == (10.0, 1.0, 5, 0.0)
    assert (row.shapes, row.dtype, row.family) == ("6x4,4x8", "float32", "matmul")
    assert row.flops == 2 * 6 * 4 * 8
    assert row.host_us is None


def test_times_grow_with_the_work() -> None:
    """Ratios alone: 64 times the FLOPs take clearly longer on any machine."""
    measure = torch_instrument("cpu")
    times = [
        measure(
            OpCall(op="aten::mm", inputs=(_t(n, n), _t(n, n)), outputs=(_t(n, n),)),
            Effort(seconds=0.2, deadline=float("inf")),
        ).median_us
        for n in (64, 256)
    ]
    assert times[1] > 4 * times[0]


def test_a_forecast_of_another_layout_lacks_its_shapes_until_they_are_measured() -> None:
    subject, cluster = profile(), cpu_cluster()
    layout = Layout.parse("tp=2,mb=2")
    wanted = lacking_calls([Forecaster(subject, cluster).simulate(layout)])
    shapes = {w.call.key for w in wanted}
    assert shapes
    assert all(w.importance >= 0 and w.estimate_s > 0 for w in wanted)
    rows = tuple(operator_row(w.call, Timing(5.0, 0.1, 9, 5.0, 5.0), "cpu") for w in wanted)
    priced = msgspec.structs.replace(subject, operators=rows)
    assert lacking_calls([Forecaster(priced, cluster).simulate(layout)]) == ()


def test_importance_is_the_share_of_the_step_times_the_spread() -> None:
    subject, cluster = profile(), cpu_cluster()
    once = Forecaster(subject, cluster).simulate(Layout.parse("mb=2"))
    matmuls = [w for w in lacking_calls([once]) if w.call.op == "aten::mm"]
    prices = once.machine.prices.operators
    for w in matmuls:
        price = prices.price(w.call.op, w.call.inputs, w.call.outputs)
        times = w.importance / (price.spread * price.time_s / float(once.step_s[0]))
        assert times == pytest.approx(round(times), rel=1e-6)  # a whole number of calls
        assert round(times) >= 1


@pytest.fixture
def here() -> Profile:
    """A run that was captured on this machine."""
    _, source = present_device()
    return msgspec.structs.replace(profile(), sources=(msgspec.structs.replace(source, backend="gloo"),))


@pytest.mark.skipif(torch.cuda.is_available(), reason="times a CPU")
def test_the_command_stores_what_it_measured_and_forecasts_use_it(
    tmp_path: Path, here: Profile, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    save_profile(here, run)
    asked = ["measure", str(run), "--layout", "tp=2,mb=2", "--json"]
    assert cli.main(asked) == 0
    first = json.loads(capsys.readouterr().out)
    assert first["measured"]
    assert first["stored_in"] == str(run / IN_RUN)
    assert len(read_measurements(run / IN_RUN).operators) == len(first["measured"])
    (forecast,) = first["forecasts"]
    assert forecast["after"]["assumed_fraction"] < forecast["before"]["assumed_fraction"]
    assert cli.main(asked) == 0
    second = json.loads(capsys.readouterr().out)
    assert not second["measured"]
    assert second["forecasts"][0]["after"]["p50"] == pytest.approx(forecast["after"]["p50"])
    code = cli.main(["forecast", str(run), "--cluster", "local", "--layout", "tp=2,mb=2", "--json"])
    printed = json.loads(capsys.readouterr().out)
    assert code == 0
    assert printed["step_time_s"]["p50"] == pytest.approx(forecast["after"]["p50"])
    assert printed["measured_fraction"] > 0


@pytest.mark.skipif(torch.cuda.is_available(), reason="times a CPU")
def test_a_sweep_becomes_a_table_that_prices_a_model_by_its_sizes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    table = tmp_path / "here.jsonl"
    asked = ["measure", "--sweep", "norm,optimizer", "--budget", "2s", "-o", str(table)]
    assert cli.main(asked) == 0
    assert "kept in" in capsys.readouterr().out
    names = {row.op for row in read_measurements(table).operators}
    assert "aten::native_layer_norm" in names
    assert "aten::_fused_adamw_" in names
    model = ["--model", "gpt:layers=2,hidden=64,heads=4,vocab=256", "--seq", "32", "--global-batch", "2"]
    forecast = [
        "forecast",
        *model,
        "--cluster",
        "local",
        "--layout",
        "dp=1",
        "--measured",
        str(table),
        "--json",
    ]
    assert cli.main(forecast) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["interpolated_fraction"] > 0
    other = [*forecast[:-1]]
    other[other.index("local")] = "8xH100-SXM"
    assert cli.main(other) == 2
    assert "never price another" in capsys.readouterr().err


def test_every_sweep_names_operators_that_can_be_rebuilt() -> None:
    seen: set[str] = set()
    for wanted in sweep_calls("all", "cpu"):
        if wanted.call.op not in seen:
            seen.add(wanted.call.op)
            rebuild(wanted.call, "cpu")
    assert len(seen) >= 2 * len(FAMILIES) - 2


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "neither a run nor --sweep"),
        (["RUN", "--sweep", "all"], "both a run and --sweep"),
        (["RUN"], "no layout was given"),
        (["--sweep", "all"], "belongs to no run"),
        (["--sweep", "nothing", "-o", "x"], "no sweep of 'nothing'"),
        (["RUN", "--layout", "tp=2", "--cluster", "8xH100-SXM"], "the forecast is for H100"),
        (["RUN", "--layout", "tp=2", "--budget", "soon"], "not a time"),
        (["RUN", "--layout", "tp=2", "--budget", "0s"], "not a time"),
        (["NOWHERE", "--layout", "tp=2"], "no run"),
    ],
)
def test_requests_that_cannot_be_met_are_refused_in_one_line(
    tmp_path: Path, here: Profile, arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    save_profile(here, run)
    typed = [str(run) if a == "RUN" else str(tmp_path / "x") if a == "x" else a for a in arguments]
    try:
        code = cli.main(["measure", *typed])
    except SystemExit as stop:
        code = int(stop.code or 0)
    assert code == 2
    assert said in capsys.readouterr().err


def test_local_is_the_machine_of_the_run_whatever_a_table_says(
    tmp_path: Path, here: Profile, capsys: pytest.CaptureFixture[str]
) -> None:
    save_profile(here, tmp_path / "run")
    table = tmp_path / "other.jsonl"
    MeasurementWriter(table, msgspec.structs.replace(here.sources[0], device_name="other")).close()
    asked = ["forecast", str(tmp_path / "run"), "--cluster", "local", "--layout", "dp=1"]
    assert cli.main(asked) == 0
    assert cli.main([*asked, "--measured", str(table)]) == 2
    assert "was measured on other" in capsys.readouterr().err


def test_a_run_of_another_machine_is_not_mixed_with_this_one(
    tmp_path: Path, here: Profile, capsys: pytest.CaptureFixture[str]
) -> None:
    other = msgspec.structs.replace(here.sources[0], threads=here.sources[0].threads + 1)
    save_profile(msgspec.structs.replace(here, sources=(other,)), tmp_path / "run")
    assert cli.main(["measure", str(tmp_path / "run"), "--layout", "tp=2"]) == 2
    assert "-o" in capsys.readouterr().err
