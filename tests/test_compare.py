"""Comparing two profiles: step time error, and parts that carry it."""

from __future__ import annotations

import io
from math import fsum

import msgspec
import pytest
from rich.console import Console

from llmprof.report.breakdown import break_down
from llmprof.report.compare import compare
from llmprof.report.compare_text import comparison_table
from llmprof.schema.profile import PhaseRow, Profile
from tests.profiles import measured


def with_phases(profile: Profile, **exclusive_us: float) -> Profile:
    """The profile with these phases in one step, whose duration is their sum."""
    phases = tuple(PhaseRow(rank=0, step=0, phase=p, exclusive_us=v) for p, v in exclusive_us.items())
    step = msgspec.structs.replace(
        profile.steps[0], duration_us=sum(exclusive_us.values()), instrumented=False
    )
    return msgspec.structs.replace(profile, phases=phases, steps=(step,))


def of_kind(profile: Profile, kind: str) -> Profile:
    return msgspec.structs.replace(profile, manifest=msgspec.structs.replace(profile.manifest, kind=kind))


def test_error_and_its_parts_by_hand() -> None:
    a = with_phases(measured(ranks=1), forward=300.0, backward_input=500.0, communication=100.0)
    b = with_phases(measured(ranks=1), forward=330.0, backward_input=500.0, communication=170.0)
    result = compare(a, b)
    assert result.step_time_ape == pytest.approx(100 / 1000)
    shares = {part.part: part.error_share for part in result.parts}
    assert shares["forward"] == pytest.approx(0.3)
    assert shares["communication"] == pytest.approx(0.7)
    assert shares["backward_input"] == 0.0


def test_parts_add_up_to_both_steps_and_shares_to_one() -> None:
    a, b = measured(), measured(ranks=1, slow_us=123.0)
    result = compare(a, b)
    assert fsum(p.a or 0.0 for p in result.parts) == pytest.approx(break_down(a).step_time_us.median)
    assert fsum(p.b or 0.0 for p in result.parts) == pytest.approx(break_down(b).step_time_us.median)
    assert fsum(p.error_share or 0.0 for p in result.parts) == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("kinds", "reference"),
    [
        (("predicted", "measured"), "b"),
        (("measured", "predicted"), "a"),
        (("measured", "measured"), "b"),
        (("predicted", "predicted"), "b"),
    ],
)
def test_the_error_is_relative_to_the_measured_one(kinds: tuple[str, str], reference: str) -> None:
    a = with_phases(measured(ranks=1), forward=800.0)
    b = with_phases(measured(ranks=1), forward=1000.0)
    result = compare(of_kind(a, kinds[0]), of_kind(b, kinds[1]))
    assert result.reference == reference
    assert result.step_time_ape == pytest.approx(200 / (800 if reference == "a" else 1000))


def test_equal_profiles_have_no_error_to_share() -> None:
    result = compare(measured(), measured())
    assert result.step_time_ape == 0.0
    assert {part.error_share for part in result.parts} == {None}
    assert result.memory_ape == 0.0


def test_a_side_without_a_window_has_no_parts_but_a_step_time() -> None:
    bare = msgspec.structs.replace(measured(), phases=(), operators=())
    result = compare(bare, measured(slow_us=200.0))
    assert {part.a for part in result.parts} == {None}
    assert {part.error_share for part in result.parts} == {None}
    assert result.step_time_ape == pytest.approx(100 / 1101)


def test_table_fits_the_terminal() -> None:
    console = Console(file=io.StringIO(), width=80, highlight=False)
    with console.capture() as capture:
        console.print(comparison_table(compare(measured(), measured(slow_us=200.0))))
    text = capture.get()
    assert max(len(line) for line in text.splitlines()) <= 80
    for word in ("step time", "9.1 %", "By phase", "share of error", "By operator family"):
        assert word in text
