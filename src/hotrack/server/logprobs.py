"""Log probabilities in the three shapes clients know: chat, text completions, and vLLM's prompt log
probabilities."""

from collections.abc import Sequence

from hotrack.core.request import TokenLogprobs, unpack_tokens
from hotrack.openai.responses import (
    ChatLogprobs,
    CompletionLogprobs,
    PromptLogprob,
    PromptLogprobs,
    TokenLogprob,
    TopLogprob,
)
from hotrack.server.detokenizer import TokenDecoder

# JSON has no infinity; OpenAI writes an impossible token like this.
FLOOR = -9999.0


def chat_logprobs(entries: Sequence[TokenLogprobs], decoder: TokenDecoder) -> ChatLogprobs:
    return ChatLogprobs([_chat_entry(entry, decoder) for entry in entries])


def _chat_entry(entry: TokenLogprobs, decoder: TokenDecoder) -> TokenLogprob:
    candidates = [
        TopLogprob(decoder.token_text(token), max(value, FLOOR), list(decoder.token_bytes(token)))
        for token, value in zip(unpack_tokens(entry.token_ids).tolist(), entry.logprobs, strict=True)
    ]
    sampled = candidates[0]
    return TokenLogprob(sampled.token, sampled.logprob, sampled.bytes, candidates[1:])


class CompletionLogprobsBuilder:
    """Keeps ``text_offset``, which counts characters from the start of the choice."""

    def __init__(self, decoder: TokenDecoder) -> None:
        self._decoder = decoder
        self._offset = 0

    def build(self, entries: Sequence[TokenLogprobs]) -> CompletionLogprobs:
        result = CompletionLogprobs([], [], [], [])
        for entry in entries:
            self._append(result, entry)
        return result

    def build_prompt(self, prompt: Sequence[int], entries: Sequence[TokenLogprobs]) -> CompletionLogprobs:
        """For ``echo``: the first prompt token has no probability."""
        first = self._decoder.token_text(prompt[0])
        result = CompletionLogprobs([first], [None], [None], [0])
        self._offset = len(first)
        for entry in entries:
            self._append(result, entry)
        return result

    def _append(self, result: CompletionLogprobs, entry: TokenLogprobs) -> None:
        text_of = self._decoder.token_text
        tokens = unpack_tokens(entry.token_ids).tolist()
        top: dict[str, float] = {}
        # The sampled token is entry 0 and comes in addition to the top ones when it is not among them.
        for token, value in [
            *zip(tokens[1:], entry.logprobs[1:], strict=True),
            (tokens[0], entry.logprobs[0]),
        ]:
            top.setdefault(text_of(token), max(value, FLOOR))
        text = text_of(tokens[0])
        result.tokens.append(text)
        result.token_logprobs.append(max(entry.logprobs[0], FLOOR))
        result.top_logprobs.append(top)
        result.text_offset.append(self._offset)
        self._offset += len(text)


def concatenate(first: CompletionLogprobs, second: CompletionLogprobs) -> CompletionLogprobs:
    return CompletionLogprobs(
        first.tokens + second.tokens,
        first.token_logprobs + second.token_logprobs,
        first.top_logprobs + second.top_logprobs,
        first.text_offset + second.text_offset,
    )


def prompt_logprobs(entries: Sequence[TokenLogprobs] | None, decoder: TokenDecoder) -> PromptLogprobs:
    """vLLM's list: None for the first prompt token, then candidates by token id."""
    result: PromptLogprobs = [None]
    for entry in entries or ():
        position: dict[str, PromptLogprob] = {}
        for place, (token, value) in enumerate(
            zip(unpack_tokens(entry.token_ids).tolist(), entry.logprobs, strict=True)
        ):
            rank = entry.rank if place == 0 else place
            position.setdefault(str(token), PromptLogprob(max(value, FLOOR), rank, decoder.token_text(token)))
        result.append(position)
    return result
