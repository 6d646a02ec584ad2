"""A headless Chromium, driven by its DevTools protocol over one websocket."""

from __future__ import annotations

import asyncio
import base64
import itertools
import json
import os
import shutil
import subprocess
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import aiohttp
import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
FLAGS = (
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-sync "
    "--disable-background-networking --disable-component-update --disable-dev-shm-usage "
    "--hide-scrollbars --remote-debugging-port=0 about:blank"
)
TIMEOUT_S = 60.0
# What the browser says of a script whose page was left or replaced while it ran.
LEFT = ("navigated or closed", "context was destroyed", "Cannot find context", "was collected")
T = TypeVar("T")

# Runs in every page before its own scripts; records what breaks the content security policy.
WATCH = """
window.violations = [];
document.addEventListener("securitypolicyviolation", (event) =>
  window.violations.push(event.violatedDirective + " " + event.blockedURI));
"""


def find_chromium() -> str:
    """Returns the path of a Chromium. Skips loudly without one, and fails where CI is set."""
    found = next(filter(None, map(shutil.which, NAMES)), None)
    if found is None:
        message = "NO Chromium on this machine: the browser tests did not run"
        if os.environ.get("CI") == "true":
            pytest.fail(message)
        pytest.skip(message)
    return found


class Tab:
    """One page of the browser. Methods block until the browser has answered.

    Attributes:
        problems: Console errors, exceptions and failed loads since the last `clear`.
        expected: Parts of messages that are not problems.
        answer: Answers requests in place of the server: URL to (status, JSON body) or None.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._numbers = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[Any]] = {}
        self._socket: aiohttp.ClientWebSocketResponse | None = None
        self.problems: list[str] = []
        self.expected: tuple[str, ...] = ()
        self.answer: Callable[[str], tuple[int, Any] | None] = lambda url: None

    def wait(self, work: Coroutine[Any, Any, T]) -> T:
        """Runs a coroutine on the loop of the connection and returns its result."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(TIMEOUT_S)

    async def connect(self, session: aiohttp.ClientSession, url: str) -> None:
        """Connects to the page and switches on the events that are watched."""
        self._socket = await session.ws_connect(url, max_msg_size=1 << 28)
        self._reader = asyncio.ensure_future(self._read())
        for name in ("Page", "Runtime", "Log", "Network"):
            await self.send(f"{name}.enable")
        await self.send("Page.addScriptToEvaluateOnNewDocument", source=WATCH)

    async def send(self, method: str, **parameters: Any) -> Any:
        """Sends a command and returns its result. Raises RuntimeError with the browser's error."""
        assert self._socket is not None
        number = next(self._numbers)
        future = self._waiting[number] = self._loop.create_future()
        await self._socket.send_json({"id": number, "method": method, "params": parameters})
        return await future

    async def _read(self) -> None:
        assert self._socket is not None
        async for message in self._socket:
            said = json.loads(message.data)
            if "id" in said:
                future = self._waiting.pop(said["id"])
                if future.cancelled():
                    continue
                if "error" in said:
                    future.set_exception(RuntimeError(said["error"]["message"]))
                else:
                    future.set_result(said["result"])
            else:
                self._event(said["method"], said["params"])

    def _event(self, method: str, given: dict[str, Any]) -> None:
        problem = None
        if method == "Runtime.exceptionThrown":
            details = given["exceptionDetails"]
            problem = details.get("exception", {}).get("description") or details["text"]
        elif method == "Runtime.consoleAPICalled" and given["type"] in ("error", "warning"):
            problem = " ".join(str(part.get("value")) for part in given["args"])
        elif method == "Log.entryAdded" and given["entry"]["level"] == "error":
            problem = f"{given['entry']['text']} {given['entry'].get('url', '')}"
        elif method == "Fetch.requestPaused":
            asyncio.ensure_future(self._answer(given))
        if problem is not None and not any(part in problem for part in self.expected):
            self.problems.append(problem)

    async def _answer(self, given: dict[str, Any]) -> None:
        found = self.answer(given["request"]["url"])
        if found is None:
            await self.send("Fetch.continueRequest", requestId=given["requestId"])
            return
        status, body = found
        await self.send(
            "Fetch.fulfillRequest",
            requestId=given["requestId"],
            responseCode=status,
            responseHeaders=[{"name": "content-type", "value": "application/json"}],
            body=base64.b64encode(json.dumps(body).encode()).decode(),
        )

    def intercept(self, pattern: str, answer: Callable[[str], tuple[int, Any] | None]) -> None:
        """Answers requests whose URL fits a pattern of `*` and `?` in place of the server."""
        self.answer = answer
        self.wait(self.send("Fetch.enable", patterns=[{"urlPattern": pattern}]))

    def run(self, script: str) -> Any:
        """Returns the value of an expression in the page; awaits promises."""
        found = self.wait(
            self.send("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        )
        if "exceptionDetails" in found:
            details = found["exceptionDetails"]
            raise AssertionError(details.get("exception", {}).get("description", details["text"]))
        return found["result"].get("value")

    def until(self, condition: str) -> Any:
        """Waits until an expression is true, and returns its value.

        The page may be replaced meanwhile: the wait then goes on in the new page.
        """
        script = f"""new Promise((resolve, reject) => {{
            const end = Date.now() + 20000;
            const look = () => {{
                let value = false;
                try {{ value = {condition}; }} catch {{ value = false; }}
                if (value) resolve(value);
                else if (Date.now() > end) reject(new Error({json.dumps(condition)}
                    + " did not become true; error bar: "
                    + document.getElementById("error")?.textContent));
                else setTimeout(look, 15);
            }};
            look();
        }})"""
        end = time.monotonic() + TIMEOUT_S
        while True:
            try:
                return self.run(script)
            except RuntimeError as error:
                if time.monotonic() > end or not any(part in str(error) for part in LEFT):
                    raise
                time.sleep(0.015)

    def back(self) -> None:
        """Goes back in the history of the tab, to another page or within this one."""
        self.run("void setTimeout(() => history.back())")

    def open(self, url: str) -> None:
        """Loads an address from nothing."""
        self.wait(self.send("Page.navigate", url="about:blank"))
        self.wait(self.send("Page.navigate", url=url))
        self.until("document.readyState === 'complete'")

    def size(self, width: int, height: int, dark: bool = False) -> None:
        """Sets the size of the window and the colour scheme that the system prefers."""
        self.wait(
            self.send(
                "Emulation.setDeviceMetricsOverride",
                width=width,
                height=height,
                deviceScaleFactor=1,
                mobile=False,
            )
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.wait(self.send("Emulation.setEmulatedMedia", features=[scheme]))

    def click(self, selector: str) -> None:
        """Clicks the middle of an element with the mouse, once it is what is seen there."""
        where = self.until(
            f"(() => {{ const wanted = document.querySelector({selector!r});"
            " wanted.scrollIntoView({ block: 'center' });"
            " const b = wanted.getBoundingClientRect();"
            " const [x, y] = [b.x + b.width / 2, b.y + b.height / 2];"
            " const seen = document.elementFromPoint(x, y); return (wanted.contains(seen) || "
            "[...wanted.labels || []].some((label) => label.contains(seen))) && [x, y]; })()"
        )
        x, y = where
        for kind in ("mouseMoved", "mousePressed", "mouseReleased"):
            event = {"type": kind, "x": x, "y": y, "button": "left", "clickCount": 1}
            self.wait(self.send("Input.dispatchMouseEvent", **event))

    def press(self, key: str, modifiers: int = 0) -> None:
        """Presses a named key, such as `ArrowRight`. Modifiers: 2 is Ctrl, 8 is Shift."""
        codes = {"Enter": 13, "Escape": 27, "Tab": 9, "ArrowLeft": 37, "ArrowUp": 38}
        codes |= {"ArrowRight": 39, "ArrowDown": 40, "Home": 36, "End": 35}
        event = {"key": key, "code": key, "windowsVirtualKeyCode": codes[key]}
        text = {"text": "\r"} if key == "Enter" else {}
        for kind in ("keyDown", "keyUp"):
            own = text if kind == "keyDown" else {}
            command = {"type": kind, "modifiers": modifiers, **event, **own}
            self.wait(self.send("Input.dispatchKeyEvent", **command))

    def type(self, selector: str, text: str) -> None:
        """Replaces the text of a field."""
        field = f"document.querySelector({selector!r})"
        self.run(f"{field}.focus(), {field}.select()")
        self.wait(self.send("Input.insertText", text=text))

    def check(self) -> None:
        """Fails if the page has had a problem or has broken its policy since the last check."""
        self.run("new Promise((done) => setTimeout(done, 40))")  # for messages on their way
        violations = self.run("window.violations")
        problems, self.problems = self.problems, []
        assert not problems and not violations, (problems, violations)


@contextmanager
def browser(profile: Path) -> Iterator[Tab]:
    """Yields a page of a new browser, which ends with the block."""
    command = [find_chromium(), *FLAGS.split()]
    command.insert(1, f"--user-data-dir={profile}")
    process = subprocess.Popen(
        command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True
    )
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    tab = Tab(loop)
    session: aiohttp.ClientSession | None = None
    try:
        assert process.stderr is not None
        line = next(line for line in process.stderr if "DevTools listening on" in line)
        threading.Thread(target=process.stderr.read, daemon=True).start()
        place = line.split("ws://")[1].split("/")[0]

        async def connected() -> aiohttp.ClientSession:
            session = aiohttp.ClientSession()
            async with session.get(f"http://{place}/json/list") as answer:
                pages = [one for one in await answer.json() if one["type"] == "page"]
            await tab.connect(session, pages[0]["webSocketDebuggerUrl"])
            return session

        session = tab.wait(connected())
        yield tab
    finally:
        if session is not None:
            tab.wait(session.close())
        process.terminate()
        process.wait(20)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(5)
