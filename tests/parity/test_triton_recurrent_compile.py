"""The recurrent kernels compile for every family of NVIDIA GPUs at Qwen3-Next's shape; no GPU needed."""

import os

import pytest
import torch

pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("nothing is compiled when interpreting", allow_module_level=True)

from fakes.triton_compile import compile_launch, recorded
from hotrack.kernels.recurrent import StatePlan
from hotrack.kernels.triton import recurrent, recurrent_steps


def meta(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


@pytest.mark.parametrize("capability", [80, 90, 120])
def test_one_token_compiles(capability: int) -> None:
    B, Hk, Hv, d = 64, 16, 32, 128
    q, k, v = (meta(B, heads, d, dtype=torch.bfloat16) for heads in (Hk, Hk, Hv))
    rows = meta(B, dtype=torch.int64)
    plan = StatePlan(rows, rows, meta(B, dtype=torch.bool), meta(B + 1, dtype=torch.int32), [1] * B, B)
    with recorded(recurrent, recurrent_steps) as launches:
        recurrent.delta_step(q, k, v, meta(B, Hv), meta(B, Hv), meta(100, Hv, d, d), plan)
        x, weight, states = (meta(*s, dtype=torch.bfloat16) for s in ((B, 8192), (8192, 4), (100, 3, 8192)))
        recurrent_steps.conv_step(x, weight, states, plan)
        recurrent_steps.gated_rms_norm(meta(B, Hv, d), v, x[0, :d], 1e-6)
        recurrent_steps.delta_gates(x[:, :Hv], x[:, Hv : 2 * Hv], meta(Hv), meta(Hv))
    assert len(launches) == 4
    for launch in launches:
        compiled = compile_launch(launch, capability)
        assert compiled.shared <= 16 << 10
        assert ".local" not in compiled.ptx, f"{compiled.name}: registers spill"
