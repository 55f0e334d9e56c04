"""Keeps our errors out of the user's training step: an exception in a hook becomes a counted warning."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import wraps
from typing import ParamSpec

import torch

from llmprof.hooks.dynamo import run_as_is

P = ParamSpec("P")

MAX_ERRORS = 3
"""After this many errors all hooks are taken out."""

logger = logging.getLogger("llmprof")


class Guard:
    """Runs our code inside the user's step; its errors are logged, counted, and finally switch us off.

    Args:
        disable: takes all hooks out; called once, after MAX_ERRORS errors.
    """

    def __init__(self, disable: Callable[[], None]) -> None:
        self._disable = disable
        self.warnings: list[str] = []
        self.disabled = False

    def wrap(self, function: Callable[P, None]) -> Callable[P, None]:
        """The same function, which no longer raises, and does nothing while a graph is compiled."""

        @wraps(function)
        def guarded(*args: P.args, **kwargs: P.kwargs) -> None:
            if torch.compiler.is_compiling() or self.disabled:
                return
            try:
                function(*args, **kwargs)
            except Exception as error:  # noqa: BLE001 (it would end the user's training step)
                self.caught(error, where=getattr(function, "__name__", "a hook"))

        run_as_is(guarded)
        return guarded

    def caught(self, error: Exception, *, where: str) -> None:
        """Count one of our errors; the third switches capture off."""
        self.warnings.append(f"llmprof failed in {where}: {type(error).__name__}: {error}")
        logger.debug("llmprof failed in %s", where, exc_info=error)
        if len(self.warnings) == 1:
            logger.warning("%s (training goes on)", self.warnings[0])
        if len(self.warnings) >= MAX_ERRORS and not self.disabled:
            self.disabled = True
            self.warnings.append(f"capture was switched off after {MAX_ERRORS} errors")
            logger.warning("%s", self.warnings[-1])
            try:
                self._disable()
            except Exception as failure:  # noqa: BLE001 (nothing more can be done)
                logger.warning("llmprof could not take its hooks out: %s", failure)
