"""Requests made up from the gateway's OpenAPI document: whatever comes, typed refusals and no 500."""

import time
from collections import defaultdict
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis.specs.openapi.checks import response_schema_conformance

from fakes.served_pool import STUB, served_pool

pytestmark = pytest.mark.e2e
BUDGET_S = 30.0
POOL = f'''models: {{a: {{cmd: "{STUB} --uds ${{SOCKET}} --name a --mib 1", sleep_level: 1}}}}'''
# Endless streams, and operations that make everything else wait for a restart.
LEAVE_OUT = ("/api/events", "/logs/stream", "/sleep", "/wake", "/unload", "/api/models/unload")
SETTINGS = settings(
    max_examples=30,
    deadline=None,
    derandomize=True,
    database=None,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=list(HealthCheck),
)


def test_no_server_errors(tmp_path: Path) -> None:
    with served_pool(tmp_path, POOL) as pool:
        schema = schemathesis.openapi.from_url(f"{pool.api.url}/openapi.json")
        operations = [result.ok() for result in schema.get_all_operations()]
        operations = [op for op in operations if not op.path.startswith(LEAVE_OUT)]
        assert len(operations) > 15
        statuses: dict[str, set[int]] = defaultdict(set)
        end = time.monotonic() + BUDGET_S
        models = cycle(["a", "b", None])

        for operation in operations:

            @SETTINGS
            @given(case=operation.as_strategy())
            def probe(case: Any) -> None:
                if time.monotonic() > end:
                    return
                model = next(models) if isinstance(case.body, dict) else None
                if model is not None:  # a made-up name is hardly ever a member's
                    case.body["model"] = model
                response = case.call(timeout=30)
                statuses[case.path].add(response.status_code)
                assert response.status_code < 500, (case.as_curl_command(), response.text)
                if model != "a":  # a member's answer is the member's
                    case.validate_response(response, checks=[response_schema_conformance])

            probe()

        assert pool.api.get("/health") == {"status": "ok"}
        assert pool.members()["a"]["num_in_flight"] == 0
        assert statuses["/v1/chat/completions"] >= {200, 404}
        assert statuses["/v1/models"] == {200}
