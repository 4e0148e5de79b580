"""A real browser for tests: headless Chromium, told what to do by the DevTools protocol over two pipes.

The protocol: https://chromedevtools.github.io/devtools-protocol/
"""

import base64
import json
import os
import shutil
import subprocess
import time
from contextlib import contextmanager

import pytest

SECONDS = 60
EXECUTABLE = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
needed = pytest.mark.skipif(EXECUTABLE is None, reason="there is no Chromium: run scripts/install_chromium.sh")
OPTIONS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--hide-scrollbars",
    "--no-first-run",
    "--remote-debugging-pipe",
]


class Tab:
    """A page that is open.

    Attributes:
        events: what the browser has told, by name, such as `Runtime.exceptionThrown`.
    """

    def __init__(self, requests, answers):
        self._requests, self._answers = requests, answers
        self._session, self._number = None, 0
        self.events = []

    def attach(self):
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method, **parameters):
        """The result of a method of the protocol."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        message |= {"sessionId": self._session} if self._session else {}
        self._requests.write(json.dumps(message).encode() + b"\0")
        self._requests.flush()
        while (answer := self._next()).get("id") != self._number:
            self.events.append(answer)
        assert "error" not in answer, answer
        return answer["result"]

    def _next(self):
        found = bytearray()
        while (byte := self._answers.read(1)) != b"\0":
            assert byte, "the browser has ended"
            found += byte
        return json.loads(found)

    def open(self, url, width=1280, height=900):
        """Opens a page in a window of that many pixels."""
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600
        )
        self.call("Page.navigate", url=url)

    def run(self, script):
        """The value of an expression of JavaScript, of its promise if it is one."""
        found = self.call("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def wait(self, script):
        """The value of an expression as soon as it is true."""
        deadline = time.monotonic() + SECONDS
        while not (found := self.run(script)):
            assert time.monotonic() < deadline, f"`{script}` did not become true in {SECONDS} s"
            time.sleep(0.05)
        return found

    def move(self, x, y):
        """Moves the pointer."""
        self.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def screenshot(self, path):
        """Writes a picture of the window."""
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot")["data"]))

    def pdf(self):
        """The printed page."""
        return base64.b64decode(self.call("Page.printToPDF")["data"])

    @property
    def complaints(self):
        """Errors of scripts, and what the browser says of them; not warnings."""
        wanted = (
            "Runtime.exceptionThrown",
            "Log.entryAdded",
            "Runtime.consoleAPICalled",
            "Page.javascriptDialogOpening",
        )
        found = [event for event in self.events if event["method"] in wanted]
        return [event for event in found if event["params"].get("type") != "warning"]

    @property
    def requested(self):
        """The addresses that were asked for, but for the page's own `data:`."""
        found = [
            event["params"]["request"]["url"] for event in self.events if event["method"] == "Network.requestWillBeSent"
        ]
        return [url for url in found if not url.startswith("data:")]


@contextmanager
def browser(profile):
    """A tab of a browser of its own, which ends with the block.

    Args:
        profile: a folder for its files.
    """
    (browser_reads, we_write), (we_read, browser_writes) = os.pipe(), os.pipe()
    # The browser reads requests from descriptor 3 and writes answers to 4.
    script = f'exec "$@" 3<&{browser_reads} 4>&{browser_writes}'
    command = ["bash", "-c", script, "bash", EXECUTABLE, *OPTIONS, f"--user-data-dir={profile}"]
    process = subprocess.Popen(
        command, pass_fds=(browser_reads, browser_writes), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    os.close(browser_reads)
    os.close(browser_writes)
    with os.fdopen(we_write, "wb") as requests, os.fdopen(we_read, "rb") as answers:
        tab = Tab(requests, answers)
        try:
            tab.attach()
            yield tab
            tab._session = None
            tab.call("Browser.close")
            process.wait(SECONDS)
        finally:
            process.kill()
            process.wait()
