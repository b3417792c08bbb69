"""The gateway as a process: uvicorn with uvloop and httptools, bounded request heads, orderly stop."""

import asyncio
import contextlib
import signal
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import uvicorn
import uvloop

from hotrack.config.pool import PoolConfig
from hotrack.core.errors import ConfigError, HotrackError
from hotrack.core.host_copies import remove_stale
from hotrack.core.runtime_dir import remove_leftovers
from hotrack.gateway.app import Gateway, create_app
from hotrack.gateway.auth import Keys
from hotrack.gateway.build import member_specs, pool_policy
from hotrack.gateway.devices import find_budgets, settle_devices
from hotrack.members.gpu import Gpus
from hotrack.members.member import MemberFactory
from hotrack.obs.log import get_logger
from hotrack.openai.protocol import BoundedProtocol
from hotrack.pool.pool import Pool

log = get_logger(__name__)
BACKLOG = 2048


class Server(uvicorn.Server):
    """Ends on SIGINT and SIGTERM without raising them again: the members are still to be ended. ``on_exit``
    is called when such a signal arrives."""

    def __init__(self, config: uvicorn.Config, on_exit: Callable[[], None] = lambda: None) -> None:
        super().__init__(config)
        self._on_exit = on_exit

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self.handle_exit, number, None)
        yield

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self._on_exit()
        super().handle_exit(sig, frame)


def uvicorn_config(app: Any, *, access_log: bool = False) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        loop="uvloop",
        http=BoundedProtocol,
        ws="none",
        lifespan="off",
        interface="asgi3",
        access_log=access_log,
        log_level="info" if access_log else "warning",
        server_header=False,
        date_header=False,
        timeout_keep_alive=75,
        timeout_graceful_shutdown=5,
    )


def listen(host: str, port: int) -> socket.socket:
    """A listening socket; ``port`` 0 takes a free one.

    Raises:
        ConfigError: the address cannot be bound; says what to do.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        raise ConfigError(
            f"cannot listen on {host}:{port}: {error.strerror or error}; "
            "choose another --port (0: any free one)"
        ) from error
    listener.setblocking(False)
    return listener


def serve(
    config: PoolConfig,
    listener: socket.socket,
    keys: Keys,
    *,
    access_log: bool = False,
    log_dir: Path | None = None,
    on_ready: Callable[[], None] = lambda: None,
) -> None:
    """Run the gateway until SIGINT or SIGTERM; members are gone when it returns. ``on_ready`` is called once
    the pool is up.

    Raises:
        ConfigError: the pool cannot exist as configured.
    """
    uvloop.run(_serve(config, listener, keys, access_log, log_dir, on_ready))


async def _serve(
    config: PoolConfig,
    listener: socket.socket,
    keys: Keys,
    access_log: bool,
    log_dir: Path | None,
    on_ready: Callable[[], None],
) -> None:
    for path in remove_leftovers():
        log.info("removed %s, left behind by a killed gateway", path)
    gpus = Gpus()
    config = settle_devices(config, gpus)
    budgets = find_budgets(config, gpus)
    specs = member_specs(config)
    for path, nbytes in remove_stale({spec.model_name for spec in specs}).items():
        log.info("removed %s (%d bytes), the host copy of no member of this pool", path, nbytes)
    pool = Pool(
        specs,
        pool_policy(config),
        budgets=budgets.of,
        gpus=budgets.gpus,
        connect=MemberFactory(log_dir, gpus),
    )
    app = create_app(pool, config, keys)
    server = Server(uvicorn_config(app, access_log=access_log), on_exit=app.stopping.set)
    preload = next(iter(config.hooks.on_startup.preload), None)
    starting = asyncio.create_task(_start(pool, app, preload, on_ready))
    starting.add_done_callback(lambda task: _leave_if_impossible(task, server))
    try:
        await server.serve(sockets=[listener])
    finally:
        starting.cancel()
        await asyncio.wait([starting])
        await pool.close()
    if not starting.cancelled():
        starting.result()


def _leave_if_impossible(starting: "asyncio.Task[None]", server: Server) -> None:
    if not starting.cancelled() and starting.exception() is not None:
        server.should_exit = True


async def _start(pool: Pool, app: Gateway, preload: str | None, on_ready: Callable[[], None]) -> None:
    try:
        await pool.start(preload=preload)
    except HotrackError as error:  # members that fail show in the status; the gateway stays up
        log.error("the pool did not start as configured: %s", error.message)
    pool.check_measured()
    app.ready.set()
    on_ready()
