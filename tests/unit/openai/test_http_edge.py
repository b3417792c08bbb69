"""What is not HTTP, and ids that are not harmless."""

import asyncio
import json
from pathlib import Path

import pytest
import uvicorn
from uvicorn.server import ServerState

from hotrack.openai.protocol import MAX_HEAD_BYTES, BoundedProtocol
from hotrack.openai.request_id import request_id_of


async def _no_app(scope: object, receive: object, send: object) -> None:
    raise AssertionError("a malformed head reached the application")


async def exchange(folder: Path, request: bytes) -> tuple[bytes, bytes]:
    """Head and body of the answer to these bytes."""
    config = uvicorn.Config(_no_app, http=BoundedProtocol, ws="none", lifespan="off", log_config=None)
    config.load()
    state = ServerState()
    path = str(folder / "s")
    server = await asyncio.get_running_loop().create_unix_server(
        lambda: BoundedProtocol(config, state, {}), path
    )
    async with server:
        reader, writer = await asyncio.open_unix_connection(path)
        writer.write(request)
        answer = await asyncio.wait_for(reader.read(), 5)
        writer.close()
        await writer.wait_closed()
    head, _, body = answer.partition(b"\r\n\r\n")
    return head, body


@pytest.mark.parametrize(
    ("request_bytes", "words"),
    [
        (b"\x16\x03\x01\x02\x00", "Invalid HTTP request"),  # TLS on a plain port
        (b"GET / HTTP/1.1\r\nno colon\r\n\r\n", "Invalid HTTP request"),
        (b"POST /v1/completions HTTP/1.1\r\ncontent-length: -1\r\n\r\n", "Invalid HTTP request"),
        (b"GET / HTTP/1.1\r\nx: " + b"a" * MAX_HEAD_BYTES, f"longer than {MAX_HEAD_BYTES} bytes"),
    ],
)
def test_a_malformed_head_gets_openais_error(tmp_path: Path, request_bytes: bytes, words: str) -> None:
    head, body = asyncio.run(exchange(tmp_path, request_bytes))
    assert head.startswith(b"HTTP/1.1 400 ")
    assert b"content-type: application/json" in head
    assert b"content-length: %d" % len(body) in head
    error = json.loads(body)["error"]
    assert (error["type"], error["code"], error["param"]) == (
        "invalid_request_error",
        "invalid_request",
        None,
    )
    assert words in error["message"]


@pytest.mark.parametrize("value", [b"r1", b"a" * 128, b"2024:x/y+z=@~-._"])
def test_a_harmless_request_id_is_kept(value: bytes) -> None:
    assert request_id_of([(b"accept", b"*"), (b"x-request-id", value)]) == value


@pytest.mark.parametrize(
    "value", [b"", b"a" * 129, b"a b", b"\xff", b"a\tb", b"<script>", b'"', b"a\x00", "\u00e9".encode()]
)
def test_any_other_request_id_is_replaced(value: bytes) -> None:
    new = request_id_of([(b"x-request-id", value)])
    assert new != value
    assert len(new) == 32
    assert request_id_of([]) != new


def test_two_request_ids_are_none() -> None:
    assert request_id_of([(b"x-request-id", b"a"), (b"x-request-id", b"b")]) not in (b"a", b"b")
