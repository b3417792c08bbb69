"""`hotrack serve` as a real process on a free loopback port."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil

import hotrack
from hotrack.cli.http import Api, ServerError

TESTS = Path(__file__).parents[1]
LISTENING = re.compile(r"listening on (http://\S+)")
STUB = f"{sys.executable} -m fakes.stub_member"


class ServedPool:
    def __init__(self, process: "subprocess.Popen[bytes]", log: Path) -> None:
        self.process = process
        self.log = log
        self.api: Api

    def text(self) -> str:
        return self.log.read_text(errors="replace")

    def until(self, condition: Callable[[], Any], what: str, limit_s: float = 60.0) -> Any:
        """First true value of ``condition()``; fails the test with the log otherwise."""
        deadline = time.monotonic() + limit_s
        while time.monotonic() < deadline:
            if value := condition():
                return value
            time.sleep(0.02)
        raise AssertionError(f"{what} did not happen within {limit_s:g} s\n{self.text()[-4000:]}")

    def wait_ready(self, limit_s: float) -> None:
        found = self.until(lambda: LISTENING.search(self.text()) or self._dead(), "listening")
        self.api = Api(found[1], timeout_s=60.0)
        self.until(lambda: self._answers("/ready"), "ready", limit_s)

    def members(self) -> dict[str, dict[str, Any]]:
        return {row["name"]: row for row in self.api.get("/api/pool/members")["members"]}

    def processes(self) -> list[psutil.Process]:
        """The gateway and everything below it."""
        gateway = psutil.Process(self.process.pid)
        return [gateway, *gateway.children(recursive=True)]

    def _answers(self, path: str) -> bool:
        try:
            self.api.get(path)
        except ServerError:
            return False
        return True

    def _dead(self) -> None:
        assert self.process.poll() is None, self.text()


@contextmanager
def served_pool(folder: Path, pool_yaml: str, *arguments: str, ready_s: float = 60.0) -> Iterator[ServedPool]:
    """A pool of members, ready within ``ready_s``; ``STUB`` in a ``cmd`` starts a stub member."""
    path = folder / "pool.yaml"
    path.write_text(pool_yaml)
    log = folder / "gateway.log"
    paths = [str(TESTS), str(Path(hotrack.__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
    python_path = os.pathsep.join(filter(None, paths))
    environment = {**os.environ, "PYTHONPATH": python_path, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "hotrack", "serve", str(path), "--port", "0", *arguments]
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=environment)
    pool = ServedPool(process, log)
    try:
        pool.wait_ready(ready_s)
        yield pool
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def all_gone(processes: list[psutil.Process]) -> bool:
    """No process of the list runs any more (zombies count as gone)."""
    return not [p for p in processes if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]
