"""The published document describes what is served."""

import json
import re

from fakes.members import scripted_member
from fakes.scripted_engine import ScriptedEngine
from hotrack.openai.openapi import openapi_json
from hotrack.server.http import OPEN_PATHS


def test_every_route_is_described_and_nothing_else() -> None:
    from hotrack.server.app import create_app

    document = json.loads(openapi_json("1", needs_key=False))
    app = create_app(scripted_member(ScriptedEngine()))
    served = {re.sub(r":path}", "}", route) for route in app._routes}  # type: ignore[attr-defined]
    assert served - document["paths"].keys() == {"/openapi.json"}
    assert document["paths"].keys() <= served


def test_references_resolve() -> None:
    text = openapi_json("1", needs_key=True).decode()
    document = json.loads(text)
    references = set(re.findall(r'"#/components/schemas/(\w+)"', text))
    assert references == document["components"]["schemas"].keys()


def test_open_paths_need_no_key() -> None:
    document = json.loads(openapi_json("1", needs_key=True))
    for path, operations in document["paths"].items():
        for operation in operations.values():
            assert ("security" in operation) == (path not in OPEN_PATHS), path
