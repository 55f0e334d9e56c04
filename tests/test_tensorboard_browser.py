"""The tab in a real browser that reaches nothing but 127.0.0.1: it draws, stays silent, and survives hostile reports."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from llmprof.schema.store import save_profile
from llmprof.tensorboard.data import build_report
from llmprof.tensorboard.writer import write_report, write_summary
from tests.browser import Browser, find_chromium
from tests.tensorboard_samples import forecasts, measured_profile, predicted_profile

pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(find_chromium() is None, reason="no Chromium is installed"),
    pytest.mark.filterwarnings("ignore:html5lib's sanitizer is deprecated:DeprecationWarning"),
]

READY = 'document.querySelector("main:not([aria-busy])")?.children.length > 0'
IN_FRAME = 'document.querySelector("iframe")?.contentDocument'
INJECTION = "<img src=x onerror=window.hacked=1>"


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with contextlib.closing(Browser()) as started:
        yield started


def _open(browser: Browser, url: str, *, dark: bool = False, ready: str = READY) -> None:
    browser.open(url, dark=dark)
    browser.wait_for(ready)


@contextlib.contextmanager
def _serve(logdir: Path) -> Iterator[str]:
    """Our plugin in TensorBoard's application, without TensorBoard's own pages; yields the tab's address."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from werkzeug.serving import make_server

        from tests.test_tensorboard_plugin import make_application

        server = make_server("127.0.0.1", 0, make_application(logdir), threaded=True)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/data/plugin_entry.html?name=llmprof"
    finally:
        server.shutdown()
        thread.join(30)
        server.server_close()


@contextlib.contextmanager
def _tensorboard(logdir: Path, *options: str) -> Iterator[str]:
    """The real program; yields the address of its page."""
    command = [sys.executable, "-m", "tensorboard.main", "--logdir", str(logdir), "--port", "0", *options]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment,
        start_new_session=True,
    ) as process:
        try:
            assert process.stdout is not None
            seen = []
            for line in process.stdout:
                seen.append(line)
                address = re.search(r"at (http://\S+:\d+\S*) \(Press", line)
                if address:
                    yield address[1].replace("localhost", "127.0.0.1")
                    break
            else:
                raise AssertionError(f"TensorBoard did not start: {''.join(seen)}")
        finally:
            os.killpg(process.pid, signal.SIGKILL)  # its plugins start processes of their own


def _our_problems(browser: Browser) -> list[str]:
    """Problems of the page without those of TensorBoard itself (icon of a bare page, fonts under a path prefix)."""
    return [p for p in browser.problems if "favicon.ico" not in p and "/font-roboto/" not in p]


def _foreign_requests(browser: Browser) -> list[str]:
    return [
        u for u in browser.requested if not u.startswith(("http://127.0.0.1:", "data:", "about:", "blob:"))
    ]


def _drawn_charts(browser: Browser, document: str = "document") -> list[int]:
    """Number of drawn shapes in each chart."""
    shapes = f'[...{document}.querySelectorAll(".chart")].map(c => c.querySelectorAll("svg path, svg text").length)'
    return [int(n) for n in browser.evaluate(shapes)]


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("demo")
    write_report(root, run="demo", profile=measured_profile(), forecasts=forecasts())
    save_profile(measured_profile(ranks=1, name="other"), root / "captured")
    return root


@pytest.mark.parametrize(
    "options", [(), ("--load_fast=false", "--path_prefix=/some/where")], ids=["fast", "slow with prefix"]
)
def test_tab_inside_tensorboard(browser: Browser, demo: Path, options: tuple[str, ...]) -> None:
    ready = f'{IN_FRAME}?.querySelector("main:not([aria-busy])")?.children.length > 0'
    with _tensorboard(demo, *options) as address:
        _open(browser, f"{address}#llmprof", ready=ready)
        assert (
            len(browser.wait_for(f'[...{IN_FRAME}.querySelectorAll("select option")].map(o => o.value)')) == 2
        )
        browser.evaluate(
            f'(() => {{ const s = {IN_FRAME}.querySelector("select"); s.value = "demo";'
            ' s.dispatchEvent(new Event("change")); })()'
        )
        browser.wait_for(f'{IN_FRAME}.querySelectorAll(".chart svg").length === 6')
        assert min(_drawn_charts(browser, IN_FRAME)) > 10
        assert _our_problems(browser) == []
        assert _foreign_requests(browser) == []


def test_every_part_is_drawn_and_fits_the_screen(browser: Browser, demo: Path, tmp_path: Path) -> None:
    with _serve(demo) as url:
        _open(browser, url)
        _select(browser, "demo")
        titles = browser.evaluate('[...document.querySelectorAll("h2")].map(h => h.textContent)')
        assert titles == [
            "Where the step goes",
            "Steps",
            "Operators",
            "Modules",
            "Memory",
            "Collectives",
            "Forecasts",
            "Forecast and baselines",
            "Where the forecast step goes",
            "Scaling",
        ]
        values = browser.evaluate('[...document.querySelectorAll(".kpi-value")].map(k => k.textContent)')
        assert values == ["413 ms", "39.7 k tokens/s", "38.7 %", "41.3 GB", "forward", "98.7 %"]
        assert browser.evaluate("document.documentElement.scrollWidth") <= 1280
        assert browser.evaluate('document.querySelectorAll("tr.has-detail").length') == 13
        browser.screenshot(tmp_path / "tab.png")
        assert (tmp_path / "tab.png").stat().st_size > 30_000
        assert _our_problems(browser) == []
        assert _foreign_requests(browser) == []


def test_forecasts_can_be_sorted_and_opened(browser: Browser, demo: Path) -> None:
    first = 'document.querySelector("tr.has-detail code").textContent'
    with _serve(demo) as url:
        _open(browser, url)
        _select(browser, "demo")
        assert browser.evaluate(first) == "dp=1,tp=8,mb=2,accum=8"
        _click(browser, "th button", "Tokens/s")
        assert browser.evaluate(first) == "dp=32,tp=8,mb=2,accum=8"
        _click(browser, "th button", "Step time")
        _click(browser, "th button", "Step time")
        assert browser.evaluate(first) == "dp=4,tp=4,pp=4,accum=16"
        browser.evaluate('document.querySelector("tr.has-detail").click()')
        detail = browser.evaluate('document.querySelector("tr.detail:not([hidden])").textContent')
        assert "NCCL ring over 400 Gbit/s links per GPU" in detail
        assert "second baseline" in detail
        for label in ("share", "tokens/s", "step time", "shape", "each", "family"):
            _click(browser, ".segmented button", label)
        assert min(_drawn_charts(browser)) > 10
        assert _our_problems(browser) == []


def test_dark_mode_follows_the_preference(browser: Browser, demo: Path) -> None:
    background = "getComputedStyle(document.body).backgroundColor"
    with _serve(demo) as url:
        _open(browser, url)
        light = browser.evaluate(background)
        _open(browser, url, dark=True)
        assert browser.evaluate("document.documentElement.dataset.theme") == "dark"
        assert browser.evaluate(background) != light


def test_empty_log_directory_says_what_to_do(browser: Browser, tmp_path: Path) -> None:
    with _serve(tmp_path) as url:
        _open(browser, url)
        text = browser.evaluate("document.body.innerText")
        assert "No run was found yet" in text
        assert "llmprof.profile" in text and str(tmp_path) in text
        save_profile(measured_profile(ranks=1), tmp_path / "new")
        browser.wait_for(
            '(document.querySelector(".empty .reload")?.click(), document.querySelectorAll(".kpi").length === 6)'
        )
        assert _our_problems(browser) == []


def test_server_that_is_gone_is_said(browser: Browser, demo: Path) -> None:
    with _serve(demo) as url:
        _open(browser, url)
    _click(browser, ".bar .reload", "Reload")
    browser.wait_for('document.body.innerText.includes("TensorBoard does not answer")')


def _hostile_reports() -> dict[str, dict[str, Any]]:
    good = build_report(measured_profile(ranks=1), forecasts())
    injected: Any = _map_strings(good, INJECTION)
    return {
        "only-version": {"version": 1},
        "wrong-types": {"version": 1, **{key: "text" for key in good if key != "version"}},
        "lists-for-objects": {"version": 1, **{key: [[1], None, {}] for key in good if key != "version"}},
        "nulls": {"version": 1, **_map_numbers(good, None)},
        "zeros": {"version": 1, **_map_numbers(good, 0)},
        "negative": {"version": 1, **_map_numbers(good, -1)},
        "huge": {"version": 1, **_map_numbers(good, 1e300)},
        "texts-for-numbers": {"version": 1, **_map_numbers(good, INJECTION)},
        "injected": {**injected, "version": 1},
        "long": {**_map_strings(good, "W" * 3_000), "version": 1},
        "prototype": {
            **good,
            "show": {**good["show"], "phases": {"constructor": 3.0, "__proto__": 4.0, "toString": 1.0}},
            "scaling": [{"cluster": "c", "family": "f", "points": [0, 10**9, -1, "x", 1]}],
        },
    }


def _map_numbers(value: Any, to: Any) -> Any:
    if isinstance(value, dict):
        return {k: _map_numbers(v, to) for k, v in value.items() if k != "version"}
    if isinstance(value, list):
        return [_map_numbers(v, to) for v in value]
    return to if isinstance(value, int | float) and not isinstance(value, bool) else value


def _map_strings(value: Any, to: str) -> Any:
    if isinstance(value, dict):
        return {k: _map_strings(v, to) for k, v in value.items()}
    if isinstance(value, list):
        return [_map_strings(v, to) for v in value]
    return to if isinstance(value, str) else value


def test_hostile_reports_give_a_message_not_a_blank_page(browser: Browser, tmp_path: Path) -> None:
    reports = _hostile_reports()
    for name, report in reports.items():
        write_summary(tmp_path, run=name, report=report)
    with _serve(tmp_path) as url:
        _open(browser, url)
        for name in reports:
            _select(browser, name)
            text = browser.evaluate('document.querySelector("main").innerText.trim()')
            assert len(text) > 20, name
            browser.evaluate(
                'document.querySelectorAll("main button, tr.has-detail").forEach(b => b.click())'
            )
            text = browser.evaluate('document.querySelector("main").innerText')
            assert (
                browser.evaluate('document.querySelectorAll("main img, main script, main iframe").length')
                == 0
            )
            assert browser.evaluate("window.hacked === undefined"), name
            assert browser.evaluate("document.documentElement.scrollWidth") <= 1280, name
            assert "undefined" not in text and "NaN" not in text, name
            assert _our_problems(browser) == [], name


def test_hostile_run_names_stay_text(browser: Browser, tmp_path: Path) -> None:
    save_profile(measured_profile(ranks=1, name=INJECTION), tmp_path / INJECTION)
    save_profile(predicted_profile("dp=8,tp=8"), tmp_path / "quote\"'&lt;`")
    with _serve(tmp_path) as url:
        _open(browser, url)
        names = browser.evaluate('[...document.querySelectorAll("select option")].map(o => o.textContent)')
        assert sorted(names) == sorted([INJECTION, "quote\"'&lt;`"])
        for name in names:
            _select(browser, name)
            assert browser.evaluate('document.querySelectorAll(".kpi").length') > 0
        assert browser.evaluate("window.hacked === undefined")
        assert _our_problems(browser) == []


def test_damaged_run_is_said_and_the_others_stay(browser: Browser, tmp_path: Path) -> None:
    save_profile(measured_profile(ranks=1), tmp_path / "good")
    save_profile(measured_profile(ranks=1), tmp_path / "torn")
    (tmp_path / "torn" / "rank-00000" / "tables.npz").write_bytes(b"PK torn")
    with _serve(tmp_path) as url:
        _open(browser, url)
        _select(browser, "torn")
        assert "This run cannot be shown" in browser.evaluate("document.body.innerText")
        _select(browser, "good")
        assert browser.evaluate('document.querySelectorAll(".kpi").length') == 6


def _select(browser: Browser, run: str) -> None:
    browser.evaluate(
        '((name) => { const s = document.querySelector("select"); s.value = name;'
        f' s.dispatchEvent(new Event("change")); }})({json.dumps(run)})'
    )
    browser.wait_for(READY)


def _click(browser: Browser, selector: str, label: str) -> None:
    clicked = browser.evaluate(
        f"[...document.querySelectorAll({selector!r})].filter(b => b.textContent.trim() === {label!r})"
        ".map(b => b.click()).length"
    )
    assert clicked > 0, f"there is no {label} among {selector}"
