"""Everything that is not inference: health, metrics, listings, events, and operating the pool."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route as Path

from hotrack.core.errors import HotrackError, ModelNotFoundError, RequestError
from hotrack.core.lifecycle import MemberState
from hotrack.core.rounding import rounded
from hotrack.gateway import dashboard
from hotrack.gateway.auth import Keys
from hotrack.gateway.listing import Listing, event_json, status_json, swap_json
from hotrack.gateway.request import decode_envelope, read_body
from hotrack.obs.log import get_logger
from hotrack.openai.errors import error_headers, error_json
from hotrack.openai.sse import event as sse_event
from hotrack.pool.pool import Pool

log = get_logger(__name__)
Handler = Callable[[Request], Awaitable[Response]]
LOG_POLL_S = 0.5
KEEP_ALIVE_S = 15.0
MAX_BODY_BYTES = 64 * 1024


class NotFoundError(RequestError):
    status = 404
    code = "not_found"


class MethodNotAllowedError(RequestError):
    status = 405
    code = "method_not_allowed"


def json_response(payload: Any, status: int = 200) -> Response:
    return Response(msgspec.json.encode(payload), status, media_type="application/json")


class Admin:
    """Handlers over a pool. ``ready`` is set once the pool has found out what runs and booted it; endless
    streams end when ``stopping`` is set."""

    def __init__(
        self,
        pool: Pool,
        listing: Listing,
        keys: Keys,
        ready: asyncio.Event,
        stopping: asyncio.Event,
        openapi: bytes,
    ) -> None:
        self._pool = pool
        self._listing = listing
        self._keys = keys
        self._ready = ready
        self._stopping = stopping
        self._openapi = openapi
        self._started = time.monotonic()

    def app(self) -> Starlette:
        routes = [
            Path("/health", self.health),
            Path("/ready", self.readiness),
            Path("/metrics", self.metrics),
            Path("/openapi.json", self.openapi),
            Path("/v1/models", self._for_users(self.models)),
            Path("/v1/models/{model:path}", self._for_users(self.model)),
            Path("/running", self._for_users(self.running)),
            Path("/api/pool/members", self._for_users(self.members)),
            Path("/api/pool/swaps", self._for_users(self.swaps)),
            Path("/api/events", self._for_users(self.events)),
            Path("/is_sleeping", self._for_users(self.is_sleeping)),
            Path("/sleep", self._for_admins(self.sleep), methods=["POST"]),
            Path("/wake_up", self._for_admins(self.wake_up), methods=["POST"]),
            Path("/wakeup", self._for_admins(self.wake_up), methods=["POST"]),
            Path("/unload", self._for_admins(self.unload), methods=["GET", "POST"]),
            Path("/api/models/unload", self._for_admins(self.unload), methods=["POST"]),
            Path("/api/models/unload/{model:path}", self._for_admins(self.unload), methods=["POST"]),
            Path("/logs/stream/{model:path}", self._for_admins(self.logs)),
            *dashboard.routes(),
        ]
        return Starlette(
            routes=routes,
            exception_handlers={HotrackError: _error, HTTPException: _http_error, Exception: _bug},
        )

    def _for_users(self, handler: Handler) -> Handler:
        async def checked(request: Request) -> Response:
            self._keys.check_api(request.scope)
            return await handler(request)

        return checked

    def _for_admins(self, handler: Handler) -> Handler:
        async def checked(request: Request) -> Response:
            self._keys.check_admin(request.scope)
            client = request.client.host if request.client else "?"
            log.info("audit: %s %s?%s from %s", request.method, request.url.path, request.url.query, client)
            return await handler(request)

        return checked

    # Open to everybody, without details.
    async def health(self, request: Request) -> Response:
        del request
        return json_response({"status": "ok"})

    async def readiness(self, request: Request) -> Response:
        del request
        if self._ready.is_set():
            return json_response({"status": "ready"})
        return json_response({"status": "starting"}, 503)

    async def metrics(self, request: Request) -> Response:
        del request
        return Response(self._pool.render_metrics(), media_type="text/plain; version=0.0.4; charset=utf-8")

    async def openapi(self, request: Request) -> Response:
        del request
        return Response(self._openapi, media_type="application/json")

    # For users.
    def _states(self) -> dict[str, MemberState]:
        return {row.name: row.state for row in self._pool.status()}

    async def models(self, request: Request) -> Response:
        del request
        return json_response(self._listing.models(self._states()))

    async def model(self, request: Request) -> Response:
        name = self._pool.resolve(request.path_params["model"])
        cards = self._listing.models(self._states())["data"]
        card = next((card for card in cards if card["id"] == name), None)
        if card is None:
            raise ModelNotFoundError(f"the model {name!r} is not listed", param="model")
        return json_response(card)

    async def running(self, request: Request) -> Response:
        del request
        return json_response(self._listing.running(self._pool.status()))

    async def members(self, request: Request) -> Response:
        del request
        uptime = rounded(time.monotonic() - self._started)
        rows = [status_json(row) for row in self._pool.status()]
        return json_response({"uptime_s": uptime, "ready": self._ready.is_set(), "members": rows})

    async def swaps(self, request: Request) -> Response:
        del request
        return json_response({"swaps": [swap_json(swap) for swap in self._pool.events.swaps()]})

    async def is_sleeping(self, request: Request) -> Response:
        state = self._states()[await self._member(request)]
        return json_response({"is_sleeping": state is MemberState.ASLEEP})

    async def events(self, request: Request) -> Response:
        """Every event of the pool as it happens (SSE), after the members' current states."""
        del request
        return StreamingResponse(self._event_stream(), media_type="text/event-stream")

    async def _event_stream(self) -> AsyncIterator[bytes]:
        events = self._pool.events.subscribe()
        pending = asyncio.ensure_future(anext(events))
        stopping = asyncio.ensure_future(self._stopping.wait())
        try:
            for row in self._pool.status():
                yield sse_event({"type": "Member", **status_json(row)})
            while not stopping.done():
                await asyncio.wait([pending, stopping], timeout=KEEP_ALIVE_S, return_when="FIRST_COMPLETED")
                if pending.done():
                    yield sse_event(event_json(pending.result()))
                    pending = asyncio.ensure_future(anext(events))
                else:
                    yield b": still here\n\n"
        finally:
            pending.cancel()  # ends the subscription too
            stopping.cancel()
            await asyncio.wait([pending, stopping])

    # For operators.
    async def sleep(self, request: Request) -> Response:
        name = await self._member(request)
        level = self._pool.spec(name).sleep_level or 0
        asked = request.query_params.get("level", str(level))
        if asked != str(level):
            raise RequestError(
                f"{name} sleeps at level {level}, not {asked[:10]}; set sleep_level in the pool file",
                param="level",
            )
        await self._pool.sleep(name)
        state = self._states()[name]  # without a process it holds no memory either
        return json_response(
            {"status": "stopped" if state is MemberState.STOPPED else "sleeping", "level": level}
        )

    async def wake_up(self, request: Request) -> Response:
        await self._pool.wake(await self._member(request))
        return json_response({"status": "awake", "tags": None})

    async def unload(self, request: Request) -> Response:
        """One member, or all of them when none is named."""
        named = request.path_params.get("model") or request.query_params.get("model")
        names = [self._pool.resolve(named)] if named else self._pool.names()
        for name in names:
            await self._pool.unload(name)
        return json_response({"msg": "ok", "unloaded": names})

    async def logs(self, request: Request) -> Response:
        """The member's last lines, then new ones; ``?no-history`` skips the former."""
        name = self._pool.resolve(request.path_params["model"])
        history = "no-history" not in request.query_params
        return StreamingResponse(self._log_stream(name, history=history), media_type="text/plain")

    async def _log_stream(self, name: str, *, history: bool) -> AsyncIterator[bytes]:
        seen = [] if history else self._pool.logs(name)
        while not self._stopping.is_set():
            lines = self._pool.logs(name)
            fresh = _new_lines(seen, lines)
            if fresh:
                yield "".join(f"{line}\n" for line in fresh).encode()
            seen = lines
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stopping.wait(), LOG_POLL_S)

    async def _member(self, request: Request) -> str:
        """The member named by ``?model=`` or a JSON field; the only one there is when none is named."""
        named = request.query_params.get("model")
        if named is None and request.method == "POST":
            body = await read_body(request.scope, request.receive, MAX_BODY_BYTES)
            named = decode_envelope(body).model if body else None
        if named is not None:
            return self._pool.resolve(named)
        names = self._pool.names()
        if len(names) > 1:
            raise RequestError(
                f"say which model with ?model=; this pool has {', '.join(names)}", param="model"
            )
        return names[0]


def _new_lines(seen: list[str], lines: list[str]) -> list[str]:
    """Lines after those in ``seen``; both are the ends of one growing log."""
    if not seen:
        return lines
    for start in range(len(lines), 0, -1):
        if lines[max(0, start - len(seen)) : start] == seen[-start:]:
            return lines[start:]
    return lines


async def _error(request: Request, error: Exception) -> Response:
    del request
    assert isinstance(error, HotrackError)
    headers = error_headers(error)
    return Response(error_json(error), error.status, headers=headers, media_type="application/json")


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    if error.status_code == 405:
        return await _error(request, MethodNotAllowedError(f"{request.method} is not allowed here"))
    return await _error(request, NotFoundError(f"there is nothing at {request.url.path[:200]}"))


async def _bug(request: Request, error: Exception) -> Response:
    log.error("%s %s failed", request.method, request.url.path, exc_info=error)
    return await _error(request, HotrackError("internal error; the gateway's log has the details"))
