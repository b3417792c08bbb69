"""Launch one member's process, keep its log, notice its end, and never leave an orphan."""

import asyncio
import contextlib
import os
import signal
import socket
from collections import deque
from collections.abc import Callable
from pathlib import Path

from hotrack.config import env
from hotrack.core.child import bound_to_parent
from hotrack.core.errors import MemberFailedError
from hotrack.core.runtime_dir import RuntimeDir
from hotrack.members.endpoint import Endpoint
from hotrack.members.spec import MemberSpec
from hotrack.obs.log import get_logger

log = get_logger(__name__)
LOG_LINES = 2000
MAX_LINE_BYTES = 8192


class MemberProcess:
    """The process group of one member.

    It runs in its own session, so that one signal reaches everything it started; it is killed by the kernel
    when the gateway dies (Linux), so that not even ``kill -9`` leaves an orphan. Its Unix socket lives in a
    directory that only this user can enter. Output goes to a ring buffer and, with ``log_dir``, to
    ``<name>.log``.
    """

    def __init__(self, spec: MemberSpec, *, log_dir: Path | None = None) -> None:
        self._spec = spec
        self._log_dir = log_dir
        self._lines: deque[str] = deque(maxlen=LOG_LINES)
        self._process: asyncio.subprocess.Process | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._runtime_dir: RuntimeDir | None = None
        self._stopping = False
        self.on_exit: Callable[[int], None] | None = None

    @property
    def pid(self) -> int | None:
        process = self._process
        return process.pid if process is not None and process.returncode is None else None

    def logs(self) -> list[str]:
        """Last lines of output, oldest first."""
        return list(self._lines)

    async def start(self) -> Endpoint:
        """Launch, and say where the server will listen (it may not yet).

        Raises:
            MemberFailedError: the program cannot be started.
        """
        assert self.pid is None, f"{self._spec.name} already runs as {self.pid}"
        self._stopping = False
        argv, endpoint = self._place()
        try:
            self._process = await asyncio.create_subprocess_exec(
                *argv,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.STDOUT,
                env=env.child_environment(dict(self._spec.env)),
                start_new_session=True,
                preexec_fn=bound_to_parent(),
                limit=MAX_LINE_BYTES,
            )
        except (OSError, ValueError) as error:
            self._remove_runtime_dir()
            raise MemberFailedError(f"{self._spec.name}: cannot start {argv[0]!r}: {error}") from error
        log.info("%s started as pid %d", self._spec.name, self._process.pid)
        self._tasks = [asyncio.create_task(self._supervise(self._process))]
        return endpoint

    async def stop(self) -> None:
        """SIGTERM, then SIGKILL after ``stop_s``, to the whole group; returns when it is reaped."""
        process = self._process
        if process is None:
            return
        self._stopping = True
        if process.returncode is None:
            self._signal(process.pid, signal.SIGTERM)
            try:
                await asyncio.wait_for(process.wait(), self._spec.deadlines.stop_s)
            except TimeoutError:
                log.warning("%s ignored SIGTERM for %g s", self._spec.name, self._spec.deadlines.stop_s)
        self._signal(process.pid, signal.SIGKILL)  # also what it may have left behind
        await process.wait()
        await asyncio.gather(*self._tasks)
        self._process = None

    def _place(self) -> tuple[list[str], Endpoint]:
        """Argument list with ``${SOCKET}`` or ``${PORT}`` filled in, and the endpoint that makes."""
        if any("${SOCKET}" in part for part in self._spec.command):
            self._runtime_dir = RuntimeDir()
            path = self._runtime_dir.path / "http.sock"
            return self._fill("${SOCKET}", str(path)), Endpoint.unix(path)
        port = free_port()
        return self._fill("${PORT}", str(port)), Endpoint.loopback(port)

    def _fill(self, name: str, value: str) -> list[str]:
        return [part.replace(name, value) for part in self._spec.command]

    async def _supervise(self, process: asyncio.subprocess.Process) -> None:
        """Copy the log until the process ends, then clean up and tell."""
        pump = asyncio.create_task(self._pump(process))
        code = await process.wait()
        self._signal(process.pid, signal.SIGKILL)  # its own children do not survive it
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(pump, 1.0)  # a stranger may still hold the pipe open
        self._remove_runtime_dir()
        if not self._stopping:
            log.warning("%s (pid %d) ended by itself: %s", self._spec.name, process.pid, describe_exit(code))
            if self.on_exit is not None:
                self.on_exit(code)

    async def _pump(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdout is not None
        path = self._log_dir / f"{self._spec.name.replace('/', '_')}.log" if self._log_dir else None
        with path.open("ab", buffering=0) if path else contextlib.nullcontext() as file:
            while True:
                try:
                    line = await process.stdout.readline()
                except ValueError:  # longer than the limit: asyncio dropped it
                    line = b"[a line longer than the limit was dropped]\n"
                if not line:
                    return
                self._lines.append(line.decode(errors="replace").rstrip("\n"))
                if file is not None:
                    file.write(line)

    def _signal(self, pid: int, number: int) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(pid, number)  # the pid leads its own group

    def _remove_runtime_dir(self) -> None:
        if self._runtime_dir is not None:
            self._runtime_dir.remove()
            self._runtime_dir = None


def free_port() -> int:
    """A loopback port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def describe_exit(code: int) -> str:
    return f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
