"""Quantised formats against their definitions, and quantising against dequantising."""

import pytest
import torch

from hotrack.kernels.reference.quant import (
    E2M1_VALUES,
    decode_e2m1,
    decode_e4m3,
    decode_e8m0,
    dequantise_fp8,
    dequantise_mxfp4,
    encode_e8m0,
    power_of_two_above,
    quantise_fp8,
    quantise_mxfp4,
)

GENERATOR = torch.Generator().manual_seed(3)


def test_every_e8m0_byte():
    found = decode_e8m0(torch.arange(256, dtype=torch.int32).to(torch.uint8))
    assert found[:255].double().tolist() == [2.0 ** (byte - 127) for byte in range(255)]
    assert found[255].isnan()


def test_e8m0_bytes_come_back_and_torch_agrees():
    every = torch.arange(1, 255, dtype=torch.int32).to(torch.uint8)
    assert torch.equal(encode_e8m0(decode_e8m0(every)), every)
    assert torch.equal(
        decode_e8m0(every.view(torch.float8_e8m0fnu)), every.view(torch.float8_e8m0fnu).float()
    )


def test_every_e4m3_and_e2m1_code():
    every = torch.arange(256, dtype=torch.int32).to(torch.uint8)
    typed = every.view(torch.float8_e4m3fn)
    expected = typed.float()
    assert torch.equal(decode_e4m3(every).nan_to_num(999.0), expected.nan_to_num(999.0))
    assert torch.equal(decode_e4m3(typed).signbit(), expected.signbit())
    signed = [*E2M1_VALUES, *(-v for v in E2M1_VALUES)]
    pairs = decode_e2m1(every[:, None])
    assert pairs.tolist() == [[signed[byte % 16], signed[byte // 16]] for byte in range(256)]


def test_power_of_two_above():
    values = torch.tensor([1.0, 1.0000001, 0.3, 0.25, 3.0, 2.0**-126, 448.0])
    assert power_of_two_above(values).tolist() == [1.0, 2.0, 0.5, 0.25, 4.0, 2.0**-126, 512.0]


@pytest.mark.parametrize("power_of_two", [False, True])
@pytest.mark.parametrize("block", [(128, 128), (32, 64), None])
@pytest.mark.parametrize("shape", [(256, 256), (300, 200), (1, 7)])
def test_fp8_error_is_half_a_step(shape, block, power_of_two):
    """A value in [2^e, 2^(e+1)) has steps of 2^(e-3); the smallest ones of 2^-9; times the scale."""
    x = torch.randn(shape, generator=GENERATOR)
    weight, scale = quantise_fp8(x, block, power_of_two=power_of_two)
    assert weight.dtype is torch.float8_e4m3fn
    size = block or shape
    assert scale.shape == (-(-shape[0] // size[0]), -(-shape[1] // size[1]))
    back = dequantise_fp8(weight, scale, size)
    each = scale.repeat_interleave(size[0], 0)[: shape[0]].repeat_interleave(size[1], 1)[:, : shape[1]]
    step = torch.maximum(x.abs() / 16, each * 2.0**-10)
    assert ((back - x).abs() <= step * 1.0001).all()
    if power_of_two:
        assert torch.equal(decode_e8m0(encode_e8m0(scale)), scale)


def test_fp8_blocks_do_not_share_scales():
    """An outlier costs precision in its own block only."""
    x = torch.randn(256, 256, generator=GENERATOR)
    x[0, 0] = 1e6
    weight, scale = quantise_fp8(x, (128, 128))
    error = (dequantise_fp8(weight, scale, (128, 128)) - x).abs()
    assert error[:128, :128].max() > 0.5
    assert error[128:].max() < 0.2
    assert error[:, 128:].max() < 0.2


def test_zeros_stay_zeros_with_finite_scales():
    weight, scale = quantise_fp8(torch.zeros(4, 4), (2, 2))
    assert scale.tolist() == [[1.0, 1.0]] * 2
    assert not dequantise_fp8(weight, scale, (2, 2)).any()
    packed, scale = quantise_mxfp4(torch.zeros(1, 32))
    assert scale.tolist() == [[1.0]]
    assert not dequantise_mxfp4(packed, scale).any()


def test_mxfp4_has_the_even_column_in_the_low_bits():
    packed = torch.zeros(1, 16, dtype=torch.uint8)
    packed[0, 0] = 0x7 | 0x9 << 4
    assert dequantise_mxfp4(packed, torch.tensor([[2.0]]))[0, :3].tolist() == [12.0, -1.0, 0.0]


def test_mxfp4_keeps_its_own_values_and_rounds_ties_to_even():
    own = torch.tensor([*E2M1_VALUES, *(-v for v in E2M1_VALUES)])
    ties = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0])
    packed, scale = quantise_mxfp4(torch.cat((own, ties, -ties))[None])
    assert scale.tolist() == [[1.0]]
    back = dequantise_mxfp4(packed, scale)[0]
    assert torch.equal(back[:16], own)
    assert back[16:24].tolist() == [0.0, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0, 6.0]
    assert torch.equal(back[24:], -back[16:24])


def test_mxfp4_groups_have_their_own_power_of_two():
    x = torch.randn(64, 96, generator=GENERATOR) * 2.0 ** torch.arange(3).repeat_interleave(32)
    packed, scale = quantise_mxfp4(x)
    assert packed.shape == (64, 48)
    assert scale.shape == (64, 3)
    assert torch.equal(decode_e8m0(encode_e8m0(scale)), scale)
    error = (dequantise_mxfp4(packed, scale) - x).abs().unflatten(1, (3, 32)).amax(2)
    assert (error <= scale).all()  # half of the widest step, 4 to 6
