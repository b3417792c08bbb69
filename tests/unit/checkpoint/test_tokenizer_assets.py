"""Tokenizers, templates and sampling defaults from folders and GGUF metadata."""

import json
import subprocess
import sys

import pytest
from tokenizers import Tokenizer, processors

from fakes.tiny_checkpoints import CHAT_TEMPLATE, write_tiny
from fakes.tiny_gguf import write_tiny_gguf
from hotrack.checkpoint.tokenizer import load_tokenizer
from hotrack.core.errors import CheckpointError
from hotrack.hub.model import ResolvedModel

ONE_LAYER = {"num_hidden_layers": 1}


def folder_assets(folder):
    return load_tokenizer(ResolvedModel("folder", folder, "x"))


def gguf_assets(path):
    return load_tokenizer(ResolvedModel("gguf", path, "x"))


@pytest.fixture
def folder(tmp_path):
    return write_tiny(tmp_path / "model", "llama", **ONE_LAYER)


def edit(path, **changes):
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_folder(folder):
    assets = folder_assets(folder)
    text = "<|im_start|>user\nhé 12<|im_end|>"
    ids = assets.tokenizer.encode(text).ids
    assert assets.tokenizer.decode(ids, skip_special_tokens=False) == text
    assert (ids[0], ids[-1]) == (1, 2)
    assert assets.chat_template == CHAT_TEMPLATE
    assert (assets.bos_token_id, assets.eos_token_ids, assets.pad_token_id) == (None, (2, 0), 0)
    assert (assets.bos_token, assets.eos_token) == (None, "<|im_end|>")
    assert assets.generation_defaults == {"temperature": 0.7, "top_p": 0.9}
    assert assets.add_bos is False


def test_minimal_folder(folder):
    (folder / "tokenizer_config.json").unlink()
    (folder / "generation_config.json").unlink()
    assets = folder_assets(folder)
    assert (assets.chat_template, assets.eos_token_ids, assets.generation_defaults) == (None, (2,), {})


def test_template_file_wins_over_the_field(folder):
    (folder / "chat_template.jinja").write_text("from file")
    assert folder_assets(folder).chat_template == "from file"


def test_named_templates(folder):
    named = [{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}]
    edit(folder / "tokenizer_config.json", chat_template=named)
    assert folder_assets(folder).chat_template == "d"


def test_the_tokenizer_s_own_end_token_comes_first(folder):
    edit(folder / "tokenizer_config.json", eos_token="<|im_start|>")
    assets = folder_assets(folder)
    assert (assets.eos_token_ids, assets.eos_token) == ((1, 2, 0), "<|im_start|>")


def test_bos_that_the_tokenizer_adds(folder):
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.post_processor = processors.TemplateProcessing("<|endoftext|> $A", None, [("<|endoftext|>", 0)])
    tokenizer.save(str(folder / "tokenizer.json"))
    edit(folder / "tokenizer_config.json", bos_token={"content": "<|endoftext|>", "special": True})
    assets = folder_assets(folder)
    assert (assets.bos_token_id, assets.bos_token, assets.add_bos) == (0, "<|endoftext|>", True)


@pytest.mark.parametrize(
    ("file", "change", "message"),
    [
        ("tokenizer_config.json", {"eos_token": "nope"}, "eos_token must be a token"),
        ("tokenizer_config.json", {"bos_token": 3}, "bos_token"),
        ("tokenizer_config.json", {"chat_template": 3}, "chat_template"),
        ("generation_config.json", {"eos_token_id": ["2"]}, "eos_token_id"),
        ("generation_config.json", {"eos_token_id": -1}, "eos_token_id"),
        ("generation_config.json", {"temperature": "hot"}, "temperature"),
        ("generation_config.json", {"top_p": 1.5}, "top_p"),
        ("tokenizer.json", {"model": {"type": "Nope"}}, "not a usable tokenizer"),
    ],
)
def test_hostile_fields(file, change, message, folder):
    edit(folder / file, **change)
    with pytest.raises(CheckpointError, match=message):
        folder_assets(folder)


@pytest.mark.parametrize("data", [b"", b"{", b"[]", b"\xff\xfe\x00"])
@pytest.mark.parametrize("file", ["tokenizer.json", "tokenizer_config.json", "generation_config.json"])
def test_damaged_files(file, data, folder):
    (folder / file).write_bytes(data)
    with pytest.raises(CheckpointError, match=file):
        folder_assets(folder)


def test_no_tokenizer_and_bad_template_bytes(folder):
    (folder / "chat_template.jinja").write_bytes(b"\xff")
    with pytest.raises(CheckpointError, match="chat_template"):
        folder_assets(folder)
    (folder / "tokenizer.json").unlink()
    with pytest.raises(CheckpointError, match="no tokenizer"):
        folder_assets(folder)


def test_gguf(tmp_path):
    write_tiny_gguf(tmp_path / "m.gguf", **ONE_LAYER)
    assets = gguf_assets(tmp_path / "m.gguf")
    assert assets.chat_template == CHAT_TEMPLATE
    assert (assets.bos_token_id, assets.eos_token_ids, assets.pad_token_id) == (1, (2,), 0)
    assert assets.add_bos is False
    text = "hi, h 12é\n<|im_end|>"
    encoding = assets.tokenizer.encode(text)
    assert assets.tokenizer.decode(encoding.ids, skip_special_tokens=False) == text
    assert encoding.tokens[0] == "hi"
    assert encoding.ids[-1] == 2


@pytest.mark.parametrize(
    ("pre", "text", "tokens"),
    [
        ("smollm", "a12", ["a", "1", "2"]),  # digits stand alone, so '1 2' never merges
        ("gpt-2", "a12", ["a", "12"]),
        ("default", "a12", ["a", "12"]),
        ("llama-bpe", "a12", ["a", "12"]),
        ("qwen2", "a12", ["a", "1", "2"]),
        ("gpt-2", "a hi", ["a", "Ġ", "hi"]),
    ],
)
def test_pre_tokenizers_cut_numbers_differently(pre, text, tokens, tmp_path):
    write_tiny_gguf(tmp_path / "m.gguf", pre=pre, **ONE_LAYER)
    assert gguf_assets(tmp_path / "m.gguf").tokenizer.encode(text).tokens == tokens


PIECES = {
    "llama-bpe": ["I", "'ll", "Ġpay", "Ġ", "123", "45", "ĠâĤ¬,", "Ġ", "Ġok", "!?ĊĊĊ", "Ġx", "Ġ"],
    "qwen2": ["I", "'ll", "Ġpay", "Ġ", *"12345", "ĠâĤ¬,", "Ġ", "Ġok", "!?ĊĊĊ", "Ġx", "Ġ"],
    "gpt-2": ["I", "'ll", "Ġpay", "Ġ12345", "ĠâĤ¬,", "Ġ", "Ġok", "!?", "ĊĊĊ", "Ġx", "Ġ"],
    "smollm": ["I", "'ll", "Ġpay", "Ġ", *"12345", "ĠâĤ¬,", "Ġ", "Ġok", "!?", "ĊĊĊ", "Ġx", "Ġ"],
}


@pytest.mark.parametrize("pre", PIECES)
def test_where_text_is_cut(pre, tmp_path):
    write_tiny_gguf(tmp_path / "m.gguf", pre=pre, **ONE_LAYER)
    tokenizer = gguf_assets(tmp_path / "m.gguf").tokenizer
    pieces = tokenizer.pre_tokenizer.pre_tokenize_str("I'll pay 12345 €,  ok!?\n\n\n x ")
    assert [p for p, _ in pieces] == PIECES[pre]


def test_gguf_that_adds_bos_and_has_an_end_of_turn(tmp_path):
    import gguf

    write = gguf.GGUFWriter.add_add_bos_token
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gguf.GGUFWriter, "add_add_bos_token", lambda self, _: write(self, True))
        write_tiny_gguf(tmp_path / "m.gguf", extra={"tokenizer.ggml.eot_token_id": 0}, **ONE_LAYER)
    assets = gguf_assets(tmp_path / "m.gguf")
    assert assets.add_bos
    assert assets.tokenizer.encode("hi").ids[0] == 1
    assert assets.tokenizer.encode("hi", add_special_tokens=False).tokens == ["hi"]
    assert assets.eos_token_ids == (2, 0)


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({"tokenizer.ggml.model": "llama"}, "'llama' is not supported"),
        ({"tokenizer.ggml.pre": "tekken"}, "'tekken' is not supported; gpt-2"),
        ({"tokenizer.ggml.tokens": 3}, "tokenizer.ggml.tokens must be a list"),
        ({"tokenizer.ggml.merges": 3}, "tokenizer.ggml.merges must be a list"),
        ({"tokenizer.ggml.token_type": 3}, "token_type must be a list"),
        ({"tokenizer.ggml.padding_token_id": 4_000_000}, "padding_token_id"),
        ({"tokenizer.chat_template": 3}, "chat_template must be a string"),
    ],
)
def test_hostile_gguf_metadata(extra, message, tmp_path):
    write_tiny_gguf(tmp_path / "m.gguf", extra=extra, **ONE_LAYER)
    with pytest.raises(CheckpointError, match=message):
        gguf_assets(tmp_path / "m.gguf")


@pytest.mark.parametrize(
    ("merges", "message"), [(["h x1"], "unusable BPE merges"), (["nospace"], "unusable BPE merges")]
)
def test_merges_outside_the_vocabulary(merges, message, tmp_path, monkeypatch):
    monkeypatch.setattr("fakes.tiny_gguf.MERGES", [])
    import gguf

    write = gguf.GGUFWriter.add_token_merges
    monkeypatch.setattr(gguf.GGUFWriter, "add_token_merges", lambda self, _: write(self, merges))
    write_tiny_gguf(tmp_path / "m.gguf", **ONE_LAYER)
    with pytest.raises(CheckpointError, match=message):
        gguf_assets(tmp_path / "m.gguf")


def test_import_brings_neither_torch_nor_numpy():
    found = "[m for m in ('torch', 'numpy', 'gguf') if m in sys.modules]"
    code = f"import sys, hotrack.checkpoint.tokenizer; print({found})"
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert result.stdout.strip() == "[]"
