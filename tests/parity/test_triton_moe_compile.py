"""The MoE, linear and sampling kernels compile for every family of NVIDIA GPUs and fit its shared memory."""

import os

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("nothing is compiled when interpreting", allow_module_level=True)

from fakes.triton_compile import compile_launch, recorded
from hotrack.kernels.triton import gemv, moe_grouped, moe_routing, rms_norm, sampling, silu
from hotrack.kernels.triton.device import Device

DEVICES = {
    80: Device(163 << 10, 132),
    89: Device(99 << 10, 132),
    90: Device(227 << 10, 132),
    100: Device(227 << 10, 132),
    120: Device(99 << 10, 132),
}
FAMILIES = [pytest.param(cc, marks=() if cc in (80, 90) else pytest.mark.slow) for cc in DEVICES]
D, I, E, K = 2048, 768, 128, 8  # noqa: E741


def meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def check(launches: list, capability: int) -> dict[str, str]:
    """name -> PTX; every program fits."""
    found = {}
    for launch in launches:
        built = compile_launch(launch, capability)
        assert built.shared <= DEVICES[capability].shared_bytes, built.name
        print(capability, built.name, f"{built.shared} bytes shared", resources(built.cubin))
        found[built.name] = built.ptx
    return found


def resources(cubin: bytes) -> str:
    """Registers and spilled bytes, where Triton carries the tool that reads them."""
    import subprocess
    import tempfile

    import triton

    tool = triton.knobs.nvidia.cuobjdump.path
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        shown = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True)
    return shown.stdout.strip().rsplit("\n", 1)[-1].strip()


@pytest.mark.parametrize("capability", FAMILIES)
@pytest.mark.parametrize("T", [1, 8, 256, 600, 65536])
def test_experts_compile(monkeypatch: pytest.MonkeyPatch, capability: int, T: int) -> None:
    monkeypatch.setattr(moe_grouped, "device_of", lambda x: DEVICES[capability])
    slots, weights = meta(T, K, dtype=torch.int32), meta(T, K, dtype=torch.float32)
    with recorded(moe_grouped, moe_routing) as launches:
        moe_grouped.moe_experts(meta(T, D), meta(E, 2 * I, D), meta(E, D, I), slots, weights)
    built = check(launches, capability)
    if T == 1:
        assert list(built) == ["_gate_up_direct", "_down_direct"]
        assert all("ld.global.L1::evict_first.L2::cache_hint.v4" in ptx for ptx in built.values())
    else:
        assert all("cp.async.cg.shared.global" in built[name] for name in ("_gate_up_blocks", "_down_blocks"))
    if T == 65536 and capability == 90:
        assert "wgmma.mma_async" in built["_gate_up_blocks"]


@pytest.mark.parametrize("capability", [cc for cc in DEVICES if cc > 80])
@pytest.mark.parametrize("T", [1, 8, pytest.param(8192, marks=pytest.mark.slow)])
def test_float8_experts_compile(monkeypatch: pytest.MonkeyPatch, capability: int, T: int) -> None:
    monkeypatch.setattr(moe_grouped, "device_of", lambda x: DEVICES[capability])
    slots, weights = meta(T, K, dtype=torch.int32), meta(T, K, dtype=torch.float32)
    float8, float32 = torch.float8_e4m3fn, torch.float32
    scales = meta(E, 12, 16, dtype=float32), meta(E, 16, 6, dtype=float32)
    with recorded(moe_grouped, moe_routing) as launches:
        moe_grouped.moe_experts(
            meta(T, D),
            meta(E, 2 * I, D, dtype=float8),
            meta(E, D, I, dtype=float8),
            slots,
            weights,
            scales=scales,
        )
    check(launches, capability)


def test_kernels_may_begin_before_the_last_one_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every kernel of a decode step waits; those whose weights are known load some first."""
    for module in (moe_grouped, moe_routing, gemv, rms_norm):
        monkeypatch.setattr(module, "dependent", lambda x: {"PDL": True, "launch_pdl": True})
    for module in (moe_grouped, gemv):
        monkeypatch.setattr(module, "device_of", lambda x: DEVICES[90])
    slots, weights = meta(1, K, dtype=torch.int32), meta(1, K, dtype=torch.float32)
    with recorded(moe_grouped, moe_routing, gemv, rms_norm) as launches:
        rms_norm.rms_norm(meta(1, D), meta(D), 1e-6)
        gemv.linear(meta(1, D), meta(5120, D))
        moe_routing.softmax_topk(meta(1, E), K, True)
        moe_grouped.moe_experts(meta(1, D), meta(E, 2 * I, D), meta(E, D, I), slots, weights)
        moe_routing.sort_choices(slots, E, 16)
        moe_grouped.combine(meta(K, D), weights)
    early = set()
    for name, ptx in check(launches, 90).items():
        wait = ptx.index("griddepcontrol.wait")
        assert wait < ptx.index("griddepcontrol.launch_dependents") < ptx.index("st.global")
        if 0 <= ptx.find("ld.global") < wait:
            early.add(name)
    assert early == {"_rms_norm", "_one_row", "_down_direct"}


@pytest.mark.parametrize("capability", [80, 90])
def test_elementwise_kernels_compile(capability: int) -> None:
    with recorded(moe_routing, silu) as launches:
        moe_routing.softmax_topk(meta(64, E, dtype=torch.float32), K, True)
        moe_routing.softmax_topk(meta(4096, 512), K, False)
        silu.silu_and_mul(meta(64, 2 * I))
    check(launches, capability)


@pytest.mark.parametrize("capability", FAMILIES)
def test_linear_compiles(monkeypatch: pytest.MonkeyPatch, capability: int) -> None:
    monkeypatch.setattr(gemv, "device_of", lambda x: DEVICES[capability])
    for M in (1, 8):
        for N, width in ((5120, 2048), (2048, 4096), (151_936, 2048)):
            with recorded(gemv) as launches:
                gemv.linear(meta(M, width), meta(N, width), residual=meta(M, N) if N == 2048 else None)
            (ptx,) = check(launches, capability).values()
            assert ("evict_first.L2::cache_hint.v4" if M == 1 else "cp.async.cg.shared.global") in ptx


@pytest.mark.parametrize("capability", FAMILIES)
def test_sampling_compiles(capability: int) -> None:
    float32, int64 = torch.float32, torch.int64
    one = meta(64, dtype=float32)
    rows = sampling.SamplingRows(
        one, meta(64, dtype=torch.int32), one, one, meta(64, dtype=int64), meta(64, dtype=int64)
    )
    with recorded(sampling) as launches:
        sampling.sample(meta(64, 151_936, dtype=float32), rows)
    check(launches, capability)
