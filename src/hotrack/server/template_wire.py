"""What the server and its template process say to each other.

Frames on stdin and stdout are a 4-byte little-endian length and JSON (msgpack has no big integers).
"""

from typing import Any, BinaryIO

import msgspec


class RenderJob(msgspec.Struct):
    template: str
    variables: dict[str, Any]


class RenderResult(msgspec.Struct):
    """Exactly one of the two is set."""

    text: str | None = None
    error: str | None = None


def read_frame(stream: BinaryIO) -> bytes | None:
    """One frame, or None when the other side has closed."""
    header = stream.read(4)
    return stream.read(int.from_bytes(header, "little")) if len(header) == 4 else None


def frame(payload: bytes) -> bytes:
    return len(payload).to_bytes(4, "little") + payload
