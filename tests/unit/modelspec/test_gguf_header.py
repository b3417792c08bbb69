"""GGUF headers: what a good one says, and that a bad one is only ever a CheckpointError."""

import contextlib
import struct

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fakes.tiny_gguf import byte_vocab, write_tiny_gguf
from hotrack.core.errors import CheckpointError
from hotrack.modelspec import load_spec
from hotrack.modelspec.gguf import read_gguf_header

TINY = {"num_hidden_layers": 1, "hidden_size": 64, "intermediate_size": 64, "head_dim": 16}


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    write_tiny_gguf(path, **TINY)
    return path


def test_metadata_and_tensors(good):
    header = read_gguf_header(good)
    assert header.metadata["general.architecture"] == "llama"
    assert header.metadata["tokenizer.ggml.tokens"] == byte_vocab()
    assert header.metadata["tokenizer.ggml.add_bos_token"] is False
    assert header.tensors["blk.0.attn_k.weight"].shape == (32, 64)
    assert max(t.offset + t.nbytes for t in header.tensors.values()) <= good.stat().st_size


@pytest.mark.parametrize("family", ["llama", "qwen3", "qwen3_moe"])
def test_spec_equals_that_of_config_json(family, tmp_path):
    from hotrack.modelspec import parse_config

    config, _ = write_tiny_gguf(tmp_path / "m.gguf", family, num_hidden_layers=2)
    expected = parse_config(config | {"bos_token_id": 1})
    assert load_spec(tmp_path / "m.gguf") == expected


def kv(key: bytes, kind: int, payload: bytes) -> bytes:
    return struct.pack("<Q", len(key)) + key + struct.pack("<I", kind) + payload


def header(version=3, tensors=0, keys=0, body=b"") -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, tensors, keys) + body


def tensor(name: bytes, dims: tuple[int, ...], kind: int, offset: int) -> bytes:
    sizes = struct.pack(f"<{len(dims)}Q", *dims)
    return (
        struct.pack("<Q", len(name))
        + name
        + struct.pack("<I", len(dims))
        + sizes
        + struct.pack("<IQ", kind, offset)
    )


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "cannot read"),
        (b"GG", "not a GGUF file"),
        (b"\x80\x02}q\x00.", "not a GGUF file"),
        (b"GGUF", "do not fit"),
        (header(version=1), "version 1"),
        (header(version=0x03000000), "version"),
        (header(tensors=1 << 60), "tensors"),
        (header(keys=1 << 60), "metadata keys"),
        (header(keys=1), "do not fit"),
        (header(keys=1, body=struct.pack("<Q", 1 << 62) + b"key"), "does not fit"),
        (header(keys=1, body=kv(b"\xff\xff", 4, b"")), "unreadable string"),
        (header(keys=1, body=kv(b"k", 99, b"")), "value type 99"),
        (header(keys=1, body=kv(b"k", 9, struct.pack("<IQ", 9, 1))), "nested value type"),
        (header(keys=1, body=kv(b"k", 9, struct.pack("<IQ", 8, 1 << 60))), "strings do not fit"),
        (header(keys=1, body=kv(b"k", 9, struct.pack("<IQ", 4, 1 << 60))), "do not fit"),
        (header(keys=2, body=kv(b"k", 7, b"\1") * 2), "appears twice"),
        (header(keys=1, body=kv(b"general.alignment", 4, struct.pack("<I", 0))), "alignment"),
        (header(keys=1, body=kv(b"general.alignment", 4, struct.pack("<I", 33))), "alignment"),
        (header(tensors=1, body=tensor(b"t", (), 0, 0)), "0 dimensions"),
        (header(tensors=1, body=tensor(b"t", (1,) * 5, 0, 0)), "5 dimensions"),
        (header(tensors=1, body=tensor(b"t", (0, 4), 0, 0)), "shape"),
        (header(tensors=1, body=tensor(b"t", (1 << 63, 4), 0, 0)), "shape"),
        (header(tensors=1, body=tensor(b"t", (4,), 4, 0)), "GGUF type 4"),
        (header(tensors=1, body=tensor(b"t", (33,), 3, 0)), "rows of 33"),
        (header(tensors=1, body=tensor(b"t", (8,), 0, 0)), "truncated"),
        (header(tensors=1, body=tensor(b"t", (8,), 0, 1 << 62)), "truncated"),
        (header(tensors=1, body=tensor(b"t", (8,), 0, 7)) + bytes(999), "not aligned"),
        (header(tensors=2, body=tensor(b"t", (8,), 0, 0) * 2) + bytes(999), "appears twice"),
        (
            header(tensors=2, body=tensor(b"t", (32,), 0, 0) + tensor(b"u", (8,), 0, 32)) + bytes(999),
            "overlaps",
        ),
    ],
)
def test_hostile_headers(data, message, tmp_path):
    path = tmp_path / "bad.gguf"
    path.write_bytes(data)
    with pytest.raises(CheckpointError, match=message):
        read_gguf_header(path)


def test_unsupported_architecture_and_missing_tensors(tmp_path):
    path = tmp_path / "m.gguf"
    for arch, message in ((b"falcon", "falcon.*llama"), (b"llama", "token_embd")):
        value = struct.pack("<Q", len(arch)) + arch
        path.write_bytes(header(keys=1, body=kv(b"general.architecture", 8, value)))
        with pytest.raises(CheckpointError, match=message):
            load_spec(path)


def test_one_part_of_a_split_model(tmp_path):
    write_tiny_gguf(tmp_path / "m.gguf", extra={"split.count": 3}, **TINY)
    with pytest.raises(CheckpointError, match="one of 3 parts"):
        load_spec(tmp_path / "m.gguf")


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_damage_is_a_checkpoint_error_or_harmless(data, good, tmp_path):
    raw = bytearray(good.read_bytes()[: data.draw(st.sampled_from([200, 3000, 10**7]))])
    for _ in range(data.draw(st.integers(1, 4))):
        raw[data.draw(st.integers(0, min(len(raw), 12_000) - 1))] = data.draw(st.integers(0, 255))
    path = tmp_path / "damaged.gguf"
    path.write_bytes(raw)
    with contextlib.suppress(CheckpointError):
        load_spec(path)
