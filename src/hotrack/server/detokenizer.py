"""Token ids to text, one token at a time, exact across UTF-8 boundaries.

Byte-level BPE (GPT-2, Llama 3, Qwen, SmolLM, DeepSeek): every token is a fixed byte string, so an incremental
UTF-8 decoder gives exactly the text of a full decode at O(1) per token. Other tokenizers (SentencePiece-like)
decode in context: there the text of a growing window is compared with the window one token shorter, and the
window restarts at each settled character.
"""

import codecs
from collections.abc import Sequence
from typing import Protocol

from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel

REPLACEMENT = "\ufffd"
# A UTF-8 character has at most four bytes, so a longer unsettled tail is not a character in the making.
_MAX_UNSETTLED = 8


class Detokenizer(Protocol):
    """State of one sequence."""

    def push(self, token_id: int) -> str:
        """Text that became certain with this token; may be empty."""
        ...

    def finish(self) -> str:
        """Text still held back; the sequence is over."""
        ...


class TokenDecoder:
    """Shared by all sequences of one tokenizer: what each token is in bytes, and new ``Detokenizer``
    objects."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._special = frozenset(i for i, t in tokenizer.get_added_tokens_decoder().items() if t.special)
        self._byte_of = _byte_alphabet() if isinstance(tokenizer.decoder, ByteLevel) else None
        self._bytes: dict[int, bytes] = {}

    def new(self, *, skip_special_tokens: bool, context: Sequence[int] = ()) -> Detokenizer:
        """``context``: tokens before the first one pushed; only SentencePiece-like tokenizers look at
        them."""
        skip: frozenset[int] = self._special if skip_special_tokens else frozenset()
        if self._byte_of is not None:
            return _ByteDetokenizer(self, skip)
        return _WindowDetokenizer(self._tokenizer, skip, context)

    def token_bytes(self, token_id: int) -> bytes:
        """UTF-8 bytes of one token on its own, special tokens spelled out; empty for ids outside the
        vocabulary."""
        cached = self._bytes.get(token_id)
        if cached is None:
            cached = self._bytes[token_id] = self._compute_bytes(token_id)
        return cached

    def token_text(self, token_id: int) -> str:
        """Text of one token on its own; bytes that are no UTF-8 show as U+FFFD."""
        return self.token_bytes(token_id).decode("utf-8", "replace")

    def _compute_bytes(self, token_id: int) -> bytes:
        token = self._tokenizer.id_to_token(token_id)
        if token is None:
            return b""
        if self._byte_of is None:
            return self._tokenizer.decode([token_id], skip_special_tokens=False).encode()
        try:
            return bytes(self._byte_of[char] for char in token)
        except KeyError:  # an added token outside the alphabet stands for itself
            return token.encode()


class _ByteDetokenizer:
    __slots__ = ("_decode", "_skip", "_token_bytes")

    def __init__(self, decoder: TokenDecoder, skip: frozenset[int]) -> None:
        self._token_bytes = decoder.token_bytes
        self._skip = skip
        self._decode = codecs.getincrementaldecoder("utf-8")("replace").decode

    def push(self, token_id: int) -> str:
        return "" if token_id in self._skip else self._decode(self._token_bytes(token_id))

    def finish(self) -> str:
        return self._decode(b"", True)


class _WindowDetokenizer:
    """``ids[:settled]`` is context whose text is already out; ``ids[settled:]`` is not certain yet.

    Skipped tokens never enter: a context of nothing but those would look like the start of a text, where
    decoders strip.
    """

    __slots__ = ("_ids", "_settled", "_skip", "_text", "_tokenizer")

    def __init__(self, tokenizer: Tokenizer, skip: frozenset[int], context: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._skip = skip
        self._ids = [i for i in context if i not in skip][-_MAX_UNSETTLED:]
        self._settled = len(self._ids)
        self._text = self._decode(self._ids)

    def push(self, token_id: int) -> str:
        if token_id in self._skip:
            return ""
        self._ids.append(token_id)
        text = self._decode(self._ids)
        unsettled = len(self._ids) - self._settled
        if text.endswith(REPLACEMENT) and unsettled < _MAX_UNSETTLED:
            return ""
        return self._settle(text)

    def finish(self) -> str:
        return self._settle(self._decode(self._ids))

    def _settle(self, text: str) -> str:
        new = text[len(self._text) :]
        del self._ids[: self._settled]
        self._settled = len(self._ids)
        self._text = self._decode(self._ids)
        return new

    def _decode(self, ids: list[int]) -> str:
        decoded: str = self._tokenizer.decode(ids, skip_special_tokens=False)
        return decoded


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's printable stand-ins: character -> byte. Printable bytes are themselves, the others follow from
    U+0100."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    alphabet = {chr(byte): byte for byte in printable}
    others = [byte for byte in range(256) if byte not in set(printable)]
    return alphabet | {chr(0x100 + i): byte for i, byte in enumerate(others)}
