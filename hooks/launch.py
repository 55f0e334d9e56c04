"""Runs a training script unchanged inside a session, in this process or below a launcher such as torchrun."""

from __future__ import annotations

import importlib.util
import json
import os
import runpy
import shutil
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from llmprof.errors import RequestError
from llmprof.hooks.startup import OPTIONS_VARIABLE, SITECUSTOMIZE, Starter

if TYPE_CHECKING:
    from llmprof.hooks.options import SessionOptions


@dataclass(frozen=True, kw_only=True)
class Target:
    """What to run.

    Attributes:
        kind: "script" (a file), "module" (as `python -m`) or "launcher" (a program that starts Python processes).
        name: file, module or program.
        arguments: those of the script, module or program.
    """

    kind: str
    name: str
    arguments: tuple[str, ...]


def parse_target(words: Sequence[str]) -> Target:
    """Read what follows `--`: `train.py --lr 1`, `-m package.train`, `torchrun --nproc-per-node 8 train.py`.

    Raises:
        RequestError: nothing to run, or neither a file nor a program.
    """
    hint = "for example: llmprof run -- train.py --lr 1"
    if not words:
        raise RequestError("there is nothing to run", hint=hint)
    first, rest = words[0], tuple(words[1:])
    if first == "-m":
        if not rest:
            raise RequestError("-m needs the name of a module", hint=hint)
        _check_module(rest[0])
        return Target(kind="module", name=rest[0], arguments=rest[1:])
    if not first.strip():
        raise RequestError("the script to run has no name", hint=hint)
    path = Path(first)
    if path.suffix in (".py", ".pyw") or path.is_dir() or (path.is_file() and not os.access(path, os.X_OK)):
        if not path.exists():
            raise RequestError(f"there is no script {first}", hint="check the path")
        if path.is_dir() and not (path / "__main__.py").is_file():
            raise RequestError(f"{first} is a directory without __main__.py", hint=hint)
        return Target(kind="script", name=first, arguments=rest)
    beside_python = os.pathsep.join([os.environ.get("PATH", os.defpath), os.path.dirname(sys.executable)])
    program = shutil.which(first, path=beside_python)
    if program is None:
        raise RequestError(f"{first} is neither a script nor a program on the PATH", hint=hint)
    return Target(kind="launcher", name=program, arguments=rest)


def _check_module(name: str) -> None:
    """Refuse what `python -m` would not find; looked for where it would, in the working directory first.

    Raises:
        RequestError: there is no such top-level module.
    """
    top = name.partition(".")[0]
    with _as_main(Target(kind="module", name=name, arguments=())):
        try:
            found = bool(top) and importlib.util.find_spec(top) is not None
        except (ImportError, ValueError):  # ValueError: __main__ has no spec
            found = False
    if not found:
        raise RequestError(f"there is no module {name}", hint="check its name, and the working directory")


def run_in_process(target: Target, options: SessionOptions, *, enabled: bool) -> int:
    """Run a script or module as `__main__` of this process.

    Returns:
        Its exit code: that of `sys.exit`, 1 after an exception (whose traceback is printed), else 0.
    """
    starter = Starter(options, implicit=False)
    if enabled:
        starter.arm()
    error: BaseException | None = None
    kept: dict[str, Any] = {}
    try:
        with _as_main(target):
            kept.update(_run(target))  # the model lives until the session has been closed
    except BaseException as raised:  # noqa: BLE001 (handed on below)
        error = raised
    starter.disarm()
    if starter.session is not None:
        starter.session.__exit__(type(error) if error else None, error, None)
    kept.clear()
    return _exit_code(error, target)


def run_launcher(target: Target, options: SessionOptions, *, enabled: bool) -> int:
    """Run a program; every Python process below it that trains is captured.

    Returns:
        Its exit code; 128 + the signal when it was killed.
    """
    with tempfile.TemporaryDirectory(prefix="llmprof-") as directory:
        environment = dict(os.environ)
        if enabled:
            Path(directory, "sitecustomize.py").write_text(SITECUSTOMIZE, encoding="utf-8")
            old = environment.get("PYTHONPATH")
            environment["PYTHONPATH"] = os.pathsep.join([directory, *([old] if old else [])])
            absolute = {**options, "logdir": os.path.abspath(options.get("logdir", "runs/llmprof"))}
            environment[OPTIONS_VARIABLE] = json.dumps(absolute)
        code = subprocess.call([target.name, *target.arguments], env=environment)
    return code if code >= 0 else 128 - code


def _run(target: Target) -> dict[str, Any]:
    if target.kind == "module":
        return runpy.run_module(target.name, run_name="__main__", alter_sys=True)
    return runpy.run_path(target.name, run_name="__main__")


@contextmanager
def _as_main(target: Target) -> Iterator[None]:
    """sys.argv and sys.path as `python train.py` or `python -m module` would set them."""
    argv, path = sys.argv, list(sys.path)
    sys.argv = [target.name, *target.arguments]
    is_script = target.kind == "script"
    sys.path[0:1] = [os.path.dirname(os.path.abspath(target.name)) if is_script else os.getcwd()]
    try:
        yield
    finally:
        sys.argv, sys.path[:] = argv, path


def _exit_code(error: BaseException | None, target: Target) -> int:
    """What `python train.py` would have returned; KeyboardInterrupt goes on."""
    if error is None:
        return 0
    if isinstance(error, SystemExit):
        if error.code is None or isinstance(error.code, int):
            return error.code or 0
        sys.stderr.write(f"{error.code}\n")
        return 1
    if not isinstance(error, Exception):
        raise error
    traceback.print_exception(type(error), error, _below_runpy(error.__traceback__))
    return 1


def _below_runpy(trace: TracebackType | None) -> TracebackType | None:
    """The traceback from the script's own first frame on."""
    whole = trace
    ours = (__file__, runpy.__file__)
    while trace is not None and (
        trace.tb_frame.f_code.co_filename in ours or trace.tb_frame.f_code.co_filename.startswith("<frozen")
    ):
        trace = trace.tb_next
    return trace or whole
