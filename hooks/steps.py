"""Step detection: optimizer steps, batch requests and root forwards in; one boundary for each training step out.

No torch here: `llmprof.hooks.taps` turns torch's hooks into these events. The rules are in hooks/README.md.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

MAX_REPEATS = 16
"""Steps of one optimizer after which the boundary no longer waits for the next batch (several epochs over one batch,
or a loader that only filled a cache) or for another optimizer; a critic that is stepped 5 times stays one step."""

BATCHES_WITHOUT_OPTIMIZER = 64
"""Batches with gradients but no optimizer step after which every batch counts as a step."""


@dataclass(frozen=True, kw_only=True)
class StepFacts:
    """What was seen between two boundaries.

    Attributes:
        microbatches: root forwards with gradients, or batch requests while forwards are not watched; at least 1.
        evaluated: a root ran without gradients or in evaluation mode.
        complete: an optimizer step (or an explicit `step()`) ended it; False for a torso at the end of the run.
        tokens, sequences: sums over the microbatches, None when not known.
    """

    microbatches: int = 1
    evaluated: bool = False
    complete: bool = True
    tokens: int | None = None
    sequences: int | None = None


class StepDetector:
    """Decides where one training step ends and the next begins.

    An optimizer step makes the step *pending*; the boundary falls at the next batch request, or, when no batch was
    requested in this step, at the next root forward after every optimizer in use has stepped. The first explicit `step()` switches detection off.

    Args:
        on_boundary: called with the facts of the step that ended.
    """

    def __init__(self, on_boundary: Callable[[StepFacts], None]) -> None:
        self._on_boundary = on_boundary
        self._explicit = False
        self._without_optimizer = True
        self._ignore_requests = False
        self._unstepped_batches = 0
        self._known_optimizers: set[int] = set()
        self.warnings: list[str] = []
        self._reset()

    def _reset(self) -> None:
        self._pending = False
        self._optimizer_steps: Counter[int] = Counter()
        self._requests = 0
        self._forwards = 0
        self._evaluated = False
        self._tokens: int | None = None
        self._sequences: int | None = None

    @property
    def pending(self) -> bool:
        """True when the work of the current step is done and only its boundary is missing."""
        return self._pending

    @property
    def started(self) -> bool:
        """True when anything was seen since the last boundary."""
        return bool(self._pending or self._requests or self._forwards or self._evaluated)

    def optimizer_stepped(self, key: int) -> None:
        """An optimizer's `step()` returned; `key` tells optimizers apart."""
        self._pending = True
        self._without_optimizer = False
        self._known_optimizers.add(key)
        self._optimizer_steps[key] += 1
        if self._optimizer_steps[key] >= MAX_REPEATS and not self._explicit:
            self._stop_waiting()

    def forget(self, key: int) -> None:
        """An optimizer is gone: no longer wait for it."""
        self._known_optimizers.discard(key)

    def _stop_waiting(self) -> None:
        """The boundary did not come: from now on wait neither for a batch nor for optimizers that rest."""
        self._known_optimizers = set(self._optimizer_steps)
        if self._requests and not self._ignore_requests:
            self._ignore_requests = True
            self.warnings.append(
                f"an optimizer was stepped {MAX_REPEATS} times on one batch of the data loader: "
                "steps are now told apart by forward passes; call session.step() to mark them yourself"
            )

    def batch_requested(self, *, grad: bool = True) -> None:
        """The loop asks for its next batch; `grad` is False when gradients are switched off."""
        if not self._explicit:
            if self._pending or self._is_step_without_optimizer():
                self.boundary()
            elif self._requests and self._without_optimizer and grad:
                self._count_unstepped_batch()
        if grad:
            self._requests += 1

    def root_forward(
        self, *, grad: bool, counts: bool = True, tokens: int | None = None, sequences: int | None = None
    ) -> None:
        """A root module is called; `grad` is False for an evaluation, `counts` False for all but the main root."""
        if self._pending and not self._explicit and not self._waits():
            self.boundary()
        if not grad:
            self._evaluated = True
            return
        self._forwards += counts
        if tokens is not None:
            self._tokens = (self._tokens or 0) + tokens
        if sequences is not None:
            self._sequences = (self._sequences or 0) + sequences

    def step(self, *, tokens: int | None = None) -> None:
        """The user marks the end of a step; from now on nothing else does."""
        self._explicit = True
        self._pending = True
        if tokens is not None:
            self._tokens = tokens
        self.boundary()

    def boundary(self) -> None:
        """End the current step."""
        facts = self.facts()
        self._reset()
        self._on_boundary(facts)

    def facts(self) -> StepFacts:
        """What was seen since the last boundary."""
        return StepFacts(
            microbatches=max(1, self._forwards or self._requests),
            evaluated=self._evaluated and not self._without_optimizer,
            complete=self._pending,
            tokens=self._tokens,
            sequences=self._sequences,
        )

    def _waits(self) -> bool:
        """True while a better sign than a forward can come: the next batch, or the step of another optimizer."""
        waits_for_batch = self._requests > 0 and not self._ignore_requests
        return waits_for_batch or not self._known_optimizers.issubset(self._optimizer_steps)

    def _is_step_without_optimizer(self) -> bool:
        """In a loop without optimizer, inference ends with the next request, and so do batches after long waiting."""
        if not self._without_optimizer:
            return False
        inferred = self._evaluated and not self._forwards
        return inferred or (self._unstepped_batches >= BATCHES_WITHOUT_OPTIMIZER and self._requests > 0)

    def _count_unstepped_batch(self) -> None:
        self._unstepped_batches += 1
        if self._unstepped_batches == BATCHES_WITHOUT_OPTIMIZER:
            self.warnings.append(
                f"no torch optimizer was stepped in {BATCHES_WITHOUT_OPTIMIZER} batches: each batch now counts as "
                "a step; call session.step() to mark steps yourself"
            )
