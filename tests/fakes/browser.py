"""A headless Chromium on one page, asked over its debugging port."""

import asyncio
import re
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import aiohttp

BROWSER = shutil.which("chromium") or shutil.which("google-chrome")
_FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
    "--remote-debugging-port=0",
)  # fmt: skip
_LISTENING = re.compile(r"DevTools listening on ws://([^/]+)/")


class Page:
    def __init__(self, address: str) -> None:
        self._address = address

    def evaluate(self, expression: str) -> Any:
        """Value of a JavaScript expression in the page."""
        return asyncio.run(self._evaluate(expression))

    def until(self, expression: str, limit_s: float = 20.0) -> None:
        """Wait for an expression to be true; fails with the page's text."""
        deadline = time.monotonic() + limit_s
        while not self.evaluate(expression):
            assert time.monotonic() < deadline, f"{expression}\n{self.evaluate('document.body.innerText')}"
            time.sleep(0.1)

    async def _evaluate(self, expression: str) -> Any:
        async with aiohttp.ClientSession() as session:
            async with session.get(f"http://{self._address}/json") as reply:
                pages = await reply.json()
            url = next(page["webSocketDebuggerUrl"] for page in pages if page["type"] == "page")
            async with session.ws_connect(url, max_msg_size=0) as socket:
                params = {"expression": expression, "returnByValue": True}
                await socket.send_json({"id": 1, "method": "Runtime.evaluate", "params": params})
                answer = await socket.receive_json(timeout=20)
                return answer["result"]["result"].get("value")


@contextmanager
def browser(url: str, folder: Path) -> Iterator[Page]:
    assert BROWSER is not None
    log = folder / "browser.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [BROWSER, *_FLAGS, f"--user-data-dir={folder / 'browser'}", url],
            stdout=subprocess.DEVNULL,
            stderr=output,
        )
    try:
        deadline = time.monotonic() + 30
        while not (found := _LISTENING.search(log.read_text(errors="replace"))):
            assert time.monotonic() < deadline, log.read_text(errors="replace")
            time.sleep(0.05)
        yield Page(found[1])
    finally:
        process.terminate()
        process.wait(20)
