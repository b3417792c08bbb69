"""Bodies become typed requests, or errors that name the field."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hotrack.core.errors import RequestError
from hotrack.openai import parse
from hotrack.openai.parse import parse_request
from hotrack.openai.requests import ChatCompletionRequest, CompletionRequest

MESSAGES = [{"role": "user", "content": "hi"}]


def chat(**fields: Any) -> tuple[ChatCompletionRequest, list[str]]:
    return parse_request(json.dumps({"messages": MESSAGES, **fields}).encode(), ChatCompletionRequest)


def test_null_means_absent() -> None:
    request, unknown = chat(temperature=None, stop=None, tools=None)
    assert (request.temperature, request.stop, request.tools, unknown) == (None, None, None, [])


def test_unknown_fields_are_reported_known_ones_are_not() -> None:
    assert chat(zzz=1, aaa=2, service_tier="x", user="u", best_of=1)[1] == ["aaa", "zzz"]


def test_no_field_is_in_two_lists() -> None:
    fields = set(ChatCompletionRequest.__struct_fields__) | set(CompletionRequest.__struct_fields__)
    assert not parse.IGNORED & fields
    assert not parse.IGNORED & parse._UNSUPPORTED.keys()
    assert not parse._UNSUPPORTED.keys() & fields


@pytest.mark.parametrize("name", sorted(parse._UNSUPPORTED))
def test_unsupported_fields_are_refused_only_when_they_ask_for_something(name: str) -> None:
    assert chat(**{name: None})[1] == []
    with pytest.raises(RequestError) as caught:
        chat(**{name: {"a": 1}})
    assert (caught.value.param, caught.value.code) == (name, "unsupported_parameter")


@pytest.mark.parametrize(
    ("fields", "param"),
    [({"n": "1"}, "n"), ({"stop": [1]}, "stop[0]"), ({"logit_bias": {"1": "x"}}, "logit_bias[...]")],
)
def test_wrong_types_name_the_field(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(RequestError) as caught:
        chat(**fields)
    assert caught.value.param == param
    assert "$" not in caught.value.message


@given(st.binary(max_size=60))
def test_any_bytes_parse_or_are_refused(body: bytes) -> None:
    with pytest.raises(RequestError):
        parse_request(body, ChatCompletionRequest)
