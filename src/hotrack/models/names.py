"""Maps parameters to checkpoint tensors by a table of patterns.

A table's key is a parameter name without its ``.weight`` / ``.bias`` suffix, followed by ``[part]`` when
several checkpoint tensors fill it; the value is the checkpoint's name. Every ``*`` stands for one number (a
layer, an expert), in order.
"""

import re
from collections.abc import Mapping

NameTable = Mapping[str, str]

_NUMBER = re.compile(r"(?<![A-Za-z_0-9])\d+(?![A-Za-z_0-9])")

DECODER: dict[str, str] = {
    "embed_tokens": "model.embed_tokens",
    "layers.*.input_layernorm": "model.layers.*.input_layernorm",
    "layers.*.self_attn.qkv_proj[q]": "model.layers.*.self_attn.q_proj",
    "layers.*.self_attn.qkv_proj[k]": "model.layers.*.self_attn.k_proj",
    "layers.*.self_attn.qkv_proj[v]": "model.layers.*.self_attn.v_proj",
    "layers.*.self_attn.o_proj": "model.layers.*.self_attn.o_proj",
    "layers.*.post_attention_layernorm": "model.layers.*.post_attention_layernorm",
    "layers.*.mlp.gate_up_proj[gate]": "model.layers.*.mlp.gate_proj",
    "layers.*.mlp.gate_up_proj[up]": "model.layers.*.mlp.up_proj",
    "layers.*.mlp.down_proj": "model.layers.*.mlp.down_proj",
    "norm": "model.norm",
    "lm_head": "lm_head",
}

EXPERTS: dict[str, str] = {
    "layers.*.mlp.gate": "model.layers.*.mlp.gate",
    "layers.*.mlp.experts.gate_up_proj[*.gate]": "model.layers.*.mlp.experts.*.gate_proj.weight",
    "layers.*.mlp.experts.gate_up_proj[*.up]": "model.layers.*.mlp.experts.*.up_proj.weight",
    "layers.*.mlp.experts.down_proj[*]": "model.layers.*.mlp.experts.*.down_proj.weight",
}


def checkpoint_name(table: NameTable, param: str, part: str) -> str:
    """The checkpoint tensor for ``part`` ('' if it is the only one) of ``param``; KeyError without an
    entry."""
    stem, dot, suffix = param.rpartition(".")
    if suffix not in ("weight", "bias"):
        stem, dot, suffix = param, "", ""
    key = f"{stem}[{part}]" if part else stem
    numbers = iter(_NUMBER.findall(key))
    found = table[_NUMBER.sub("*", key)]
    return re.sub(r"\*", lambda _: next(numbers), found) + dot + suffix
