"""The gateway as one ASGI application: inference goes straight to the proxy, the rest to Starlette."""

import asyncio

from starlette.applications import Starlette

from hotrack.config.pool import PoolConfig
from hotrack.core.errors import HotrackError
from hotrack.gateway.admin import Admin
from hotrack.gateway.auth import Keys
from hotrack.gateway.build import make_routes
from hotrack.gateway.listing import Listing
from hotrack.gateway.openapi import gateway_openapi
from hotrack.gateway.proxy import Proxy
from hotrack.gateway.reply import Reply
from hotrack.gateway.request import Receive, Scope, Send
from hotrack.openai.request_id import request_id_of
from hotrack.pool.pool import Pool

# What members answer. Everything else they have (sleep, wake, rpc, ...) is unreachable from outside.
INFERENCE = frozenset({
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/embeddings",
    "/v1/responses",
    "/v1/messages",
    "/v1/rerank",
    "/v1/score",
    "/v1/audio/speech",
    "/rerank",
    "/score",
    "/pooling",
    "/classify",
    "/tokenize",
    "/detokenize",
})  # fmt: skip


class Gateway:
    """ASGI application. ``ready``: set when the pool is up. ``stopping``: set when the server is to end."""

    def __init__(
        self, proxy: Proxy, admin: Starlette, keys: Keys, ready: asyncio.Event, stopping: asyncio.Event
    ) -> None:
        self._proxy = proxy
        self._admin = admin
        self._keys = keys
        self.ready = ready
        self.stopping = stopping

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["method"] == "POST" and scope["path"] in INFERENCE:
            try:
                self._keys.check_api(scope)
            except HotrackError as error:
                await Reply(send, request_id_of(scope["headers"])).error(error)
                return
            await self._proxy(scope, receive, send)
        else:
            await self._admin(scope, receive, send)


def create_app(pool: Pool, config: PoolConfig, keys: Keys) -> Gateway:
    """The application for ``pool``; the caller starts and closes the pool and sets the events."""
    ready, stopping = asyncio.Event(), asyncio.Event()
    proxy = Proxy(pool, make_routes(config), observe=pool.metrics.count_request)
    openapi = gateway_openapi(INFERENCE, needs_key=bool(keys.api or keys.admin))
    admin = Admin(pool, Listing(config), keys, ready, stopping, openapi).app()
    return Gateway(proxy, admin, keys, ready, stopping)
