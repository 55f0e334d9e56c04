"""The plugin inside TensorBoard's own application: every route, good and bad, and how runs are found."""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from werkzeug.test import Client, TestResponse

from llmprof.schema.store import RunWriter, save_profile
from llmprof.tensorboard.runs import find_run_directories
from llmprof.tensorboard.writer import write_report, write_summary
from tests.tensorboard_samples import forecasts, measured_profile

if TYPE_CHECKING:
    from llmprof.tensorboard.plugin import LlmprofPlugin

PREFIX = "/data/plugin/llmprof"
STATIC = Path(__file__).parents[1] / "llmprof" / "tensorboard" / "static"

# TensorBoard's own copy of bleach warns when it is imported
pytestmark = pytest.mark.filterwarnings("ignore:html5lib's sanitizer is deprecated:DeprecationWarning")


def _plugin_class() -> type[LlmprofPlugin]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from llmprof.tensorboard.plugin import LlmprofPlugin
    return LlmprofPlugin


def make_application(logdir: Path, *, path_prefix: str = "") -> Any:
    """Our plugin in TensorBoard's WSGI application."""
    plugin = _plugin_class()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from tensorboard.backend import application
        from tensorboard.backend.event_processing import data_provider, plugin_event_multiplexer

    multiplexer = plugin_event_multiplexer.EventMultiplexer()
    multiplexer.AddRunsFromDirectory(str(logdir))
    multiplexer.Reload()
    flags = argparse.Namespace(
        logdir=str(logdir), path_prefix=path_prefix, samples_per_plugin={}, window_title=""
    )
    provider = data_provider.MultiplexerDataProvider(multiplexer, str(logdir))
    return application.TensorBoardWSGIApp(flags, [plugin], provider)


def _application(logdir: Path, *, path_prefix: str = "") -> Client:
    return Client(make_application(logdir, path_prefix=path_prefix))


def _json(response: TestResponse) -> Any:
    assert response.mimetype == "application/json"
    return json.loads(response.get_data())


@pytest.fixture
def logdir(tmp_path: Path) -> Path:
    root = tmp_path / "logs"
    write_report(root, run="demo", profile=measured_profile(), forecasts=forecasts())
    save_profile(measured_profile(ranks=1), root / "sweep" / "captured")
    return root


def test_entry_point_names_the_plugin() -> None:
    points = importlib.metadata.entry_points(group="tensorboard_plugins")
    mine = [p for p in points if p.value.startswith("llmprof.")]
    assert {p.value for p in mine} == {"llmprof.tensorboard.plugin:LlmprofPlugin"}
    assert mine[0].load() is _plugin_class()


def test_import_of_the_plugin_needs_little() -> None:
    code = (
        "import sys, llmprof.tensorboard.plugin;"
        "print(sorted({'torch', 'pandas', 'numpy', 'msgspec', 'rich'} & sys.modules.keys()))"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert out.strip() == "[]"


def test_listing_offers_the_tab(logdir: Path) -> None:
    entry = _json(_application(logdir).get("/data/plugins_listing"))["llmprof"]
    assert entry["enabled"] is True
    assert entry["tab_name"] == "LLMPROF"
    assert entry["loading_mechanism"] == {"type": "IFRAME", "module_path": f"{PREFIX}/index.js"}


def test_path_prefix_is_kept(logdir: Path) -> None:
    client = _application(logdir, path_prefix="/some/where")
    entry = _json(client.get("/some/where/data/plugins_listing"))["llmprof"]
    assert entry["loading_mechanism"]["module_path"] == f"/some/where{PREFIX}/index.js"
    assert client.get(f"/some/where{PREFIX}/index.js").status_code == 200


def test_every_static_file_is_served(logdir: Path) -> None:
    client = _application(logdir)
    files = [f for f in STATIC.rglob("*") if f.suffix in (".js", ".css")]
    assert len(files) >= 10
    for file in files:
        response = client.get(f"{PREFIX}/{file.relative_to(STATIC).as_posix()}")
        assert response.status_code == 200, file
        assert response.get_data() == file.read_bytes()
        expected = "text/css" if file.suffix == ".css" else "application/javascript"
        assert response.mimetype == expected
        assert response.headers["X-Content-Type-Options"] == "nosniff"


@pytest.mark.parametrize(
    "path",
    [
        "/nothing.js",
        "/../plugin.py",
        "/vendor/../../plugin.py",
        "/%2e%2e/plugin.py",
        "/vendor/VERSION",
        "/vendor/..%2f..%2fplugin.py",
        "/data/runs/../../index.js/..",
        "//etc/passwd",
    ],
)
def test_other_paths_are_not_found(logdir: Path, path: str) -> None:
    assert _application(logdir).get(PREFIX + path).status_code == 404


def test_runs_come_from_event_files_and_from_run_directories(logdir: Path) -> None:
    answer = _json(_application(logdir).get(f"{PREFIX}/data/runs"))
    assert answer["logdir"] == str(logdir)
    assert {(r["name"], r["source"]) for r in answer["runs"]} == {
        ("demo", "summary"),
        ("sweep/captured", "directory"),
    }
    assert all(r["updated"] > 0 for r in answer["runs"])


def test_report_of_an_event_file(logdir: Path) -> None:
    report = _json(_application(logdir).get(f"{PREFIX}/data/report?run=demo"))
    assert report["show"]["step_time_us"]["median"] == 413_000.0
    assert len(report["forecasts"]) == 13


def test_report_of_a_run_directory(logdir: Path) -> None:
    report = _json(_application(logdir).get(f"{PREFIX}/data/report?run=sweep/captured"))
    assert report["run"]["world_size"] == 1
    assert report["forecasts"] == []


def test_report_is_compressed_when_the_browser_takes_it(logdir: Path) -> None:
    response = _application(logdir).get(f"{PREFIX}/data/report?run=demo", headers={"Accept-Encoding": "gzip"})
    assert response.headers["Content-Encoding"] == "gzip"


def test_the_newer_of_event_file_and_directory_is_shown(tmp_path: Path) -> None:
    save_profile(measured_profile(), tmp_path / "demo")
    write_report(tmp_path, run="demo", profile=measured_profile(), forecasts=forecasts())
    client = _application(tmp_path)
    assert [r["source"] for r in _json(client.get(f"{PREFIX}/data/runs"))["runs"]] == ["summary"]
    later = time.time() + 100
    os.utime(tmp_path / "demo" / "rank-00000" / "manifest.json", (later, later))
    assert [r["source"] for r in _json(client.get(f"{PREFIX}/data/runs"))["runs"]] == ["directory"]
    assert _json(client.get(f"{PREFIX}/data/report?run=demo"))["forecasts"] == []


def test_the_newest_report_of_a_run_is_shown(tmp_path: Path) -> None:
    for world_size in range(1, 13):
        write_summary(tmp_path, run="demo", report={"version": 1, "run": {"world_size": world_size}})
    report = _json(_application(tmp_path).get(f"{PREFIX}/data/report?run=demo"))
    assert report["run"]["world_size"] == 12


@pytest.mark.parametrize("run", ["", "nothing", "../logs/demo", "/etc", "x" * 5_000, "<script>"])
def test_unknown_run_is_one_clear_error(logdir: Path, run: str) -> None:
    response = _application(logdir).get(f"{PREFIX}/data/report", query_string={"run": run})
    assert response.status_code == 404
    error = _json(response)["error"]
    assert error["kind"] == "run"
    assert "there is no run" in error["message"] and len(error["message"]) < 400


def test_empty_log_directory_has_no_runs_and_no_active_tab(tmp_path: Path) -> None:
    client = _application(tmp_path)
    assert _json(client.get(f"{PREFIX}/data/runs")) == {"runs": [], "logdir": str(tmp_path)}
    assert _json(client.get("/data/plugins_listing"))["llmprof"]["enabled"] is False


def test_missing_log_directory_is_no_fault(tmp_path: Path) -> None:
    client = _application(tmp_path / "later")
    assert _json(client.get(f"{PREFIX}/data/runs"))["runs"] == []


def _torn_manifest(root: Path) -> None:
    (root / "bad" / "rank-00000" / "manifest.json").write_text('{"version": 1, "kin')


def _foreign_tables(root: Path) -> None:
    (root / "bad" / "rank-00000" / "tables.npz").write_bytes(b"not a zip file")


def _newer_version(root: Path) -> None:
    (root / "bad" / "rank-00000" / "manifest.json").write_text('{"version": 99}')


@pytest.mark.parametrize("damage", [_torn_manifest, _foreign_tables, _newer_version])
def test_damaged_run_directory_is_one_clear_error(tmp_path: Path, damage: Callable[[Path], None]) -> None:
    save_profile(measured_profile(ranks=1), tmp_path / "bad")
    damage(tmp_path)
    client = _application(tmp_path)
    assert [r["name"] for r in _json(client.get(f"{PREFIX}/data/runs"))["runs"]] == ["bad"]
    response = client.get(f"{PREFIX}/data/report?run=bad")
    assert response.status_code == 404
    assert _json(response)["error"]["message"]


def test_report_of_a_newer_version_is_one_clear_error(tmp_path: Path) -> None:
    write_summary(tmp_path, run="new", report={"version": 99})
    error = _json(_application(tmp_path).get(f"{PREFIX}/data/report?run=new"))["error"]
    assert "format version 99" in error["message"] and error["hint"] == "update llmprof"


def test_only_reading_is_allowed(logdir: Path) -> None:
    client = _application(logdir)
    assert client.post(f"{PREFIX}/data/runs").status_code == 405
    assert client.head(f"{PREFIX}/data/runs").status_code == 200


def test_directory_report_follows_the_run(tmp_path: Path) -> None:
    save_profile(measured_profile(ranks=1), tmp_path / "run")
    client = _application(tmp_path)
    assert _json(client.get(f"{PREFIX}/data/report?run=run"))["run"]["world_size"] == 1
    save_profile(measured_profile(ranks=2), tmp_path / "run")
    assert _json(client.get(f"{PREFIX}/data/report?run=run"))["run"]["world_size"] == 2


def test_run_that_is_still_going_is_shown(tmp_path: Path) -> None:
    profile = measured_profile(ranks=1)
    writer = RunWriter(tmp_path / "live", 0)
    writer.begin(profile.manifest)
    client = _application(tmp_path)
    report = _json(client.get(f"{PREFIX}/data/report?run=live"))
    assert report["show"] is None and "no step" in report["problem"]["message"]
    for row in profile.steps[:6]:
        writer.journal(row)
    writer.close()
    report = _json(client.get(f"{PREFIX}/data/report?run=live"))
    assert report["run"]["status"] == "partial"
    assert [step["step"] for step in report["steps"]] == [0, 1, 2, 3, 4, 5]
    assert report["show"]["phases"] == {}


def test_is_active_does_not_wait_for_a_slow_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    go_on = threading.Event()

    def slow(root: Path) -> dict[str, Path]:
        assert go_on.wait(60)
        return {"run": root / "run"}

    monkeypatch.setattr("llmprof.tensorboard.runs.find_run_directories", slow)
    plugin_class = _plugin_class()
    from tensorboard.plugins.base_plugin import TBContext

    plugin = plugin_class(TBContext(logdir=str(tmp_path)))
    assert plugin.is_active() is False
    assert plugin.is_active() is False
    go_on.set()
    deadline = time.monotonic() + 30
    while not plugin.is_active() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert plugin.is_active() is True


def test_run_directories_are_found_by_their_path(tmp_path: Path) -> None:
    for name in ("a", "b/c", "b/c/d", ".hidden"):
        save_profile(measured_profile(ranks=2), tmp_path / name)
    (tmp_path / "rank-00000").mkdir()  # looks like one, but holds no manifest
    (tmp_path / "loop").symlink_to(tmp_path, target_is_directory=True)
    (tmp_path / "file").write_text("")
    assert sorted(find_run_directories(tmp_path)) == ["a", "b/c", "b/c/d"]


def test_log_directory_may_be_the_run_itself(tmp_path: Path) -> None:
    save_profile(measured_profile(ranks=1), tmp_path)
    assert find_run_directories(tmp_path) == {".": tmp_path}


def test_search_for_runs_ends_at_a_depth(tmp_path: Path) -> None:
    deep = tmp_path.joinpath(*"abcdefgh")
    save_profile(measured_profile(ranks=1), deep)
    assert find_run_directories(tmp_path) == {}
