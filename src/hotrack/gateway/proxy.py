"""The hot path: one inference request from client to member and back.

Plain ASGI, no framework: read the body, look at ``model``, take a lease from the pool, pass bytes both ways.
Two things may interrupt that at any point: the client hangs up, or the pool abandons the lease because the
drain deadline passed. Both cancel the handling task and are told apart by the interruption's error.
"""

import asyncio
from collections.abc import Callable, Coroutine
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import Any

from hotrack.core.clock import Clock, MonotonicClock
from hotrack.core.errors import (
    BadGatewayError,
    DrainingError,
    DrainTimeoutError,
    HotrackError,
    MemberFailedError,
    RequestError,
)
from hotrack.gateway.contract import Lease, Leases
from hotrack.gateway.reply import HOP_BY_HOP, Reply, engine_death
from hotrack.gateway.request import (
    MAX_BODY_BYTES,
    ClientGoneError,
    Envelope,
    Receive,
    Route,
    Scope,
    Send,
    decode_envelope,
    find_route,
    read_body,
    rewrite,
)
from hotrack.gateway.routes import Routes
from hotrack.gateway.upstream import Headers, UpstreamError, UpstreamResponse
from hotrack.gateway.upstreams import Upstreams
from hotrack.gateway.waiting import Heartbeats
from hotrack.obs.log import get_logger
from hotrack.openai.request_id import request_id_of

log = get_logger(__name__)
DEADLINE_HEADER = b"x-hotrack-deadline-s"
MEMBER_RETRY_S = 5.0
# The member has its own name, framing and (if any) key; the gateway's credentials stop here.
_NOT_FORWARDED = HOP_BY_HOP | {
    b"host", b"content-length", b"expect", b"authorization", b"x-api-key", b"x-request-id", DEADLINE_HEADER,
}  # fmt: skip

CLIENT_GONE = "client_gone"
# The server cancels what still runs when its own patience ends.
SHUTTING_DOWN = DrainingError("the gateway is shutting down; retry later")
Observer = Callable[[str, str], None]


def _observe_nothing(_member: str, _code: str) -> None: ...


class _Interruption:
    """Stops the handling task once, for one reason."""

    def __init__(self) -> None:
        self.error: Exception | None = None
        self._closed = False
        task = asyncio.current_task()
        assert task is not None
        self._task = task

    async def when_client_gone(self, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self._stop(ClientGoneError())

    async def when_abandoned(self, lease: Lease, member: str) -> None:
        await lease.abandoned.wait()
        self._stop(
            DrainTimeoutError(
                f"{member} had to give its device back before this response was finished; retry"
            )
        )

    def close(self) -> None:
        """From now on nothing interrupts: the outcome is decided and only has to be written."""
        self._closed = True

    def _stop(self, error: Exception) -> None:
        if self.error is None and not self._closed:
            self.error = error
            self._task.cancel()

    def reason(self) -> Exception | None:
        """The interruption behind the CancelledError being handled; None for a cancellation from outside."""
        if self.error is not None:
            self._task.uncancel()
        return self.error


@dataclass(slots=True)
class _Call:
    """One request on its way: what the client asked and what was decided about it."""

    target: bytes
    headers: Headers
    request_id: str
    reply: Reply
    deadline_s: float | None = None
    began: float | None = None
    body: bytes = b""
    envelope: Envelope = field(default_factory=Envelope)
    route: Route | None = None
    granted: bool = False
    code: str = ""


class Proxy:
    """ASGI application for every ``POST`` that a member answers.

    ``observe(member, code)`` is called once per request that held a lease; ``code`` is the HTTP status it was
    answered with, else the error's code.
    """

    def __init__(
        self,
        pool: Leases,
        routes: Routes,
        *,
        observe: Observer = _observe_nothing,
        clock: Clock | None = None,
        max_body_bytes: int = MAX_BODY_BYTES,
    ) -> None:
        self._pool = pool
        self._routes = routes
        self._observe = observe
        self._clock = clock or MonotonicClock()
        self._max_body_bytes = max_body_bytes
        self._upstreams = Upstreams()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        call = _begin(scope, send)
        interruption = _Interruption()
        watcher: asyncio.Task[None] | None = None
        try:
            call.body = await read_body(scope, receive, self._max_body_bytes)
            self._route(call, scope)
            watcher = asyncio.create_task(interruption.when_client_gone(receive))
            await self._serve(call, send, interruption)
        except asyncio.CancelledError:
            await self._fail(call, interruption.reason() or SHUTTING_DOWN)
            if interruption.error is None:
                raise
        except (HotrackError, UpstreamError, ClientGoneError) as error:
            interruption.close()
            await self._fail(call, error)
        finally:
            if watcher is not None:
                watcher.cancel()
            if call.granted and call.route is not None:
                self._observe(call.route.member, call.code or str(call.reply.status))

    def _route(self, call: _Call, scope: Scope) -> None:
        call.deadline_s = _deadline(scope)
        call.envelope = decode_envelope(call.body)
        routes = self._routes
        call.route = find_route(routes.by_name, call.envelope.model, routes.listed)
        assert call.envelope.model is not None
        call.body = rewrite(call.body, call.envelope.model, call.route)

    async def _serve(self, call: _Call, send: Send, interruption: _Interruption) -> None:
        while not await self._answered(call, send, interruption):
            pass  # its member's wake failed before a byte had left: the request waits again

    async def _answered(self, call: _Call, send: Send, interruption: _Interruption) -> bool:
        """False: the member that had begun to answer turned out not to be fit for it; nothing was sent."""
        assert call.route is not None
        member = call.route.member
        async with AsyncExitStack() as stack:
            lease = await self._acquire(call, send, member, stack)
            call.granted = True
            watcher = asyncio.create_task(interruption.when_abandoned(lease, member))
            try:
                connections = self._upstreams.of(member, lease.endpoint)
                answer = connections.request(b"POST", call.target, call.headers, call.body)
                response = await (_unless_revoked(lease, answer) if lease.provisional else answer)
                if response is None:
                    return False
                try:
                    await call.reply.forward(response, lease.first_byte)
                    if reason := engine_death(call.reply.end):
                        lease.engine_dead(reason)
                finally:
                    response.close()
            finally:
                watcher.cancel()
        return True

    async def _acquire(self, call: _Call, send: Send, member: str, stack: AsyncExitStack) -> Lease:
        manager = self._pool.lease(
            member,
            deadline_s=self._remaining_s(call),
            priority=call.envelope.priority or 0,
            request_id=call.request_id,
        )
        if not call.envelope.stream:
            return await stack.enter_async_context(manager)
        request_id = (b"x-request-id", call.request_id.encode())
        beats = Heartbeats(send, self._clock, [request_id], started=call.reply.started)
        try:
            async with beats:
                return await stack.enter_async_context(manager)
        finally:
            if beats.started:
                call.reply.adopt_stream()

    def _remaining_s(self, call: _Call) -> float | None:
        """Of the client's own deadline, which a second attempt does not renew."""
        if call.deadline_s is None:
            return None
        if call.began is None:
            call.began = self._clock.now()
            return call.deadline_s
        return max(0.0, call.deadline_s - (self._clock.now() - call.began))

    async def _fail(self, call: _Call, error: Exception) -> None:
        if isinstance(error, ClientGoneError):
            call.code = CLIENT_GONE
            return
        if isinstance(error, UpstreamError):
            member = call.route.member if call.route else "member"
            log.warning("request %s: %s: %s", call.request_id, member, error)
            error = _upstream_failure(member, error)
        assert isinstance(error, HotrackError)
        call.code = error.code
        await call.reply.error(error)


async def _unless_revoked(
    lease: Lease, answer: Coroutine[Any, Any, UpstreamResponse]
) -> UpstreamResponse | None:
    """The beginning of an answer, once bytes of it may leave. None as soon as they never may: the member then
    hears that nobody wants it."""
    passed = False
    request = asyncio.ensure_future(answer)
    verdict = asyncio.ensure_future(lease.verified())
    try:
        await asyncio.wait((request, verdict), return_when=asyncio.FIRST_COMPLETED)
        passed = await verdict
        return await request if passed else None
    finally:
        verdict.cancel()
        if not passed:
            request.cancel()
            await asyncio.wait((request,))
            if not request.cancelled() and request.exception() is None:
                request.result().close()


def _upstream_failure(member: str, error: UpstreamError) -> HotrackError:
    if error.connected:
        return BadGatewayError(f"{member} did not finish its answer: {error}", retry_after_s=MEMBER_RETRY_S)
    return MemberFailedError(f"{member} is not reachable: {error}", retry_after_s=MEMBER_RETRY_S)


def _begin(scope: Scope, send: Send) -> _Call:
    headers: Headers = [pair for pair in scope["headers"] if pair[0] not in _NOT_FORWARDED]
    request_id = request_id_of(scope["headers"])
    headers.append((b"x-request-id", request_id))
    query: bytes = scope["query_string"]
    target: bytes = scope["path"].encode()
    return _Call(
        target=target + b"?" + query if query else target,
        headers=headers,
        request_id=request_id.decode("latin-1"),
        reply=Reply(send, request_id),
    )


def _deadline(scope: Scope) -> float | None:
    for name, value in scope["headers"]:
        if name == DEADLINE_HEADER:
            try:
                seconds = float(value)
            except ValueError:
                seconds = -1.0
            if not 0 < seconds < 86400:
                text = value.decode("latin-1")
                raise RequestError(f"{DEADLINE_HEADER.decode()} must be seconds in (0, 86400), got {text!r}")
            return seconds
    return None
