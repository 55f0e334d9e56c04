"""Starts a session in a process whose script does not name us: as soon as, and only if, it imports torch."""

from __future__ import annotations

import importlib.util
import json
import logging
import os
import sys
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from llmprof.hooks.options import SessionOptions
    from llmprof.hooks.session import Session

OPTIONS_VARIABLE = "LLMPROF_RUN"
"""Environment variable in which a launcher hands the options, as JSON, to the processes that it starts."""

SITECUSTOMIZE = '''\
"""Starts llmprof in this process, then runs the sitecustomize that this file hides."""
import os
import sys
from importlib.machinery import PathFinder
from importlib.util import module_from_spec

here = os.path.dirname(os.path.abspath(__file__))
sys.path[:] = [entry for entry in sys.path if not entry or os.path.abspath(entry) != here]
try:
    from llmprof.hooks.startup import arm_from_environment
except ImportError:
    pass
else:
    arm_from_environment()
spec = PathFinder.find_spec("sitecustomize", sys.path)
if spec is not None and spec.loader is not None:
    sys.modules["sitecustomize"] = module_from_spec(spec)
    spec.loader.exec_module(sys.modules["sitecustomize"])
'''
"""Put first on PYTHONPATH, every Python process below a launcher runs this."""

logger = logging.getLogger("llmprof")


class Starter:
    """Opens a session once torch is imported; importing it earlier would rob a script of its say in threads.

    Args:
        options: of the session.
        implicit: processes that train nothing (a launcher, a data worker) write nothing.
    """

    def __init__(self, options: SessionOptions, *, implicit: bool) -> None:
        self._options = options
        self._implicit = implicit
        self.session: Session | None = None

    def arm(self) -> None:
        """Open now when torch is there already, else when it comes."""
        if "torch" in sys.modules:
            self._open()
        else:
            sys.meta_path.insert(0, _AfterImport("torch", self._open))

    def disarm(self) -> None:
        """Do not wait any longer."""
        for finder in [f for f in sys.meta_path if isinstance(f, _AfterImport)]:
            sys.meta_path.remove(finder)

    def _open(self) -> None:
        try:
            from llmprof.hooks.options import make_options
            from llmprof.hooks.session import Session

            self.session = Session(make_options(self._options), implicit=self._implicit)
            self.session.open()
        except Exception as error:  # noqa: BLE001 (it would end the user's script)
            logger.warning("llmprof could not start: %s: %s", type(error).__name__, error)


def arm_from_environment() -> None:
    """Arm with the options that a launcher left in the environment; without them do nothing."""
    text = os.environ.get(OPTIONS_VARIABLE, "")
    if not text or os.environ.get("LLMPROF", "1") == "0":
        return
    try:
        options: SessionOptions = json.loads(text)
    except ValueError:
        logger.warning("llmprof could not read its options from %s", OPTIONS_VARIABLE)
        return
    Starter(options, implicit=True).arm()


class _AfterImport(MetaPathFinder):
    """Finds one module as usual, and calls a function when it has been executed."""

    def __init__(self, name: str, then: Callable[[], None]) -> None:
        self._name = name
        self._then = then

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """The usual spec with a loader that reports back."""
        if fullname != self._name:
            return None
        if self in sys.meta_path:
            sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            spec.loader = _ReportingLoader(spec.loader, self._then)
        return spec


class _ReportingLoader(Loader):
    """Another loader, which it puts back into the module before it runs."""

    def __init__(self, inner: Loader, then: Callable[[], None]) -> None:
        self._inner = inner
        self._then = then

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        """As the inner loader does."""
        return self._inner.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        """Run the module, then report."""
        spec: Any = module.__spec__
        spec.loader = module.__loader__ = self._inner
        self._inner.exec_module(module)
        self._then()
