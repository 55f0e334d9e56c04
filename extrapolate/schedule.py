"""Pipeline schedules: for one stage, the instructions of a step in order. A schedule is an iterator of instructions."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal, NamedTuple


@dataclass(frozen=True, slots=True)
class Forward:
    """Run the stage's forward on a microbatch."""

    microbatch: int


@dataclass(frozen=True, slots=True)
class Backward:
    """Run the stage's backward on a microbatch."""

    microbatch: int


class Transfer(NamedTuple):
    """One message between neighbours: what, of which microbatch, over which boundary (i is between i and i + 1)."""

    what: Literal["activation", "gradient"]
    microbatch: int
    boundary: int


@dataclass(frozen=True, slots=True)
class Post:
    """Offer transfers to the neighbours and go on; a transfer starts when both sides have posted it."""

    transfers: tuple[Transfer, ...]


@dataclass(frozen=True, slots=True)
class Wait:
    """Stand still until posted transfers have arrived (or, on the sending side, have left)."""

    transfers: tuple[Transfer, ...]


Instruction = Forward | Backward | Post | Wait
Schedule = Callable[[int, int, int], Iterator[Instruction]]
"""(stage, number of stages, number of microbatches) -> instructions."""


def gpipe(stage: int, num_stages: int, num_microbatches: int) -> Iterator[Instruction]:
    """All forwards, then all backwards. Sends run beside the computation and are waited for at the turn."""
    ends = _Ends(stage, num_stages)
    for phase, receive, send in (
        (Forward, ends.activation_in, ends.activation_out),
        (Backward, ends.gradient_in, ends.gradient_out),
    ):
        sent: list[Transfer] = []
        for microbatch in range(num_microbatches):
            yield from _exchange(receive(microbatch))
            yield phase(microbatch)
            yield from _post(send(microbatch))
            sent.extend(send(microbatch))
        yield from _wait(tuple(sent))


def one_forward_one_backward(stage: int, num_stages: int, num_microbatches: int) -> Iterator[Instruction]:
    """1F1B as torch runs it: in the steady state a send and the opposite receive are one operation, waited for."""
    ends = _Ends(stage, num_stages)
    warmup = min(num_microbatches, num_stages - stage)
    pending: tuple[Transfer, ...] = ()
    for microbatch in range(warmup):
        yield from _exchange(ends.activation_in(microbatch))
        yield Forward(microbatch)
        yield from _wait(pending)
        pending = ends.activation_out(microbatch)
        if microbatch < warmup - 1:
            yield from _post(pending)
    forward, backward = warmup, 0
    while True:
        yield from _exchange(pending + ends.gradient_in(backward))
        yield Backward(backward)
        pending = ends.gradient_out(backward)
        backward += 1
        if forward == num_microbatches:
            break
        yield from _exchange(pending + ends.activation_in(forward))
        yield Forward(forward)
        pending = ends.activation_out(forward)
        forward += 1
    yield from _post(pending)
    for microbatch in range(backward, num_microbatches):
        yield from _exchange(ends.gradient_in(microbatch))
        yield Backward(microbatch)
        yield from _wait(pending)
        pending = ends.gradient_out(microbatch)
        yield from _post(pending)
    yield from _wait(pending)


SCHEDULES: dict[str, Schedule] = {"gpipe": gpipe, "1f1b": one_forward_one_backward}
"""Schedules by the name they have in a layout."""


def in_flight(instructions: Sequence[Instruction]) -> int:
    """The most microbatches whose forward has run and whose backward has not."""
    held = most = 0
    for instruction in instructions:
        held += isinstance(instruction, Forward) - isinstance(instruction, Backward)
        most = max(most, held)
    return most


def gathers_needed(instructions: Sequence[Instruction]) -> dict[Forward | Backward, bool]:
    """For each forward and backward, whether sharded parameters must be gathered first.

    Inside a pipeline a block stays gathered after a backward that is not the step's last and is released after
    a forward, so only a backward leaves the next instruction with gathered parameters.
    """
    passes = [i for i in instructions if isinstance(i, (Forward, Backward))]
    gathers: dict[Forward | Backward, bool] = {passes[0]: True} if passes else {}
    for before, after in pairwise(passes):
        gathers[after] = isinstance(before, Forward)
    return gathers


@dataclass(frozen=True, slots=True)
class _Ends:
    """The transfers that a stage takes part in; none over the ends of the pipeline."""

    stage: int
    num_stages: int

    def activation_in(self, microbatch: int) -> tuple[Transfer, ...]:
        return self._over("activation", microbatch, self.stage - 1)

    def activation_out(self, microbatch: int) -> tuple[Transfer, ...]:
        return self._over("activation", microbatch, self.stage)

    def gradient_in(self, microbatch: int) -> tuple[Transfer, ...]:
        return self._over("gradient", microbatch, self.stage)

    def gradient_out(self, microbatch: int) -> tuple[Transfer, ...]:
        return self._over("gradient", microbatch, self.stage - 1)

    def _over(
        self, what: Literal["activation", "gradient"], microbatch: int, boundary: int
    ) -> tuple[Transfer, ...]:
        inside = 0 <= boundary < self.num_stages - 1
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
