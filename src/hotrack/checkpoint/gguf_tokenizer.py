"""A byte-level BPE tokenizer from GGUF metadata, for the pre-tokenizers whose rules we know.

GGUF names the rule that cuts text before BPE (``tokenizer.ggml.pre``) instead of carrying it. A wrong rule
gives plausible but different tokens, so an unknown name is an error.
"""

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from hotrack.core.errors import CheckpointError
from hotrack.modelspec.fields import Fields, shorten
from hotrack.modelspec.gguf import GgufHeader

CONTROL, USER_DEFINED = 3, 4  # tokenizer.ggml.token_type values that are matched before BPE
MAX_VOCAB = 1 << 22

# Contractions, words with one leading symbol, numbers, punctuation with newlines, runs of blanks.
_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|%s"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
PATTERNS = {"llama-bpe": _WORDS % r"\p{N}{1,3}", "qwen2": _WORDS % r"\p{N}"}
BYTE_LEVEL = ("gpt-2", "default")
SUPPORTED = (*BYTE_LEVEL, "smollm", *PATTERNS)


def tokenizer_from_gguf(header: GgufHeader) -> Tokenizer:
    """Raises CheckpointError for another kind of tokenizer, an unknown pre-tokenizer or damaged lists."""
    where = str(header.path)
    meta = Fields(header.metadata, where)
    kind = meta.text("tokenizer.ggml.model")
    if kind != "gpt2":
        raise CheckpointError(
            f"{where}: tokenizer {shorten(kind)!r} is not supported; byte-level BPE ('gpt2') is. "
            "Use the model's safetensors folder, which carries tokenizer.json"
        )
    pre = meta.text("tokenizer.ggml.pre", default="default")
    if pre not in SUPPORTED:
        raise CheckpointError(
            f"{where}: pre-tokenizer {shorten(pre)!r} is not supported; {', '.join(SUPPORTED)} are"
        )
    tokens = _strings(meta, "tokenizer.ggml.tokens")
    vocab = {token: i for i, token in enumerate(tokens)}
    if len(vocab) != len(tokens):
        raise CheckpointError(f"{where}: the vocabulary lists {len(tokens) - len(vocab)} tokens twice")
    merges = [tuple(m.split(" ", 1)) for m in _strings(meta, "tokenizer.ggml.merges")]
    try:
        model = models.BPE(vocab=vocab, merges=merges, ignore_merges=pre == "llama-bpe")  # type: ignore[arg-type]
    except Exception as e:  # the library raises bare Exception
        raise CheckpointError(f"{where}: unusable BPE merges: {shorten(e, 200)}") from e
    tokenizer = Tokenizer(model)
    if pre == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = _pre_tokenizer(pre)
    tokenizer.decoder = decoders.ByteLevel()
    _add_special(tokenizer, meta, tokens)
    _add_bos(tokenizer, meta, tokens)
    return tokenizer


def _pre_tokenizer(pre: str) -> pre_tokenizers.PreTokenizer:
    if pre in BYTE_LEVEL:
        return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    if pre == "smollm":
        digits = pre_tokenizers.Digits(individual_digits=True)
        return pre_tokenizers.Sequence(
            [digits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)]
        )
    split = pre_tokenizers.Split(Regex(PATTERNS[pre]), behavior="isolated")
    return pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


def _add_special(tokenizer: Tokenizer, meta: Fields, tokens: list[str]) -> None:
    types = meta.get("tokenizer.ggml.token_type")
    if not isinstance(types, list) or len(types) != len(tokens):
        raise meta.fail("tokenizer.ggml.token_type", f"a list of {len(tokens)} types", types)
    by_type = {
        kind: [
            AddedToken(t, normalized=False, special=kind == CONTROL)
            for t, k in zip(tokens, types, strict=True)
            if k == kind
        ]
        for kind in (CONTROL, USER_DEFINED)
    }
    tokenizer.add_special_tokens(by_type[CONTROL])
    tokenizer.add_tokens(by_type[USER_DEFINED])


def _add_bos(tokenizer: Tokenizer, meta: Fields, tokens: list[str]) -> None:
    """``encode`` adds the beginning-of-sequence token exactly if the file says so."""
    if not meta.flag("tokenizer.ggml.add_bos_token", default=False):
        return
    bos = meta.integer("tokenizer.ggml.bos_token_id", low=0, high=len(tokens) - 1)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="BOS $A", pair="BOS $A BOS $B", special_tokens=[("BOS", bos)]
    )


def _strings(meta: Fields, name: str) -> list[str]:
    value = meta.get(name)
    if not isinstance(value, list) or len(value) > MAX_VOCAB or not all(isinstance(v, str) for v in value):
        raise meta.fail(name, f"a list of at most {MAX_VOCAB} strings", value)
    return value
