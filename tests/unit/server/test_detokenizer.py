"""Token by token must give the text of a full decode, whatever the tokens."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from fakes.scripted_engine import byte_tokenizer
from hotrack.server.detokenizer import TokenDecoder

TEXTS = ["hello world, héllo wörld 日本語 😀 test", "a  b   c\n\nd"] * 3


def byte_level_bpe() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<|end|>"],
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXTS, trainer)
    tokenizer.add_tokens([AddedToken("<a b>", special=False)])
    return tokenizer


def sentencepiece_like() -> Tokenizer:
    special = ["<unk>", "<s>", "</s>"]
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    trainer = trainers.BpeTrainer(vocab_size=120, special_tokens=special, show_progress=False)
    tokenizer.train_from_iterator(TEXTS, trainer)
    tokenizer.add_tokens([f"<0x{i:02X}>" for i in range(256)])
    return tokenizer


TOKENIZERS = {"byte-level": byte_level_bpe(), "sentencepiece": sentencepiece_like()}


@pytest.mark.parametrize("name", TOKENIZERS)
@settings(max_examples=120, deadline=None)
@given(data=st.data(), skip=st.booleans())
def test_increments_equal_full_decode(name: str, data: st.DataObject, skip: bool) -> None:
    tokenizer = TOKENIZERS[name]
    ids = data.draw(st.lists(st.integers(0, tokenizer.get_vocab_size() - 1), max_size=24))
    detokenizer = TokenDecoder(tokenizer).new(skip_special_tokens=skip)
    text = "".join(map(detokenizer.push, ids)) + detokenizer.finish()
    assert text == tokenizer.decode(ids, skip_special_tokens=skip)


@given(text=st.text(max_size=40))
def test_characters_never_come_out_in_parts(text: str) -> None:
    tokenizer = byte_tokenizer()
    detokenizer = TokenDecoder(tokenizer).new(skip_special_tokens=True)
    pieces = [detokenizer.push(i) for i in tokenizer.encode(text).ids]
    assert "".join(pieces) == text
    assert detokenizer.finish() == ""


def test_unfinished_character_shows_at_the_end_only() -> None:
    tokenizer = byte_tokenizer()
    detokenizer = TokenDecoder(tokenizer).new(skip_special_tokens=True)
    ids = tokenizer.encode("😀").ids
    assert [detokenizer.push(i) for i in ids[:3]] == ["", "", ""]
    assert detokenizer.finish() == "\ufffd"


def test_garbage_is_not_held_back_for_ever() -> None:
    tokenizer = TOKENIZERS["sentencepiece"]
    bad = tokenizer.token_to_id("<0xE3>")
    detokenizer = TokenDecoder(tokenizer).new(skip_special_tokens=True)
    shown = "".join(detokenizer.push(bad) for _ in range(100))
    assert len(shown) > 80


def test_context_keeps_the_space_of_the_first_word() -> None:
    tokenizer = TOKENIZERS["sentencepiece"]
    prompt, world = tokenizer.encode("hello").ids, tokenizer.encode("world").ids
    with_context = TokenDecoder(tokenizer).new(skip_special_tokens=True, context=prompt)
    assert "".join(map(with_context.push, world)) == " world"


def test_token_bytes_are_exact() -> None:
    tokenizer = byte_tokenizer()
    decoder = TokenDecoder(tokenizer)
    assert b"".join(map(decoder.token_bytes, tokenizer.encode("é😀").ids)) == "é😀".encode()
    assert decoder.token_text(0) == "<|end|>"
    assert decoder.token_bytes(10_000) == b""  # models may have more rows than their tokenizer has tokens
