"""The Triton kernels compile for every family of NVIDIA GPUs, within its shared memory; no GPU needed."""

import os

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("nothing is compiled when interpreting", allow_module_level=True)

from fakes.triton_compile import Compiled, compile_launch, recorded
from hotrack.kernels.paged import HeadShape, LayerKV
from hotrack.kernels.triton import attention_decode, attention_prefill, rms_norm, rope_cache
from hotrack.kernels.triton.device import Device

DEVICES = {
    80: Device(163 << 10, 108),
    89: Device(99 << 10, 128),
    90: Device(227 << 10, 132),
    100: Device(227 << 10, 148),
    120: Device(99 << 10, 170),
}
QWEN3_30B = (HeadShape(32, 4, 128), 128)
SHAPES = [QWEN3_30B, (HeadShape(8, 1, 192), 128), (HeadShape(14, 2, 64), 64), (HeadShape(8, 4, 256), 256)]
LAYERS = 48


def meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def a_layer(heads: HeadShape, v_dim: int) -> LayerKV:
    K, d = heads.num_kv_heads, heads.head_dim
    row = LAYERS * K * 16 * (d + v_dim)
    k, v = (meta(8, row).as_strided((8, K, 16, n), (row, 16 * n, n, 1)) for n in (d, v_dim))
    return LayerKV(k, v, None, None)


def attention_launches(
    monkeypatch: pytest.MonkeyPatch, device: Device, heads: HeadShape, v_dim: int, window: int | None
):
    for module in (attention_decode, attention_prefill):
        monkeypatch.setattr(module, "device_of", lambda q: device)
    kv, int32 = a_layer(heads, v_dim), torch.int32
    q = meta(64, heads.num_heads + 2 * heads.num_kv_heads, heads.head_dim)[:, : heads.num_heads]
    tables, lens, starts = meta(64, 512, dtype=int32), meta(64, dtype=int32), meta(65, dtype=int32)
    sinks = None if window is None else meta(heads.num_heads)
    options = {"window": window, "sinks": sinks}
    with recorded(attention_decode, attention_prefill) as launches:
        attention_decode.decode_attention(q[:1], kv, tables[:1], lens[:1], 8192, 0.1, **options)
        if window is None:
            attention_decode.decode_attention(
                q, kv, tables[:32], lens[:32], 8192, 0.1, query_start=starts[:33], max_query_len=2
            )
        attention_prefill.prefill_attention(q, kv, tables, starts, lens, 64, 0.1, **options)
    return launches


def check(built: Compiled, device: Device) -> None:
    assert built.cubin
    assert built.shared <= device.shared_bytes, built.name


@pytest.mark.parametrize("capability", DEVICES)
def test_attention_compiles(monkeypatch: pytest.MonkeyPatch, capability: int) -> None:
    device = DEVICES[capability]
    launches = attention_launches(monkeypatch, device, *QWEN3_30B, None)
    built = [compile_launch(launch, capability) for launch in launches]
    assert [b.name for b in built] == ["_attend", "_merge", "_attend", "_merge", "_attend"]
    for each in built:
        check(each, device)
    for attend in (built[0], built[-1]):
        assert "mma" in attend.ptx
        assert "cp.async.cg.shared.global" in attend.ptx  # 16 bytes at a time
    if capability == 90:
        assert "wgmma.mma_async" in built[-1].ptx


@pytest.mark.slow
@pytest.mark.parametrize("window", [None, 128])
@pytest.mark.parametrize(("heads", "v_dim"), SHAPES)
@pytest.mark.parametrize("capability", DEVICES)
def test_attention_of_other_shapes_compiles(
    monkeypatch: pytest.MonkeyPatch, capability: int, heads: HeadShape, v_dim: int, window: int | None
) -> None:
    device = DEVICES[capability]
    for launch in attention_launches(monkeypatch, device, heads, v_dim, window):
        check(compile_launch(launch, capability), device)


@pytest.mark.parametrize("capability", [80, 90])
def test_elementwise_kernels_compile(capability: int) -> None:
    heads, width = QWEN3_30B
    kv, weight = a_layer(heads, width), meta(width)
    with recorded(rope_cache, rms_norm) as launches:
        for norms in (None, (weight, weight)):
            rope_cache.rotate_and_cache(
                meta(64, 40 * width), heads, meta(64, 1, width), meta(64, 1, width), kv,
                meta(64, dtype=torch.int64), norms, 1e-6,
            )  # fmt: skip
        rms_norm.rms_norm(meta(8, 2048), meta(2048), 1e-6)
        rms_norm.add_rms_norm(meta(8, 2048), meta(8, 2048), meta(2048), 1e-6)
    for launch in launches:
        built = compile_launch(launch, capability)
        check(built, DEVICES[capability])
        assert ".v4." in built.ptx or ".v2." in built.ptx
