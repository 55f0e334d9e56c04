"""A function of this process run in a forked child with a time limit: bytes out, the parent's state untouched."""

from __future__ import annotations

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
        payload: the function's result, or the error's text when `status` is "failed".
        status: "ok", "failed", "late" or "died".
    """

    payload: bytes
    status: str


def run_forked(function: Callable[[], bytes], *, timeout_s: float) -> ChildResult:
    """Call `function` in a forked child and return its bytes.

    The child shares nothing with the parent but a copy of its memory. It leaves with `os._exit`, so no
    exit handler, flush or destructor of the parent's objects runs twice.

    Args:
        function: called in the child; an exception comes back as status "failed" with its text.
        timeout_s: wall time after which the child is killed and the status is "late".
    """
    read_end, write_end = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # forking with threads: the child runs one thread
        pid = os.fork()
    if pid == 0:
        os.close(read_end)
        _serve(function, write_end)
    os.close(write_end)
    try:
        data = _read_until(read_end, time.monotonic() + timeout_s)
    finally:
        os.close(read_end)
        if not _finished(pid):
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
    if data is None:
        return ChildResult(b"", "late")
    if not data:
        return ChildResult(b"", "died")
    return ChildResult(data[1:], "ok" if data[:1] == OK else "failed")


def _serve(function: Callable[[], bytes], write_end: int) -> None:
    """Child side: never returns."""
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


def _finished(pid: int) -> bool:
    """True when the child has ended (or ends within a moment) and was waited for."""
    for _ in range(100):
        done, _ = os.waitpid(pid, os.WNOHANG)
        if done:
            return True
        time.sleep(0.005)
    return False
