"""The server process's end of an engine: starts the ranks, talks to rank 0, notices when any of them dies
(no torch).
"""

import asyncio
import secrets
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any, Self

from hotrack.config.engine import EngineConfig
from hotrack.config.env import child_environment, rank_environment
from hotrack.core.child import bound_to_parent
from hotrack.core.errors import EngineDeadError, HotrackError, error_from_code
from hotrack.core.lifecycle import FinishReason
from hotrack.core.request import EngineOutput, EngineRequest
from hotrack.core.runtime_dir import RuntimeDir
from hotrack.engine import wire
from hotrack.engine.link import RankSocket
from hotrack.engine.messages import (
    AbortRequest,
    AddRequest,
    Control,
    ControlReply,
    FromRank,
    LoadProgress,
    RankFailed,
    RankReady,
    StepOutputs,
    ToRank,
    WakeLanded,
)
from hotrack.obs.log import get_logger

Sink = Callable[[EngineOutput | HotrackError], None]
StageProgress = Callable[[str, int, int], None]
Landed = Callable[[dict[str, Any], HotrackError | None], None]
SHUTDOWN_GRACE_S = 5.0
REPORT_GRACE_S = 0.2
TRANSITIONS = ("sleep", "wake")

log = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class RankInfo:
    """``pids`` by rank; ``info``: what rank 0 decided at start (num_blocks, max_model_len, vocab_size,
    weight_bytes, ...).
    """

    pids: tuple[int, ...]
    info: dict[str, Any] = field(default_factory=dict)

    @property
    def max_model_len(self) -> int:
        return int(self.info["max_model_len"])


class EngineClient:
    """One engine. Use from one event loop; ``start`` first, ``close`` last.

    Every submitted request gets outputs up to one with a ``finish_reason``, or one error. If a rank exits,
    or nothing is heard for ``config.rank_timeout_s`` while something is outstanding, all ranks are killed
    and everything outstanding, as well as everything later, fails with EngineDeadError; ``on_death`` is
    called once. ``on_landed`` hears how a streamed wake ended: the report of all of it, or an error.
    """

    def __init__(
        self,
        config: EngineConfig,
        *,
        on_death: Callable[[EngineDeadError], None] | None = None,
        debug: bool = False,
    ) -> None:
        self.config = config
        self.stats: dict[str, float] = {}
        self.dead: EngineDeadError | None = None
        self.on_landed: Landed = lambda *_: None
        self._on_death = on_death
        self._debug = debug
        self._sinks: dict[str, Sink] = {}
        self._controls: dict[str, asyncio.Future[dict[str, Any]]] = {}
        self._ranks: list[asyncio.subprocess.Process] = []
        self._tasks: list[asyncio.Task[None]] = []
        self._ready: asyncio.Future[RankReady] | None = None
        self._progress: StageProgress | None = None
        self._directory: RuntimeDir | None = None
        self._socket: RankSocket | None = None
        self._control_ids = count()
        self._transitions = 0
        self._last_heard = 0.0
        self._closing = False

    # ---- life

    async def start(self, on_progress: StageProgress | None = None) -> RankInfo:
        """Start the ranks and wait until they can take requests.

        Raises:
            HotrackError: what kept a rank from starting (CheckpointError, ConfigError, ...); nothing is left
            behind.
        """
        loop = asyncio.get_running_loop()
        self._progress = on_progress
        self._ready = loop.create_future()
        self._last_heard = loop.time()
        self._directory = RuntimeDir()
        try:
            self._socket = RankSocket(wire.server_endpoint(self._directory.path), self._receive, loop)
            salt = secrets.token_bytes(16)
            for rank in range(self.config.tensor_parallel_size):
                self._ranks.append(await self._spawn(rank, self._directory.path, salt))
            self._tasks = [
                asyncio.create_task(self._watch_silence()),
                *(asyncio.create_task(self._watch_exit(r, p)) for r, p in enumerate(self._ranks)),
            ]
            ready = await self._ready
        except BaseException:
            await self._stop()
            raise
        # Everyone is connected: with the directory gone, nothing can be left behind however this process
        # ends.
        self._remove_directory()
        return RankInfo(tuple(process.pid for process in self._ranks), ready.info)

    async def close(self) -> None:
        """Shut down gracefully; after a few seconds, by force. Outstanding requests end with an abort.

        Harmless after a ``start`` that failed or was cancelled: nothing is left to close.
        """
        if self._closing:
            return
        self._closing = True
        if self.dead is None and self._socket is not None:
            with suppress(TimeoutError, HotrackError):
                async with asyncio.timeout(SHUTDOWN_GRACE_S):
                    await self.control("shutdown")
                    await asyncio.gather(*(process.wait() for process in self._ranks))
        await self._stop()
        self._fail_outstanding(EngineDeadError("the engine was shut down"))

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    # ---- requests

    def submit(self, request: EngineRequest, sink: Sink) -> None:
        """Start a sequence; ``sink`` gets its outputs in order, then nothing more after a finish reason or
        an error.
        """
        if self.dead is not None or self._closing:
            sink(self.dead or EngineDeadError("the engine is shutting down"))
            return
        self._note_outstanding()
        self._sinks[request.request_id] = sink
        self._send([AddRequest(request)])

    def abort(self, request_ids: Sequence[str]) -> None:
        """Forget sequences; their sinks hear nothing more. Unknown ids are fine."""
        known = tuple(i for i in request_ids if self._sinks.pop(i, None) is not None)
        if known and self.dead is None:
            self._send([AbortRequest(known)])

    async def add(self, request: EngineRequest) -> AsyncIterator[EngineOutput]:
        """Outputs of one sequence; leaving the iteration early aborts it.

        Raises:
            HotrackError: the request was refused (with the engine's typed error) or the engine died.
        """
        queue: asyncio.Queue[EngineOutput | HotrackError] = asyncio.Queue()
        self.submit(request, queue.put_nowait)
        try:
            while True:
                output = await queue.get()
                if isinstance(output, HotrackError):
                    raise output
                if output.finish_reason is FinishReason.ERROR:
                    raise error_from_code(output.error_code or "internal_error", output.error or "failed")
                yield output
                if output.finish_reason is not None:
                    return
        finally:
            self.abort([request.request_id])

    async def control(self, op: str, **args: Any) -> dict[str, Any]:
        """Run a control at a step boundary: 'sleep', 'wake', 'pause', 'resume', 'reset_prefix_cache',
        'stats'.

        Raises:
            HotrackError: the engine refused; nothing changed.
            EngineDeadError: the engine is gone.
        """
        if self.dead is not None:
            raise self.dead
        self._note_outstanding()
        control_id = f"c{next(self._control_ids)}"
        reply: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        self._controls[control_id] = reply
        self._send([Control(control_id, op, args)])
        self._transitions += op in TRANSITIONS
        try:
            return await reply
        finally:
            self._transitions -= op in TRANSITIONS

    # ---- messages

    def _send(self, messages: list[ToRank]) -> None:
        assert self._socket is not None, "start the client first"
        self._socket.send(wire.to_rank_encoder.encode(messages))

    def _receive(self, data: bytes) -> None:
        self._last_heard = asyncio.get_running_loop().time()
        self._handle(wire.from_rank_decoder.decode(data))

    def _handle(self, message: FromRank) -> None:
        match message:
            case StepOutputs():
                self.stats = message.stats
                for output in message.outputs:
                    self._deliver(output)
            case ControlReply():
                self._reply(message)
            case WakeLanded():
                self.on_landed(message.report, _error_in(message))
            case LoadProgress():
                if self._progress is not None:
                    self._progress(message.stage, message.done, message.total)
            case RankReady():
                if self._ready is not None and not self._ready.done():
                    self._ready.set_result(message)
            case RankFailed():
                error = error_from_code(message.kind, message.message)
                error.code = message.code
                self._die(error)

    def _deliver(self, output: EngineOutput) -> None:
        sink = self._sinks.get(output.request_id)
        if sink is None:
            return  # aborted here while its output was on the way
        if output.finish_reason is not None:
            del self._sinks[output.request_id]
        sink(output)

    def _reply(self, message: ControlReply) -> None:
        future = self._controls.pop(message.control_id, None)
        if future is None or future.done():
            return
        if (error := _error_in(message)) is None:
            future.set_result(message.result)
        else:
            future.set_exception(error)

    # ---- death

    async def _watch_exit(self, rank: int, process: asyncio.subprocess.Process) -> None:
        status = await process.wait()
        if self._closing:
            return
        how = f"was killed by signal {-status}" if status < 0 else f"exited with status {status}"
        # A failure report may still be in the socket, or on its way from rank 0: it says more than a status.
        await asyncio.sleep(REPORT_GRACE_S)
        self._die(EngineDeadError(f"rank {rank} (pid {process.pid}) {how}; see the log above"))

    async def _watch_silence(self) -> None:
        """Half the timeout without a word while something is outstanding: ask. The whole of it: the engine
        hangs.
        """
        limit = self.config.rank_timeout_s
        loop = asyncio.get_running_loop()
        asked: asyncio.Task[Any] | None = None
        while True:
            await asyncio.sleep(limit / 8)
            silence = loop.time() - self._last_heard
            if self._ready is None or not self._ready.done() or not (self._sinks or self._controls):
                continue
            if self._transitions:  # moving weights takes as long as it takes; whoever asked has a deadline
                continue
            if silence > limit:
                self._die(EngineDeadError(f"the engine has been silent for {silence:.1f} s with work to do"))
            elif silence > limit / 2 and (asked is None or asked.done()):
                asked = asyncio.create_task(self.control("stats"))
                asked.add_done_callback(lambda task: task.cancelled() or task.exception())

    def _note_outstanding(self) -> None:
        """Silence counts from the moment there is something to answer."""
        if not self._sinks and not self._controls:
            self._last_heard = asyncio.get_running_loop().time()

    def _die(self, error: HotrackError) -> None:
        if self.dead is not None or self._closing:
            return
        self.dead = error if isinstance(error, EngineDeadError) else EngineDeadError(error.message)
        log.error("engine died: %s", error.message)
        self._kill()
        if self._ready is not None and not self._ready.done():
            self._ready.set_exception(error)
            return
        self._fail_outstanding(self.dead)
        if self._on_death is not None:
            self._on_death(self.dead)

    def _fail_outstanding(self, error: EngineDeadError) -> None:
        sinks, self._sinks = list(self._sinks.values()), {}
        for sink in sinks:
            sink(error)
        controls, self._controls = list(self._controls.values()), {}
        for future in controls:
            if not future.done():
                future.set_exception(error)

    def _kill(self) -> None:
        for process in self._ranks:
            if process.returncode is None:
                with suppress(ProcessLookupError):
                    process.kill()

    async def _stop(self) -> None:
        """Kill what still lives, reap it, close the socket, remove the directory."""
        self._kill()
        await asyncio.gather(*(process.wait() for process in self._ranks))
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks.clear()
        if self._socket is not None:
            self._socket.close()
            self._socket = None
        self._remove_directory()

    def _remove_directory(self) -> None:
        if self._directory is not None:
            self._directory.remove()
            self._directory = None

    async def _spawn(self, rank: int, directory: Path, salt: bytes) -> asyncio.subprocess.Process:
        argument = wire.launch(self.config, rank, directory, salt, debug=self._debug).encode()
        # Ranks of one host talk over loopback only.
        environment = child_environment(rank_environment())
        return await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "hotrack.engine.rank",
            argument,
            stdin=asyncio.subprocess.DEVNULL,
            env=environment,
            preexec_fn=bound_to_parent(),
        )


def _error_in(message: ControlReply | WakeLanded) -> HotrackError | None:
    error = message.error
    return None if error is None else error_from_code(error["code"], error["message"])
