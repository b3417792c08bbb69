"""Tokenizer, chat template and sampling defaults of a model. No torch: the HTTP process loads only this."""

from dataclasses import dataclass, field
from pathlib import Path

from tokenizers import Tokenizer

from hotrack.checkpoint.gguf_tokenizer import tokenizer_from_gguf
from hotrack.core.errors import CheckpointError
from hotrack.hub.model import ResolvedModel
from hotrack.modelspec.fields import MAX_JSON_BYTES, Fields, read_json_object, shorten
from hotrack.modelspec.gguf import eos_token_ids, read_gguf_header

MAX_TEMPLATE_BYTES = 1 << 20
MAX_ID = 1 << 31
# generation_config.json fields that become sampling defaults, with their ranges
DEFAULTS = {
    "temperature": (0.0, 100.0),
    "top_p": (0.0, 1.0),
    "top_k": (-1.0, 1e9),
    "min_p": (0.0, 1.0),
    "repetition_penalty": (1e-3, 1e3),
}


@dataclass(frozen=True, slots=True)
class TokenizerAssets:
    """What turns messages into token ids and back.

    ``tokenizer.encode(text)`` adds the beginning-of-sequence token exactly if ``add_bos``; pass
    ``add_special_tokens=False`` for text that a chat template rendered. ``eos_token_ids`` end a generation.
    ``generation_defaults`` are the model's own sampling values (temperature, top_p, top_k, min_p,
    repetition_penalty), for requests that name none.
    """

    tokenizer: Tokenizer = field(repr=False)
    chat_template: str | None
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    pad_token_id: int | None
    generation_defaults: dict[str, float]
    add_bos: bool

    @property
    def bos_token(self) -> str | None:
        return None if self.bos_token_id is None else self.tokenizer.id_to_token(self.bos_token_id)

    @property
    def eos_token(self) -> str | None:
        return self.tokenizer.id_to_token(self.eos_token_ids[0]) if self.eos_token_ids else None


def load_tokenizer(resolved: ResolvedModel) -> TokenizerAssets:
    """Read the tokenizer of a model folder or GGUF file. Raises CheckpointError."""
    return _from_gguf(resolved.path) if resolved.kind == "gguf" else _from_folder(resolved.path)


def _from_gguf(path: Path) -> TokenizerAssets:
    header = read_gguf_header(path)
    tokenizer = tokenizer_from_gguf(header)
    meta = Fields(header.metadata, str(path))
    last = tokenizer.get_vocab_size() - 1
    bos = meta.integers("tokenizer.ggml.bos_token_id", high=last, max_len=1)
    pad = meta.integers("tokenizer.ggml.padding_token_id", high=last, max_len=1)
    template = meta.text("tokenizer.chat_template", default="")
    return TokenizerAssets(
        tokenizer=tokenizer,
        chat_template=template or None,
        bos_token_id=bos[0] if bos else None,
        eos_token_ids=tuple(i for i in eos_token_ids(header) if i <= last),
        pad_token_id=pad[0] if pad else None,
        generation_defaults={},
        add_bos=_adds(tokenizer, bos[0] if bos else None),
    )


def _from_folder(folder: Path) -> TokenizerAssets:
    tokenizer = _read_tokenizer(folder / "tokenizer.json")
    config = _optional(folder / "tokenizer_config.json")
    generation = _optional(folder / "generation_config.json")
    model = _optional(folder / "config.json")
    eos = generation.integers("eos_token_id", high=MAX_ID, max_len=1024)
    named = _token_id(tokenizer, config, "eos_token")
    own = () if named is None else (named,)
    # The tokenizer's own end token first: chat templates print it as eos_token.
    eos_ids = tuple(dict.fromkeys(own + (eos or model.integers("eos_token_id", high=MAX_ID, max_len=1024))))
    bos = _token_id(tokenizer, config, "bos_token")
    return TokenizerAssets(
        tokenizer=tokenizer,
        chat_template=_chat_template(folder, config),
        bos_token_id=bos,
        eos_token_ids=eos_ids,
        pad_token_id=_token_id(tokenizer, config, "pad_token"),
        generation_defaults={
            name: generation.number(name, low=low, high=high)
            for name, (low, high) in DEFAULTS.items()
            if generation.get(name) is not None
        },
        add_bos=_adds(tokenizer, bos),
    )


def _optional(path: Path) -> Fields:
    return Fields(read_json_object(path) if path.is_file() else {}, str(path))


def _read_tokenizer(path: Path) -> Tokenizer:
    if not path.is_file():
        raise CheckpointError(
            f"{path.parent} has no tokenizer.json; other tokenizer formats are not supported"
        )
    if path.stat().st_size > MAX_JSON_BYTES:
        raise CheckpointError(f"{path} is larger than {MAX_JSON_BYTES} bytes")
    try:
        return Tokenizer.from_file(str(path))
    except Exception as e:  # the library raises bare Exception
        raise CheckpointError(f"{path} is not a usable tokenizer: {shorten(e, 200)}") from e


def _token_id(tokenizer: Tokenizer, config: Fields, name: str) -> int | None:
    """Id of a special token given as a string or as an object with 'content'; None when there is none."""
    value = config.get(name)
    if isinstance(value, dict):
        value = value.get("content")
    if value is None:
        return None
    token_id = tokenizer.token_to_id(value) if isinstance(value, str) else None
    if token_id is None:
        raise config.fail(name, "a token of the vocabulary", value)
    return int(token_id)


def _chat_template(folder: Path, config: Fields) -> str | None:
    """``chat_template.jinja``, else tokenizer_config.json's: a string, or a list with a 'default'."""
    file = folder / "chat_template.jinja"
    if file.is_file():
        if file.stat().st_size > MAX_TEMPLATE_BYTES:
            raise CheckpointError(f"{file} is larger than {MAX_TEMPLATE_BYTES} bytes")
        try:
            return file.read_text("utf-8")
        except (OSError, UnicodeDecodeError) as e:
            raise CheckpointError(f"cannot read {file}: {e}") from e
    value = config.get("chat_template")
    if isinstance(value, list):
        named = {t.get("name"): t.get("template") for t in value if isinstance(t, dict)}
        value = named.get("default")
    if value is not None and not isinstance(value, str):
        raise config.fail("chat_template", "a template, or a list of named ones", value)
    return value


def _adds(tokenizer: Tokenizer, bos: int | None) -> bool:
    return bos is not None and bos in tokenizer.encode("").ids
