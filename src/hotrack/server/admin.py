"""Health, metrics, and vLLM's sleep surface."""

from starlette.requests import Request
from starlette.responses import Response

from hotrack._version import __version__
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
        report = await residency.sleep(int(text), http.query_params.get("mode", "abort"))
        return json_response(SleepResponse("sleeping", int(residency.level), rounded(report)))

    async def wake_up(self, http: Request) -> Response:
        tags = http.query_params.getlist("tags") or None
        report = await self._member.residency.wake(tags)
        status = "sleeping" if self._member.residency.is_sleeping else "awake"
        return json_response(WakeResponse(status, tags, rounded(report)))

    async def is_sleeping(self, _: Request) -> Response:
        return json_response(IsSleepingResponse(self._member.residency.is_sleeping))

    async def reset_prefix_cache(self, _: Request) -> Response:
        return json_response(ResetPrefixCacheResponse(await self._member.residency.reset_prefix_cache()))
