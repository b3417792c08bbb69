"""Quantised weight formats: what the stored bytes mean, and how values become them.

FP8 is E4M3 with one scale per block; MXFP4 is two E2M1 values per byte with one power of two per 32 (OCP
Microscaling Formats specification 1.0). Power-of-two scales may be stored as E8M0 bytes.
"""

from functools import cache

import torch
from torch import Tensor

E4M3_MAX = 448.0
E2M1_MAX = 6.0
MXFP4_GROUP = 32
E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
E2M1_MIDPOINTS = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)


def decode_e8m0(scale: Tensor) -> Tensor:
    """uint8 or float8_e8m0fnu -> float32 of the same shape: 2^(byte - 127); byte 255 is NaN."""
    bits = scale.view(torch.uint8).to(torch.int32)
    value = (bits << 23).view(torch.float32)
    value = torch.where(bits == 0, 2.0**-127, value)  # a subnormal, which has no exponent bits
    return torch.where(bits == 255, torch.nan, value)


def encode_e8m0(scale: Tensor) -> Tensor:
    """float32 powers of two, 2^-126 to 2^127 -> uint8 of the same shape."""
    return (scale.view(torch.int32) >> 23).to(torch.uint8)


def decode_e4m3(raw: Tensor) -> Tensor:
    """uint8 or float8_e4m3fn -> float32 of the same shape. By table: five times as fast as torch's cast."""
    codes = raw.view(torch.uint8)
    return _e4m3_table(codes.device).index_select(0, codes.flatten().int()).view(codes.shape)


def decode_e2m1(packed: Tensor) -> Tensor:
    """uint8 [..., C / 2], the even column in the low bits -> float32 [..., C]"""
    pairs = _e2m1_pairs(packed.device).index_select(0, packed.flatten().int())
    return pairs.view(torch.float32).view(*packed.shape[:-1], 2 * packed.shape[-1])


@cache
def _e4m3_table(device: torch.device) -> Tensor:
    return torch.arange(256, device=device).to(torch.uint8).view(torch.float8_e4m3fn).float()


@cache
def _e2m1_pairs(device: torch.device) -> Tensor:
    """Of every byte its two values, as the bits of one float64: a look-up that moves both at once."""
    values = torch.tensor([*E2M1_VALUES, *(-v for v in E2M1_VALUES)], device=device)
    low, high = values.repeat(16), values.repeat_interleave(16)
    return torch.stack((low, high), -1).view(torch.float64).flatten()


def scale_columns(values: Tensor, scales: Tensor, block: int) -> Tensor:
    """values float32 [R, C] times scales [R, ceil(C / block)], in place."""
    columns = values.shape[1]
    if columns % block == 0:
        values.view(len(values), -1, block).mul_(scales[..., None])
        return values
    return values.mul_(scales.repeat_interleave(block, 1)[:, :columns])


def power_of_two_above(value: Tensor) -> Tensor:
    """The least power of two that is not below ``value`` (positive normal float32)."""
    mantissa, exponent = torch.frexp(value)  # mantissa in [0.5, 1)
    return torch.ldexp(torch.ones_like(value), exponent - (mantissa == 0.5).int())


def expand_blocks(scale: Tensor, shape: tuple[int, int], block: tuple[int, int]) -> Tensor:
    """scale [ceil(R / block[0]), ceil(C / block[1])] -> one scale per element of ``shape`` [R, C]"""
    rows = scale.repeat_interleave(block[0], 0)[: shape[0]]
    return rows.repeat_interleave(block[1], 1)[:, : shape[1]]


def dequantise_fp8(weight: Tensor, scale: Tensor, block: tuple[int, int]) -> Tensor:
    """weight float8_e4m3fn [R, C], scale float32 [ceil(R / block[0]), ceil(C / block[1])] -> float32
    [R, C]"""
    by_row = scale.repeat_interleave(block[0], 0)[: len(weight)]
    return scale_columns(decode_e4m3(weight), by_row, block[1])


def quantise_fp8(
    x: Tensor, block: tuple[int, int] | None, *, power_of_two: bool = False
) -> tuple[Tensor, Tensor]:
    """x [R, C] -> float8_e4m3fn [R, C] and its scales float32 [ceil(R / block[0]), ceil(C / block[1])];
    [1, 1] when ``block`` is None. A block of zeros has scale 1. ``power_of_two``: scales fit E8M0.
    """
    rows, columns = x.shape
    block = block or (max(rows, 1), max(columns, 1))
    scale = _block_amax(x.float(), block) / E4M3_MAX
    scale = torch.where(scale > 0, scale.clamp_min(torch.finfo(torch.float32).tiny), 1.0)
    if power_of_two:
        scale = power_of_two_above(scale)
    scaled = x.float() / expand_blocks(scale, (rows, columns), block)
    return scaled.clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn), scale


def _block_amax(x: Tensor, block: tuple[int, int]) -> Tensor:
    rows, columns = x.shape
    padding = (0, -columns % block[1], 0, -rows % block[0])
    padded = torch.nn.functional.pad(x.abs(), padding)
    return padded.view(-1, block[0], padded.shape[1] // block[1], block[1]).amax((1, 3))


def dequantise_mxfp4(packed: Tensor, scale: Tensor) -> Tensor:
    """packed uint8 [R, C / 2] (the even column in the low bits), scale float32 [R, C / 32] -> float32
    [R, C]"""
    values = decode_e2m1(packed)
    return (values.view(*scale.shape, MXFP4_GROUP) * scale[..., None]).view(values.shape)


def quantise_mxfp4(x: Tensor) -> tuple[Tensor, Tensor]:
    """x [R, C], C a multiple of 32 -> packed uint8 [R, C / 2], scales float32 powers of two [R, C / 32].

    Rounds to nearest, ties to the even code. A group of zeros has scale 1.
    """
    groups = x.float().reshape(len(x), -1, MXFP4_GROUP)
    scale = groups.abs().amax(-1) / E2M1_MAX
    scale = power_of_two_above(torch.where(scale > 0, scale.clamp_min(2.0**-126), 1.0))
    scaled = (groups / scale[..., None]).flatten(-2)
    midpoints = torch.tensor(E2M1_MIDPOINTS, device=x.device)
    below = torch.bucketize(scaled.abs(), midpoints)
    above = torch.bucketize(scaled.abs(), midpoints, right=True)
    codes = torch.where(below % 2 == 0, below, above) + 8 * (scaled < 0)
    pairs = codes.to(torch.uint8).view(len(x), -1, 2)
    return pairs[..., 0] | (pairs[..., 1] << 4), scale
