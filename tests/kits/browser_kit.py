"""A headless Chromium that tests drive: its DevTools protocol over two pipes, so that no package is needed for it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

NAMES = ("chromium-headless-shell", "chrome-headless-shell", "chromium", "chromium-browser", "google-chrome")
PATIENCE = 30.0

_KEYS = {"Enter": "\r", " ": " ", "*": "*"}  # keys that write something
_CODES = {"Tab": 9, "Enter": 13}  # of keys that the browser itself acts on


def browser() -> str:
    """The program; skips the test where none is installed."""
    found = next(filter(None, map(shutil.which, NAMES)), None)
    if found is None:
        pytest.skip("no Chromium is installed (Debian: apt-get install chromium-headless-shell)")
    return found


class Tab:
    """One page of a browser.

    Attributes:
        problems: errors of scripts, refused loads and messages of the console since the last `open`.
        requests: addresses that the page asked for since the last `open`, its own included.
    """

    def __init__(self, writer: int, reader: int) -> None:
        self._writer = writer
        self._reader = reader
        self._rest = b""
        self._number = 0
        self._session: str | None = None
        self._events: list[dict[str, Any]] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log", "Accessibility"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> Any:
        """A command of the protocol and its result."""
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._writer, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._receive()
            if answer.get("id") == self._number:
                assert "error" not in answer, (method, answer["error"])
                return answer["result"]
            self._events.append(answer)

    def _receive(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            piece = os.read(self._reader, 1 << 16)
            assert piece, "the browser ended"
            self._rest += piece
        line, _, self._rest = self._rest.partition(b"\0")
        message: dict[str, Any] = json.loads(line)
        return message

    def open(self, url: str, *, width: int = 1100, height: int = 900, dark: bool = False, scripts: bool = True) -> None:
        """Load an address and wait until it is loaded."""
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        self.call("Emulation.setScriptExecutionDisabled", value=not scripts)
        for address in ("about:blank", url):
            self._events.clear()
            self.call("Page.navigate", url=address)
            self._wait("Page.loadEventFired")

    def follow(self, address: str) -> None:
        """Go where a script of the page would go: to the value of an expression; wait until that is loaded."""
        self._events = [e for e in self._events if e.get("method") != "Page.loadEventFired"]
        self.run(f"setTimeout((to) => location.assign(to), 0, {address}) && 0")
        self._wait("Page.loadEventFired")

    def _wait(self, event: str) -> None:
        while not any(e.get("method") == event for e in self._events):
            self._events.append(self._receive())

    def run(self, code: str) -> Any:
        """The value of an expression in the page; of a promise, what it comes to."""
        answer = self.call("Runtime.evaluate", expression=code, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def until(self, code: str) -> None:
        """Wait until an expression is true."""
        deadline = time.monotonic() + PATIENCE
        while not self.run(code):
            assert time.monotonic() < deadline, (code, self.problems)
            time.sleep(0.02)

    def press(self, *keys: str) -> None:
        """Keys, one after the other, to whatever has the focus."""
        for key in keys:
            text = _KEYS.get(key)
            code = {"key": key, "windowsVirtualKeyCode": _CODES.get(key, 0)}
            self.call("Input.dispatchKeyEvent", type="keyDown", **code, **({"text": text} if text else {}))
            self.call("Input.dispatchKeyEvent", type="keyUp", **code)

    def roles(self) -> list[tuple[str, str]]:
        """What a screen reader is told: role and name of each node that it sees."""
        nodes = self.call("Accessibility.getFullAXTree")["nodes"]
        seen = [n for n in nodes if not n["ignored"]]
        return [(n["role"]["value"], n.get("name", {}).get("value", "")) for n in seen]

    @property
    def problems(self) -> list[str]:
        """See above."""
        self.run("0")  # events that were on their way have come
        found = []
        for event in self._events:
            method, given = event.get("method"), event.get("params", {})
            if method == "Runtime.exceptionThrown":
                found.append(json.dumps(given["exceptionDetails"]))
            elif method == "Log.entryAdded":
                found.append(given["entry"]["text"])
            elif method == "Runtime.consoleAPICalled":
                found.append(json.dumps(given["args"]))
        return found

    @property
    def requests(self) -> list[str]:
        """See above."""
        return [e["params"]["request"]["url"] for e in self._events if e.get("method") == "Network.requestWillBeSent"]


@contextmanager
def tab(folder: Path) -> Iterator[Tab]:
    """A tab of a new browser, whose profile is in this folder; skips the test where no browser is installed."""
    program = browser()
    to_browser, commands = os.pipe()
    answers, from_browser = os.pipe()
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--remote-debugging-pipe"]
    flags += ["--no-first-run", "--disable-background-networking", "--hide-scrollbars", f"--user-data-dir={folder}"]
    # Chromium reads commands from its file 3 and writes answers to its file 4.
    shell = f'exec 3<&{to_browser} 4>&{from_browser}; exec "$0" "$@"'
    with open(folder / "log", "wb") as log:
        process = subprocess.Popen(
            ["bash", "-c", shell, program, *flags], pass_fds=(to_browser, from_browser), stdout=log, stderr=log
        )
    os.close(to_browser)
    os.close(from_browser)
    try:
        yield Tab(commands, answers)
    finally:
        os.close(commands)  # which ends it
        try:
            process.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        os.close(answers)
