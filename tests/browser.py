"""A headless Chromium, driven over a pipe: no library, no port. For tests, benchmarks and pictures of the viewer."""

from __future__ import annotations

import base64
import fcntl
import json
import os
import select
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
PATIENCE_S = 60.0
KEYS = {"Enter": 13, "Escape": 27, "ArrowRight": 39, "ArrowLeft": 37, "Tab": 9}
FLAGS = (
    "--headless=new",
    "--remote-debugging-pipe",
    "--disable-gpu",
    "--disable-extensions",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
    "--hide-scrollbars",
    "--mute-audio",
)


class BrowserError(Exception):
    """The browser refused, or did not come to what was waited for."""


def find_chromium() -> str | None:
    """The path of a Chromium on this machine."""
    named = os.environ.get("AGENTRL_CHROMIUM")
    return named or next((path for name in NAMES if (path := shutil.which(name))), None)


class Tab:
    """A page of a browser: what it did is kept in `errors` and `requests`."""

    def __init__(self, browser: Browser, session: str) -> None:
        self._browser, self._session = browser, session
        self.errors: list[str] = []
        """What its console complained of, and exceptions nobody caught."""
        self.requests: list[str] = []
        """Addresses it asked for."""
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        return self._browser.call(method, parameters, self._session)

    def open(self, address: str) -> None:
        """Go there; returns when the page has loaded, not when it has drawn what it asks for."""
        found = self.call("Page.navigate", url=address)
        if "errorText" in found:
            raise BrowserError(f"{address}: {found['errorText']}")

    def evaluate(self, expression: str) -> Any:
        """The value of JavaScript; promises are waited for."""
        answer = self.call("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
        if "exceptionDetails" in answer:
            raise BrowserError(answer["exceptionDetails"].get("exception", {}).get("description", str(answer)))
        return answer["result"].get("value")

    def wait(self, condition: str) -> None:
        """Until the JavaScript is true."""
        deadline = time.monotonic() + PATIENCE_S
        while not self.evaluate(f"Boolean({condition})"):
            if time.monotonic() > deadline:
                text = self.evaluate("document.body.innerText.slice(0, 2000)")
                raise BrowserError(f"never came: {condition}; errors: {self.errors}; the page says: {text}")
            self.evaluate("new Promise(requestAnimationFrame)")

    def press(self, key: str) -> None:
        """A key, by its name or as a character."""
        code = KEYS.get(key, ord(key.upper()) if len(key) == 1 else 0)
        text = {} if key in KEYS else {"text": key}
        text |= {"text": "\r"} if key == "Enter" else {}
        for kind in ("keyDown", "keyUp"):
            given = {"type": kind, "key": key, "windowsVirtualKeyCode": code}
            self.call("Input.dispatchKeyEvent", **given, **(text if kind == "keyDown" else {}))

    def size(self, width: int, height: int, *, scale: float = 1.0, theme: str = "light") -> None:
        phone = width < 600
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=scale, mobile=phone
        )
        scheme = [{"name": "prefers-color-scheme", "value": theme}]
        self.call("Emulation.setEmulatedMedia", features=scheme)

    def picture(self, path: Path, **how: Any) -> None:
        """Of what is on the screen; `how`: format and quality."""
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot", **how)["data"]))

    def told(self, event: dict[str, Any]) -> None:
        """An event of this page."""
        method, parameters = event["method"], event["params"]
        match method:
            case "Runtime.exceptionThrown":
                self.errors.append(json.dumps(parameters["exceptionDetails"])[:2000])
            case "Runtime.consoleAPICalled" if parameters["type"] in ("error", "warning", "assert"):
                self.errors.append(json.dumps(parameters["args"])[:2000])
            case "Log.entryAdded" if parameters["entry"]["level"] in ("error", "warning"):
                self.errors.append(json.dumps(parameters["entry"])[:2000])
            case "Network.requestWillBeSent":
                self.requests.append(parameters["request"]["url"])


class Browser:
    """A process; `tab` opens pages, each with cookies and storage of its own."""

    def __init__(self, program: str) -> None:
        self._home = tempfile.TemporaryDirectory(prefix="agentrl-browser-", ignore_cleanup_errors=True)
        read_here, write_there = os.pipe()
        read_there, write_here = os.pipe()

        def wire() -> None:
            """Chromium reads from 3 and writes to 4."""
            ends = [fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, 10) for end in (read_there, write_there)]
            os.dup2(ends[0], 3)
            os.dup2(ends[1], 4)

        root = ["--no-sandbox"] if os.geteuid() == 0 else []
        command = [program, *FLAGS, *root, f"--user-data-dir={self._home.name}", "about:blank"]
        null = subprocess.DEVNULL
        self._process = subprocess.Popen(command, close_fds=False, preexec_fn=wire, stdout=null, stderr=null)
        os.close(read_there)
        os.close(write_there)
        self._read, self._write = read_here, write_here
        self._buffer = b""
        self._number = 0
        self._tabs: dict[str, Tab] = {}

    def __enter__(self) -> Browser:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.call("Browser.close", {})
            self._process.wait(10)
        except (BrowserError, OSError, subprocess.TimeoutExpired):
            self._process.kill()
            self._process.wait()
        os.close(self._read)
        os.close(self._write)
        self._home.cleanup()

    @contextmanager
    def tab(self) -> Iterator[Tab]:
        context = self.call("Target.createBrowserContext", {})["browserContextId"]
        target = self.call("Target.createTarget", {"url": "about:blank", "browserContextId": context})["targetId"]
        session = self.call("Target.attachToTarget", {"targetId": target, "flatten": True})["sessionId"]
        tab = Tab.__new__(Tab)
        self._tabs[session] = tab
        tab.__init__(self, session)  # type: ignore[misc]
        try:
            yield tab
        finally:
            del self._tabs[session]
            self.call("Target.disposeBrowserContext", {"browserContextId": context})

    def call(self, method: str, parameters: dict[str, Any], session: str | None = None) -> dict[str, Any]:
        self._number += 1
        number = self._number
        request = {"id": number, "method": method, "params": parameters}
        if session is not None:
            request["sessionId"] = session
        message = json.dumps(request).encode() + b"\0"
        while message:
            message = message[os.write(self._write, message) :]
        return self._until(lambda answer: answer.get("id") == number, method)

    def _until(self, wanted: Callable[[dict[str, Any]], bool], what: str) -> dict[str, Any]:
        while True:
            answer = self._next(what)
            if wanted(answer):
                if "error" in answer:
                    raise BrowserError(f"{what}: {answer['error']}")
                return answer.get("result", {})
            tab = self._tabs.get(answer.get("sessionId", ""))
            if tab is not None and "method" in answer:
                tab.told(answer)

    def _next(self, what: str) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._read], [], [], PATIENCE_S)
            chunk = os.read(self._read, 1 << 20) if ready else b""
            if not chunk:
                raise BrowserError(f"{what}: the browser {'ended' if ready else 'does not answer'}")
            self._buffer += chunk
        message, _, self._buffer = self._buffer.partition(b"\0")
        return json.loads(message)  # type: ignore[no-any-return]
