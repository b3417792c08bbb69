"""Server-sent events framing."""

from typing import Any

import msgspec

DONE = b"data: [DONE]\n\n"
HEARTBEAT = b": waiting\n\n"
_encoder = msgspec.json.Encoder()


def event(payload: Any) -> bytes:
    """One ``data:`` event holding ``payload`` as JSON."""
    return b"data: " + _encoder.encode(payload) + b"\n\n"
