"""Pipeline schedules: order, completeness, activations in flight, and the bubble in closed form."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmprof.extrapolate.graph import Kind
from llmprof.extrapolate.ledger import Ledger
from llmprof.extrapolate.schedule import (
    SCHEDULES,
    Compute,
    Pipeline,
    Post,
    Wait,
    gathers_needed,
    in_flight,
)
from llmprof.extrapolate.simulate import Pass
from llmprof.extrapolate.steady import StageClock, Times, Timetable, run_step

ZERO = np.zeros(1)


class Fixed:
    """A stage with constant times of its passes; a whole backward is the sum of its halves."""

    def __init__(self, forward: float, input: float, weight: float = 0.0) -> None:
        self._seconds = {"forward": forward, "input": input, "weight": weight, "backward": input + weight}

    def run(self, kind: Kind) -> Pass:
        seconds = self._seconds[kind.phase]
        return Pass(duration_s=np.array([seconds]), ledger=Ledger(own={"forward": seconds}))


def run(
    name: str,
    stages: Sequence[Fixed],
    microbatches: int,
    transfer: float | Sequence[float] = 0.0,
    *,
    chunks: int = 1,
) -> list[StageClock]:
    count = len(stages)
    moving = [transfer] * (count * chunks - 1) if isinstance(transfer, float) else list(transfer)
    times = Times(stages=stages, transfer_s=[np.array([t]) for t in moving], start_s=ZERO)
    return run_step(Timetable(name, Pipeline(count, chunks, microbatches)), times, every=True)


def end_of(clocks: Sequence[StageClock]) -> float:
    return max(float(c.now_s[0]) for c in clocks)


pipelines = st.tuples(st.integers(1, 6), st.integers(1, 4), st.integers(1, 4))
"""Stages, chunks, and rounds of as many microbatches as stages."""


@pytest.mark.parametrize("name", SCHEDULES)
@given(sizes=pipelines)
def test_every_pass_once_and_every_transfer_on_both_sides(name: str, sizes: tuple[int, int, int]) -> None:
    stages, chunks, rounds = sizes
    if name in ("gpipe", "1f1b"):
        chunks = 1
    pipeline = Pipeline(stages, chunks, rounds * stages)
    posted: dict[object, int] = {}
    phases = {"zero-bubble": ("forward", "input", "weight")}.get(name, ("forward", "backward"))
    for stage in range(stages):
        program = list(SCHEDULES[name](stage, pipeline))
        passes = [i for i in program if isinstance(i, Compute)]
        for phase in phases:
            for chunk in range(chunks):
                order = [i.microbatch for i in passes if (i.phase, i.chunk) == (phase, chunk)]
                assert order == list(range(pipeline.microbatches))
        assert len(passes) == len(phases) * chunks * pipeline.microbatches
        waited = [t for i in program if isinstance(i, Wait) for t in i.transfers]
        offered = [t for i in program if isinstance(i, Post) for t in i.transfers]
        assert sorted(map(str, waited)) == sorted(map(str, offered))
        for transfer in offered:
            posted[transfer] = posted.get(transfer, 0) + 1
    assert len(posted) == 2 * pipeline.microbatches * (stages * chunks - 1)
    # with one stage both sides are on it
    assert set(posted.values()) <= {2}


@given(stages=st.integers(1, 8), microbatches=st.integers(1, 16))
def test_activations_in_flight(stages: int, microbatches: int) -> None:
    pipeline = Pipeline(stages, 1, microbatches)
    for stage in range(stages):
        flight = in_flight(list(SCHEDULES["1f1b"](stage, pipeline)))
        assert flight == min(microbatches, stages - stage)
        assert in_flight(list(SCHEDULES["gpipe"](stage, pipeline))) == microbatches


@given(sizes=pipelines)
def test_chunks_in_flight_of_an_interleaved_pipeline(sizes: tuple[int, int, int]) -> None:
    # Narayanan et al. 2021: warm-up of (chunks - 1) p + 2 (p - 1 - stage) passes, and one more forward before a backward
    stages, chunks, rounds = sizes
    for stage in range(stages):
        flight = in_flight(list(SCHEDULES["interleaved"](stage, Pipeline(stages, chunks, rounds * stages))))
        warmup = (chunks - 1) * stages + 2 * (stages - 1 - stage)
        assert flight == min(chunks * rounds * stages, warmup + 1)


@pytest.mark.parametrize("microbatches", [4, 8, 16])
def test_a_split_backward_holds_no_more_than_1f1b_on_its_first_stage(microbatches: int) -> None:
    # ZB-H1 (Qi et al. 2023): activations until the weight gradients; at most one for each stage
    pipeline = Pipeline(4, 1, microbatches)
    assert [in_flight(list(SCHEDULES["zero-bubble"](s, pipeline))) for s in range(4)] == [4, 4, 4, 4]


@settings(deadline=None)
@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
@given(stages=st.integers(1, 6), microbatches=st.integers(1, 12))
def test_bubble_in_closed_form(name: str, stages: int, microbatches: int) -> None:
    # equal stages, free messages: (m + p - 1)(f + b), of which (p - 1) / (m + p - 1) is idle
    clocks = run(name, [Fixed(1.0, 2.0)] * stages, microbatches)
    total = end_of(clocks)
    assert total == pytest.approx((microbatches + stages - 1) * 3.0)
    busy = microbatches * 3.0
    assert (total - busy) / total == pytest.approx((stages - 1) / (microbatches + stages - 1))
    first = clocks[0]
    assert first.ledger().parts().get("bubble", 0.0) + busy == pytest.approx(float(first.now_s[0]))


@settings(deadline=None, max_examples=30)
@given(sizes=pipelines)
def test_bubble_of_virtual_stages_in_closed_form(sizes: tuple[int, int, int]) -> None:
    # Narayanan et al. 2021, section 2.2: (p - 1)(f + b) / v beyond the work of m (f + b)
    stages, chunks, rounds = sizes
    clocks = run("interleaved", [Fixed(1 / chunks, 2 / chunks)] * stages, rounds * stages, chunks=chunks)
    assert end_of(clocks) == pytest.approx(3.0 * (rounds * stages + (stages - 1) / chunks))


@settings(deadline=None, max_examples=30)
@given(stages=st.integers(1, 6), rounds=st.integers(1, 4))
def test_bubble_of_a_split_backward_in_closed_form(stages: int, rounds: int) -> None:
    # Qi et al. 2023, table 2: ZB-H1 leaves (p - 1)(f + b - w) where the three are alike, a third of 1F1B's 3 (p - 1)
    clocks = run("zero-bubble", [Fixed(1.0, 1.0, 1.0)] * stages, rounds * stages)
    assert end_of(clocks) == pytest.approx(3.0 * rounds * stages + stages - 1)


def test_two_stage_gpipe_by_hand() -> None:
    # f = 1, b = 2, a message takes 0.5 and starts when both sides are ready for it; two microbatches.
    # stage 0: F0 0-1, F1 1-2                            stage 1: F0 1.5-2.5, is ready for activation 1 at 2.5
    # stage 1: F1 3-4, B0 4-6, sends gradient 0, B1 6-8  stage 0: gradient 0 at 6.5, B0 6.5-8.5, ready for the next
    # gradient 1 moves 8.5-9, stage 0: B1 9-11
    clocks = run("gpipe", [Fixed(1.0, 2.0)] * 2, 2, 0.5)
    assert float(clocks[1].now_s[0]) == pytest.approx(9.0)
    assert float(clocks[0].now_s[0]) == pytest.approx(11.0)
    assert clocks[0].ledger().parts()["forward"] == pytest.approx(6.0)
    assert clocks[0].ledger().parts()["pp"] + clocks[0].ledger().parts()["bubble"] == pytest.approx(5.0)
    starts = {s.name: s.start_s for s in clocks[1].spans if s.stream == "schedule"}
    assert starts == {"forward 0": 1.5, "forward 1": 3.0, "backward 0": 4.0, "backward 1": 6.0}


def test_one_f_one_b_waits_for_the_fused_message() -> None:
    # f = 1, b = 2, message 0.5, two microbatches.
    # stage 1: receives 0 at 1.5, F0 1.5-2.5, B0 2.5-4.5, then sends gradient 0 while receiving activation 1
    # stage 0: F0 0-1, F1 1-2 (activation 0 sent 1-1.5), fused send of activation 1 + receive of gradient 0:
    #   activation 1 is posted by stage 1 only at 4.5: both arrive at 5.0; B0 5-7
    # stage 1: F1 5-6, B1 6-8, gradient 1 sent 8-8.5; stage 0: B1 8.5-10.5
    clocks = run("1f1b", [Fixed(1.0, 2.0)] * 2, 2, 0.5)
    assert float(clocks[0].now_s[0]) == pytest.approx(10.5)
    assert float(clocks[1].now_s[0]) == pytest.approx(8.5)


def test_slow_link_is_the_pipeline() -> None:
    # with messages far longer than compute, 1F1B moves one message each way at a time
    clocks = run("1f1b", [Fixed(0.001, 0.002)] * 2, 4, 1.0)
    assert float(clocks[0].now_s[0]) == pytest.approx(5.0, abs=0.1)
    assert clocks[0].ledger().parts()["pp"] > 0.9 * float(clocks[0].now_s[0]) - 1.0


def test_sampled_runs_are_independent_pipelines() -> None:
    class Sampled:
        def run(self, kind: Kind) -> Pass:
            return Pass(duration_s=np.array([1.0, 2.0, 4.0]), ledger=Ledger(own={"forward": 1.0}))

    times = Times(stages=[Sampled()] * 3, transfer_s=[np.zeros(3)] * 2, start_s=np.zeros(3))
    clocks = run_step(Timetable("1f1b", Pipeline(3, 1, 4)), times)
    assert clocks[0].now_s == pytest.approx(np.array([1.0, 2.0, 4.0]) * 12)


@given(stages=st.integers(2, 6), microbatches=st.integers(1, 12))
def test_gathers_of_a_sharded_pipeline(stages: int, microbatches: int) -> None:
    # torch gathers a block microbatches + 1 times on every stage (68 = 4 blocks x 17 for 16 microbatches)
    for stage in range(stages):
        needed = gathers_needed(list(SCHEDULES["1f1b"](stage, Pipeline(stages, 1, microbatches))))
        assert sum(needed.values()) == microbatches + 1


@given(sizes=pipelines)
def test_a_split_backward_gathers_no_oftener(sizes: tuple[int, int, int]) -> None:
    # weights stay gathered from the gradients of the input to the next forward, and so to the end
    stages, _, rounds = sizes
    program = list(SCHEDULES["zero-bubble"](stages - 1, Pipeline(stages, 1, rounds * stages)))
    needed = gathers_needed(program)
    assert not any(gather for one, gather in needed.items() if one.phase == "weight" and one.microbatch == 0)
