"""The dashboard's files: served as they are, with nothing inline and nothing from elsewhere."""

import asyncio
import re
from importlib.resources import files

import pytest
from starlette.applications import Starlette

from fakes.http_calls import Reply, call
from hotrack.gateway import dashboard

FOLDER = files("hotrack.gateway") / "ui"


def get(path: str) -> Reply:
    return asyncio.run(call(Starlette(routes=dashboard.routes()), "GET", path))


@pytest.mark.parametrize(("path", "name", "kind"), [
    ("/ui", "index.html", "text/html"),
    ("/ui/ui.css", "ui.css", "text/css"),
    ("/ui/ui.js", "ui.js", "text/javascript"),
])  # fmt: skip
def test_files_and_their_headers(path: str, name: str, kind: str) -> None:
    reply = get(path)
    assert reply.status == 200
    assert reply.body == (FOLDER / name).read_bytes()
    assert reply.headers["content-type"].startswith(kind)
    assert "default-src 'none'; script-src 'self'" in reply.headers["content-security-policy"]
    assert reply.headers["x-content-type-options"] == "nosniff"


@pytest.mark.parametrize("path", ["/ui/other.js", "/ui/..%2Fadmin.py", "/ui/__init__.py"])
def test_nothing_else_is_served(path: str) -> None:
    with pytest.raises(dashboard.NoSuchPageError, match="the dashboard is at /ui"):
        get(path)


def test_the_page_keeps_to_its_policy() -> None:
    page, script = ((FOLDER / name).read_text() for name in ("index.html", "ui.js"))
    assert not re.search(r"\bon\w+=|style=|javascript:|https?://", page)
    assert re.findall(r"<script(?![^>]*\bsrc=)", page) == []
    for unsafe in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "localStorage"):
        assert unsafe not in script


def test_people_without_a_mouse_or_a_screen_find_everything() -> None:
    page = (FOLDER / "index.html").read_text()
    assert '<html lang="en">' in page
    assert 'name="viewport"' in page
    assert 'role="status"' in page
    assert 'class="skip"' in page
    ids = set(re.findall(r'\bid="([^"]+)"', page))
    assert set(re.findall(r'(?:aria-labelledby|for)="([^"]+)"', page)) <= ids
    used = set(re.findall(r'byId\("([^"]+)"\)', (FOLDER / "ui.js").read_text()))
    assert used <= ids
