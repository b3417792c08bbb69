"""Health, metrics, and vLLM's sleep surface."""

from msgspec import UNSET
from starlette.requests import Request
from starlette.responses import Response

from hotrack._version import __version__
from hotrack.config.units import parse_size
from hotrack.core.errors import RequestError
from hotrack.core.rounding import rounded
from hotrack.obs.member_metrics import CONTENT_TYPE
from hotrack.openai.responses import (
    IsSleepingResponse,
    ResetPrefixCacheResponse,
    SleepResponse,
    VersionResponse,
    WakeResponse,
)
from hotrack.server.http import error_response, json_response
from hotrack.server.member import Member


class AdminEndpoints:
    def __init__(self, member: Member) -> None:
        self._member = member

    async def health(self, _: Request) -> Response:
        """200 while the engine lives, asleep included."""
        dead = self._member.residency.dead
        return Response(status_code=200) if dead is None else error_response(dead)

    async def metrics(self, _: Request) -> Response:
        self._member.metrics.update_engine(self._member.engine.stats)
        return Response(self._member.metrics.render(), headers={"content-type": CONTENT_TYPE})

    async def version(self, _: Request) -> Response:
        return json_response(VersionResponse(__version__))

    async def sleep(self, http: Request) -> Response:
        text = http.query_params.get("level", "1")
        if not (text.isascii() and text.isdigit() and len(text) < 4):
            raise RequestError(f"level must be one of 0, 1, 2; got {text!r}", param="level")
        residency = self._member.residency
        mode, nbytes = http.query_params.get("mode", "abort"), http.query_params.get("nbytes")
        report = await residency.sleep(int(text), mode, None if nbytes is None else _bytes(nbytes))
        return json_response(SleepResponse("sleeping", int(residency.level), rounded(report)))

    async def wake_up(self, http: Request) -> Response:
        tags = http.query_params.getlist("tags") or None
        streamed = _truth(http.query_params.get("streamed", "false"))
        report = await self._member.residency.wake(tags, streamed=streamed)
        status = "sleeping" if self._member.residency.is_sleeping else "awake"
        return json_response(WakeResponse(status, tags, rounded(report)))

    async def is_sleeping(self, _: Request) -> Response:
        """While asleep also what is missing, by tag: after a partial sleep less than everything."""
        residency = self._member.residency
        missing = residency.missing_bytes if residency.is_sleeping else {}
        return json_response(IsSleepingResponse(residency.is_sleeping, missing or UNSET))

    async def reset_prefix_cache(self, _: Request) -> Response:
        return json_response(ResetPrefixCacheResponse(await self._member.residency.reset_prefix_cache()))


def _bytes(text: str) -> int:
    try:
        return parse_size(text)
    except ValueError as error:
        raise RequestError(f"nbytes: {error}", param="nbytes") from None


def _truth(text: str) -> bool:
    if text.lower() not in ("true", "false", "1", "0"):
        raise RequestError(f"streamed must be true or false; got {text!r}", param="streamed")
    return text.lower() in ("true", "1")
