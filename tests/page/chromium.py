"""Headless Chromium, driven through the DevTools protocol over a pipe: no driver, no package.

https://chromedevtools.github.io/devtools-protocol/ names the commands. Messages are JSON texts that
end with a zero byte; Chromium reads them from file descriptor 3 and writes to 4.
"""

from __future__ import annotations

import base64
import contextlib
import itertools
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
ANSWER_S = 30.0
PATIENCE_MS = 20_000
_FLAGS = (
    "--headless=new",
    "--no-sandbox",  # tests may run as root, and open nothing but their own server
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-extensions",
    "--disable-background-networking",
    "--no-first-run",
    "--hide-scrollbars",
    "--remote-debugging-pipe",
)
# Puts the two ends where Chromium looks for them, then becomes Chromium.
_LAUNCH = """
import fcntl, os, sys
ends = [fcntl.fcntl(int(fd), fcntl.F_DUPFD, 10) for fd in sys.argv[1:3]]
os.dup2(ends[0], 3)
os.dup2(ends[1], 4)
os.execvp(sys.argv[3], sys.argv[3:])
"""


def find_chromium() -> str | None:
    """The program, or None where there is none."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


class Failure(AssertionError):
    """The browser refused a command, a script threw, or what was waited for did not come."""


class Browser:
    """A running Chromium. `calls` may be made from one thread."""

    def __init__(self, program: str, folder: str) -> None:
        to_read, self._write = os.pipe()
        self._read, to_write = os.pipe()
        command = [sys.executable, "-c", _LAUNCH, str(to_read), str(to_write), program, *_FLAGS]
        self._process = subprocess.Popen(
            [*command, f"--user-data-dir={folder}", "about:blank"],
            pass_fds=(to_read, to_write),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(to_read)
        os.close(to_write)
        self._ids = itertools.count(1)
        self._changed = threading.Condition()
        self._answers: dict[int, dict[str, Any]] = {}
        self._listeners: dict[str, Callable[[str, dict[str, Any]], None]] = {}
        self._thread = threading.Thread(target=self._listen, daemon=True)
        self._thread.start()

    def call(self, method: str, session: str | None = None, /, **params: Any) -> dict[str, Any]:
        """Send one command and wait for its result. Raises Failure."""
        number = next(self._ids)
        message: dict[str, Any] = {"id": number, "method": method, "params": params}
        if session is not None:
            message["sessionId"] = session
        data = json.dumps(message).encode() + b"\0"
        while data:
            data = data[os.write(self._write, data) :]
        with self._changed:
            if not self._changed.wait_for(lambda: number in self._answers, ANSWER_S):
                raise Failure(f"{method}: Chromium does not answer")
            answer = self._answers.pop(number)
        if "error" in answer:
            raise Failure(f"{method}: {answer['error']['message']}")
        result: dict[str, Any] = answer["result"]
        return result

    @contextlib.contextmanager
    def page(self) -> Iterator[Page]:
        """A page with a storage of its own, closed at the end."""
        context = self.call("Target.createBrowserContext")["browserContextId"]
        target = self.call("Target.createTarget", url="about:blank", browserContextId=context)
        attached = self.call("Target.attachToTarget", targetId=target["targetId"], flatten=True)
        page = Page(self, attached["sessionId"])
        self._listeners[attached["sessionId"]] = page.heard
        try:
            page.prepare()
            yield page
        finally:
            del self._listeners[attached["sessionId"]]
            self.call("Target.disposeBrowserContext", browserContextId=context)

    def close(self) -> None:
        """End the process."""
        with contextlib.suppress(Failure, OSError):
            self.call("Browser.close")
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(10)
        self._thread.join(10)
        os.close(self._write)
        os.close(self._read)

    def _listen(self) -> None:
        rest = b""
        while chunk := os.read(self._read, 1 << 16):
            *messages, rest = (rest + chunk).split(b"\0")
            for text in messages:
                message = json.loads(text)
                if "id" in message:
                    with self._changed:
                        self._answers[message["id"]] = message
                        self._changed.notify_all()
                elif listener := self._listeners.get(message.get("sessionId", "")):
                    listener(message["method"], message["params"])


class Page:
    """One tab.

    `problems` gathers what the console and the browser complain of, `sent` method and address of
    each request.
    """

    def __init__(self, browser: Browser, session: str) -> None:
        self._browser, self._session = browser, session
        self.problems: list[str] = []
        self.sent: list[tuple[str, str]] = []

    def prepare(self) -> None:
        """Have events sent; a desktop window."""
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")
        self.window(1280, 800)

    def heard(self, method: str, params: dict[str, Any]) -> None:
        """Keep what tests ask about."""
        if method == "Log.entryAdded" and params["entry"]["level"] == "error":
            self.problems.append(params["entry"]["text"])
        elif method == "Runtime.exceptionThrown":
            self.problems.append(str(params["exceptionDetails"]))
        elif method == "Runtime.consoleAPICalled" and params["type"] in ("error", "assert"):
            self.problems.append(str(params["args"]))
        elif method == "Network.requestWillBeSent":
            self.sent.append((params["request"]["method"], params["request"]["url"]))

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """One command to this tab."""
        return self._browser.call(method, self._session, **params)

    def open(self, url: str) -> None:
        """Go to `url`; returns when its message box is there."""
        self.call("Page.navigate", url=url)
        self.until("document.querySelector('.composer textarea')")

    def run(self, script: str) -> Any:
        """The value of a JavaScript expression, or of the promise that it makes. Raises Failure."""
        done = self.call(
            "Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True
        )
        if "exceptionDetails" in done:
            raise Failure(f"{script}: {done['exceptionDetails']}")
        return done["result"].get("value")

    def until(self, condition: str, patience_ms: int = PATIENCE_MS) -> None:
        """Wait until a JavaScript expression holds. Raises Failure with what the page shows."""
        script = f"""new Promise((resolve) => {{
          const end = performance.now() + {patience_ms};
          const look = () => {{
            let holds = false;
            try {{ holds = Boolean({condition}); }} catch {{ holds = false; }}
            if (holds || performance.now() > end) resolve(holds); else setTimeout(look, 20);
          }};
          look();
        }})"""
        try:
            held = self.run(script)
        except Failure:  # the document was replaced meanwhile
            held = self.run(script)
        if not held:
            raise Failure(f"not so: {condition}; the page shows: {self.text('body')[:2000]!r}")

    def text(self, selector: str) -> str:
        """The text a person sees in the first element found; empty where there is none."""
        return str(self.run(f"document.querySelector({json.dumps(selector)})?.innerText ?? ''"))

    def count(self, selector: str) -> int:
        """How many elements are found."""
        return int(self.run(f"document.querySelectorAll({json.dumps(selector)}).length"))

    def click(self, selector: str) -> None:
        """Press and release the mouse on the first element found, where it can be seen."""
        self.until(f"document.querySelector({json.dumps(selector)})")
        x, y = self.run(
            f"""(() => {{
              const element = document.querySelector({json.dumps(selector)});
              element.scrollIntoView({{ block: "nearest" }});
              const box = element.getBoundingClientRect();
              return [box.x + box.width / 2, box.y + box.height / 2];
            }})()"""
        )
        for kind in ("mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def type(self, text: str) -> None:
        """Put text where the focus is."""
        self.call("Input.insertText", text=text)

    def press(self, key: str, *, shift: bool = False) -> None:
        """Press and release a key where the focus is."""
        code, text = {"Enter": (13, "\r"), "Escape": (27, ""), "Tab": (9, ""), " ": (32, " ")}[key]
        shared: dict[str, Any] = {
            "key": key,
            "code": "Space" if key == " " else key,
            "windowsVirtualKeyCode": code,
            "modifiers": 8 if shift else 0,
        }
        down = {"type": "keyDown", "text": text} if text else {"type": "rawKeyDown"}
        self.call("Input.dispatchKeyEvent", **down, **shared)
        self.call("Input.dispatchKeyEvent", type="keyUp", **shared)

    def window(self, width: int, height: int, *, phone: bool = False, dark: bool = False) -> None:
        """The size of the window in CSS pixels, and the kind of device."""
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=2 if phone else 1,
            mobile=phone,
        )
        self.call("Emulation.setTouchEmulationEnabled", enabled=phone)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])

    def picture(self, path: Path) -> None:
        """Write what the window shows as PNG."""
        shot = self.call("Page.captureScreenshot", format="png")
        path.write_bytes(base64.b64decode(shot["data"]))


@contextlib.contextmanager
def chromium() -> Iterator[Browser]:
    """Chromium with a fresh profile. Raises FileNotFoundError where there is none."""
    program = find_chromium()
    if program is None:
        raise FileNotFoundError("no Chromium found")
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        browser = Browser(program, folder)
        try:
            yield browser
        finally:
            browser.close()
