"""The offline API's engine in rank processes, behind an EngineClient."""

import asyncio
import threading
from collections.abc import Coroutine, Sequence
from typing import Any, TypeVar

from hotrack.config.engine import EngineConfig
from hotrack.core.errors import HotrackError
from hotrack.core.request import EngineOutput, EngineRequest
from hotrack.engine.client import EngineClient, RankInfo
from hotrack.engine.in_process import Outputs, Watch

T = TypeVar("T")


class RanksBackend:
    """Rank processes; an event loop on a thread of its own serves their client."""

    def __init__(self, config: EngineConfig) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="hotrack-client", daemon=True)
        self._thread.start()
        try:
            self._client, started = self._wait(_started(config))
        except BaseException:
            self._end_loop()
            raise
        self.info = started.info

    def run(self, requests: Sequence[EngineRequest], watch: Watch) -> Outputs:
        return self._wait(self._run(requests, watch))

    async def _run(self, requests: Sequence[EngineRequest], watch: Watch) -> Outputs:
        outputs: Outputs = {request.request_id: [] for request in requests}
        events: asyncio.Queue[EngineOutput | HotrackError] = asyncio.Queue()
        for request in requests:
            self._client.submit(request, events.put_nowait)
        unfinished = set(outputs)
        try:
            while unfinished:
                event = await events.get()
                if isinstance(event, HotrackError):
                    raise event
                if event.request_id not in unfinished:
                    continue  # sent before the engine heard that it was stopped
                outputs[event.request_id].append(event)
                if watch(event):
                    self._client.abort([event.request_id])
                    unfinished.remove(event.request_id)
                elif event.finish_reason is not None:
                    unfinished.remove(event.request_id)
        finally:
            self._client.abort(list(outputs))
        return outputs

    def control(self, op: str, **args: Any) -> dict[str, Any]:
        return self._wait(self._client.control(op, **args))

    def close(self) -> None:
        self._wait(self._client.close())
        self._end_loop()

    def _wait(self, coroutine: Coroutine[Any, Any, T]) -> T:
        future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def _end_loop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


async def _started(config: EngineConfig) -> tuple[EngineClient, RankInfo]:
    client = EngineClient(config)
    return client, await client.start()
