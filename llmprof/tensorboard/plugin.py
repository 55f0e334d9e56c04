"""Turns event files and run directories below a log directory into the LLMPROF tab of TensorBoard.

TensorBoard imports this module at start-up and dies with it, so everything that could fail is imported on
first use, and no route takes a path from a request: files come from a fixed list, runs from their names.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tensorboard import plugin_util
from tensorboard.backend import http_util
from tensorboard.plugins import base_plugin
from werkzeug import wrappers

from llmprof.tensorboard import PLUGIN_NAME

if TYPE_CHECKING:
    from llmprof.tensorboard.runs import RunSource

_STATIC = Path(__file__).parent / "static"
_JAVASCRIPT = "application/javascript"
_FILES = {
    "/index.js": _JAVASCRIPT,
    "/api.js": _JAVASCRIPT,
    "/charts.js": _JAVASCRIPT,
    "/dom.js": _JAVASCRIPT,
    "/forecast.js": _JAVASCRIPT,
    "/forecast_detail.js": _JAVASCRIPT,
    "/forecast_table.js": _JAVASCRIPT,
    "/format.js": _JAVASCRIPT,
    "/measured.js": _JAVASCRIPT,
    "/operators.js": _JAVASCRIPT,
    "/overview.js": _JAVASCRIPT,
    "/scaling.js": _JAVASCRIPT,
    "/table.js": _JAVASCRIPT,
    "/theme.js": _JAVASCRIPT,
    "/parts.css": "text/css",
    "/style.css": "text/css",
    "/vendor/echarts.esm.min.js": _JAVASCRIPT,
}
_VENDOR_EXPIRES_S = 86_400
_PATIENCE_S = 0.1

Application = Callable[[dict[str, Any], Callable[..., Any]], Iterable[bytes]]


class LlmprofPlugin(base_plugin.TBPlugin):  # type: ignore[misc]
    """The tab: static files, the list of runs, and one report for each run."""

    plugin_name = PLUGIN_NAME

    def __init__(self, context: base_plugin.TBContext) -> None:
        self._logdir: str = context.logdir or ""
        self._data_provider = context.data_provider
        self._sources: RunSource | None = None
        self._lock = threading.Lock()
        self._looker: threading.Thread | None = None
        self._found = False

    def get_plugin_apps(self) -> dict[str, Application]:
        """Routes below `data/plugin/llmprof`."""
        apps: dict[str, Application] = {
            route: _static_app(_STATIC / route[1:], content_type) for route, content_type in _FILES.items()
        }
        apps["/data/runs"] = wrappers.Request.application(self._serve_runs)
        apps["/data/report"] = wrappers.Request.application(self._serve_report)
        return apps

    def is_active(self) -> bool:
        """Whether a run directory lies below the log directory, as far as is known without waiting for it.

        TensorBoard asks this while its page loads, and knows by itself of runs in event files. A slow
        (network) log directory is looked through in a thread; the next call has its answer.
        """
        with self._lock:
            if self._found:
                return True
            if self._looker is None or not self._looker.is_alive():
                self._looker = threading.Thread(target=self._look, name="llmprof-runs", daemon=True)
                self._looker.start()
            looker = self._looker
        looker.join(_PATIENCE_S)
        return self._found

    def frontend_metadata(self) -> base_plugin.FrontendMetadata:
        """One ES module drives the tab."""
        return base_plugin.FrontendMetadata(es_module_path="/index.js", tab_name="LLMPROF")

    def _look(self) -> None:
        self._found = bool(self._run_source().directories())

    def _run_source(self) -> RunSource:
        with self._lock:
            if self._sources is None:
                from llmprof.tensorboard.runs import RunSource

                self._sources = RunSource(self._logdir, self._data_provider)
            return self._sources

    def _serve_runs(self, request: wrappers.Request) -> wrappers.Response:
        def answer() -> dict[str, Any]:
            runs = self._run_source().list_runs(*_experiment(request))
            return {"runs": runs, "logdir": self._logdir}

        return _respond(request, answer)

    def _serve_report(self, request: wrappers.Request) -> wrappers.Response:
        def answer() -> dict[str, Any]:
            return self._run_source().report(request.args.get("run", ""), *_experiment(request))

        return _respond(request, answer)


def _experiment(request: wrappers.Request) -> tuple[Any, str]:
    return plugin_util.context(request.environ), plugin_util.experiment_id(request.environ)


def _static_app(file: Path, content_type: str) -> Application:
    def serve(request: wrappers.Request) -> wrappers.Response:
        expires = _VENDOR_EXPIRES_S if file.parent.name == "vendor" else 0
        response: wrappers.Response = http_util.Respond(
            request, file.read_bytes(), content_type, expires=expires
        )
        return response

    return wrappers.Request.application(serve)


def _respond(request: wrappers.Request, answer: Callable[[], dict[str, Any]]) -> wrappers.Response:
    """The answer as JSON; what the user can mend as `{error: {kind, message, hint}}`, which the tab shows."""
    from llmprof.errors import LlmprofError

    try:
        if request.method not in ("GET", "HEAD"):
            return _json(
                request, _error("request", f"{request.method} is not allowed here", "use GET"), code=405
            )
        return _json(request, answer())
    except LlmprofError as reason:
        error = _error(reason.kind, reason.message, reason.hint)
    except OSError as reason:
        error = _error("run", f"a file cannot be read: {reason}", "reload")
    return _json(request, error, code=404)


def _error(kind: str, message: str, hint: str) -> dict[str, Any]:
    return {"error": {"kind": kind, "message": message, "hint": hint}}


def _json(request: wrappers.Request, content: dict[str, Any], *, code: int = 200) -> wrappers.Response:
    response: wrappers.Response = http_util.Respond(request, content, "application/json", code=code)
    return response
