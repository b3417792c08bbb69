"""A worker of the swap benchmark as seen from outside: a child process that answers JSON lines."""

import contextlib
import json
import os
import selectors
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from hotrack.bench.client import BenchError
from hotrack.config import env
from hotrack.core.child import bound_to_parent
from hotrack.core.errors import HotrackError
from hotrack.core.progress import Progress

ANSWER_TIMEOUT_S = 600.0
"""No operation of 100 GiB takes longer; a worker that does is stuck."""

Reply = dict[str, Any]

HOTRACK_WORKER = (sys.executable, "-m", "hotrack.memory.swap_worker")
MODEL_WORKER = (sys.executable, "-m", "hotrack.checkpoint.swap_worker")


class RefusedError(HotrackError):
    """The worker answered with an error of its own; ``code`` is that error's."""


class Worker:
    """One worker; ``send`` and ``receive`` apart let several work at the same time.

    The worker ignores SIGINT (a terminal sends it to every process of the group): ``end`` ends it by its pid,
    and so does the kernel when this process dies.
    """

    def __init__(
        self, name: str, argv: Sequence[str] = HOTRACK_WORKER, environment: Mapping[str, str] | None = None
    ) -> None:
        self.name = name
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - closed by end()
        self._process = subprocess.Popen(
            argv,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            env=env.child_environment(dict(environment or {})),
            preexec_fn=bound_to_parent(),
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._requests, self._replies = self._process.stdin, self._process.stdout
        self._buffer = b""
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._replies, selectors.EVENT_READ)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    def send(self, op: str, **arguments: Any) -> None:
        try:
            self._requests.write(json.dumps({"op": op, **arguments}).encode() + b"\n")
            self._requests.flush()
        except BrokenPipeError as error:
            raise self._dead(op) from error

    def receive(self, op: str, progress: Progress | None = None) -> Reply:
        """The answer to the oldest request without one.

        Raises:
            RefusedError: the worker reports an error; it can go on.
            BenchError: the worker is gone or silent.
        """
        deadline = time.monotonic() + ANSWER_TIMEOUT_S
        while True:
            reply: Reply = json.loads(self._line(op, deadline))
            if "progress" not in reply:
                break
            if progress is not None:
                progress(*reply["progress"])
        if not reply["ok"]:
            raise RefusedError(f"{self.name}: {op}: {reply['error']}", code=reply["code"])
        return reply

    def call(self, op: str, *, progress: Progress | None = None, **arguments: Any) -> Reply:
        if progress is not None:
            arguments["report_progress"] = True
        self.send(op, **arguments)
        return self.receive(op, progress)

    def _line(self, op: str, deadline: float) -> bytes:
        while b"\n" not in self._buffer:
            if not self._selector.select(max(0.0, deadline - time.monotonic())):
                raise BenchError(
                    f"{self.name} (pid {self.pid}) did not answer '{op}' in {ANSWER_TIMEOUT_S:.0f} s; its "
                    f"last words: {self._last_words()}"
                )
            data = os.read(self._replies.fileno(), 1 << 16)
            if not data:
                raise self._dead(op)
            self._buffer += data
        line, _, self._buffer = self._buffer.partition(b"\n")
        return line

    def _dead(self, op: str) -> BenchError:
        code = self._process.wait()
        return BenchError(
            f"{self.name} (pid {self.pid}) ended with code {code} during '{op}': {self._last_words()}"
        )

    def _last_words(self) -> str:
        self._errors.seek(0)
        lines = self._errors.read().decode(errors="replace").split("\n")
        return "\n".join(line for line in lines if line.strip())[-2000:] or "nothing on stderr"

    def kill(self) -> None:
        """SIGKILL, and wait until the process is gone."""
        self._process.kill()
        self._process.wait()

    def end(self) -> None:
        """Ask it to leave; kill it when it does not."""
        with contextlib.suppress(OSError):
            self._requests.close()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self.kill()
        self._selector.close()
        self._replies.close()
        self._errors.close()


class Workers:
    """Starts workers and ends them all, whatever happens."""

    def __init__(self) -> None:
        self._all: list[Worker] = []

    def start(self, name: str, argv: Sequence[str] = HOTRACK_WORKER, **environment: str) -> Worker:
        worker = Worker(name, argv, environment)
        self._all.append(worker)
        return worker

    def end(self, worker: Worker) -> None:
        self._all.remove(worker)
        worker.end()

    def end_all(self) -> None:
        for worker in reversed(self._all):
            with contextlib.suppress(OSError):
                worker.kill()
            worker.end()
        self._all.clear()


@contextlib.contextmanager
def workers() -> Iterator[Workers]:
    started = Workers()
    try:
        yield started
    finally:
        started.end_all()
