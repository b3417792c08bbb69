"""load_weights: fused, sharded and stacked parameters; refusals; memory; progress; threads."""

import os

import pytest
import torch
from safetensors.torch import save_file

from fakes.tiny_checkpoints import tiny_config, tiny_weights, write_tiny
from hotrack.checkpoint import stored
from hotrack.checkpoint.load import load_weights
from hotrack.checkpoint.open import open_checkpoint
from hotrack.checkpoint.stored import TensorFile
from hotrack.checkpoint.targets import LoadTarget, Source
from hotrack.core.errors import CheckpointError
from hotrack.hub.model import ResolvedModel

ONE_LAYER = {"num_hidden_layers": 1}


def checkpoint(folder):
    return open_checkpoint(ResolvedModel("folder", folder, folder.name))


def whole(ckpt, dtype=torch.float32):
    """A target per tensor, filled with NaN so that an unwritten element shows."""
    return {
        n: LoadTarget(torch.full(ckpt.info(n).shape, float("nan"), dtype=dtype), (Source(n),))
        for n in ckpt.names()
    }


@pytest.mark.parametrize("num_threads", [1, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_whole_tensors_with_conversion(dtype, num_threads, tmp_path):
    write_tiny(tmp_path, "qwen3_moe", seed=5, shards=2, **ONE_LAYER)
    expected = tiny_weights(tiny_config("qwen3_moe", **ONE_LAYER), seed=5)
    with checkpoint(tmp_path) as ckpt:
        targets = whole(ckpt, dtype)
        report = load_weights(ckpt, targets, num_threads=num_threads)
    assert report.num_copies == len(expected)
    assert report.stored_bytes == sum(w.numel() * 4 for w in expected.values())
    for name, weight in expected.items():
        assert torch.equal(targets[name].param, weight.to(dtype))


def test_fused_sharded_and_stacked_parameters(tmp_path):
    config = write_and_weights(tmp_path)
    weights, prefix = config, "model.layers.0."
    q, k, v = (weights[f"{prefix}self_attn.{n}_proj.weight"] for n in "qkv")
    rank = slice(1, 2)  # the second of two ranks: half of every head group
    qkv = torch.full((64 + 32 + 32, 128), float("nan"))
    o = torch.full((128, 64), float("nan"))
    experts = torch.full((8, 2, 64, 128), float("nan"))
    half = {n: slice(w.shape[0] // 2 * rank.start, None) for n, w in zip("qkv", (q, k, v), strict=True)}
    rows = {"q": slice(0, 64), "k": slice(64, 96), "v": slice(96, 128)}
    targets = {
        "qkv": LoadTarget(
            qkv,
            tuple(Source(f"{prefix}self_attn.{n}_proj.weight", (rows[n],), (half[n],)) for n in "qkv"),
        ),
        "o": LoadTarget(o, (Source(f"{prefix}self_attn.o_proj.weight", (), (slice(None), slice(64, 128))),)),
        "experts": LoadTarget(
            experts,
            tuple(
                Source(f"{prefix}mlp.experts.{e}.{name}_proj.weight", (e, i))
                for e in range(8)
                for i, name in enumerate(("gate", "up"))
            ),
        ),
    }
    with checkpoint(tmp_path) as ckpt:
        load_weights(ckpt, targets, is_elsewhere=lambda _: True)
    assert torch.equal(qkv, torch.cat([w[w.shape[0] // 2 :] for w in (q, k, v)]))
    assert torch.equal(o, weights[f"{prefix}self_attn.o_proj.weight"][:, 64:])
    for e in range(8):
        assert torch.equal(experts[e, 1], weights[f"{prefix}mlp.experts.{e}.up_proj.weight"])


def write_and_weights(folder):
    write_tiny(folder, "qwen3_moe", seed=2, **ONE_LAYER)
    return tiny_weights(tiny_config("qwen3_moe", **ONE_LAYER), seed=2)


@pytest.mark.parametrize(("start", "stop"), [(0, 1000), (3, 997), (511, 513), (999, 1000)])
def test_row_ranges_across_block_borders(start, stop, tmp_path, monkeypatch):
    monkeypatch.setattr(stored, "BLOCK_ELEMENTS", 64)
    write_tiny(tmp_path, "llama", **ONE_LAYER)
    weight = torch.randn(1000, 6)
    save_file({"w": weight}, tmp_path / "model.safetensors")
    part = torch.empty(stop - start, 2)
    with checkpoint(tmp_path) as ckpt:
        targets = {"p": LoadTarget(part, (Source("w", select=(slice(start, stop), slice(2, 4))),))}
        load_weights(ckpt, targets)
    assert torch.equal(part, weight[start:stop, 2:4])


def test_progress_ends_at_the_total(tmp_path):
    write_tiny(tmp_path, "llama", **ONE_LAYER)
    calls = []
    with checkpoint(tmp_path) as ckpt:
        load_weights(ckpt, whole(ckpt), progress=lambda done, total: calls.append((done, total)))
        assert calls[-1] == (ckpt.total_bytes, ckpt.total_bytes)
    assert [c[0] for c in calls] == sorted(c[0] for c in calls)


def refuse(folder, change, message):
    """``change(targets)`` breaks the plan; nothing may be written when it is refused."""
    with checkpoint(folder) as ckpt:
        targets = whole(ckpt)
        change(targets)
        with pytest.raises(CheckpointError, match=message):
            load_weights(ckpt, targets)
    assert all(bool(t.param.isnan().all()) for t in targets.values() if t.param.is_floating_point())


NORM = "model.norm.weight"
EMBED = "model.embed_tokens.weight"


@pytest.mark.parametrize(
    ("target", "message"),
    [
        (
            LoadTarget(torch.full((128,), float("nan")), (Source("model.nrom.weight"),)),
            r"lacks 1.*model\.nrom",
        ),
        (
            LoadTarget(torch.full((64,), float("nan")), (Source(NORM),)),
            r"norm.weight.*\[128\]; expected \[64\]",
        ),
        (LoadTarget(torch.full((1, 128), float("nan")), (Source(NORM),)), r"expected \[1, 128\]"),
        (LoadTarget(torch.zeros(128, dtype=torch.int32), (Source(NORM),)), "stored as float32"),
        (
            LoadTarget(torch.full((64,), float("nan")), (Source(NORM, select=(slice(100, 164),)),)),
            r"\[28\] of \[128\]",
        ),
        (
            LoadTarget(torch.full((128,), float("nan")), (Source(NORM, select=(slice(None), slice(None))),)),
            "2 dimensions expected",
        ),
    ],
)
def test_mismatches_name_the_tensor_and_write_nothing(target, message, tmp_path):
    write_tiny(tmp_path, "llama", **ONE_LAYER)
    refuse(tmp_path, lambda targets: targets.update({NORM: target}), message)


def test_unexpected_tensor(tmp_path):
    write_tiny(tmp_path, "llama", **ONE_LAYER)
    refuse(tmp_path, lambda targets: targets.pop(NORM), r"does not know: 'model\.norm\.weight'")


def test_integer_weights_are_refused(tmp_path):
    write_tiny(tmp_path, "llama", **ONE_LAYER)
    save_file({"w": torch.zeros(4, dtype=torch.int8)}, tmp_path / "model.safetensors")
    refuse(tmp_path, lambda _: None, "stored as int8")


def test_harmless_leftovers_are_ignored(tmp_path):
    write_tiny(tmp_path, "llama", **ONE_LAYER)
    extra = {"lm_head.weight": torch.ones(2), "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(2)}
    weights = tiny_weights(tiny_config("llama", **ONE_LAYER), seed=0)
    save_file(weights | extra, tmp_path / "model.safetensors")
    with checkpoint(tmp_path) as ckpt:
        targets = whole(ckpt)
        for name in extra:
            del targets[name]
        load_weights(ckpt, targets)


@pytest.mark.parametrize("family", ["qwen3_next", "qwen3_moe"])
def test_draft_heads_of_families_that_publish_them_are_left_unread(family, tmp_path):
    write_tiny(tmp_path, family, **ONE_LAYER)
    weights = tiny_weights(tiny_config(family, **ONE_LAYER), seed=0)
    save_file(weights | {"mtp.fc.weight": torch.zeros(4, 8)}, tmp_path / "model.safetensors")
    with checkpoint(tmp_path) as ckpt:
        targets = whole(ckpt)
        del targets["mtp.fc.weight"]
        if family == "qwen3_next":
            load_weights(ckpt, targets)
        else:
            with pytest.raises(CheckpointError, match=r"'mtp\.fc\.weight'"):
                load_weights(ckpt, targets)


def test_what_a_source_adds_is_added_in_the_parameters_dtype(tmp_path):
    name = "model.norm.weight"
    write_tiny(tmp_path, "qwen3_next", dtype="bfloat16", **ONE_LAYER)
    with checkpoint(tmp_path) as ckpt:
        plain, added = (torch.full((128,), float("nan")) for _ in range(2))
        for param, add in ((plain, 0.0), (added, 1.0)):
            load_weights(
                ckpt, {"norm": LoadTarget(param, (Source(name, add=add),))}, is_elsewhere=lambda _: True
            )
    assert torch.equal(added, plain + 1)
    assert not torch.equal(added, added.bfloat16().float())


def test_optional_source_may_be_missing(tmp_path):
    write_tiny(tmp_path, "llama", **ONE_LAYER)
    bias = torch.ones(3)
    with checkpoint(tmp_path) as ckpt:
        load_weights(ckpt, whole(ckpt) | {"bias": LoadTarget(bias, (Source("no.bias", optional=True),))})
    assert torch.equal(bias, torch.ones(3))


def test_a_read_error_in_a_thread_reaches_the_caller(tmp_path):
    write_tiny(tmp_path, "llama")
    with checkpoint(tmp_path) as ckpt:
        targets = whole(ckpt)
        os.truncate(tmp_path / "model.safetensors", 50_000)
        with pytest.raises(CheckpointError, match="ends at byte"):
            load_weights(ckpt, targets, num_threads=2)


def test_no_second_copy(tmp_path, monkeypatch):
    """A load holds a block per thread beside the parameters, however large the tensor."""
    largest = 0
    read = TensorFile.read

    def counted(self, offset, nbytes):
        nonlocal largest
        largest = max(largest, nbytes)
        return read(self, offset, nbytes)

    monkeypatch.setattr(TensorFile, "read", counted)
    write_tiny(tmp_path, "llama", **ONE_LAYER)
    big = torch.randn(4096, 1024)
    save_file({"w": big}, tmp_path / "model.safetensors")
    param = torch.empty(4096, 1024)
    with checkpoint(tmp_path) as ckpt:
        load_weights(ckpt, {"w": LoadTarget(param, (Source("w"),))}, num_threads=2)
    assert torch.equal(param, big)
    assert largest <= 4 * stored.BLOCK_ELEMENTS
