"""One streamed request against an OpenAI-compatible endpoint, timed."""

import asyncio
import itertools
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import aiohttp
import msgspec

from hotrack.core.errors import HotrackError


class BenchError(HotrackError):
    """The endpoint answered with an error, or not at all."""

    code = "bench_error"


@dataclass(frozen=True, slots=True)
class RequestRecord:
    """Times in seconds from sending the request. ``gaps``: seconds between content chunks after the first."""

    ttft_s: float
    e2e_s: float
    prompt_tokens: int
    output_tokens: int
    gaps: tuple[float, ...]

    @property
    def decode_tokens_per_s(self) -> float:
        """Output rate after the first token; 0 when there was only one."""
        rest = self.e2e_s - self.ttft_s
        return (self.output_tokens - 1) / rest if self.output_tokens > 1 and rest > 0 else 0.0


class OpenAIClient:
    """Streams completions from ``base_url`` (without ``/v1``)."""

    def __init__(self, base_url: str, model: str | None = None, api_key: str | None = None) -> None:
        self.base_url = base_url.rstrip("/").removesuffix("/v1")
        self.model = model or ""
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=10, sock_read=600)
        connector = aiohttp.TCPConnector(limit=0)
        self._session = aiohttp.ClientSession(headers=headers, timeout=timeout, connector=connector)

    async def close(self) -> None:
        await self._session.close()

    async def __aenter__(self) -> "OpenAIClient":
        return self

    async def __aexit__(self, *_exc: object) -> None:
        await self.close()

    async def healthy(self) -> bool:
        try:
            async with self._session.get(f"{self.base_url}/health") as response:
                return response.status == 200
        except (aiohttp.ClientError, TimeoutError, OSError):
            return False

    async def first_model(self) -> str:
        """Id of the first model the server lists.

        Raises:
            BenchError: no server there, or it lists none.
        """
        try:
            async with self._session.get(f"{self.base_url}/v1/models") as response:
                body = await response.json()
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise BenchError(f"no OpenAI server answers at {self.base_url}: {error}") from error
        models = [m["id"] for m in body.get("data", [])]
        if not models:
            raise BenchError(f"{self.base_url}/v1/models lists no model; name one with --model")
        return str(models[0])

    async def complete(self, prompt: str, output_len: int) -> RequestRecord:
        """One greedy streamed completion of exactly ``output_len`` tokens (``ignore_eos``).

        Raises:
            BenchError: the server refused, cut the stream or sent an error event.
        """
        body = {
            "model": self.model,
            "prompt": prompt,
            "max_tokens": output_len,
            "temperature": 0.0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        try:
            return await self._timed(body)
        except (aiohttp.ClientError, asyncio.IncompleteReadError, OSError) as error:
            raise BenchError(f"request to {self.base_url} failed: {error}") from error

    async def _timed(self, body: dict[str, Any]) -> RequestRecord:
        start = time.perf_counter()
        marks: list[float] = []
        usage: dict[str, int] | None = None
        async with self._session.post(f"{self.base_url}/v1/completions", json=body) as response:
            if response.status != 200:
                raise BenchError(f"HTTP {response.status}: {(await response.text())[:300]}")
            async for payload in _events(response.content):
                if "error" in payload:
                    raise BenchError(f"stream ended with an error: {payload['error']}")
                usage = payload.get("usage") or usage
                # Some servers send an empty text first; a token is what counts.
                if any(choice.get("text") for choice in payload.get("choices", ())):
                    marks.append(time.perf_counter() - start)
        end = time.perf_counter() - start
        if not marks or usage is None:
            raise BenchError("the stream ended without text or without usage")
        gaps = tuple(b - a for a, b in itertools.pairwise(marks))
        return RequestRecord(marks[0], end, usage["prompt_tokens"], usage["completion_tokens"], gaps)


async def _events(content: aiohttp.StreamReader) -> AsyncIterator[dict[str, Any]]:
    """JSON payloads of an SSE stream, ``[DONE]`` left out."""
    async for line in content:
        if line.startswith(b"data:"):
            data = line[5:].strip()
            if data and data != b"[DONE]":
                yield msgspec.json.decode(data)
