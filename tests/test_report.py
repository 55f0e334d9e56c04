"""The numbers of `show` against values worked out by hand, and what they must conserve."""

from __future__ import annotations

import io
from math import fsum

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from llmprof.errors import RequestError, RunError
from llmprof.report.breakdown import break_down, group_operators
from llmprof.report.chrome import chrome_trace
from llmprof.report.steps import choose_steps, rank_weights, slowest_per_step
from llmprof.report.terminal import SafeConsole
from llmprof.report.text import Bar, Elided, show_text
from llmprof.report.units import (
    bytes_text,
    count_text,
    energy_text,
    percent_text,
    range_text,
    seconds_text,
    three_digits,
    time_text,
)
from llmprof.schema.profile import PHASES, PhaseRow, Profile, RankClass, StepRow
from tests.profiles import PHASE_SHARES, STEP_US, measured, operator

SLOWEST_US = STEP_US + 1


def replace_manifest(profile: Profile, **changes: object) -> Profile:
    return msgspec.structs.replace(profile, manifest=msgspec.structs.replace(profile.manifest, **changes))


def render(profile: Profile, *, width: int = 80, top: int = 10) -> str:
    breakdown = break_down(profile)
    stream = io.StringIO()
    console = Console(file=stream, width=width, highlight=False)
    groups, layers = group_operators(breakdown, by="op"), group_operators(breakdown, by="layer")
    console.print(show_text(breakdown, groups, layers, by="op", top=top))
    return stream.getvalue()


def test_step_time_is_that_of_the_slowest_rank_without_the_profiled_steps() -> None:
    step_time = break_down(measured()).step_time_us
    assert (step_time.median, step_time.iqr, step_time.n) == (SLOWEST_US, 0.0, 12)


def test_iqr_by_hand() -> None:
    # six steps of 1001 us and six of 1201 us: quartiles 1001 and 1201, median half way
    step_time = break_down(measured(slow_us=200.0)).step_time_us
    assert (step_time.median, step_time.iqr, step_time.n) == (1101.0, 200.0, 12)


def test_slowest_rank_may_change_from_step_to_step() -> None:
    rows = [
        StepRow(rank=rank, step=step, start_us=0.0, duration_us=duration)
        for rank, step, duration in [(0, 0, 10.0), (1, 0, 30.0), (0, 1, 50.0), (1, 1, 20.0)]
    ]
    assert slowest_per_step(rows).median == 40.0


def test_a_single_step_has_no_iqr() -> None:
    step_time = break_down(measured(steps=1)).step_time_us
    assert step_time.n == 1
    assert step_time.iqr is None


def test_steps_that_are_not_training_on_any_rank_are_left_out() -> None:
    profile = measured(steps=4)
    steps = [
        msgspec.structs.replace(s, kind="compile", duration_us=9e6) if (s.rank, s.step) == (1, 0) else s
        for s in profile.steps
    ]
    assert break_down(msgspec.structs.replace(profile, steps=tuple(steps))).step_time_us.n == 3


def test_instrumented_steps_serve_when_there_are_no_others_and_say_so() -> None:
    breakdown = break_down(measured(steps=0))
    assert breakdown.step_time_us.median == 1250.0
    assert any("profiler's overhead" in w for w in breakdown.warnings)


def test_warm_up_steps_serve_when_there_are_no_others_and_say_so() -> None:
    profile = measured()
    steps = tuple(msgspec.structs.replace(s, kind="warmup") for s in profile.steps)
    chosen, warnings = choose_steps(msgspec.structs.replace(profile, steps=steps))
    assert len(chosen) == len(steps)
    assert "only warmup" in warnings[0]


def test_no_step_is_an_error_of_the_run() -> None:
    with pytest.raises(RunError, match="no step was seen"):
        break_down(msgspec.structs.replace(measured(), steps=()))


def test_phases_are_scaled_to_the_uninstrumented_step() -> None:
    phases = break_down(measured()).phases
    assert tuple(phases) == PHASES
    for phase in PHASES:
        assert phases[phase] == pytest.approx(PHASE_SHARES.get(phase, 0.0) * SLOWEST_US)
    assert sum(phases.values()) == pytest.approx(SLOWEST_US, abs=1e-9)


@given(
    st.lists(
        st.tuples(
            st.integers(1, 64),
            st.lists(st.floats(0.0, 1e6), min_size=len(PHASES), max_size=len(PHASES)).filter(
                lambda values: sum(values) > 1
            ),
        ),
        min_size=1,
        max_size=4,
    )
)
def test_phases_sum_to_the_step_whatever_the_ranks_did(ranks: list[tuple[int, list[float]]]) -> None:
    classes = tuple(RankClass(rank=rank, count=count) for rank, (count, _) in enumerate(ranks))
    rows = tuple(
        PhaseRow(rank=rank, step=0, phase=phase, exclusive_us=value)
        for rank, (_, values) in enumerate(ranks)
        for phase, value in zip(PHASES, values, strict=True)
    )
    profile = msgspec.structs.replace(replace_manifest(measured(), rank_classes=classes), phases=rows)
    breakdown = break_down(profile)
    assert fsum(breakdown.phases.values()) == pytest.approx(breakdown.step_time_us.median, rel=1e-12)
    assert all(value >= -1e-9 for value in breakdown.phases.values())


def test_operators_that_fill_the_window_fill_the_step() -> None:
    # the window's forward and backward_weight phases, 0.30 and 0.16 of 1250 us, each given to one operator
    profile = measured()
    rows = tuple(
        operator(rank, phase=phase, exclusive_us=PHASE_SHARES[phase] * 1250.0)
        for rank in range(2)
        for phase in ("forward", "backward_weight")
    )
    breakdown = break_down(msgspec.structs.replace(profile, operators=rows))
    by_phase = {line.phase: line.exclusive_us for line in breakdown.operators}
    assert by_phase["forward"] == pytest.approx(breakdown.phases["forward"])
    assert by_phase["backward_weight"] == pytest.approx(breakdown.phases["backward_weight"])


def test_equal_ranks_give_the_values_of_one() -> None:
    line = break_down(measured()).operators[0]
    assert (line.module, line.count, line.time_us) == ("layers.0.mlp.up", 8.0, 30.0)
    assert line.exclusive_us == pytest.approx(240.0 * SLOWEST_US / 1250.0)


def test_a_rank_class_weighs_as_many_ranks_as_it_stands_for() -> None:
    classes = (RankClass(rank=0, count=3), RankClass(rank=1, count=1))
    profile = replace_manifest(measured(), rank_classes=classes, world_size=4)
    assert rank_weights(profile) == {0: 0.75, 1: 0.25}
    rows = (operator(0, count=4.0, time_us=10.0), operator(1, count=8.0, time_us=20.0))
    line = break_down(msgspec.structs.replace(profile, operators=rows)).operators[0]
    assert line.count == pytest.approx(0.75 * 4 + 0.25 * 8)
    assert line.time_us == pytest.approx((0.75 * 40 + 0.25 * 160) / 5)


def test_collectives() -> None:
    (line,) = break_down(measured()).collectives
    assert (line.kind, line.axis, line.group_size, line.size_bytes) == ("all_reduce", "dp", 2, 4_000_000)
    assert (line.count, line.time_us) == (2.0, 100.0)
    assert line.exposed_us == pytest.approx(150.0 * SLOWEST_US / 1250.0)


def test_a_back_to_back_sweep_is_not_part_of_the_step() -> None:
    profile = measured()
    rows = tuple(msgspec.structs.replace(row, in_situ=False) for row in profile.collectives)
    assert break_down(msgspec.structs.replace(profile, collectives=rows)).collectives == ()


@pytest.mark.parametrize(
    ("layout", "shards"), [("dp=2", 2), ("dp=1,tp=2", 1), ("dp=1,pp=2", 1), ("dp=1,cp=2:ring", 2), ("", 2)]
)
def test_ranks_that_share_data_count_its_tokens_once(layout: str, shards: int) -> None:
    breakdown = break_down(measured(layout=layout))
    assert breakdown.tokens_per_s == pytest.approx(512 * shards / (SLOWEST_US * 1e-6))


def test_what_is_not_known_is_none() -> None:
    breakdown = break_down(replace_manifest(measured(tokens=None), peak_flops=None))
    assert breakdown.tokens_per_s is None
    assert breakdown.mfu is None


def test_mfu() -> None:
    # 4 MFLOP in 1001 us on two devices of 10 GFLOP/s
    assert break_down(measured()).mfu == pytest.approx(4e6 / (2 * 1e10 * SLOWEST_US * 1e-6))


def test_peak_memory_prefers_steps_without_the_profiler() -> None:
    profile = measured()
    assert break_down(profile).peak_memory_bytes == 21_000_001
    steps = tuple(
        msgspec.structs.replace(s, peak_memory_bytes=90 if s.instrumented else 50 + s.rank)
        for s in profile.steps
    )
    assert break_down(msgspec.structs.replace(profile, steps=steps)).peak_memory_bytes == 51


def test_one_rank_alone() -> None:
    breakdown = break_down(measured(), rank=0)
    assert breakdown.step_time_us.median == STEP_US
    assert breakdown.peak_memory_bytes == 21_000_000
    with pytest.raises(RequestError, match="rank 7 is not in the run"):
        break_down(measured(), rank=7)


def test_groups_add_up_to_the_operators() -> None:
    breakdown = break_down(measured())
    total = fsum(line.exclusive_us for line in breakdown.operators)
    for by in ("op", "module", "layer", "family"):
        assert fsum(g.exclusive_us for g in group_operators(breakdown, by=by)) == pytest.approx(total)
    first = group_operators(breakdown, by="op")[0]
    assert (first.key, first.count, first.phases) == ("aten::mm", 24.0, ("forward", "backward_weight"))
    assert first.flops == 24 * 2 * 64 * 128 * 256


def test_depth_cuts_module_names() -> None:
    keys = [g.key for g in group_operators(break_down(measured()), by="module", depth=1)]
    assert keys == ["layers", "optimizer"]


@pytest.mark.parametrize(
    ("module", "layer"),
    [
        ("layers.0.mlp", "layers.*.mlp"),
        ("h.11", "h.*"),
        ("3.conv1.0", "*.conv1.*"),
        ("conv2d.v2", "conv2d.v2"),
        ("", "(root)"),
    ],
)
def test_repeated_layers_are_added_up(module: str, layer: str) -> None:
    profile = msgspec.structs.replace(measured(ranks=1), operators=(operator(0, module=module),))
    assert [g.key for g in group_operators(break_down(profile), by="layer")] == [layer]


@pytest.mark.parametrize(
    ("room", "expected"), [(20, "abcdefghij"), (10, "abcdefghij"), (7, "ab…ghij"), (1, "…")]
)
def test_long_names_lose_their_middle(room: int, expected: str) -> None:
    console = Console(file=io.StringIO(), width=room)
    with console.capture() as capture:
        console.print(Elided("abcdefghij"))
    assert capture.get() == expected + "\n"


def test_state_of_the_run_is_told() -> None:
    profile = replace_manifest(measured(slow_us=200.0), status="partial", world_size=4, warnings=("careful",))
    warnings = break_down(profile).warnings
    assert warnings[0] == "the run is partial: it ended before it was closed, 2 of 4 ranks were found"
    assert "IQR is 18% of the median over 12 steps" in warnings[1]
    assert warnings[-1] == "careful"


def test_a_run_without_a_window_still_has_a_step_time() -> None:
    profile = msgspec.structs.replace(measured(), phases=(), operators=(), collectives=(), spans=())
    breakdown = break_down(profile)
    assert breakdown.phases == {}
    assert any("no profiled window" in w for w in breakdown.warnings)
    assert "1.00 ms" in render(profile)


def test_text_fits_the_terminal_and_says_what_matters() -> None:
    text = render(replace_manifest(measured(), warnings=("a warning",)))
    assert max(len(line) for line in text.splitlines()) <= 80
    for word in ("tiny", "1.00 ms", "median of 12 steps", "backward weight", "mm   ", "layers.*.mlp.up", "fwd+bwd",
                 "all_reduce", "a warning", "98.5 % of operator time"):  # fmt: skip
        assert word in text
    assert "\x1b" not in text


def test_top_limits_rows_and_says_how_many_there_are() -> None:
    text = render(measured(), top=1)
    assert "1 of 3" in text
    assert "mul " not in text


def test_a_long_module_name_does_not_break_the_table() -> None:
    name = ".".join(["a_rather_long_module_name"] * 8)
    text = render(msgspec.structs.replace(measured(), operators=(operator(0, module=name),)))
    assert max(len(line) for line in text.splitlines()) <= 80


@pytest.mark.parametrize("as_terminal", [False, True])
def test_names_cannot_command_the_terminal(as_terminal: bool) -> None:
    stream = io.StringIO()
    console = SafeConsole(
        file=stream, width=80, highlight=False, force_terminal=as_terminal, color_system=None
    )
    name = "aten::mm\x1b[2J\x1b]0;title\x07\x9b31m\u202e\nforged line"
    profile = msgspec.structs.replace(measured(), operators=(msgspec.structs.replace(operator(0), op=name),))
    profile = replace_manifest(profile, name="run\x1b[8m", warnings=("careful\x1b[8m",))
    breakdown = break_down(profile)
    groups = group_operators(breakdown, by="op")
    console.print(show_text(breakdown, groups, [], by="op", top=10))
    text = stream.getvalue()
    assert not set("\x1b\x07\x9b\u202e") & set(text)
    assert "mm[2J]0;title31m forged line" in text and "careful[8m" in text
    assert max(len(line) for line in text.splitlines()) <= 80


@pytest.mark.parametrize(("share", "expected"), [(0.0, ""), (1.0, "█" * 8), (0.5, "█" * 4), (2.0, "█" * 8)])
def test_bars(share: float, expected: str) -> None:
    console = Console(file=io.StringIO(), width=40)
    with console.capture() as capture:
        console.print(Bar(share, width=8))
    assert capture.get().rstrip() == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (time_text(0.5), "500 ns"),
        (time_text(0.0), "0 ns"),
        (time_text(999.0), "999 us"),
        (time_text(1000.0), "1.00 ms"),
        (time_text(142_345.0), "142 ms"),
        (seconds_text(119.0), "119 s"),
        (seconds_text(121.0), "2.02 min"),
        (seconds_text(86400.0 * 6), "6.00 days"),
        (seconds_text(None), "unknown"),
        (seconds_text(float("inf")), "unknown"),
        (range_text(0.9, 1.2), "[0.900 .. 1.20 s]"),
        (bytes_text(1_210_000_000), "1.21 GB"),
        (bytes_text(512), "512 B"),
        (bytes_text(0), "0 B"),
        (count_text(14391.0), "14,391"),
        (count_text(1.0), "1"),
        (count_text(1_520_000.0), "1.52 M"),
        (percent_text(0.29), "29.0 %"),
        (percent_text(0.00004), "<0.1 %"),
        (percent_text(0.0), "0.0 %"),
        (percent_text(32.388), "3,239 %"),
        (three_digits(0.0000251), "2.5e-05"),
        (energy_text(3210.0), "3.21 kJ"),
    ],
)
def test_units(text: str, expected: str) -> None:
    assert text == expected


def test_chrome_trace_has_a_process_for_each_rank_and_keeps_times() -> None:
    trace = chrome_trace(measured())
    spans = [e for e in trace["traceEvents"] if e["ph"] == "X"]
    assert [(e["pid"], e["ts"], e["dur"], e["cat"]) for e in spans] == [
        (0, 10.0, 30.0, "forward"),
        (1, 10.0, 30.0, "forward"),
    ]
    assert spans[1]["args"]["module"] == "layers.0.mlp.up"
    names = {e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "process_name"}
    assert names == {"rank 0", "rank 1"}


def test_a_profile_without_spans_has_no_timeline() -> None:
    with pytest.raises(RequestError, match="no timeline"):
        chrome_trace(msgspec.structs.replace(measured(), spans=()))
