"""safetensors folders: what is read equals what was written; hostile files end as CheckpointError."""

import contextlib
import json
import os
import struct

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from fakes.tiny_checkpoints import tiny_config, tiny_weights, write_tiny
from hotrack.checkpoint.open import open_checkpoint
from hotrack.checkpoint.safetensors_format import INDEX, open_folder
from hotrack.core.errors import CheckpointError
from hotrack.hub.model import ResolvedModel


def checkpoint(folder):
    return open_checkpoint(ResolvedModel("folder", folder, folder.name))


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_tensor_comes_back(shards, dtype, tmp_path):
    write_tiny(tmp_path, "qwen3_moe", seed=3, shards=shards, dtype=dtype, num_hidden_layers=2)
    expected = tiny_weights(tiny_config("qwen3_moe", dtype=dtype, num_hidden_layers=2), seed=3)
    with checkpoint(tmp_path) as ckpt:
        assert set(ckpt.names()) == set(expected)
        assert ckpt.total_bytes == sum(w.numel() * w.element_size() for w in expected.values())
        for name, weight in expected.items():
            assert ckpt.info(name) == (tuple(weight.shape), dtype)
            assert torch.equal(ckpt.read(name, torch.float32), weight.float())


def test_scalars_empty_and_integer_tensors(tmp_path):
    tensors = {
        "scalar": torch.tensor(2.5),
        "empty": torch.empty(0, 4),
        "ids": torch.arange(6, dtype=torch.int64).view(2, 3),
    }
    save_file(tensors, tmp_path / "model.safetensors")
    stored, files = open_folder(tmp_path)
    for name, tensor in tensors.items():
        result = torch.full_like(tensor, 9)
        stored[name].copy_into(result)
        assert torch.equal(result, tensor)
    for file in files:
        file.close()


def test_a_single_file_of_another_name_is_found(tmp_path):
    save_file({"a": torch.ones(2)}, tmp_path / "weights.safetensors")
    stored, files = open_folder(tmp_path)
    files[0].close()
    assert list(stored) == ["a"]


def test_missing_tensor_names_the_nearest(tmp_path):
    write_tiny(tmp_path, "llama", num_hidden_layers=1)
    with checkpoint(tmp_path) as ckpt, pytest.raises(CheckpointError, match=r"nearest.*model\.norm\.weight"):
        ckpt.info("model.norm.weights")


def raw(header: object, data: bytes = b"", *, length: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def entry(dtype="F32", shape=(2,), begin=0, end=8):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}


HOSTILE = {
    "empty": (b"", "0 bytes"),
    "seven bytes": (b"\0" * 7, "7 bytes"),
    "zero header": (b"\0" * 64, "header of 0"),
    "huge header": (raw({}, length=1 << 63), "header of"),
    "header beyond file": (raw({}, length=100), "header of 100"),
    "not json": (raw(b"hello!!!"), "not valid JSON"),
    "pickle": (b"\x80\x02}q\x00." + b"\0" * 40, "header of"),
    "list": (raw([]), "JSON object"),
    "deep": (raw(b"[" * 50_000), "nested too deeply"),
    "duplicate": (raw(b'{"a":%s,"a":%s}' % ((json.dumps(entry()).encode(),) * 2), bytes(8)), "appears twice"),
    "entry not object": (raw({"a": 3}), "instead of an object"),
    "no dtype": (raw({"a": {"shape": [2], "data_offsets": [0, 8]}}, bytes(8)), "dtype"),
    "unknown dtype": (raw({"a": entry("F128")}, bytes(8)), "F128"),
    "dtype list": (raw({"a": entry(["F32"])}, bytes(8)), "dtype"),
    "negative shape": (raw({"a": entry(shape=(-2,))}, bytes(8)), "natural numbers"),
    "float shape": (raw({"a": entry(shape=(2.0,))}, bytes(8)), "natural numbers"),
    "many dims": (raw({"a": entry(shape=(1,) * 9, end=4)}, bytes(4)), "at most 8"),
    "huge shape": (raw({"a": entry(shape=(1 << 62, 1 << 62))}, bytes(8)), "needs"),
    "wrong size": (raw({"a": entry(end=12)}, bytes(12)), "needs 8 bytes"),
    "reversed": (raw({"a": entry(begin=8, end=0)}, bytes(8)), "needs 8 bytes"),
    "negative": (raw({"a": entry(begin=-8, end=0)}, bytes(8)), "natural numbers"),
    "overlap": (raw({"a": entry(), "b": entry(begin=4, end=12)}, bytes(12)), "overlaps"),
    "hole": (raw({"a": entry(begin=4, end=12)}, bytes(12)), "hole"),
    "truncated": (raw({"a": entry()}, bytes(7)), "truncated"),
    "trailing": (raw({"a": entry()}, bytes(9)), "no tensor owns"),
}


@pytest.mark.parametrize(("data", "message"), HOSTILE.values(), ids=HOSTILE.keys())
def test_hostile_file(data, message, tmp_path):
    (tmp_path / "model.safetensors").write_bytes(data)
    with pytest.raises(CheckpointError, match=message):
        open_folder(tmp_path)


@pytest.mark.parametrize(
    "name", ["../outside.safetensors", "/etc/passwd", "a/b.safetensors", "model.bin", "..", "", 7, None]
)
def test_index_may_only_name_neighbours(name, tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    save_file({"a": torch.ones(2)}, tmp_path / "outside.safetensors")
    (folder / INDEX).write_text(json.dumps({"weight_map": {"a": name}}))
    with pytest.raises(CheckpointError, match="only plain names"):
        open_folder(folder)


@pytest.mark.parametrize(
    ("index", "message"),
    [
        ({}, "weight_map"),
        ({"weight_map": []}, "weight_map"),
        ({"weight_map": {}}, "weight_map"),
        ({"weight_map": {"a": "gone.safetensors"}}, "cannot open .*gone"),
        ({"weight_map": {"a": "one.safetensors", "z": "one.safetensors"}}, "'z' in one.safetensors"),
        ({"weight_map": {"a": "one.safetensors", "b": "two.safetensors"}}, "'a' is in both"),
    ],
)
def test_hostile_index(index, message, tmp_path):
    save_file({"a": torch.ones(2)}, tmp_path / "one.safetensors")
    save_file({"a": torch.ones(2), "b": torch.ones(2)}, tmp_path / "two.safetensors")
    (tmp_path / INDEX).write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=message):
        open_folder(tmp_path)


def test_pickles_and_ambiguous_folders_are_refused(tmp_path):
    with pytest.raises(CheckpointError, match="no safetensors"):
        open_folder(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"\x80\x02}q\x00.")
    with pytest.raises(CheckpointError, match="pickled"):
        open_folder(tmp_path)
    for name in ("a", "b"):
        save_file({name: torch.ones(2)}, tmp_path / f"{name}.safetensors")
    with pytest.raises(CheckpointError, match="2 safetensors files"):
        open_folder(tmp_path)


def test_a_fifo_does_not_hang(tmp_path):
    os.mkfifo(tmp_path / "x.safetensors")
    with pytest.raises(CheckpointError, match="not a regular file"):
        open_folder(tmp_path)


def test_file_cut_after_it_was_opened(tmp_path):
    write_tiny(tmp_path, "qwen3", num_hidden_layers=1)
    with checkpoint(tmp_path) as ckpt:
        os.truncate(tmp_path / "model.safetensors", 30_000)
        with pytest.raises(CheckpointError, match="ends at byte"):
            ckpt.read("lm_head.weight", torch.float32)


def test_failed_open_leaves_no_descriptor(tmp_path):
    save_file({"a": torch.ones(2)}, tmp_path / "one.safetensors")
    (tmp_path / INDEX).write_text(
        json.dumps({"weight_map": {"a": "one.safetensors", "b": "two.safetensors"}})
    )
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(CheckpointError):
        open_folder(tmp_path)
    assert len(os.listdir("/proc/self/fd")) == before


SMALL = {"num_hidden_layers": 1, "hidden_size": 32, "intermediate_size": 32, "head_dim": 8, "vocab_size": 300}
VALUES = (
    st.none()
    | st.integers(-(2**70), 2**70)
    | st.text(max_size=4)
    | st.lists(st.integers(-4, 2**66), max_size=3)
)


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    field=st.sampled_from(["dtype", "shape", "data_offsets"]),
    which=st.integers(0, 20),
    value=VALUES | st.sampled_from(["F32", "F16", "I64", "F8_E4M3"]),
    length=st.none() | st.integers(0, 2**64 - 1),
)
def test_any_header_opens_or_is_a_checkpoint_error(field, which, value, length, tmp_path):
    path = tmp_path / "model.safetensors"
    if not (tmp_path / "config.json").exists():
        write_tiny(tmp_path, "llama", **SMALL)
        path.rename(tmp_path / "good.bytes")
    data = (tmp_path / "good.bytes").read_bytes()
    size = struct.unpack("<Q", data[:8])[0]
    header = json.loads(data[8 : 8 + size])
    names = [n for n in header if n != "__metadata__"]
    header[names[which % len(names)]][field] = value
    path.write_bytes(raw(header, data[8 + size :], length=length))
    with contextlib.suppress(CheckpointError):
        stored, files = open_folder(tmp_path)
        for tensor in stored.values():
            assert 0 <= tensor.offset <= tensor.offset + tensor.nbytes <= path.stat().st_size
        for file in files:
            file.close()
