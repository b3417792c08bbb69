"""One token of the gated delta rule in Triton against the reference, interpreted or on a GPU."""

import importlib.util
import os

import pytest
import torch

if importlib.util.find_spec("triton") is None:
    pytest.skip("needs Triton", allow_module_level=True)
if os.environ.get("TRITON_INTERPRET") == "1":
    from fakes.triton_interpreter import repair

    repair()
elif not torch.cuda.is_available():
    pytest.skip("needs a GPU, or TRITON_INTERPRET=1", allow_module_level=True)

from hotrack.kernels.recurrent import StatePlan
from hotrack.kernels.reference.gated_delta import gated_delta_rule
from hotrack.kernels.triton.recurrent import delta_step

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.mark.parametrize(("Hk", "Hv", "k_dim", "v_dim"), [(2, 4, 128, 128), (1, 3, 24, 40), (4, 4, 16, 16)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_token(Hk: int, Hv: int, k_dim: int, v_dim: int, dtype: torch.dtype) -> None:
    B, N = 5, 9
    generator = torch.Generator(DEVICE).manual_seed(2)

    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device=DEVICE)

    # q, k and v are runs of one wider row; a packed cache row has more than one layer's states.
    packed = randn(B, 2 * Hk * k_dim + Hv * v_dim + 8).to(dtype)
    q, k, v, _ = packed.split((Hk * k_dim, Hk * k_dim, Hv * v_dim, 8), -1)
    q, k, v = q.unflatten(1, (Hk, k_dim)), k.unflatten(1, (Hk, k_dim)), v.unflatten(1, (Hv, v_dim))
    g, beta = -randn(B, Hv).abs(), randn(B, Hv).sigmoid()
    rows = randn(N, Hv * k_dim * v_dim + 16)
    rows[4] = float("nan")  # belongs to a sequence that starts here
    states = rows[:, 16:].view(N, Hv, k_dim, v_dim)
    read = torch.tensor([7, 0, 4, 2, 1], device=DEVICE)
    write = torch.tensor([7, 3, 4, 2, 8], device=DEVICE)
    fresh = torch.tensor([False, False, True, False, False], device=DEVICE)
    starts = torch.arange(B + 1, dtype=torch.int32, device=DEVICE)
    plan = StatePlan(read, write, fresh, starts, [1] * B, B)
    expected_rows = rows.clone()
    expected = gated_delta_rule(q, k, v, g, beta, expected_rows[:, 16:].view_as(states), plan)
    torch.testing.assert_close(delta_step(q, k, v, g, beta, states, plan), expected, atol=2e-6, rtol=1e-5)
    torch.testing.assert_close(rows, expected_rows, atol=2e-6, rtol=1e-5, equal_nan=True)
    assert not states.isnan().any()
