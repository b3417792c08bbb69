"""``/ui``: one static page over the pool's API. It has no data of its own, so it needs no key; what it asks
for does."""

from importlib.resources import files

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route as Path

from hotrack.core.errors import RequestError

_TYPES = {
    "index.html": "text/html; charset=utf-8",
    "ui.css": "text/css; charset=utf-8",
    "ui.js": "text/javascript; charset=utf-8",
}
_HEADERS = {
    # Nothing from elsewhere, nothing inline: a model's name or log line can never become code.
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}


class NoSuchPageError(RequestError):
    status = 404
    code = "not_found"


def routes() -> list[Path]:
    folder = files("hotrack.gateway") / "ui"
    contents = {name: (folder / name).read_bytes() for name in _TYPES}

    async def page(request: Request) -> Response:
        name = request.path_params.get("name", "index.html")
        if name not in contents:
            raise NoSuchPageError(f"there is no /ui/{name[:40]}; the dashboard is at /ui")
        return Response(contents[name], media_type=_TYPES[name], headers=_HEADERS)

    return [Path("/ui", page), Path("/ui/{name}", page)]
