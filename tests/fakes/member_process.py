"""A member server as users start it: ``python -m hotrack.server`` on a free loopback port."""

import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Self

import psutil

START_TIMEOUT_S = 60.0


class MemberProcess:
    """Use as a context manager; leaving it kills whatever is left. ``log``: everything the process wrote."""

    def __init__(self, model: Path | str, *flags: str, folder: Path) -> None:
        self.log_path = folder / f"member-{time.monotonic_ns()}.log"
        self.port = free_port()
        command = [sys.executable, "-m", "hotrack.server", str(model), "--port", str(self.port), *flags]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "HOTRACK_STORE_DIR": str(folder / "store")}
        with self.log_path.open("wb") as log:
            self.process = subprocess.Popen(
                command, stdout=log, stderr=log, env=environment, start_new_session=True
            )

    def signal_group(self, number: int) -> None:
        """To the server, its ranks and its template process at once, as a terminal does."""
        os.killpg(self.process.pid, number)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def log(self) -> str:
        return self.log_path.read_text()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        children = self.children()
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(15)
            except subprocess.TimeoutExpired:
                self.process.kill()
        self.process.wait()
        for child in children:
            if child.is_running():
                child.kill()

    def wait_ready(self) -> Self:
        deadline = time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < deadline:
            if self.process.poll() is not None:
                raise AssertionError(f"the server ended with {self.process.returncode}:\n{self.log}")
            try:
                if self.get("/health")[0] == 200:
                    return self
            except OSError:
                time.sleep(0.05)
        raise AssertionError(f"the server was not ready in {START_TIMEOUT_S} s:\n{self.log}")

    def wait_log(self, words: str) -> None:
        """Until the process has written ``words``."""
        deadline = time.monotonic() + START_TIMEOUT_S
        while words not in self.log:
            assert self.process.poll() is None, self.log
            assert time.monotonic() < deadline, self.log
            time.sleep(0.01)

    def children(self) -> list[psutil.Process]:
        """Rank and template processes, alive now."""
        try:
            return psutil.Process(self.process.pid).children(recursive=True)
        except psutil.NoSuchProcess:
            return []

    def ranks(self) -> list[psutil.Process]:
        return [child for child in self.children() if "hotrack.engine.rank" in child.cmdline()]

    def connect(self) -> http.client.HTTPConnection:
        return http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)

    def request(self, method: str, path: str, body: Any = None) -> tuple[int, Any]:
        """Status, and the body as JSON where it is JSON."""
        raw = body if isinstance(body, bytes | None) else json.dumps(body).encode()
        connection = self.connect()
        try:
            connection.request(method, path, raw)
            reply = connection.getresponse()
            data = reply.read()
        finally:
            connection.close()
        is_json = reply.headers.get_content_type() == "application/json"
        return reply.status, json.loads(data) if is_json else data.decode()

    def get(self, path: str) -> tuple[int, Any]:
        return self.request("GET", path)

    def post(self, path: str, body: Any = None) -> tuple[int, Any]:
        return self.request("POST", path, body)


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port: int = sock.getsockname()[1]
        return port


def wait_gone(processes: list[psutil.Process], timeout_s: float = 10.0) -> bool:
    """True when all of them have ended in time."""
    _, alive = psutil.wait_procs(processes, timeout=timeout_s)
    return not [p for p in alive if p.status() != psutil.STATUS_ZOMBIE]
