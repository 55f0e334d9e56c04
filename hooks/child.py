"""A function of this process run in a forked child with a time limit: bytes out, the parent's state untouched."""

from __future__ import annotations

import gc
import os
import select
import signal
import time
import warnings
from collections.abc import Callable
from typing import NamedTuple

OK = b"\x00"
FAILED = b"\x01"


class ChildResult(NamedTuple):
    """What a child sent back.

    Attributes:
        payload: the function's result, the error's text when `status` is "failed", what ended it when "died".
        status: "ok", "failed", "late" or "died".
    """

    payload: bytes
    status: str


def run_forked(function: Callable[[], bytes], *, timeout_s: float) -> ChildResult:
    """Call `function` in a forked child and return its bytes.

    The child shares nothing with the parent but a copy of its memory. It leaves with `os._exit` and collects no
    garbage, so no exit handler, flush or destructor of the parent's objects runs twice: these may need threads or
    locks that a fork does not copy. A child that a signal ended is replaced once.

    Args:
        function: called in the child; an exception comes back as status "failed" with its text.
        timeout_s: wall time after which the child is killed and the status is "late".
    """
    deadline = time.monotonic() + timeout_s
    result = _run_once(function, deadline)
    return _run_once(function, deadline) if result.status == "died" else result


def _run_once(function: Callable[[], bytes], deadline: float) -> ChildResult:
    read_end, write_end = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # forking with threads: the child runs one thread
        pid = os.fork()
    if pid == 0:
        os.close(read_end)
        _serve(function, write_end)
    os.close(write_end)
    status: int | None = None
    try:
        data = _read_until(read_end, deadline)
    finally:
        os.close(read_end)
        status = _finished(pid)
        if status is None:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
    if data is None:
        return ChildResult(b"", "late")
    if status is None or os.waitstatus_to_exitcode(status) or not data:
        return ChildResult(_end_of(status).encode(), "died")
    return ChildResult(data[1:], "ok" if data[:1] == OK else "failed")


def _serve(function: Callable[[], bytes], write_end: int) -> None:
    """Child side: never returns."""
    gc.disable()
    gc.freeze()
    try:
        message = OK + function()
    except BaseException as error:  # noqa: BLE001 (the parent tells the user)
        message = FAILED + f"{type(error).__name__}: {error}".encode(errors="replace")
    try:
        view = memoryview(message)
        while view:
            view = view[os.write(write_end, view) :]
    finally:
        os._exit(0)


def _read_until(descriptor: int, deadline: float) -> bytes | None:
    """All bytes until the other end closes, or None when the deadline passes first."""
    chunks: list[bytes] = []
    while True:
        left = deadline - time.monotonic()
        if left <= 0:
            return None
        ready, _, _ = select.select([descriptor], [], [], left)
        if not ready:
            return None
        chunk = os.read(descriptor, 1 << 20)
        if not chunk:
            return b"".join(chunks)
        chunks.append(chunk)


def _finished(pid: int) -> int | None:
    """Wait status of a child that has ended, or ends within a moment; None while it runs."""
    for _ in range(100):
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return status
        time.sleep(0.005)
    return None


def _end_of(status: int | None) -> str:
    """Which signal ended a child that sent nothing, "" when it left by itself."""
    code = os.waitstatus_to_exitcode(status) if status is not None else 0
    if code < 0:
        name = signal.strsignal(-code) or f"signal {-code}"
        return f"the tracing process was ended by signal {-code} ({name}), twice"
    return ""
