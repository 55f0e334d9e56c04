"""Keeps torch.compile away from our own functions, without breaking a graph that meets them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def run_as_is(function: Callable[..., Any]) -> None:
    """Tell torch.compile never to compile this function, or what it calls, as a frame of its own.

    Dynamo compiles every frame that runs while it is active, so also a hook that an uncompiled module calls: the
    first call would take seconds, and `is_compiling()` would be True in it for ever. When a graph is traced through
    a call of the function it is still followed; there it must return at once. A torch without the (private) call
    for this compiles the function, which costs that time and nothing else.
    """
    eval_frame: Any = getattr(getattr(torch._C, "_dynamo", None), "eval_frame", None)
    action = getattr(eval_frame, "_FrameAction", None)
    strategy = getattr(eval_frame, "_FrameExecStrategy", None)
    set_strategy = getattr(eval_frame, "set_code_exec_strategy", None)
    code = getattr(function, "__code__", None)
    if action is None or strategy is None or set_strategy is None or code is None:
        return
    set_strategy(code, strategy(action.SKIP, action.SKIP))
