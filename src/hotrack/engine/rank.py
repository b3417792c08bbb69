"""One rank of an engine as a process: ``python -m hotrack.engine.rank LAUNCH_JSON``.

Rank 0 talks to the server process and turns what arrives into one frame per step, which it sends to the
other ranks and then runs itself; they run the same frames. An idle rank blocks in poll. A rank ends when its
parent says so or ends itself; signals to the process group do not reach it.
"""

import os
import sys
import time
from datetime import timedelta
from itertools import count
from pathlib import Path

import msgspec
import torch.distributed as dist
import zmq

from hotrack.core.child import leave_signals_to_parent
from hotrack.core.errors import EngineDeadError, HotrackError
from hotrack.core.request import EngineOutput
from hotrack.distributed.tensor_parallel import TensorParallel
from hotrack.engine import wire
from hotrack.engine.build import HASH_EVERY, BuiltEngine, build_engine
from hotrack.engine.core import EngineCore
from hotrack.engine.messages import (
    AbortRequest,
    AddRequest,
    Control,
    ControlReply,
    FromRank,
    LoadProgress,
    RankFailed,
    RankReady,
    StepFrame,
    StepOutputs,
    ToRank,
    WakeLanded,
)
from hotrack.obs.log import get_logger, setup_logging

PROGRESS_INTERVAL_S = 0.1
LANDING_IDLE_MS = 2000  # longer than most wakes, so that a first request may come during one

log = get_logger("hotrack.engine.rank")


class ServerLink:
    """Rank 0's socket to the server process."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], directory: str) -> None:
        self._socket = context.socket(zmq.PAIR)
        self._socket.set_hwm(0)
        self._socket.connect(wire.server_endpoint(directory))
        self._last_progress = (0.0, "")

    def send(self, message: FromRank) -> None:
        self._socket.send(wire.from_rank_encoder.encode(message))

    def progress(self, stage: str, done: int, total: int) -> None:
        """Progress while loading; not more often than people can see. Called by one thread at a time."""
        now = time.monotonic()
        then, last_stage = self._last_progress
        if done < total and stage == last_stage and now - then < PROGRESS_INTERVAL_S:
            return
        self._last_progress = (now, stage)
        self.send(LoadProgress(stage, done, total))

    def receive(self, *, wait_ms: int | None) -> list[ToRank]:
        """Everything that has arrived, up to and including the first control. ``wait_ms``: for the first
        message, None without end."""
        messages: list[ToRank] = []
        if not self._socket.poll(wait_ms):
            return messages
        while True:
            messages += wire.to_rank_decoder.decode(self._socket.recv())
            if not self._socket.poll(0) or any(isinstance(m, Control) for m in messages):
                return messages


class FrameFeed:
    """Rank 0: builds frames and sends them to the other ranks. ``last_digest`` of a step travels in the next
    frame.
    """

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], directory: str, size: int) -> None:
        self._sockets = [context.socket(zmq.PAIR) for _ in range(1, size)]
        for rank, socket in enumerate(self._sockets, 1):
            socket.set_hwm(0)
            socket.bind(wire.frame_endpoint(directory, rank))
        self._steps = count()

    def wait_for_followers(self) -> None:
        """Return once every other rank has loaded and is connected (the sockets' directory is removed after
        that).
        """
        for socket in self._sockets:
            socket.recv()

    def next(self, messages: list[ToRank], digest: int | None) -> StepFrame:
        frame = StepFrame(
            step=next(self._steps),
            adds=tuple(m.request for m in messages if isinstance(m, AddRequest)),
            aborts=tuple(i for m in messages if isinstance(m, AbortRequest) for i in m.request_ids),
            controls=tuple(m for m in messages if isinstance(m, Control)),
            now=time.monotonic(),
            plan_hash=digest,
        )
        if self._sockets:
            data = wire.frame_encoder.encode(frame)
            for socket in self._sockets:
                socket.send(data)
        return frame


def run_leader(core: EngineCore, link: ServerLink, feed: FrameFeed) -> None:
    """Serve until a shutdown control."""
    pending: list[ToRank] = []
    while True:
        if not pending and core.has_work:
            pending = link.receive(wait_ms=0)
        elif not pending and core.transitions.is_landing:
            # Nobody uses what a streamed wake brings: any control ends it, so that it is verified.
            pending = link.receive(wait_ms=LANDING_IDLE_MS) or [Control("", "stats")]
        elif not pending:
            pending = link.receive(wait_ms=None)
        messages, pending = _until_control(pending)
        frame = feed.next(messages, core.last_digest)
        outputs: list[EngineOutput] = []
        replies: list[ControlReply | WakeLanded] = []
        for emission in core.step(frame):
            if isinstance(emission, EngineOutput):
                outputs.append(emission)
            else:
                replies.append(emission)
        if outputs:
            link.send(StepOutputs(tuple(outputs), core.stats()))
        for reply in replies:
            link.send(reply)
        if any(control.op == "shutdown" for control in frame.controls):
            return


def run_follower(
    core: EngineCore, context: zmq.Context[zmq.Socket[bytes]], directory: str, rank: int
) -> None:
    """Run rank 0's frames until it says shutdown.

    Raises:
        EngineDeadError: this rank planned something else than rank 0 did.
    """
    socket = context.socket(zmq.PAIR)
    socket.connect(wire.frame_endpoint(directory, rank))
    socket.send(b"")
    while True:
        frame = wire.frame_decoder.decode(socket.recv())
        if frame.plan_hash != core.last_digest:
            raise EngineDeadError(
                f"rank {rank} planned {core.last_digest} before frame {frame.step}, rank 0 {frame.plan_hash}"
            )
        core.step(frame)
        if any(control.op == "shutdown" for control in frame.controls):
            return


def main(argument: str) -> int:
    """Exit status: 0 after a shutdown, 1 after a failure (reported to the server process if it still
    listens).
    """
    launch = msgspec.json.decode(argument, type=wire.RankLaunch)
    leave_signals_to_parent()
    config = launch.engine_config()
    setup_logging(f"{config.served_model_name or Path(config.model).name}/rank{launch.rank}")
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    link = ServerLink(context, launch.directory) if launch.rank == 0 else None
    try:
        _serve(launch, context, link)
    except Exception as exc:
        error = exc if isinstance(exc, HotrackError) else EngineDeadError(f"{type(exc).__name__}: {exc}")
        ours = error.exit_code == HotrackError.exit_code  # not wrong options or unusable files
        log.critical("%s", error.message, exc_info=ours and (exc is not error or exc.__cause__ is not None))
        if link is not None:
            link.send(RankFailed(launch.rank, error.message, error.code, type(error).code))
        context.destroy(linger=1000)
        return 1
    context.destroy(linger=1000)
    return 0


def _serve(launch: wire.RankLaunch, context: zmq.Context[zmq.Socket[bytes]], link: ServerLink | None) -> None:
    config = launch.engine_config()
    feed = FrameFeed(context, launch.directory, config.tensor_parallel_size) if link else None
    tp = _join(launch)
    built = build_engine(
        config,
        tp=tp,
        salt=bytes.fromhex(launch.salt),
        progress=link.progress if link else None,
        hash_every=0 if tp.size == 1 else 1 if launch.debug else HASH_EVERY,
    )
    try:
        if link is not None and feed is not None:
            feed.wait_for_followers()
            link.send(_ready(built))
            run_leader(built.core, link, feed)
        else:
            run_follower(built.core, context, launch.directory, launch.rank)
    finally:
        built.core.close()
    if tp.size > 1:
        dist.destroy_process_group()


def _ready(built: BuiltEngine) -> RankReady:
    return RankReady(0, os.getpid(), built.info)


def _join(launch: wire.RankLaunch) -> TensorParallel:
    """The group of all ranks; meets through a file, so there is no port to clash or to protect."""
    config = launch.engine_config()
    size = config.tensor_parallel_size
    if size == 1:
        return TensorParallel()
    store = dist.FileStore(f"{launch.directory}/rendezvous", size)  # type: ignore[attr-defined]
    timeout = timedelta(seconds=config.rank_timeout_s)
    dist.init_process_group("gloo", store=store, rank=launch.rank, world_size=size, timeout=timeout)
    return TensorParallel(launch.rank, size, dist.group.WORLD)


def _until_control(messages: list[ToRank]) -> tuple[list[ToRank], list[ToRank]]:
    """A frame ends with its first control, so that what was sent after it also happens after it."""
    for index, message in enumerate(messages):
        if isinstance(message, Control):
            if index:  # and what was sent before it happens before it
                return messages[:index], messages[index:]
            return messages[:1], messages[1:]
    return messages, []


if __name__ == "__main__":
    status = main(sys.argv[1])
    # Taking the interpreter and torch apart takes most of a second. After a failure, other threads may hang
    # in a collective with a dead peer.
    sys.stderr.flush()
    os._exit(status)
