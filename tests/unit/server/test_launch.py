"""Pieces of the member's life that need no process."""

import asyncio
import socket
import threading

import pytest

from hotrack.core.errors import ConfigError
from hotrack.server import launch


def test_unless_gives_the_result_or_cancels() -> None:
    async def scenario() -> None:
        async def work() -> str:
            return "done"

        assert await launch._unless(asyncio.Event(), work()) == "done"
        event, ended = asyncio.Event(), []

        async def endless() -> str:
            try:
                await asyncio.Event().wait()
            finally:
                ended.append(True)
            return "never"

        waiting = asyncio.create_task(launch._unless(event, endless()))
        await asyncio.sleep(0)
        event.set()
        assert await waiting is None
        assert ended == [True]

    asyncio.run(scenario())


def test_unless_passes_errors_on() -> None:
    async def scenario() -> None:
        async def work() -> None:
            raise ConfigError("no")

        with pytest.raises(ConfigError):
            await launch._unless(asyncio.Event(), work())

    asyncio.run(scenario())


def test_daemon_thread_work_is_not_waited_for() -> None:
    gate = threading.Event()

    async def scenario() -> None:
        assert await launch._in_daemon_thread(lambda: 5) == 5
        with pytest.raises(ConfigError):
            await launch._in_daemon_thread(_fail)
        stuck = asyncio.create_task(launch._in_daemon_thread(gate.wait))
        await asyncio.sleep(0)
        stuck.cancel()

    asyncio.run(scenario())  # would hang if anyone joined the thread
    gate.set()


def _fail() -> None:
    raise ConfigError("no")


def test_port_taken_while_loading() -> None:
    async def scenario() -> None:
        import uvicorn

        async def app(scope: object, receive: object, send: object) -> None: ...

        with socket.socket() as mine, socket.socket() as other:
            for sock in (mine, other):
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            mine.bind(("127.0.0.1", 0))
            other.bind(mine.getsockname())
            other.listen()
            server = launch._Uvicorn(uvicorn.Config(app, lifespan="off", log_config=None))
            serving = asyncio.create_task(server.serve(sockets=[mine]))
            with pytest.raises(ConfigError, match="cannot listen"):
                await launch._until_listening(server, serving)

    asyncio.run(scenario())
