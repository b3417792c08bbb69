"""OpenAI error bodies, from hotrack's exception tree."""

import math
from typing import Any

import msgspec

from hotrack.core.errors import HotrackError


def error_body(error: HotrackError) -> dict[str, Any]:
    return {"error": {"message": error.message, "type": error.type, "param": error.param, "code": error.code}}


def error_json(error: HotrackError) -> bytes:
    return msgspec.json.encode(error_body(error))


def error_headers(error: HotrackError) -> dict[str, str]:
    """``Retry-After`` in whole seconds, rounded up, when the error carries an estimate."""
    if error.retry_after_s is None:
        return {}
    return {"Retry-After": str(max(1, math.ceil(error.retry_after_s)))}


def sse_error(error: HotrackError) -> bytes:
    """The last event of a stream that failed after its 200 was sent (no ``[DONE]`` follows)."""
    return b"data: " + error_json(error) + b"\n\n"
