"""Start a server command, time it until it is ready, and end it."""

import asyncio
import contextlib
import shlex
import signal
import socket
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass

from hotrack.bench.client import BenchError, OpenAIClient


@dataclass(frozen=True, slots=True)
class Launched:
    url: str
    ready_s: float


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextlib.asynccontextmanager
async def launched(command: str, *, timeout_s: float = 600.0) -> AsyncIterator[Launched]:
    """Run ``command`` (``{port}`` is filled in) until the block ends; ready means ``/health`` answers 200.

    Raises:
        BenchError: the process ended or did not become ready in time.
    """
    port = free_port()
    argv = [part.replace("{port}", str(port)) for part in shlex.split(command)]
    start = time.perf_counter()
    process = await asyncio.create_subprocess_exec(
        *argv, stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.DEVNULL
    )
    url = f"http://127.0.0.1:{port}"
    try:
        async with OpenAIClient(url) as client:
            while not await client.healthy():
                if process.returncode is not None:
                    raise BenchError(f"{argv[0]} ended with code {process.returncode} before it was ready")
                if time.perf_counter() - start > timeout_s:
                    raise BenchError(f"{argv[0]} was not ready after {timeout_s:.0f} s")
                await asyncio.sleep(0.02)
        yield Launched(url, time.perf_counter() - start)
    finally:
        await _end(process)


async def _end(process: asyncio.subprocess.Process) -> None:
    if process.returncode is not None:
        return
    process.send_signal(signal.SIGTERM)
    try:
        await asyncio.wait_for(process.wait(), 15)
    except TimeoutError:
        process.kill()
        await process.wait()
