"""The prompts of a request as token ids, checked."""

from typing import Any

import msgspec

from hotrack.core.errors import RequestError
from hotrack.openai.requests import ChatCompletionRequest, CompletionRequest, TokenId
from hotrack.server.chat_template import ChatTemplate
from hotrack.server.codec import Codec

MAX_SEQUENCES = 1024  # prompts times n, in one request


async def chat_prompt(request: ChatCompletionRequest, template: ChatTemplate, codec: Codec) -> list[int]:
    """Raises RequestError when the messages cannot be rendered, ContextLengthError when they cannot fit."""
    proceed = bool(request.continue_final_message)
    text = await template.render(
        request.messages,
        add_generation_prompt=not proceed
        if request.add_generation_prompt is None
        else request.add_generation_prompt,
        continue_final_message=proceed,
        kwargs=request.chat_template_kwargs,
    )
    # Templates write the special tokens themselves.
    ids = await codec.encode(text, add_special_tokens=bool(request.add_special_tokens), param="messages")
    return _checked(ids, request.truncate_prompt_tokens, "messages")


async def completion_prompts(request: CompletionRequest, codec: Codec) -> list[list[int]]:
    """One list of token ids per prompt, in order."""
    add_special = request.add_special_tokens is not False
    prompts = []
    for prompt in _as_list(request.prompt):
        if isinstance(prompt, str):
            ids = await codec.encode(prompt, add_special_tokens=add_special, param="prompt")
        else:
            ids = prompt
            if bad := next((i for i in ids if i >= codec.vocab_size), None):
                raise RequestError(
                    f"prompt: {bad} is not a token id of this model (0 to {codec.vocab_size - 1})",
                    param="prompt",
                )
        prompts.append(_checked(ids, request.truncate_prompt_tokens, "prompt"))
    return prompts


def check_num_sequences(num_prompts: int, n: int) -> None:
    if num_prompts * n > MAX_SEQUENCES:
        raise RequestError(
            f"{num_prompts} prompts times n={n} are {num_prompts * n} sequences; at most {MAX_SEQUENCES} "
            "fit in one request",
            param="n",
        )


def _as_list(prompt: Any) -> list[str] | list[list[int]]:
    if isinstance(prompt, str):
        return [prompt]
    for shape in (list[str], list[TokenId], list[list[TokenId]]):
        try:
            value: Any = msgspec.convert(prompt, shape)
        except msgspec.ValidationError:
            continue
        if value:
            return [value] if shape == list[TokenId] else value
    raise RequestError(
        "prompt must be a string, a list of strings, a list of token ids or a list of such lists, and not "
        "empty",
        param="prompt",
    )


def _checked(ids: list[int], truncate: int | None, param: str) -> list[int]:
    if truncate is not None:
        if truncate < 1:
            raise RequestError(
                f"truncate_prompt_tokens must be at least 1, got {truncate}", param="truncate_prompt_tokens"
            )
        ids = ids[-truncate:]
    if not ids:
        raise RequestError(f"{param} has no tokens; send at least one", param=param)
    return ids
