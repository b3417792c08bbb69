"""The published OpenAPI document, generated from the wire types and a list of operations."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from hotrack.openai import requests, responses

_REF = "#/components/schemas/{name}"


@dataclass(frozen=True, slots=True)
class Operation:
    """``open``: needs no key. ``response`` None: a body without a published schema."""

    path: str
    method: str
    summary: str
    response: type[Any] | None
    body: type[Any] | None = None
    query: tuple[dict[str, Any], ...] = ()
    path_parameters: tuple[str, ...] = ()
    streams: bool = False
    media_type: str = "application/json"
    open: bool = False
    errors: tuple[int, ...] = ()


_LEVEL = {"name": "level", "in": "query", "schema": {"type": "integer", "enum": [0, 1, 2], "default": 1}}
_MODE = {
    "name": "mode",
    "in": "query",
    "schema": {"type": "string", "enum": ["abort", "wait", "keep"], "default": "abort"},
}
_NBYTES = {
    "name": "nbytes",
    "in": "query",
    "description": "Give back only about so much of each device: KV first, then weights from the last layer.",
    "schema": {"type": "integer", "minimum": 1},
}
_STREAMED = {
    "name": "streamed",
    "in": "query",
    "description": "Return while weights are on their way; answers leave when all are verified.",
    "schema": {"type": "boolean", "default": False},
}
_TAGS = {
    "name": "tags",
    "in": "query",
    "schema": {"type": "array", "items": {"type": "string", "enum": ["weights", "kv_cache", "scheduling"]}},
}
_BODY = (400, 404, 413)
MEMBER_OPERATIONS = (
    Operation(
        "/v1/chat/completions",
        "post",
        "Chat",
        responses.ChatCompletion,
        requests.ChatCompletionRequest,
        streams=True,
        errors=(*_BODY, 503),
    ),
    Operation(
        "/v1/completions",
        "post",
        "Text completion",
        responses.Completion,
        requests.CompletionRequest,
        streams=True,
        errors=(*_BODY, 503),
    ),
    Operation("/v1/models", "get", "Models", responses.ModelList),
    Operation(
        "/v1/models/{model}",
        "get",
        "One model",
        responses.ModelCard,
        path_parameters=("model",),
        errors=(404,),
    ),
    Operation(
        "/tokenize",
        "post",
        "Text or messages to tokens",
        responses.TokenizeResponse,
        requests.TokenizeRequest,
        errors=_BODY,
    ),
    Operation(
        "/detokenize",
        "post",
        "Tokens to text",
        responses.DetokenizeResponse,
        requests.DetokenizeRequest,
        errors=_BODY,
    ),
    Operation(
        "/sleep",
        "post",
        "Free the device",
        responses.SleepResponse,
        query=(_LEVEL, _MODE, _NBYTES),
        errors=(400, 500, 503),
    ),
    Operation(
        "/wake_up",
        "post",
        "Take the device back",
        responses.WakeResponse,
        query=(_TAGS, _STREAMED),
        errors=(400, 500, 503),
    ),
    Operation("/is_sleeping", "get", "Asleep?", responses.IsSleepingResponse),
    Operation(
        "/reset_prefix_cache",
        "post",
        "Forget cached prefixes",
        responses.ResetPrefixCacheResponse,
        errors=(503,),
    ),
    Operation("/health", "get", "200 while the engine lives", None, open=True, errors=(503,)),
    Operation("/metrics", "get", "Prometheus metrics", None, media_type="text/plain", open=True),
    Operation("/version", "get", "Version", responses.VersionResponse, open=True),
)


def openapi_json(
    version: str,
    *,
    needs_key: bool,
    title: str = "hotrack member",
    operations: Sequence[Operation] = MEMBER_OPERATIONS,
) -> bytes:
    """OpenAPI 3.1, as JSON."""
    types = [t for op in operations for t in (op.body, op.response) if t is not None]
    _, components = msgspec.json.schema_components([*types, responses.ErrorResponse], ref_template=_REF)
    paths: dict[str, dict[str, Any]] = {}
    for op in operations:
        paths.setdefault(op.path, {})[op.method] = _operation(op, needs_key)
    document: dict[str, Any] = {
        "openapi": "3.1.0",
        "info": {"title": title, "version": version},
        "paths": paths,
        "components": {"schemas": components},
    }
    if needs_key:
        document["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
    return msgspec.json.format(msgspec.json.encode(document))


def _operation(op: Operation, needs_key: bool) -> dict[str, Any]:
    result: dict[str, Any] = {"summary": op.summary, "responses": {"200": _success(op)}}
    errors = [*op.errors, *([401] if needs_key and not op.open else [])]
    for status in sorted(errors):
        result["responses"][str(status)] = {"description": "error", "content": _json(responses.ErrorResponse)}
    parameters = [
        *op.query,
        *(
            {"name": n, "in": "path", "required": True, "schema": {"type": "string"}}
            for n in op.path_parameters
        ),
    ]
    if parameters:
        result["parameters"] = parameters
    if op.body is not None:
        result["requestBody"] = {"required": True, "content": _json(op.body)}
    if needs_key and not op.open:
        result["security"] = [{"key": []}]
    return result


def _success(op: Operation) -> dict[str, Any]:
    result: dict[str, Any] = {"description": "success"}
    if op.response is not None:
        result["content"] = _json(op.response)
    elif op.media_type != "application/json":
        result["content"] = {op.media_type: {"schema": {"type": "string"}}}
    if op.streams:
        result["content"]["text/event-stream"] = {}
    return result


def _json(kind: type[Any]) -> dict[str, Any]:
    return {"application/json": {"schema": {"$ref": _REF.format(name=kind.__name__)}}}
