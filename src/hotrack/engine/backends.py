"""Where the offline API's engine lives: in this process (one rank), or in rank processes behind an
EngineClient.
"""

import asyncio
import threading
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Protocol, TypeVar

from hotrack.config.engine import EngineConfig
from hotrack.core.errors import HotrackError, error_from_code
from hotrack.core.request import EngineOutput, EngineRequest
from hotrack.engine.build import build_engine
from hotrack.engine.client import EngineClient, RankInfo
from hotrack.engine.messages import Control, ControlReply, StepFrame

T = TypeVar("T")
Outputs = dict[str, list[EngineOutput]]
Watch = Callable[[EngineOutput], bool]


class Backend(Protocol):
    """``run`` returns every request's outputs, in order, once all have ended. ``watch`` sees each output as
    it comes; True ends that request there."""

    info: dict[str, Any]

    def run(self, requests: Sequence[EngineRequest], watch: Watch) -> Outputs: ...

    def control(self, op: str, **args: Any) -> dict[str, Any]: ...

    def close(self) -> None: ...


class InProcessBackend:
    """One rank; steps run on the caller's thread and the core's worker."""

    def __init__(self, config: EngineConfig) -> None:
        built = build_engine(config)
        self.info = built.info
        self._core = built.core
        self._steps = 0

    def run(self, requests: Sequence[EngineRequest], watch: Watch) -> Outputs:
        outputs: Outputs = {request.request_id: [] for request in requests}
        adds, stopped = tuple(requests), tuple[str, ...]()
        try:
            while adds or stopped or self._core.has_work:
                fresh = self._step(adds, stopped)
                adds, stopped = (), tuple(output.request_id for output in fresh if watch(output))
                for output in fresh:
                    outputs[output.request_id].append(output)
        except BaseException:
            self._step(aborts=tuple(outputs))
            raise
        return outputs

    def _step(self, adds: tuple[EngineRequest, ...] = (), aborts: tuple[str, ...] = ()) -> list[EngineOutput]:
        emissions = self._core.step(StepFrame(self._next_step(), adds, aborts))
        return [emission for emission in emissions if isinstance(emission, EngineOutput)]

    def control(self, op: str, **args: Any) -> dict[str, Any]:
        frame = StepFrame(self._next_step(), controls=(Control("c", op, args),))
        for emission in self._core.step(frame):
            if isinstance(emission, ControlReply):
                if emission.error is not None:
                    raise error_from_code(emission.error["code"], emission.error["message"])
                return emission.result
        raise AssertionError(f"control {op} was not answered: nothing runs between calls")

    def close(self) -> None:
        self._core.close()

    def _next_step(self) -> int:
        self._steps += 1
        return self._steps


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
