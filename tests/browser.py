"""Drives a headless Chromium over its debugging pipe, with the standard library alone, for the tests of the tab."""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-extensions",
    "--hide-scrollbars",
    "--enable-unsafe-swiftshader",
    "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
    "--remote-debugging-pipe",
)


def find_chromium() -> str | None:
    """The browser's path, or None when there is none."""
    names = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
    return next((path for path in map(shutil.which, names) if path), None)


class Browser:
    """One page of a headless browser that reaches nothing but 127.0.0.1.

    Attributes:
        problems: console errors, uncaught exceptions and log entries of level "error", as text.
        requested: every address that the page asked for.
    """

    def __init__(self, *, width: int = 1280, height: int = 800) -> None:
        executable = find_chromium()
        assert executable is not None, "no Chromium"
        self._profile = tempfile.mkdtemp(prefix="llmprof-browser-")
        to_browser, self._out = os.pipe()
        self._in, from_browser = os.pipe()
        command = [executable, *FLAGS, f"--user-data-dir={self._profile}", f"--window-size={width},{height}"]
        script = f'exec 3<&{to_browser} 4>&{from_browser}; exec "$@"'
        self._process = subprocess.Popen(
            ["bash", "-c", script, "browser", *command, "about:blank"],
            pass_fds=(to_browser, from_browser),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(to_browser)
        os.close(from_browser)
        self._buffer = b""
        self._last_id = 0
        self._session = ""
        self.problems: list[str] = []
        self.requested: list[str] = []
        self._open_page(width, height)

    def close(self) -> None:
        """End the browser and remove its profile."""
        self._process.kill()
        self._process.wait(timeout=30)
        os.close(self._out)
        os.close(self._in)
        shutil.rmtree(self._profile, ignore_errors=True)

    def _open_page(self, width: int, height: int) -> None:
        targets = self.call("Target.getTargets")["targetInfos"]
        page = next(t["targetId"] for t in targets if t["type"] == "page")
        self._session = self.call("Target.attachToTarget", targetId=page, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=False,
        )

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Call a method of the DevTools protocol and return its result."""
        self._last_id += 1
        request: dict[str, Any] = {"id": self._last_id, "method": method, "params": parameters}
        if self._session:
            request["sessionId"] = self._session
        os.write(self._out, json.dumps(request).encode() + b"\0")
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline:
            message = self._receive(deadline)
            if message.get("id") == self._last_id:
                assert "error" not in message, f"{method}: {message['error']}"
                result: dict[str, Any] = message["result"]
                return result
        raise AssertionError(f"{method} got no answer")

    def _receive(self, deadline: float) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._in], [], [], max(0.0, deadline - time.monotonic()))
            assert ready, "the browser does not answer"
            data = os.read(self._in, 1 << 20)
            assert data, "the browser has ended"
            self._buffer += data
        line, self._buffer = self._buffer.split(b"\0", 1)
        message: dict[str, Any] = json.loads(line)
        self._note(message.get("method", ""), message.get("params", {}))
        return message

    def _note(self, method: str, parameters: dict[str, Any]) -> None:
        if method == "Network.requestWillBeSent":
            self.requested.append(parameters["request"]["url"])
        elif method == "Runtime.exceptionThrown":
            details = parameters["exceptionDetails"]
            self.problems.append(str(details.get("exception", {}).get("description", details["text"])))
        elif method == "Runtime.consoleAPICalled" and parameters["type"] in ("error", "assert"):
            self.problems.append(str([argument.get("value", argument) for argument in parameters["args"]]))
        elif method == "Log.entryAdded" and parameters["entry"]["level"] == "error":
            self.problems.append(f"{parameters['entry']['text']} {parameters['entry'].get('url', '')}")

    def open(self, url: str, *, dark: bool = False) -> None:
        """Load a page afresh; what was noted about an earlier one is forgotten."""
        self.call("Page.navigate", url="about:blank")
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        self.problems.clear()
        self.requested.clear()
        self.call("Page.navigate", url=url)

    def evaluate(self, expression: str) -> Any:
        """The value of a JavaScript expression; a promise is awaited."""
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, f"{expression}: {answer['exceptionDetails']}"
        return answer["result"].get("value")

    def wait_for(self, expression: str, *, timeout_s: float = 90.0) -> Any:
        """The value of an expression as soon as it is true.

        Raises:
            AssertionError: it is not true in time.
        """
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            value = self.evaluate(f"(() => {{ try {{ return {expression}; }} catch {{ return null; }} }})()")
            if value:
                return value
            time.sleep(0.1)
        body = self.evaluate("document.body ? document.body.innerText.slice(0, 1500) : ''")
        raise AssertionError(
            f"{expression} did not become true; problems: {self.problems}; the page says: {body}"
        )

    def screenshot(self, file: Path) -> None:
        """Write a PNG of what is visible."""
        file.write_bytes(base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"]))
