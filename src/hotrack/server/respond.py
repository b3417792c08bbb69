"""From a running generation to an HTTP response: whole, or as server-sent events; gone clients stop it."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, asynccontextmanager

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from hotrack.core.errors import HotrackError
from hotrack.obs.log import get_logger
from hotrack.openai.errors import sse_error
from hotrack.openai.sse import DONE
from hotrack.server.formats import Choice, CompletionFormat, Format
from hotrack.server.generation import ClientGoneError, Generation
from hotrack.server.residency import Residency

log = get_logger(__name__)
_STREAM_HEADERS = {"cache-control": "no-cache", "x-accel-buffering": "no"}


class EventStream(Response):
    """Blocks of events, each written at once. The iterator is closed whatever happens."""

    media_type = "text/event-stream"

    def __init__(self, first: bytes, rest: AsyncGenerator[bytes, None]) -> None:
        super().__init__(headers=_STREAM_HEADERS)
        # A length of zero was set for the empty body of the base class.
        self.raw_headers = [(name, value) for name, value in self.raw_headers if name != b"content-length"]
        self._first = first
        self._rest = rest

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:  # noqa: ARG002 ASGI
        async with aclosing(self._rest) as rest:
            await send(
                {"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers}
            )
            await send({"type": "http.response.body", "body": self._first, "more_body": True})
            async for block in rest:
                await send({"type": "http.response.body", "body": block, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})


async def respond_whole(
    http: Request, residency: Residency, generation: Generation, form: Format
) -> Response:
    choices = [Choice() for _ in generation.jobs]
    async with _running(http, residency, generation):
        async for batch in generation.updates():
            for index, delta in batch:
                choices[index].add(delta)
    return Response(form.whole(choices), media_type="application/json")


async def respond_stream(
    http: Request, residency: Residency, generation: Generation, form: Format
) -> Response:
    """Waits for the first tokens, so that what fails before them gets a real status."""
    blocks = _blocks(http, residency, generation, form)
    try:
        first = await anext(blocks)
    except BaseException:
        await blocks.aclose()
        raise
    return EventStream(first, blocks)


async def _blocks(
    http: Request, residency: Residency, generation: Generation, form: Format
) -> AsyncGenerator[bytes, None]:
    started = False
    try:
        async with _running(http, residency, generation), aclosing(generation.updates()) as updates:
            async for batch in updates:
                block = b"".join([form.event(index, delta) for index, delta in batch])
                if not started:
                    block = _opening(form) + block
                    started = True
                yield block if generation.live else block + form.closing() + DONE
    except ClientGoneError:
        if not started:
            raise
    except HotrackError as error:
        if not started:
            raise
        yield sse_error(error)
    except Exception:
        if not started:
            raise
        log.exception("a stream failed")
        yield sse_error(HotrackError("internal error; the server's log has the details"))


def _opening(form: Format) -> bytes:
    if isinstance(form, CompletionFormat) and form.wanted.echo:
        return form.echo_events()
    return form.opening()


@asynccontextmanager
async def _running(http: Request, residency: Residency, generation: Generation) -> AsyncIterator[None]:
    """Admitted, and watched for a client that hangs up."""
    with residency.admit(generation):
        watch = asyncio.create_task(_watch(http.receive, generation))
        try:
            yield
        finally:
            watch.cancel()


async def _watch(receive: Receive, generation: Generation) -> None:
    # The body has been read, so the next message can only be the end of the connection.
    while (await receive())["type"] != "http.disconnect":
        pass
    generation.fail(ClientGoneError("the client closed the connection"))
