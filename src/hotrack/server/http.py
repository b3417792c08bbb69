"""The edge: keys, body limits, error bodies, response counts. Plain ASGI, so streams pass through
untouched."""

import hmac
from typing import TypeVar

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from hotrack.core.errors import HotrackError, PayloadTooLargeError, RequestError, UnauthorizedError
from hotrack.obs.log import get_logger
from hotrack.obs.member_metrics import MemberMetrics
from hotrack.openai.errors import error_headers, error_json
from hotrack.openai.parse import parse_request
from hotrack.openai.request_id import request_id_of

log = get_logger(__name__)
T = TypeVar("T", bound=msgspec.Struct)

# Probes and scrapers carry no key; none of these says anything about requests.
OPEN_PATHS = frozenset({"/health", "/metrics", "/version", "/openapi.json"})
_encode = msgspec.json.Encoder().encode


def json_response(body: msgspec.Struct | dict[str, object]) -> Response:
    return Response(_encode(body), media_type="application/json")


def error_response(error: HotrackError) -> Response:
    return Response(
        error_json(error),
        status_code=error.status,
        headers=error_headers(error),
        media_type="application/json",
    )


async def on_hotrack_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, HotrackError)
    if error.status >= 500 and error.type == HotrackError.type:
        log.error("request failed: %s", error)
    return error_response(error)


async def on_http_error(request: Request, error: Exception) -> Response:
    """Unknown routes and methods, in OpenAI's shape."""
    assert isinstance(error, HTTPException)
    text = {
        404: f"no such endpoint: {request.url.path}",
        405: f"{request.method} is not allowed for {request.url.path}",
    }
    body = RequestError(
        text.get(error.status_code, error.detail), code={404: "not_found"}.get(error.status_code)
    )
    response = error_response(body)
    response.status_code = error.status_code
    response.headers.update(error.headers or {})
    return response


async def on_bug(_: Request, __: Exception) -> Response:
    return error_response(HotrackError("internal error; the server's log has the details"))


async def read_body(request: Request, limit: int) -> bytes:
    """The whole body, or PayloadTooLargeError as soon as it is known to be longer than ``limit`` bytes."""
    declared = request.headers.get("content-length", "")
    if declared.isdigit() and int(declared) > limit:
        raise _too_large(int(declared), limit)
    parts: list[bytes] = []
    size = 0
    try:
        async for part in request.stream():
            size += len(part)
            if size > limit:
                raise _too_large(size, limit)
            parts.append(part)
    except ClientDisconnect:
        raise RequestError("the client closed the connection before the body was complete") from None
    return b"".join(parts)


def _too_large(size: int, limit: int) -> PayloadTooLargeError:
    return PayloadTooLargeError(
        f"the request body has at least {size} bytes; this server takes {limit} (--max-body-bytes)"
    )


async def read_request(request: Request, schema: type[T], limit: int, metrics: MemberMetrics) -> T:
    parsed, unknown = parse_request(await read_body(request, limit), schema)
    if unknown:
        metrics.ignored_fields.inc(len(unknown))
        log.debug("ignored unknown fields: %s", ", ".join(unknown)[:500])
    return parsed


def request_id(request: Request) -> str:
    """The caller's ``X-Request-Id`` when it is a harmless one, else a new id."""
    return request_id_of(request.headers.raw).decode("ascii")


class Edge:
    """Outermost middleware: checks the key and counts responses by route and status."""

    def __init__(
        self, app: ASGIApp, *, api_key: str | None, metrics: MemberMetrics, routes: frozenset[str]
    ) -> None:
        self._app = app
        self._key = api_key.encode() if api_key is not None else None
        self._metrics = metrics
        self._routes = routes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        path = scope["path"]
        # Unknown paths share one label, or a scanner could fill memory with series.
        route = path if path in self._routes else "other"

        async def counted(message: Message) -> None:
            if message["type"] == "http.response.start":
                self._metrics.response(route, message["status"])
            await send(message)

        if path not in OPEN_PATHS and not self._allowed(scope):
            error = UnauthorizedError("this server needs a key: send the header 'Authorization: Bearer KEY'")
            response = error_response(error)
            response.headers["WWW-Authenticate"] = "Bearer"
            await response(scope, receive, counted)
            return
        await self._app(scope, receive, counted)

    def _allowed(self, scope: Scope) -> bool:
        if self._key is None:
            return True
        given = next((value for name, value in scope["headers"] if name == b"authorization"), b"")
        kind, _, key = given.partition(b" ")
        return kind.lower() == b"bearer" and hmac.compare_digest(key.strip(), self._key)
