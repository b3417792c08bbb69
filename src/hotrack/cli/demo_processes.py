"""Processes the demo starts: an engine alone, and a whole gateway. Neither survives the demo."""

import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hotrack.cli.demo_script import DemoModel, Reference, ask
from hotrack.cli.http import Api, ServerError
from hotrack.config import env
from hotrack.config.units import parse_size
from hotrack.core.child import bound_to_parent
from hotrack.core.errors import HotrackError
from hotrack.members.probe import tree_bytes
from hotrack.members.process import free_port

START_TIMEOUT_S = 180.0
STOP_TIMEOUT_S = 20.0
POLL_S = 0.05
_LISTENING = re.compile(r"listening on (http://\S+)")


class DemoError(HotrackError):
    """A step of the demo failed."""

    code = "demo_failed"


class Running:
    """A process of ours with its output in ``log``."""

    def __init__(
        self, process: "subprocess.Popen[bytes]", log: Path, cancelled: threading.Event | None = None
    ) -> None:
        self.process = process
        self.log = log
        self._cancelled = cancelled or threading.Event()

    def check(self) -> None:
        """Raises DemoError with the end of the log when the process is gone."""
        code = self.process.poll()
        if code is not None:
            tail = "\n".join(self.log.read_text(errors="replace").splitlines()[-15:])
            raise DemoError(f"{self.log.stem} ended with exit code {code}; its last words:\n{tail}")

    def wait_for(self, condition: Callable[[], Any], what: str) -> Any:
        """The first true value of ``condition()``. Raises DemoError on a timeout or when the process ends."""
        deadline = time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < deadline:
            if value := condition():
                return value
            self.check()
            if self._cancelled.wait(POLL_S):
                raise DemoError("cancelled")
        raise DemoError(f"{self.log.stem}: not {what} within {START_TIMEOUT_S:g} s; see {self.log}")


@contextmanager
def run(
    name: str, arguments: Sequence[str], folder: Path, cancelled: threading.Event | None = None
) -> Iterator[Running]:
    """``python -m ARGUMENTS`` with its output in ``folder``; ended on leaving, by SIGKILL if need be."""
    log = folder / f"{name}.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=env.child_environment({"HOTRACK_API_KEY": ""}),  # these servers are nobody else's
            start_new_session=True,  # Ctrl-C reaches the demo alone, which then ends its processes in order
            preexec_fn=bound_to_parent(),
        )
    try:
        yield Running(process, log, cancelled)
    finally:
        _end(process)


def _end(process: "subprocess.Popen[bytes]") -> None:
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


@contextmanager
def engine(
    name: str, model: str, flags: Sequence[str], folder: Path, cancelled: threading.Event
) -> Iterator[tuple[Api, int]]:
    """A server of one model, ready; and its pid."""
    port = free_port()
    arguments = ["hotrack.server", model, "--port", str(port), "--served-model-name", name, *flags]
    with run(f"{name}-alone", arguments, folder, cancelled) as running:
        api = Api(f"http://127.0.0.1:{port}")
        running.wait_for(lambda: _answers(api, "/health"), "ready")
        yield api, running.process.pid


def reference(model: DemoModel, max_model_len: int, folder: Path, cancelled: threading.Event) -> Reference:
    """Start the engine alone, ask before it ever sleeps, then measure one sleep; end it.

    Raises:
        DemoError: it did not start, or ``cancelled`` was set meanwhile.
    """
    flags = ["--max-model-len", str(max_model_len), "--kv-cache-memory-bytes", model.kv_cache]
    answers = []
    with engine(model.name, model.model, flags, folder, cancelled) as (api, pid):
        for question in model.questions:
            answers.append(ask(api, model.name, question, stream=False, echo=_ignore))
            api.post("/reset_prefix_cache")  # in the pool each question comes after a wake, caches empty
        resident = tree_bytes(pid) or 0
        report = api.post("/sleep")["report"]
        asleep = tree_bytes(pid) or 0
    awake = resident + parse_size(model.kv_cache)
    return Reference(tuple(answers), resident, awake, asleep, report["store_bytes"])


def _ignore(_piece: str) -> None: ...


@contextmanager
def gateway(pool_file: Path, folder: Path, progress: Callable[[Api], None]) -> Iterator[Api]:
    """`hotrack serve` on a free port, ready. ``progress`` is called now and then while it starts."""
    with run("gateway", ["hotrack", "serve", str(pool_file), "--port", "0"], folder) as running:
        found = running.wait_for(
            lambda: _LISTENING.search(running.log.read_text(errors="replace")), "listening"
        )
        api = Api(found[1])

        def ready() -> bool:
            if _answers(api, "/ready"):
                return True
            progress(api)
            return False

        running.wait_for(ready, "ready")
        yield api


def _answers(api: Api, path: str) -> bool:
    try:
        api.get(path)
    except ServerError:
        return False
    return True
