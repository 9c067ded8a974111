"""Open a page in a headless Chromium and listen to what it says and asks for."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

NAMES = ("chromium", "chromium-browser", "google-chrome")
BROWSER = next(filter(None, map(shutil.which, NAMES)), None)
QUIET = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run",
    "--disable-background-networking", "--window-size=1280,900",
)  # fmt: skip
# File descriptors on which a browser takes commands and gives events.
COMMANDS, EVENTS = 3, 4


class Tab:
    """A tab that is driven by messages of the DevTools protocol, through two pipes.

    Attributes:
        events: every event so far, in order.
    """

    def __init__(self, to: BinaryIO, back: BinaryIO) -> None:
        self.to, self.back, self.number = to, back, 0
        self.events: list[dict[str, Any]] = []
        self.session: dict[str, str] = {}
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        attached = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self.session = {"sessionId": attached["sessionId"]}
        for domain in ("Page", "Network", "Runtime", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """Send a command and return its result."""
        self.number += 1
        message = {"id": self.number, "method": method, "params": params, **self.session}
        self.to.write(json.dumps(message).encode() + b"\0")
        self.to.flush()
        while (answer := self._next()).get("id") != self.number:
            self.events.append(answer)
        assert "error" not in answer, answer
        return answer["result"]

    def open(self, url: str) -> None:
        """Go to ``url`` and wait until it is loaded."""
        self.call("Page.navigate", url=url)
        while not self.named("Page.loadEventFired"):
            self.events.append(self._next())

    def value(self, expression: str) -> Any:
        """Evaluate JavaScript in the page, and return a plain value."""
        found = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def named(self, *methods: str) -> list[dict[str, Any]]:
        """Return what came with the events of these names."""
        return [event["params"] for event in self.events if event.get("method") in methods]

    def _next(self) -> dict[str, Any]:
        letters = bytearray()
        while (letter := self.back.read(1)) != b"\0":
            assert letter, "the browser has ended"
            letters += letter
        return json.loads(letters)


@contextmanager
def tab(folder: Path, *, scripts: bool = True) -> Iterator[Tab]:
    """Start a browser that keeps its files in ``folder``."""
    assert BROWSER
    taken, given = os.pipe()
    heard, said = os.pipe()

    def place() -> None:
        for end, number in ((os.dup(taken), COMMANDS), (os.dup(said), EVENTS)):
            os.dup2(end, number)

    command = [BROWSER, *QUIET, "--remote-debugging-pipe", f"--user-data-dir={folder}"]
    if not scripts:
        command.append("--blink-settings=scriptEnabled=false")
    process = subprocess.Popen(
        command, preexec_fn=place, pass_fds=(COMMANDS, EVENTS), stderr=subprocess.DEVNULL
    )
    os.close(taken)
    os.close(said)
    try:
        with open(given, "wb") as to, open(heard, "rb") as back:
            yield Tab(to, back)
    finally:
        process.terminate()
        process.wait(30)
