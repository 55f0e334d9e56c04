"""Pipeline schedules: for one stage, the instructions of a step in order. A schedule is an iterator of instructions."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

Phase = Literal["forward", "backward", "input", "weight"]
"""What a pass computes: a whole backward, or its halves, gradients of the input first and of the weights later."""


class Compute(NamedTuple):
    """Run one pass of a chunk of the stage (several with virtual stages) on a microbatch."""

    phase: Phase
    microbatch: int
    chunk: int = 0


class Transfer(NamedTuple):
    """One message: what, of which microbatch, over which boundary (i is between virtual stages i and i + 1)."""

    what: Literal["activation", "gradient"]
    microbatch: int
    boundary: int

    def sides(self, num_stages: int) -> tuple[int, int]:
        """Sending and receiving stage: virtual stage v is on stage v modulo their number."""
        before, after = self.boundary % num_stages, (self.boundary + 1) % num_stages
        return (before, after) if self.what == "activation" else (after, before)


@dataclass(frozen=True, slots=True)
class Post:
    """Offer transfers to the neighbours and go on; a transfer starts when both sides have posted it."""

    transfers: tuple[Transfer, ...]


@dataclass(frozen=True, slots=True)
class Wait:
    """Stand still until posted transfers have arrived (or, on the sending side, have left)."""

    transfers: tuple[Transfer, ...]


Instruction = Compute | Post | Wait


class Pipeline(NamedTuple):
    """What a schedule depends on: stages, virtual stages on each, microbatches."""

    stages: int
    chunks: int
    microbatches: int


Schedule = Callable[[int, Pipeline], Iterator[Instruction]]
"""Stage and pipeline -> instructions of the stage."""


def gpipe(stage: int, pipeline: Pipeline) -> Iterator[Instruction]:
    """All forwards, then all backwards. Sends run beside the computation and are waited for at the turn."""
    ends = _Ends(stage, pipeline)
    phases: tuple[Phase, ...] = ("forward", "backward")
    for phase in phases:
        sent: list[Transfer] = []
        for microbatch in range(pipeline.microbatches):
            yield from _exchange(ends.needed(phase, microbatch))
            yield Compute(phase, microbatch)
            yield from _post(ends.made(phase, microbatch))
            sent.extend(ends.made(phase, microbatch))
        yield from _wait(tuple(sent))


def one_forward_one_backward(stage: int, pipeline: Pipeline) -> Iterator[Instruction]:
    """1F1B as torch runs it: in the steady state a send and the opposite receive are one operation, waited for."""
    ends, microbatches = _Ends(stage, pipeline), pipeline.microbatches
    warmup = min(microbatches, pipeline.stages - stage)
    pending: tuple[Transfer, ...] = ()
    for microbatch in range(warmup):
        yield from _exchange(ends.needed("forward", microbatch))
        yield Compute("forward", microbatch)
        yield from _wait(pending)
        pending = ends.made("forward", microbatch)
        if microbatch < warmup - 1:
            yield from _post(pending)
    forward, backward = warmup, 0
    while True:
        yield from _exchange(pending + ends.needed("backward", backward))
        yield Compute("backward", backward)
        pending = ends.made("backward", backward)
        backward += 1
        if forward == microbatches:
            break
        yield from _exchange(pending + ends.needed("forward", forward))
        yield Compute("forward", forward)
        pending = ends.made("forward", forward)
        forward += 1
    yield from _post(pending)
    for microbatch in range(backward, microbatches):
        yield from _exchange(ends.needed("backward", microbatch))
        yield Compute("backward", microbatch)
        yield from _wait(pending)
        pending = ends.made("backward", microbatch)
        yield from _post(pending)
    yield from _wait(pending)


def interleaved(stage: int, pipeline: Pipeline) -> Iterator[Instruction]:
    """1F1B over virtual stages (Narayanan et al. 2021), in torch's order; messages move beside the computation."""
    return _beside(stage, pipeline, _rounds(stage, pipeline, ahead=2, split=False))


def zero_bubble(stage: int, pipeline: Pipeline) -> Iterator[Instruction]:
    """ZB-H1 (Qi et al. 2023) in torch's order: weight gradients wait behind as many backwards as there are stages before."""
    return _beside(stage, pipeline, _rounds(stage, pipeline, ahead=1, split=True))


SCHEDULES: dict[str, Schedule] = {
    "gpipe": gpipe,
    "1f1b": one_forward_one_backward,
    "interleaved": interleaved,
    "zero-bubble": zero_bubble,
}
"""Schedules by the name they have in a layout."""
ROUNDS = ("interleaved", "zero-bubble")
"""Schedules in which the microbatches of a step are a whole number of rounds."""
SPLIT_BACKWARD = ("zero-bubble",)
"""Schedules that run gradients of the weights apart."""


def _rounds(stage: int, pipeline: Pipeline, *, ahead: int, split: bool) -> Iterator[Compute]:
    """Passes of a stage in order: each chunk in turn takes the microbatches of a round, backwards from the last chunk.

    Args:
        ahead: forwards that a stage runs ahead of the one after it.
        split: run gradients of the weights apart.
    """
    stages, chunks, microbatches = pipeline
    per_round = round_size(pipeline)
    total = chunks * microbatches
    warmup = min(total, (chunks - 1) * per_round + ahead * (stages - 1 - stage))
    whole: Phase = "input" if split else "backward"
    held: list[Compute] = []
    for step in range(total + warmup):
        if step < total:
            yield Compute("forward", *_turn(step, per_round, chunks))
        if step >= warmup:
            microbatch, turn = _turn(step - warmup, per_round, chunks)
            yield Compute(whole, microbatch, chunks - 1 - turn)
            held.append(Compute("weight", microbatch, chunks - 1 - turn))
            if split and len(held) > stage:
                yield held.pop(0)
    if split:
        yield from held


def round_size(pipeline: Pipeline) -> int:
    """Microbatches that a chunk takes before the next chunk's turn (torch: about as many as there are stages)."""
    return pipeline.microbatches // max(1, pipeline.microbatches // pipeline.stages)


def _turn(step: int, per_round: int, chunks: int) -> tuple[int, int]:
    """(microbatch, chunk) of the step-th pass."""
    turn, place = divmod(step, per_round)
    return turn // chunks * per_round + place, turn % chunks


def _beside(stage: int, pipeline: Pipeline, order: Iterator[Compute]) -> Iterator[Instruction]:
    """Passes with their messages: receives are open from the start, sends are never waited for before the end."""
    ends = _Ends(stage, pipeline)
    passes = list(order)
    yield from _post(tuple(t for one in passes for t in ends.needed(*one)))
    sent: list[Transfer] = []
    for one in passes:
        yield from _wait(ends.needed(*one))
        yield one
        made = ends.made(*one)
        yield from _post(made)
        sent.extend(made)
    yield from _wait(tuple(sent))


def in_flight(instructions: Sequence[Instruction]) -> int:
    """The most (microbatch, chunk) pairs whose forward has run and whose weight gradients have not."""
    held = most = 0
    for instruction in instructions:
        if isinstance(instruction, Compute):
            held += {"forward": 1, "input": 0}.get(instruction.phase, -1)
            most = max(most, held)
    return most


def gathers_needed(instructions: Sequence[Instruction]) -> dict[Compute, bool]:
    """For each pass, whether sharded parameters must be gathered first.

    Inside a pipeline a block stays gathered after a backward that is not the step's last and is released after
    a forward, so only a backward leaves the chunk's next pass with gathered parameters.
    """
    passes = [i for i in instructions if isinstance(i, Compute)]
    gathers: dict[Compute, bool] = {}
    before: dict[int, Compute] = {}
    for one in passes:
        last = before.get(one.chunk)
        gathers[one] = last is None or last.phase == "forward"
        before[one.chunk] = one
    return gathers


@dataclass(frozen=True, slots=True)
class _Ends:
    """The transfers that a stage takes part in; none over the ends of the pipeline."""

    stage: int
    pipeline: Pipeline

    def needed(self, phase: Phase, microbatch: int, chunk: int = 0) -> tuple[Transfer, ...]:
        """What must have arrived before a pass."""
        if phase == "forward":
            return self._over("activation", microbatch, self._virtual(chunk) - 1)
        return self._over("gradient", microbatch, self._virtual(chunk)) if phase != "weight" else ()

    def made(self, phase: Phase, microbatch: int, chunk: int = 0) -> tuple[Transfer, ...]:
        """What a pass sends."""
        if phase == "forward":
            return self._over("activation", microbatch, self._virtual(chunk))
        return self._over("gradient", microbatch, self._virtual(chunk) - 1) if phase != "weight" else ()

    def _virtual(self, chunk: int) -> int:
        return chunk * self.pipeline.stages + self.stage

    def _over(
        self, what: Literal["activation", "gradient"], microbatch: int, boundary: int
    ) -> tuple[Transfer, ...]:
        inside = 0 <= boundary < self.pipeline.stages * self.pipeline.chunks - 1
        return (Transfer(what, microbatch, boundary),) if inside else ()


def _exchange(transfers: tuple[Transfer, ...]) -> Iterator[Instruction]:
    yield from _post(transfers)
    yield from _wait(transfers)


def _post(transfers: tuple[Transfer, ...]) -> Iterator[Instruction]:
    if transfers:
        yield Post(transfers)


def _wait(transfers: tuple[Transfer, ...]) -> Iterator[Instruction]:
    if transfers:
        yield Wait(transfers)
