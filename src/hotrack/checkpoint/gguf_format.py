"""GGUF files as Hugging Face tensors: names mapped, blocks dequantised, llama's q/k row order undone.

llama.cpp stores the q and k rows of Llama models with the two halves of a head interleaved (rotary pairs
adjacent); hotrack rotates halves, as Hugging Face does, so rows are put back while reading.
"""

import re
from functools import partial
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from hotrack.checkpoint.gguf_blocks import DECODERS, decode_reference
from hotrack.checkpoint.safetensors_format import plain
from hotrack.checkpoint.stored import Decode, StoredTensor, TensorFile
from hotrack.core.errors import CheckpointError
from hotrack.modelspec import ModelSpec
from hotrack.modelspec.fields import shorten
from hotrack.modelspec.gguf import GgufHeader, GgufTensor, read_gguf_header, spec_from_gguf

PLAIN = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
GLOBAL_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_gate_inp": "mlp.gate",
}
EXPERT_NAMES = {"ffn_gate_exps": "gate_proj", "ffn_up_exps": "up_proj", "ffn_down_exps": "down_proj"}
LAYER_TENSOR = re.compile(r"blk\.(\d{1,4})\.(\w+)\.(weight|bias)")
GLOBAL_TENSOR = re.compile(r"(\w+)\.(weight|bias)")


def open_gguf(path: Path) -> tuple[ModelSpec, dict[str, StoredTensor], list[TensorFile]]:
    """Spec, tensors under Hugging Face names, open file. On a CheckpointError nothing stays open."""
    header = read_gguf_header(path)
    spec = spec_from_gguf(header)
    file = TensorFile(path)
    try:
        return spec, _tensors(header, spec, file), [file]
    except BaseException:
        file.close()
        raise


def _tensors(header: GgufHeader, spec: ModelSpec, file: TensorFile) -> dict[str, StoredTensor]:
    tensors: dict[str, StoredTensor] = {}
    for tensor in header.tensors.values():
        if layer := LAYER_TENSOR.fullmatch(tensor.name):
            tensors |= _layer(tensor, spec, file, *layer.groups())
        elif (match := GLOBAL_TENSOR.fullmatch(tensor.name)) and match[1] in GLOBAL_NAMES:
            tensors[f"{GLOBAL_NAMES[match[1]]}.{match[2]}"] = _stored(tensor, file, tensor.shape)
        else:
            raise _unknown(file, tensor)
    return tensors


def _layer(
    tensor: GgufTensor, spec: ModelSpec, file: TensorFile, layer: str, part: str, suffix: str
) -> dict[str, StoredTensor]:
    prefix = f"model.layers.{layer}."
    if part in EXPERT_NAMES and suffix == "weight" and len(tensor.shape) == 3:
        num_experts, rows, columns = tensor.shape
        return {
            f"{prefix}mlp.experts.{e}.{EXPERT_NAMES[part]}.weight": _stored(
                tensor, file, (rows, columns), first_row=e * rows
            )
            for e in range(num_experts)
        }
    if part not in LAYER_NAMES:
        raise _unknown(file, tensor)
    permuted = spec.family == "llama" and part in ("attn_q", "attn_k")
    stored = _stored(tensor, file, tensor.shape, row_group=spec.head_dim if permuted else 1)
    return {f"{prefix}{LAYER_NAMES[part]}.{suffix}": stored}


def _stored(
    tensor: GgufTensor, file: TensorFile, shape: tuple[int, ...], *, first_row: int = 0, row_group: int = 1
) -> StoredTensor:
    """``shape`` is all of ``tensor``, or a window of its flattened rows from ``first_row`` on."""
    if shape[0] % row_group:
        raise CheckpointError(
            f"{file.path}: tensor {shorten(tensor.name)!r} has {shape[0]} rows; "
            f"expected a multiple of the head size {row_group}"
        )
    dtype = PLAIN.get(tensor.type)
    if dtype is None and len(shape) == 1:
        raise CheckpointError(f"{file.path}: vector {shorten(tensor.name)!r} is quantised ({tensor.type})")
    decode = plain(dtype) if dtype else DECODERS.get(tensor.type) or partial(decode_reference, tensor.type_id)
    # A row of dimension 0 may hold several stored rows (a stack of matrices) or be one element (a vector).
    row_bytes = tensor.nbytes * prod(shape[1:]) // prod(tensor.shape)
    return StoredTensor(
        file=file,
        offset=tensor.offset + first_row * row_bytes,
        shape=shape,
        dtype=tensor.type if dtype is None else str(dtype).removeprefix("torch."),
        row_bytes=row_bytes,
        decode=partial(_unpermute, decode, row_group) if row_group > 1 else decode,
        row_group=row_group,
    )


def _unpermute(decode: Decode, head_dim: int, raw: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Rows of whole heads: stored row 2i + j of a head is row j * head_dim/2 + i."""
    rows = decode(raw, shape)
    heads = rows.view(-1, head_dim // 2, 2, *shape[1:])  # [H, d/2, 2, in]
    return heads.transpose(1, 2).reshape(shape)


def _unknown(file: TensorFile, tensor: GgufTensor) -> CheckpointError:
    return CheckpointError(f"{file.path} holds tensor {shorten(tensor.name)!r}, which no supported model has")
