"""Records a few steps of a training loop, for tests of the recorder."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import nn

from llmprof.hooks.modules import ModuleNames
from llmprof.hooks.recorder import Recorder, Recording
from llmprof.schema.profile import OperatorRow

STEPS = 2


def recorder_of(*roots: nn.Module) -> Recorder:
    """A recorder that knows the modules of `roots`."""
    names = ModuleNames()
    for root in roots:
        names.add(root)
    return Recorder(names, rank=0, device="cpu")


def record(step: Callable[[], object], *roots: nn.Module, steps: int = STEPS) -> Recording:
    """One warm-up step, then a window of `steps` steps numbered from 5."""
    torch.set_num_threads(1)
    step()
    recorder = recorder_of(*roots)
    recorder.start()
    for number in range(5, 5 + steps):
        recorder.mark_step(number)
        step()
    recorder.mark_step(5 + steps)
    return recorder.stop()


def rows(
    recording: Recording, *ops: str, phase: str | None = None, module: str | None = None
) -> list[OperatorRow]:
    """Operator rows with one of the bare names, in a phase and a module when given."""
    return [
        row
        for row in recording.operators
        if (not ops or row.op.removeprefix("aten::") in ops)
        and (phase is None or row.phase == phase)
        and (module is None or row.module == module)
    ]


def calls(found: Iterable[OperatorRow]) -> float:
    """Calls per step of all rows together."""
    return sum(row.count for row in found)


def flops(found: Iterable[OperatorRow]) -> float:
    """FLOPs per step of all rows together."""
    return sum(row.count * row.flops for row in found)
