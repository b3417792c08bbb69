"""Reading a client's request: bounded, validated, and decoded no further than routing needs."""

from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from hotrack.core.errors import ModelNotFoundError, PayloadTooLargeError, RequestError

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]

MAX_BODY_BYTES = 8 * 1024 * 1024


class ClientGoneError(Exception):
    """The client hung up; nobody is left to answer."""


class Envelope(msgspec.Struct):
    """The fields of a request body that the gateway itself looks at; all others pass through unread."""

    model: str | None = None
    stream: bool | None = None
    priority: int | None = None


_envelope = msgspec.json.Decoder(Envelope)
_fields = msgspec.json.Decoder(dict[str, msgspec.Raw])
_encoder = msgspec.json.Encoder()


@dataclass(frozen=True, slots=True)
class Route:
    """How requests for one name reach a member.

    ``upstream_name``: what the member is told as ``model``; ``strip``: body keys removed; ``overrides``: body
    keys set. A body is rewritten only when one of the three asks for it.
    """

    member: str
    upstream_name: str
    strip: frozenset[str] = frozenset()
    overrides: Mapping[str, Any] = field(default_factory=dict)


async def read_body(scope: Scope, receive: Receive, limit: int = MAX_BODY_BYTES) -> bytes:
    """The request body.

    Raises:
        PayloadTooLargeError: as soon as the declared or received size exceeds ``limit``.
        ClientGoneError: the client hung up first.
    """
    for name, value in scope["headers"]:
        if name == b"content-length" and int(value) > limit:
            raise _too_large(int(value), limit)
    pieces: list[bytes] = []
    size = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientGoneError
        piece: bytes = message.get("body", b"")
        size += len(piece)
        if size > limit:
            raise _too_large(size, limit)
        pieces.append(piece)
        if not message.get("more_body", False):
            return pieces[0] if len(pieces) == 1 else b"".join(pieces)


def _too_large(size: int, limit: int) -> PayloadTooLargeError:
    return PayloadTooLargeError(f"the request body has at least {size} bytes; the limit is {limit} bytes")


def decode_envelope(body: bytes) -> Envelope:
    """Routing fields of a JSON body.

    Raises:
        RequestError: not UTF-8, not JSON, not an object, or a field of the wrong type.
    """
    try:
        body.decode()  # the JSON scanner skips unread strings without looking at their encoding
        return _envelope.decode(body)
    except UnicodeDecodeError as error:
        raise RequestError(
            f"the request body is not valid UTF-8: {error.reason} at byte {error.start}"
        ) from None
    except msgspec.ValidationError as error:
        raise RequestError(f"the request body is not a valid request: {error}") from None
    except msgspec.DecodeError as error:
        raise RequestError(f"the request body is not valid JSON: {error}") from None
    except RecursionError:
        raise RequestError("the request body is nested too deeply") from None


def find_route(routes: Mapping[str, Route], model: str | None, served: list[str]) -> Route:
    """The route for ``model``, which may be a member's id or an alias.

    Raises:
        RequestError, ModelNotFoundError: naming the served models.
    """
    if not model:
        raise RequestError(f"'model' is required; served models: {', '.join(served)}", param="model")
    route = routes.get(model)
    if route is None:
        shown = model if len(model) <= 100 else model[:100] + "..."
        raise ModelNotFoundError(
            f"the model {shown!r} is not served here; served models: {', '.join(served)}", param="model"
        )
    return route


def rewrite(body: bytes, model: str, route: Route) -> bytes:
    """``body`` as the member should see it; the same object when nothing needs to change.

    Values that are kept are copied as raw JSON, so numbers and escapes stay as the client wrote them.
    """
    if model == route.upstream_name and not route.strip and not route.overrides:
        return body
    fields: dict[str, Any] = dict(_fields.decode(body))
    for name in route.strip:
        fields.pop(name, None)
    fields.update(route.overrides)
    fields["model"] = route.upstream_name
    return _encoder.encode(fields)
