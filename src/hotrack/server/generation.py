"""One HTTP request as sequences in the engine: submit, merge their outputs, count, and abort what nobody
wants any more."""

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any, Protocol

from hotrack.core.errors import HotrackError
from hotrack.core.lifecycle import FinishReason
from hotrack.core.request import EngineOutput, EngineRequest
from hotrack.obs.member_metrics import MemberMetrics
from hotrack.server.sequence import Delta, SequenceState

Sink = Callable[[EngineOutput | HotrackError], None]


class Engine(Protocol):
    """What the server needs of ``engine.client.EngineClient``. ``stats``: gauges and totals as of the last
    step. ``on_landed``: called with the report of a streamed wake when it is over, or with its error."""

    stats: dict[str, float]
    on_landed: Callable[[dict[str, Any], HotrackError | None], None]

    def submit(self, request: EngineRequest, sink: Sink) -> None:
        """Start a sequence; ``sink`` gets its outputs, or the error that ended the engine."""
        ...

    def abort(self, request_ids: Sequence[str]) -> None:
        """Forget sequences; unknown ids are fine."""
        ...

    async def control(self, op: str, **args: Any) -> dict[str, Any]: ...


class ClientGoneError(HotrackError):
    """The client closed its connection; there is nobody to tell."""

    status = 499
    type = "client_closed_request"
    code = "client_closed_request"


@dataclass(frozen=True, slots=True)
class Job:
    """One sequence to run: choice ``index`` of the response."""

    index: int
    request: EngineRequest
    state: SequenceState


class Generation:
    """Live sequences of one response.

    ``updates`` yields what is new whenever something is; outputs that arrive while the consumer is busy come
    together. Leaving the iteration early, for whatever reason, aborts the rest in the engine.
    """

    def __init__(self, engine: Engine, metrics: MemberMetrics, jobs: Sequence[Job]) -> None:
        self._engine = engine
        self._metrics = metrics
        self._inbox: deque[tuple[Job, EngineOutput] | HotrackError] = deque()
        self._arrived = asyncio.Event()
        self._started = perf_counter()
        self._last: dict[int, float] = {}
        self.jobs = tuple(jobs)
        self.live = {job.request.request_id: job for job in jobs}

    def fail(self, error: HotrackError) -> None:
        """End the response with ``error``, from outside (client gone, shutdown)."""
        self._inbox.append(error)
        self._arrived.set()

    async def updates(self) -> AsyncGenerator[list[tuple[int, Delta]], None]:
        """Batches of ``(choice index, delta)``, never empty.

        Raises:
            HotrackError: what ended a sequence other than stop or length; the whole response fails with it.
        """
        try:
            self._submit()
            while self.live:
                await self._arrived.wait()
                self._arrived.clear()
                if batch := self._drain():
                    yield batch
        finally:
            if self.live:
                self._engine.abort(tuple(self.live))
                self.live.clear()

    def _submit(self) -> None:
        for job in self.jobs:
            self._engine.submit(job.request, self._sink(job))

    def _sink(self, job: Job) -> Sink:
        inbox, arrived = self._inbox, self._arrived

        def sink(output: EngineOutput | HotrackError) -> None:
            inbox.append(output if isinstance(output, HotrackError) else (job, output))
            arrived.set()

        return sink

    def _drain(self) -> list[tuple[int, Delta]]:
        batch = []
        now = perf_counter()
        while self._inbox:
            item = self._inbox.popleft()
            if isinstance(item, HotrackError):
                raise item
            job, output = item
            if job.state.finished:
                continue  # tokens the engine had in flight when a stop string matched
            counted = job.state.num_tokens
            delta = job.state.feed(output)
            self._count(job, job.state.num_tokens - counted, now)
            if job.state.finished:
                self._finish(job, delta, now)
            if not delta.empty:
                batch.append((job.index, delta))
        return batch

    def _finish(self, job: Job, delta: Delta, now: float) -> None:
        del self.live[job.request.request_id]
        if job.state.stopped_here:
            self._engine.abort((job.request.request_id,))
        assert delta.finish_reason in (FinishReason.STOP, FinishReason.LENGTH), f"{delta.finish_reason=}"
        self._metrics.finished(delta.finish_reason.value)
        self._metrics.output_length.observe(job.state.num_tokens)
        self._metrics.e2e.observe(now - self._started)

    def _count(self, job: Job, num_tokens: int, now: float) -> None:
        if not num_tokens:
            return
        before = self._last.get(job.index)
        if before is None:
            self._metrics.first_token.observe(now - self._started)
        else:
            self._metrics.token_gap.observe((now - before) / num_tokens)
        self._last[job.index] = now
        self._metrics.generation_tokens.inc(num_tokens)
