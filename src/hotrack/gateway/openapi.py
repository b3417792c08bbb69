"""What the gateway's OpenAPI document lists: inference as members publish it, and the pool's endpoints."""

from dataclasses import replace

import msgspec

from hotrack._version import __version__
from hotrack.openai.openapi import MEMBER_OPERATIONS, Operation, openapi_json

# Where members' documents say more than that the body names a model.
_DESCRIBED = ("/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize")
_WAITING = (400, 404, 413, 429, 500, 502, 503, 504)
_OPERATING = (400, 403, 404, 500, 502, 503, 504)
_MODEL = {"name": "model", "in": "query", "schema": {"type": "string"}}
_NAMED = ("model",)
_TEXT, _EVENTS = "text/plain", "text/event-stream"


class MemberRequest(msgspec.Struct):
    """Whatever the member takes."""

    model: str


_POOL_OPERATIONS = (
    Operation("/v1/models", "get", "Models of the pool", None),
    Operation("/v1/models/{model}", "get", "One model", None, path_parameters=_NAMED, errors=(404,)),
    Operation("/running", "get", "Members that have a process", None),
    Operation("/api/pool/members", "get", "Every member's state", None),
    Operation("/api/pool/swaps", "get", "The latest swaps", None),
    Operation("/api/events", "get", "What happens, as it happens", None, media_type=_EVENTS),
    Operation("/is_sleeping", "get", "Asleep?", None, query=(_MODEL,), errors=(400, 404)),
    *(
        Operation(path, method, summary, None, query=(_MODEL,), errors=_OPERATING)
        for path, method, summary in (
            ("/sleep", "post", "Put a member to sleep"),
            ("/wake_up", "post", "Make a member ready"),
            ("/wakeup", "post", "Make a member ready"),
            ("/unload", "get", "End members' processes"),
            ("/unload", "post", "End members' processes"),
            ("/api/models/unload", "post", "End members' processes"),
        )
    ),
    Operation(
        "/api/models/unload/{model}",
        "post",
        "End a member's process",
        None,
        path_parameters=_NAMED,
        errors=_OPERATING,
    ),
    Operation(
        "/logs/stream/{model}",
        "get",
        "A member's output",
        None,
        path_parameters=_NAMED,
        media_type=_TEXT,
        errors=(403, 404),
    ),
    Operation("/health", "get", "200 while the gateway lives", None, open=True),
    Operation("/ready", "get", "200 once the pool is up", None, open=True, errors=(503,)),
    Operation("/metrics", "get", "Prometheus metrics", None, media_type=_TEXT, open=True),
)


def gateway_openapi(inference: frozenset[str], *, needs_key: bool) -> bytes:
    """The document, as JSON. ``inference``: paths that are passed on to members."""
    described = [replace(op, errors=_WAITING) for op in MEMBER_OPERATIONS if op.path in _DESCRIBED]
    passed_on = [
        Operation(path, "post", "Passed on to the member", None, MemberRequest, errors=_WAITING)
        for path in sorted(inference.difference(_DESCRIBED))
    ]
    operations = [*described, *passed_on, *_POOL_OPERATIONS]
    return openapi_json(__version__, needs_key=needs_key, title="hotrack pool", operations=operations)
