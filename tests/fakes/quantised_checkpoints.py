"""Tiny checkpoints in the published quantised formats, and what their weights are worth."""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from fakes.tiny_checkpoints import tiny_weights, write_tiny
from hotrack.kernels.reference.quant import (
    dequantise_fp8,
    dequantise_mxfp4,
    encode_e8m0,
    quantise_fp8,
    quantise_mxfp4,
)

PLAIN = (
    "embed",
    "lm_head",
    "norm",
    "mlp.gate.",
    "in_proj_ba",
    "conv1d",
    "A_log",
    "dt_bias",
    "_gate.",
    "bias",
)


def is_plain(name: str) -> bool:
    """What every publisher leaves as it is."""
    return any(part in name for part in PLAIN)


def write_quantised(
    folder: Path,
    family: str,
    *,
    block: tuple[int, int] | None = (32, 64),
    scale: str = "float32",
    experts: str = "fp8",
    ignored: tuple[str, ...] = (),
    seed: int = 0,
    **overrides: object,
) -> dict[str, torch.Tensor]:
    """Write a checkpoint as ``write_tiny`` does, quantised; returns its weights dequantised, float32.

    ``scale``: 'float32', 'bfloat16', 'e8m0' or 'uint8' (the same bytes).
    """
    write_tiny(folder, family, seed, **overrides)
    config = json.loads((folder / "config.json").read_text())
    stored: dict[str, torch.Tensor] = {}
    values: dict[str, torch.Tensor] = {}
    for name, weight in tiny_weights(config, seed).items():
        if is_plain(name) or any(name.startswith(i + ".") for i in ignored):
            stored[name], values[name] = weight, weight.float()
        elif experts == "mxfp4" and ".experts." in name:
            packed, scales = quantise_mxfp4(weight)
            stored[name], stored[name.removesuffix(".weight") + ".scale"] = packed, e8m0(scales, scale)
            values[name] = dequantise_mxfp4(packed, scales)
        else:
            stored |= fp8(name, weight, block, scale, values)
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    config["quantization_config"] = {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": None if block is None else list(block),
        "modules_to_not_convert": list(ignored),
        **({"scale_fmt": "ue8m0"} if scale in ("e8m0", "uint8") else {}),
        **({"store_dtype": "mxfp4", "mxfp4_block_size": 32} if experts == "mxfp4" else {}),
    }
    (folder / "config.json").write_text(json.dumps(config))
    return values


def fp8(name, weight, block, scale, values):
    power_of_two = scale in ("e8m0", "uint8")
    # A fused projection was dealt out to 4 ranks first: each share has blocks of its own.
    shares = weight.chunk(4) if name.endswith("qkv_proj.weight") and block else [weight]
    made = [quantise_fp8(share, block, power_of_two=power_of_two) for share in shares]
    if scale == "bfloat16":
        made = [(quantised, scales.bfloat16().float()) for quantised, scales in made]
    values[name] = torch.cat([dequantise_fp8(*each, block or tuple(weight.shape)) for each in made])
    quantised, scales = (torch.cat(each) for each in zip(*made, strict=True))
    if power_of_two:
        return {name: quantised, name.removesuffix(".weight") + ".scale": e8m0(scales, scale)}
    kept = scales.to(getattr(torch, scale))
    if block is None:
        return {name: quantised, name + "_scale": kept.view(())}
    return {name: quantised, name + "_scale_inv": kept}


def e8m0(scales, spelling):
    encoded = encode_e8m0(scales)
    return encoded if spelling == "uint8" else encoded.view(torch.float8_e8m0fnu)
