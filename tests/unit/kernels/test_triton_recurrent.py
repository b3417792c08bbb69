"""Decode steps of gated DeltaNet in Triton against the reference, interpreted or on a GPU."""

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
from hotrack.kernels.reference import gated_delta as reference
from hotrack.kernels.reference.causal_conv import causal_conv1d
from hotrack.kernels.triton.recurrent import delta_step
from hotrack.kernels.triton.recurrent_steps import conv_step, delta_gates, gated_rms_norm

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
ROWS = 9


def randn(*shape: int, seed: int = 2) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator(DEVICE).manual_seed(seed), device=DEVICE)


def five_decodes() -> StatePlan:
    """One starts in row 4; two leave a snapshot behind."""
    read, write = (torch.tensor(rows, device=DEVICE) for rows in ([7, 0, 4, 2, 1], [7, 3, 4, 2, 8]))
    fresh = torch.tensor([False, False, True, False, False], device=DEVICE)
    return StatePlan(read, write, fresh, torch.arange(6, dtype=torch.int32, device=DEVICE), [1] * 5, 5)


def packed_states(*shape: int, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    """Cache rows with something else before the states; and the states [ROWS, *shape]."""
    size = torch.Size(shape).numel()
    rows = randn(ROWS, 16 + size, seed=3).to(dtype)
    rows[4] = float("nan")
    return rows, rows[:, 16:].view(ROWS, *shape)


@pytest.mark.parametrize(("Hk", "Hv", "k_dim", "v_dim"), [(2, 4, 128, 128), (1, 3, 24, 40), (4, 4, 16, 16)])
@DTYPES
def test_one_token(Hk: int, Hv: int, k_dim: int, v_dim: int, dtype: torch.dtype) -> None:
    B = 5
    # q, k and v are runs of one wider row; a packed cache row has more than one layer's states.
    packed = randn(B, 2 * Hk * k_dim + Hv * v_dim + 8).to(dtype)
    q, k, v, _ = packed.split((Hk * k_dim, Hk * k_dim, Hv * v_dim, 8), -1)
    q, k, v = q.unflatten(1, (Hk, k_dim)), k.unflatten(1, (Hk, k_dim)), v.unflatten(1, (Hv, v_dim))
    g, beta = -randn(B, Hv).abs(), randn(B, Hv, seed=4).sigmoid()
    rows, states = packed_states(Hv, k_dim, v_dim)
    plan = five_decodes()
    expected_rows = rows.clone()
    expected = reference.gated_delta_rule(q, k, v, g, beta, expected_rows[:, 16:].view_as(states), plan)
    torch.testing.assert_close(delta_step(q, k, v, g, beta, states, plan), expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(rows, expected_rows, atol=1e-5, rtol=1e-5, equal_nan=True)
    assert not states.isnan().any()


@DTYPES
@pytest.mark.parametrize("channels", [512, 40])
def test_convolution(channels: int, dtype: torch.dtype) -> None:
    rows, states = packed_states(3, channels, dtype=dtype)
    expected_rows = rows.clone()
    x, weight = randn(5, channels + 8).to(dtype)[:, :channels], randn(channels, 4, seed=5).to(dtype)
    expected = causal_conv1d(x, weight, expected_rows[:, 16:].view_as(states), five_decodes())
    torch.testing.assert_close(conv_step(x, weight, states, five_decodes()), expected)
    assert torch.equal(states, expected_rows[:, 16:].view_as(states))


@DTYPES
def test_gates(dtype: torch.dtype) -> None:
    b, a = (30 * randn(7, 80)).to(dtype).chunk(2, -1)
    a_log, dt_bias = randn(40, seed=6), randn(40, seed=7)
    for ours, theirs in zip(
        delta_gates(a, b, a_log, dt_bias), reference.delta_gates(a, b, a_log, dt_bias), strict=True
    ):
        torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=1e-5)


@DTYPES
@pytest.mark.parametrize("size", [128, 12])
def test_gated_norm(size: int, dtype: torch.dtype) -> None:
    x, weight = randn(6, 3, size), randn(size, seed=8).to(dtype)
    gate = randn(6, 4 * size, seed=9).to(dtype)[:, size:].view(6, 3, size)
    expected = reference.gated_rms_norm(x, gate, weight, 1e-6)
    torch.testing.assert_close(gated_rms_norm(x, gate, weight, 1e-6), expected)
