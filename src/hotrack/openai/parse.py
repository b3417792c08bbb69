"""JSON bytes to a typed request, or a ``RequestError`` that names the field.

Fields the API defines but this server cannot honour are refused when they would change the answer, and
ignored when they would not. Unknown fields are ignored, as vLLM does, and reported to the caller for its
metrics.
"""

import re
from collections.abc import Callable
from typing import Any, TypeVar

import msgspec

from hotrack.core.errors import RequestError

T = TypeVar("T", bound=msgspec.Struct)

# Defined by OpenAI or vLLM; accepting them silently does not change the tokens.
IGNORED = frozenset(
    {
        "audio",
        "cache_salt",
        "detokenize",
        "documents",
        "early_stopping",
        "echo_prompt",
        "include_reasoning",
        "kv_transfer_params",
        "length_penalty",
        "metadata",
        "mm_processor_kwargs",
        "modalities",
        "parallel_tool_calls",
        "prediction",
        "prompt_cache_key",
        "prompt_cache_retention",
        "reasoning_effort",
        "request_id",
        "return_tokens_as_token_ids",
        "safety_identifier",
        "service_tier",
        "spaces_between_special_tokens",
        "store",
        "verbosity",
    }
)

# Would change the answer, and this server does not implement them: refused unless they ask for nothing.
_UNSUPPORTED: dict[str, Callable[[Any], bool]] = {
    "allowed_token_ids": bool,
    "bad_words": bool,
    "best_of": lambda value: value not in (None, 1),
    "chat_template": bool,
    "function_call": lambda value: value not in (None, "none"),
    "functions": bool,
    "guided_choice": bool,
    "guided_grammar": bool,
    "guided_json": bool,
    "guided_regex": bool,
    "logits_processors": bool,
    "prompt_embeds": bool,
    "structured_outputs": bool,
    "use_beam_search": bool,
    "web_search_options": bool,
}
_PATH = re.compile(r" - at `\$\.?(?P<path>[^`]*)`$")


def parse_request(body: bytes, schema: type[T]) -> tuple[T, list[str]]:
    """The request, and the names of fields that are in no published API.

    Raises:
        RequestError: not JSON, not UTF-8, a wrong type (``param`` names the field), or an unsupported field.
    """
    try:
        request = msgspec.json.decode(body, type=schema)
        present = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
    except msgspec.ValidationError as error:
        raise _wrong_type(str(error)) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise RequestError(
            f"the request body is not valid JSON in UTF-8: {error}", code="invalid_json"
        ) from None
    extra = present.keys() - schema.__struct_fields__
    for name in sorted(extra & _UNSUPPORTED.keys()):
        if _UNSUPPORTED[name](msgspec.json.decode(present[name])):
            raise unsupported(name, f"{name} is not supported by this server; leave it out")
    return request, sorted(extra - IGNORED - _UNSUPPORTED.keys())


def unsupported(param: str, message: str) -> RequestError:
    return RequestError(message, code="unsupported_parameter", param=param)


def _wrong_type(message: str) -> RequestError:
    match = _PATH.search(message)
    path = match["path"] if match else None
    text = message[: match.start()] if match else message
    if path is None and (missing := re.search(r"required field `([^`]+)`", text)):
        path = missing[1]
    where = f"{path}: " if path else "request body: "
    return RequestError(f"{where}{text[:1].lower()}{text[1:]}", param=path or None)
