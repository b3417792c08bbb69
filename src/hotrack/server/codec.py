"""Text to token ids and back, for one model."""

import asyncio
from collections.abc import Sequence

from tokenizers import Tokenizer

from hotrack.core.errors import ContextLengthError
from hotrack.server.detokenizer import TokenDecoder

# Longer texts are tokenized beside the event loop (the tokenizer lets go of the interpreter lock).
_INLINE_CHARS = 16384


class Codec:
    """``max_model_len``: prompt and completion together, in tokens. ``vocab_size``: ids below it are valid;
    a model may have more of them than its tokenizer.
    """

    def __init__(self, tokenizer: Tokenizer, max_model_len: int, vocab_size: int) -> None:
        self._tokenizer = tokenizer
        self._longest_token_chars = max(map(len, tokenizer.get_vocab(with_added_tokens=True)), default=1)
        self.max_model_len = max_model_len
        self.vocab_size = vocab_size
        self.decoder = TokenDecoder(tokenizer)

    async def encode(self, text: str, *, add_special_tokens: bool, param: str) -> list[int]:
        """Token ids. ``param``: the field that the text comes from, for errors.

        Raises:
            ContextLengthError: the text is too long whatever its tokens are; it is not even tokenized.
        """
        if len(text) > self.max_model_len * self._longest_token_chars:
            least = -(-len(text) // self._longest_token_chars)
            raise too_long(f"at least {least}", 0, self.max_model_len, param)
        if len(text) > _INLINE_CHARS:
            return await asyncio.to_thread(self._encode, text, add_special_tokens)
        return self._encode(text, add_special_tokens)

    def _encode(self, text: str, add_special_tokens: bool) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids
        return ids

    def decode(self, token_ids: Sequence[int]) -> str:
        text: str = self._tokenizer.decode(list(token_ids), skip_special_tokens=False)
        return text


def too_long(
    prompt_tokens: int | str, max_tokens: int, limit: int, param: str, budget_param: str = "max_tokens"
) -> ContextLengthError:
    """OpenAI's sentence, with the numbers. ``param``: the prompt's field; ``budget_param``:
    the token budget's."""
    asked = f"{prompt_tokens} in the prompt" + (f" and {max_tokens} in the completion" if max_tokens else "")
    return ContextLengthError(
        f"this model's maximum context length is {limit} tokens, prompt and completion together; the "
        f"request has {asked}. "
        f"Shorten the prompt or lower {budget_param}",
        param=budget_param if isinstance(prompt_tokens, int) and prompt_tokens < limit else param,
    )
