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
    Backward,
    Forward,
    Post,
    Wait,
    gathers_needed,
    in_flight,
)
from llmprof.extrapolate.simulate import Pass
from llmprof.extrapolate.steady import StageClock, Times, run_step

ZERO = np.zeros(1)


class Fixed:
    """A stage with constant forward and backward times."""

    def __init__(self, forward: float, backward: float) -> None:
        self._seconds = (forward, backward)

    def run(self, kind: Kind) -> Pass:
        seconds = self._seconds[kind.backward]
        return Pass(duration_s=np.array([seconds]), ledger=Ledger(own={"forward": seconds}))


def run(
    name: str, stages: Sequence[Fixed], microbatches: int, transfer: float | Sequence[float] = 0.0
) -> list[StageClock]:
    count = len(stages)
    moving = [transfer] * (count - 1) if isinstance(transfer, float) else list(transfer)
    times = Times(stages=stages, transfer_s=[np.array([t]) for t in moving], start_s=ZERO)
    return run_step(name, microbatches, times, every=True)


@pytest.mark.parametrize("name", SCHEDULES)
@given(stages=st.integers(1, 6), microbatches=st.integers(1, 9))
def test_every_microbatch_once_and_every_transfer_on_both_sides(
    name: str, stages: int, microbatches: int
) -> None:
    posted: dict[object, int] = {}
    for stage in range(stages):
        program = list(SCHEDULES[name](stage, stages, microbatches))
        order = [i.microbatch for i in program if isinstance(i, Forward)]
        back = [i.microbatch for i in program if isinstance(i, Backward)]
        assert order == back == list(range(microbatches))
        waited = [t for i in program if isinstance(i, Wait) for t in i.transfers]
        offered = [t for i in program if isinstance(i, Post) for t in i.transfers]
        assert sorted(map(str, waited)) == sorted(map(str, offered))
        for transfer in offered:
            posted[transfer] = posted.get(transfer, 0) + 1
    assert len(posted) == 2 * microbatches * (stages - 1)
    assert set(posted.values()) <= {2}


@given(stages=st.integers(1, 8), microbatches=st.integers(1, 16))
def test_activations_in_flight(stages: int, microbatches: int) -> None:
    for stage in range(stages):
        flight = in_flight(list(SCHEDULES["1f1b"](stage, stages, microbatches)))
        assert flight == min(microbatches, stages - stage)
        assert in_flight(list(SCHEDULES["gpipe"](stage, stages, microbatches))) == microbatches


@settings(deadline=None)
@pytest.mark.parametrize("name", SCHEDULES)
@given(stages=st.integers(1, 6), microbatches=st.integers(1, 12))
def test_bubble_in_closed_form(name: str, stages: int, microbatches: int) -> None:
    # equal stages, free messages: (m + p - 1)(f + b), of which (p - 1) / (m + p - 1) is idle
    clocks = run(name, [Fixed(1.0, 2.0)] * stages, microbatches)
    total = max(float(c.now_s[0]) for c in clocks)
    assert total == pytest.approx((microbatches + stages - 1) * 3.0)
    busy = microbatches * 3.0
    assert (total - busy) / total == pytest.approx((stages - 1) / (microbatches + stages - 1))
    first = clocks[0]
    assert first.ledger().parts().get("bubble", 0.0) + busy == pytest.approx(float(first.now_s[0]))


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
    clocks = run_step("1f1b", 4, times)
    assert clocks[0].now_s == pytest.approx(np.array([1.0, 2.0, 4.0]) * 12)


@given(stages=st.integers(2, 6), microbatches=st.integers(1, 12))
def test_gathers_of_a_sharded_pipeline(stages: int, microbatches: int) -> None:
    # torch gathers a block microbatches + 1 times on every stage (68 = 4 blocks x 17 for 16 microbatches)
    for stage in range(stages):
        needed = gathers_needed(list(SCHEDULES["1f1b"](stage, stages, microbatches)))
        assert sum(needed.values()) == microbatches + 1
