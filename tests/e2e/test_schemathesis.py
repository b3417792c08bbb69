"""Requests made up from the published OpenAPI document: whatever comes, no 5xx and no broken answer."""

import time
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis.specs.openapi.checks import response_schema_conformance

from fakes.member_process import MemberProcess

pytestmark = pytest.mark.e2e
BUDGET_S = 60.0
# Their states have tests of their own; here they would only make everything else answer 503.
LEAVE_OUT = {"/sleep", "/wake_up"}
SETTINGS = settings(
    max_examples=80,
    deadline=None,
    derandomize=True,
    database=None,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=list(HealthCheck),
)


def test_no_server_errors(member: MemberProcess) -> None:
    schema = schemathesis.openapi.from_url(f"{member.url}/openapi.json")
    operations = [result.ok() for result in schema.get_all_operations()]
    assert len(operations) > len(LEAVE_OUT) + 8
    statuses: dict[str, set[int]] = {}
    end = time.monotonic() + BUDGET_S

    for operation in operations:
        if operation.path in LEAVE_OUT:
            continue

        @SETTINGS
        @given(case=operation.as_strategy())
        def probe(case: Any) -> None:
            if time.monotonic() > end:
                return
            if isinstance(case.body, dict) and "completions" in case.path:
                case.body["max_tokens"] = 2  # the point is the parsing, not a thousand tokens
                case.body.pop("max_completion_tokens", None)
            response = case.call(timeout=30)
            statuses.setdefault(case.path, set()).add(response.status_code)
            assert response.status_code < 500, (case.as_curl_command(), response.text)
            case.validate_response(response, checks=[response_schema_conformance])

        probe()

    assert member.get("/health")[0] == 200
    # The generator must have got through to the engine, not only to the parser.
    assert 200 in statuses["/v1/completions"]
    assert 400 in statuses["/v1/chat/completions"]
