"""HTTP client for one member, in vLLM's dialect. Every call has a deadline and raises
``MemberFailedError``.
"""

import asyncio
from collections.abc import Mapping, Sequence
from http import HTTPStatus
from typing import Any

import aiohttp
import msgspec

from hotrack.core.errors import MemberFailedError
from hotrack.core.lifecycle import SleepMode
from hotrack.members.canary import CanaryAnswer
from hotrack.members.endpoint import Endpoint
from hotrack.members.spec import MemberSpec

MAX_BODY_BYTES = 4 << 20
MAX_REASON_CHARS = 300
NOT_OFFERED = (HTTPStatus.NOT_FOUND, HTTPStatus.METHOD_NOT_ALLOWED)


class MemberClient:
    """``close()`` it. Successful answers of older engines may be empty (200 or 204); those are accepted."""

    def __init__(self, endpoint: Endpoint, spec: MemberSpec) -> None:
        self._endpoint = endpoint
        self._spec = spec
        self._session: aiohttp.ClientSession | None = None

    async def close(self) -> None:
        if self._session is not None:
            session, self._session = self._session, None
            await session.close()

    async def healthy(self) -> bool:
        """True when the health path answers 200. False also when nobody listens."""
        try:
            await self._call("GET", self._spec.health_path, self._spec.deadlines.probe_s)
        except MemberFailedError:
            return False
        return True

    async def is_sleeping(self) -> bool:
        """vLLM also says true when merely paused."""
        body = await self._call("GET", "/is_sleeping", self._spec.deadlines.probe_s)
        value = body.get("is_sleeping")
        if not isinstance(value, bool):
            raise MemberFailedError(
                f"{self._spec.name}: GET /is_sleeping answered without a boolean is_sleeping"
            )
        return value

    async def sleep(self, level: int, mode: SleepMode, nbytes: int | None = None) -> dict[str, Any]:
        """The engine's own report, {} when it gives none. ``nbytes``: give back only about so many."""
        params = {"level": str(level), "mode": str(mode)}
        if nbytes is not None:
            params["nbytes"] = str(nbytes)
        return _report(await self._call("POST", "/sleep", self._spec.deadlines.sleep_s, params=params))

    async def wake_up(self, tags: Sequence[str] = (), *, streamed: bool = False) -> dict[str, Any]:
        """The engine's own report, {} when it gives none. ``streamed``: see ``MemberSpec.streamed_wake``."""
        params = [("tags", tag) for tag in tags]
        if streamed:
            params.append(("streamed", "true"))
        return _report(await self._call("POST", "/wake_up", self._spec.deadlines.wake_s, params=params))

    async def reload_weights(self) -> None:
        """Level 2 dropped the weights; the engine reads them again in place."""
        body = {"method": "reload_weights"}
        await self._call("POST", "/collective_rpc", self._spec.deadlines.wake_s, json=body)

    async def reset_prefix_cache(self) -> None:
        """Prefix hashes must not outlive their KV. An engine without the endpoint resets by itself or has
        none.
        """
        body = await self._call("POST", "/reset_prefix_cache", self._spec.deadlines.probe_s, optional=True)
        if body.get("success") is False:
            raise MemberFailedError(f"{self._spec.name}: the prefix cache was not reset (success: false)")

    async def models(self) -> list[str]:
        body = await self._call("GET", "/v1/models", self._spec.deadlines.probe_s)
        try:
            return [str(model["id"]) for model in body["data"]]
        except (KeyError, TypeError) as error:
            raise MemberFailedError(
                f"{self._spec.name}: GET /v1/models answered no list of models"
            ) from error

    async def ask(self, prompt: str, max_tokens: int) -> CanaryAnswer:
        """Greedy completion with logprobs."""
        body = {
            "model": self._spec.model_name,
            "prompt": prompt,
            "max_tokens": max_tokens,
            "temperature": 0,
            "logprobs": 1,
        }
        answer = await self._call("POST", "/v1/completions", self._spec.deadlines.canary_s, json=body)
        try:
            choice = answer["choices"][0]
            logprobs = choice.get("logprobs") or {}
            values = logprobs.get("token_logprobs") or [None]
            return CanaryAnswer(
                text=str(choice["text"]),
                tokens=tuple(str(token) for token in logprobs.get("tokens") or ()),
                first_logprob=None if values[0] is None else float(values[0]),
            )
        except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
            raise MemberFailedError(
                f"{self._spec.name}: its completion has no text or malformed logprobs"
            ) from error

    async def _call(
        self,
        method: str,
        path: str,
        timeout_s: float,
        *,
        params: Mapping[str, str] | Sequence[tuple[str, str]] = (),
        json: Mapping[str, Any] | None = None,
        optional: bool = False,
    ) -> dict[str, Any]:
        """JSON object of a 2xx answer ({} for an empty body). ``optional``: {} also when there is no such
        endpoint.
        """
        what = f"{self._spec.name}: {method} {path}"
        try:
            async with self._connection().request(
                method,
                self._endpoint.base_url + path,
                params=params,
                json=json,
                timeout=aiohttp.ClientTimeout(total=timeout_s),
                allow_redirects=False,
            ) as response:
                raw = await response.content.read(MAX_BODY_BYTES)
                status = response.status
        except TimeoutError as error:
            raise MemberFailedError(f"{what} gave no answer within {timeout_s:g} s") from error
        except (aiohttp.ClientError, OSError, asyncio.IncompleteReadError) as error:
            raise MemberFailedError(f"{what} failed: {str(error) or type(error).__name__}") from error
        if optional and status in NOT_OFFERED:
            return {}
        if not 200 <= status < 300:
            raise MemberFailedError(f"{what} answered {status}: {_reason(raw)}")
        return _json_object(raw)

    def _connection(self) -> aiohttp.ClientSession:
        if self._session is None:  # made inside the running loop
            uds = self._endpoint.uds
            connector = aiohttp.UnixConnector(path=str(uds)) if uds else aiohttp.TCPConnector()
            self._session = aiohttp.ClientSession(connector=connector, trust_env=False)
        return self._session


def _json_object(raw: bytes) -> dict[str, Any]:
    if not raw.strip():
        return {}
    try:
        body = msgspec.json.decode(raw)
    except msgspec.DecodeError:
        return {}  # e.g. a plain "OK" from /health; callers that need fields check for them
    return body if isinstance(body, dict) else {}


def _report(body: dict[str, Any]) -> dict[str, Any]:
    report = body.get("report")
    return report if isinstance(report, dict) else {}


def _reason(raw: bytes) -> str:
    """What an error answer says to people: OpenAI's or FastAPI's message, else its first line."""
    body = _json_object(raw)
    error = body.get("error", body)
    if isinstance(error, dict):
        for key in ("message", "detail"):
            if isinstance(error.get(key), str):
                return str(error[key])[:MAX_REASON_CHARS]
    if isinstance(error, str):
        return error[:MAX_REASON_CHARS]
    lines = raw.decode(errors="replace").strip().splitlines()
    if not lines or lines[0].lstrip().startswith(("{", "[", "<")):
        return f"{len(raw)} bytes without a message"
    return lines[0][:MAX_REASON_CHARS]
