"""The ASGI application of one member."""

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from hotrack._version import __version__
from hotrack.core.errors import HotrackError
from hotrack.openai.openapi import openapi_json
from hotrack.server.admin import AdminEndpoints
from hotrack.server.api import OpenAIEndpoints
from hotrack.server.http import Edge, on_bug, on_hotrack_error, on_http_error
from hotrack.server.member import Member


def create_app(member: Member) -> ASGIApp:
    api, admin = OpenAIEndpoints(member), AdminEndpoints(member)
    document = openapi_json(__version__, needs_key=member.config.api_key is not None)

    async def openapi(_: Request) -> Response:
        return Response(document, media_type="application/json")

    routes = [
        Route("/v1/chat/completions", api.chat_completions, methods=["POST"]),
        Route("/v1/completions", api.completions, methods=["POST"]),
        Route("/v1/models", api.models),
        Route("/v1/models/{model:path}", api.model),
        Route("/tokenize", api.tokenize, methods=["POST"]),
        Route("/detokenize", api.detokenize, methods=["POST"]),
        Route("/health", admin.health),
        Route("/metrics", admin.metrics),
        Route("/version", admin.version),
        Route("/openapi.json", openapi),
        Route("/sleep", admin.sleep, methods=["POST"]),
        Route("/wake_up", admin.wake_up, methods=["POST"]),
        Route("/is_sleeping", admin.is_sleeping),
        Route("/reset_prefix_cache", admin.reset_prefix_cache, methods=["POST"]),
    ]
    app = Starlette(
        routes=routes,
        exception_handlers={
            HotrackError: on_hotrack_error,
            HTTPException: on_http_error,
            Exception: on_bug,
        },
    )
    # Around all of Starlette, so that its answer to a bug of ours is counted too.
    return Edge(
        app,
        api_key=member.config.api_key,
        metrics=member.metrics,
        routes=frozenset(route.path for route in routes),
    )
