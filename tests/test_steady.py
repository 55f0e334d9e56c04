"""Short cuts of the simulation equal what they replace: many microbatches from a few, equal layers in closed form."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmprof.extrapolate.graph import Kind
from llmprof.extrapolate.ledger import Ledger
from llmprof.extrapolate.machine import Machine, Segment, Stretch
from llmprof.extrapolate.schedule import Pipeline, in_flight
from llmprof.extrapolate.simulate import Pass, Streams
from llmprof.extrapolate.steady import Times, Timetable, most_in_flight, programs, run_step

times = st.floats(0.1, 10.0)


@dataclass
class FixedStage:
    """A stage whose first backward is cheaper (nothing to accumulate) and whose last one leaves a tail behind."""

    forward: Pass
    backward: Pass

    def run(self, kind: Kind) -> Pass:
        if kind.phase == "forward":
            return self.forward
        duration = self.backward.duration_s * (0.9 if kind.first else 1.0)
        ledger = Ledger(own={"compute": float(duration[0])})
        return Pass(duration_s=duration, ledger=ledger, tail_s=0.7 * duration if kind.last else None)


def make_stages(durations: list[tuple[float, float]]) -> list[FixedStage]:
    def one(duration: float) -> Pass:
        draws = duration * np.array([1.0, 1.3, 0.8])
        return Pass(duration_s=draws, ledger=Ledger(own={"compute": duration}))

    return [FixedStage(one(f), one(b)) for f, b in durations]


@settings(deadline=None, max_examples=100)
@given(
    schedule=st.sampled_from(["1f1b", "gpipe"]),
    durations=st.lists(st.tuples(times, times), min_size=1, max_size=6),
    microbatches=st.integers(1, 60),
    transfer=st.floats(0.0, 2.0),
)
def test_a_few_microbatches_tell_the_rest(
    schedule: str, durations: list[tuple[float, float]], microbatches: int, transfer: float
) -> None:
    links = [np.full(3, transfer)] * (len(durations) - 1)
    made = Times(stages=make_stages(durations), transfer_s=links, start_s=np.zeros(3))
    table = Timetable(schedule, Pipeline(len(durations), 1, microbatches))
    short, full = run_step(table, made), run_step(table, made, every=True)
    for a, b in zip(short, full, strict=True):
        np.testing.assert_allclose(a.now_s, b.now_s, rtol=1e-9 if schedule == "1f1b" else 0.03)
        np.testing.assert_allclose(a.tail_end_s, b.tail_end_s, rtol=1e-9 if schedule == "1f1b" else 0.03)
        parts = a.ledger().parts()
        assert sum(parts.values()) == pytest.approx(float(a.now_s[0]), rel=1e-9)
        assert parts["compute"] == pytest.approx(b.ledger().parts()["compute"], rel=1e-9)


@settings(deadline=None, max_examples=100)
@given(
    schedule=st.sampled_from(["1f1b", "gpipe"]),
    stages=st.integers(1, 8),
    duration=st.tuples(times, times),
    head=st.floats(0.0, 0.5),
    microbatches=st.integers(1, 80),
)
def test_equal_stages_with_a_longer_last_one_are_exact(
    schedule: str, stages: int, duration: tuple[float, float], head: float, microbatches: int
) -> None:
    forward, backward = duration
    durations = [duration] * (stages - 1) + [(forward * (1 + head), backward * (1 + head))]
    links = [np.full(3, 0.02 * forward)] * (stages - 1)
    made = Times(stages=make_stages(durations), transfer_s=links, start_s=np.zeros(3))
    table = Timetable(schedule, Pipeline(len(durations), 1, microbatches))
    short, full = run_step(table, made), run_step(table, made, every=True)
    for a, b in zip(short, full, strict=True):
        np.testing.assert_allclose(a.now_s, b.now_s, rtol=1e-9 if schedule == "1f1b" else 2e-3)


@settings(deadline=None, max_examples=40)
@given(
    schedule=st.sampled_from(["interleaved", "zero-bubble"]),
    chunks=st.integers(1, 3),
    durations=st.lists(st.tuples(times, times), min_size=2, max_size=4),
    rounds=st.integers(1, 14),
    transfer=st.floats(0.0, 2.0),
)
def test_a_few_rounds_tell_the_rest(
    schedule: str, chunks: int, durations: list[tuple[float, float]], rounds: int, transfer: float
) -> None:
    stages = len(durations)
    links = [np.full(3, transfer)] * (stages * chunks - 1)
    made = Times(stages=make_stages(durations), transfer_s=links, start_s=np.zeros(3))
    table = Timetable(schedule, Pipeline(stages, chunks, rounds * stages))
    short, full = run_step(table, made), run_step(table, made, every=True)
    for a, b in zip(short, full, strict=True):
        np.testing.assert_allclose(a.now_s, b.now_s, rtol=1e-9)
        np.testing.assert_allclose(a.tail_end_s, b.tail_end_s, rtol=1e-9)
        parts = a.ledger().parts()
        assert sum(parts.values()) == pytest.approx(float(a.now_s[0]), rel=1e-9)
        assert parts["compute"] == pytest.approx(b.ledger().parts()["compute"], rel=1e-9)


@pytest.mark.parametrize(
    ("schedule", "chunks"), [("1f1b", 1), ("gpipe", 1), ("zero-bubble", 1), ("interleaved", 3)]
)
@pytest.mark.parametrize(("stages", "microbatches"), [(1, 9), (4, 4), (4, 40), (8, 64)])
def test_activations_in_flight_are_those_of_the_whole_program(
    schedule: str, chunks: int, stages: int, microbatches: int
) -> None:
    table = Timetable(schedule, Pipeline(stages, chunks, microbatches))
    whole = tuple(in_flight(p) / chunks for p in programs(table))
    assert most_in_flight(table) == pytest.approx(whole)


def segment(device: float, host: float) -> Segment:
    scale = np.array([1.0, 0.6, 1.7])
    return Segment(
        device_s=device * scale,
        host_s=host * scale[::-1].copy(),
        parts={"forward": device},
        evidence={},
        calls={},
    )


@settings(deadline=None)
@given(
    steps=st.lists(st.tuples(times, times), min_size=1, max_size=3),
    count=st.integers(1, 7),
    ahead=times,
    cpu=st.booleans(),
)
def test_equal_layers_in_closed_form(
    steps: list[tuple[float, float]], count: int, ahead: float, cpu: bool
) -> None:
    machine = Machine(prices=cast("Any", None), factors=cast("Any", None), cpu=cpu, serial_fsdp=False)
    segments = [segment(*step) for step in steps]
    looped, closed = (Streams(zero=np.zeros(3)) for _ in range(2))
    for streams in (looped, closed):
        machine.run(streams, segment(ahead, 0.5))
    for _ in range(count):
        for one in segments:
            machine.run(looped, one)
    machine.repeat(closed, Stretch.of(*((one, "layer", "forward") for one in segments)), count)
    np.testing.assert_allclose(closed.now(), looped.now(), rtol=1e-12)
    np.testing.assert_allclose(closed.now("host"), looped.now("host"), rtol=1e-12)
    for part in ("forward", "host"):
        assert closed.parts.get(part, 0.0) == pytest.approx(looped.parts.get(part, 0.0), rel=1e-9, abs=1e-9)
    assert len(closed.spans) == count * len(steps)
