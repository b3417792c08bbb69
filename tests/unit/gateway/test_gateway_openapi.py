"""The published document lists what the gateway serves, and nothing else."""

import json
import re

from hotrack.config.pool_file import load_pool_text
from hotrack.core.clock import MonotonicClock
from hotrack.gateway.app import INFERENCE, create_app
from hotrack.gateway.auth import Keys
from hotrack.gateway.build import member_specs, pool_policy
from hotrack.gateway.openapi import gateway_openapi
from hotrack.pool.pool import Pool


def test_every_route_is_described_and_nothing_else() -> None:
    config = load_pool_text("models: {m: {cmd: 'x ${PORT}', sleep_level: 1}}")
    pool = Pool(member_specs(config), pool_policy(config), clock=MonotonicClock())
    served = {("post", path) for path in INFERENCE}
    for route in create_app(pool, config, Keys())._admin.routes:
        for method in route.methods - {"HEAD"}:  # type: ignore[attr-defined]
            served.add((method.lower(), route.path.replace(":path}", "}")))  # type: ignore[attr-defined]
    paths = json.loads(gateway_openapi(INFERENCE, needs_key=False))["paths"]
    described = {(method, path) for path, operations in paths.items() for method in operations}
    assert served - described == {("get", path) for path in ("/openapi.json", "/ui", "/ui/{name}")}
    assert described <= served


def test_references_resolve() -> None:
    text = gateway_openapi(INFERENCE, needs_key=True).decode()
    references = set(re.findall(r'"#/components/schemas/(\w+)"', text))
    assert references == json.loads(text)["components"]["schemas"].keys()
