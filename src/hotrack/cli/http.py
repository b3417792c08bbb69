"""A small blocking HTTP client for commands that talk to a running gateway or engine."""

import http.client
import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit

from hotrack.core.errors import ConfigError, HotrackError

DEFAULT_URL = "http://127.0.0.1:8000"
IS_IT_THERE = "is 'hotrack serve' running there? (--url)"


class ServerError(HotrackError):
    """The server said no; ``status_code`` is its HTTP status."""

    def __init__(self, message: str, *, status_code: int, code: str | None = None) -> None:
        super().__init__(message, code=code)
        self.status_code = status_code


class Api:
    """Requests to ``url`` with ``key`` as bearer token. Raises ServerError for anything but success."""

    def __init__(self, url: str, key: str | None = None, *, timeout_s: float = 600.0) -> None:
        parts = urlsplit(url if "://" in url else f"http://{url}")
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError(f"--url must look like {DEFAULT_URL}, got {url!r}")
        self.url = f"{parts.scheme}://{parts.netloc}{parts.path.rstrip('/')}"
        self._parts = parts
        self._timeout_s = timeout_s
        self._headers = {"content-type": "application/json"}
        if key:
            self._headers["authorization"] = f"Bearer {key}"

    def get(self, path: str) -> Any:
        return self._json("GET", path, None)

    def post(self, path: str, body: Any = None) -> Any:
        return self._json("POST", path, body)

    def stream(self, path: str, body: Any) -> Iterator[bytes]:
        """Lines of an event stream as they arrive, without the newline."""
        with self._answer("POST", path, body) as response:
            for line in response:
                yield line.rstrip(b"\r\n")

    def _json(self, method: str, path: str, body: Any) -> Any:
        with self._answer(method, path, body) as response:
            try:
                return json.loads(response.read() or b"null")
            except ValueError:
                raise self._stranger(response) from None

    @contextmanager
    def _answer(self, method: str, path: str, body: Any) -> Iterator[http.client.HTTPResponse]:
        parts = self._parts
        kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        connection = kind(parts.hostname or "", parts.port, timeout=self._timeout_s)
        try:
            payload = None if body is None else json.dumps(body).encode()
            connection.request(method, parts.path.rstrip("/") + path, payload, self._headers)
            response = connection.getresponse()
            if response.status >= 400:
                raise self._refusal(response)
            yield response
        except http.client.BadStatusLine as error:
            raise ServerError(
                f"what answered at {self.url} does not speak HTTP; {IS_IT_THERE}", status_code=0
            ) from error
        except (OSError, http.client.HTTPException) as error:
            raise ServerError(
                f"no answer from {self.url}: {error}; {IS_IT_THERE}",
                status_code=0,
            ) from error
        finally:
            connection.close()

    def _refusal(self, response: http.client.HTTPResponse) -> ServerError:
        try:
            error = json.loads(response.read(65536))["error"]
            return ServerError(str(error["message"]), status_code=response.status, code=error.get("code"))
        except (ValueError, KeyError, TypeError):
            return self._stranger(response)

    def _stranger(self, response: http.client.HTTPResponse) -> ServerError:
        """Somebody else's answer, described and not shown."""
        server = "".join(c for c in response.headers.get("server", "")[:40] if c.isprintable())
        kind = response.headers.get_content_type()
        return ServerError(
            f"{self.url} answered {response.status} with {kind}{f' (server: {server})' if server else ''}, "
            f"which is not hotrack's; {IS_IT_THERE}",
            status_code=response.status,
        )


def text_pieces(lines: Iterator[bytes]) -> Iterator[str]:
    """Answer text out of the lines of an OpenAI chat or completion stream.

    Raises:
        ServerError: an error event, or the stream ended without its ``[DONE]``.
    """
    for line in lines:
        if not line.startswith(b"data: "):
            continue
        data = line[6:]
        if data == b"[DONE]":
            return
        event = json.loads(data)
        if "error" in event:
            raise ServerError(event["error"]["message"], status_code=200, code=event["error"].get("code"))
        for choice in event.get("choices", []):
            text = choice.get("text") or choice.get("delta", {}).get("content")
            if text:
                yield text
    raise ServerError("the stream ended without [DONE]", status_code=200, code="incomplete_stream")
