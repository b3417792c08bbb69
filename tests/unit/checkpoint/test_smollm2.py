"""The real SmolLM2-135M-Instruct GGUF, when it is in the cache (``hotrack pull smollm2``)."""

import gguf
import numpy as np
import pytest
import torch

from hotrack.checkpoint.load import load_weights
from hotrack.checkpoint.open import open_checkpoint
from hotrack.checkpoint.targets import LoadTarget, Source
from hotrack.checkpoint.tokenizer import load_tokenizer
from hotrack.hub.demo import SMOLLM2
from hotrack.modelspec.bytes import num_parameters
from hotrack.modelspec.gguf import read_gguf_header

RESOLVED = SMOLLM2.resolved()
pytestmark = pytest.mark.skipif(RESOLVED is None, reason="smollm2 is not in the cache")


def test_spec_and_weights():
    with open_checkpoint(RESOLVED) as ckpt:
        spec = ckpt.spec
        assert (spec.num_layers, spec.hidden_size, spec.num_heads, spec.num_kv_heads) == (30, 576, 9, 3)
        assert (spec.rms_norm_eps, spec.rope.theta, spec.tie_word_embeddings) == (1e-5, 1e5, True)
        assert num_parameters(spec) == sum(np.prod(ckpt.info(n).shape) for n in ckpt.names()) == 134_515_008
        targets = {
            n: LoadTarget(torch.full(ckpt.info(n).shape, float("nan"), dtype=torch.bfloat16), (Source(n),))
            for n in ckpt.names()
        }
        load_weights(ckpt, targets)
    assert all(bool(t.param.isfinite().all()) for t in targets.values())
    q = "model.layers.7.self_attn.q_proj.weight"
    assert torch.equal(targets[q].param, reference_q("blk.7.attn_q.weight", heads=9).bfloat16())


def reference_q(name: str, heads: int) -> torch.Tensor:
    """The package's dequantisation, and the row order undone in the plain way."""
    tensor = read_gguf_header(RESOLVED.path).tensors[name]
    raw = np.fromfile(RESOLVED.path, dtype=np.uint8, count=tensor.nbytes, offset=tensor.offset)
    rows = gguf.quants.dequantize(raw.reshape(tensor.shape[0], -1), gguf.GGMLQuantizationType(tensor.type_id))
    half_split = rows.reshape(heads, tensor.shape[0] // heads // 2, 2, -1).swapaxes(1, 2)
    return torch.from_numpy(np.ascontiguousarray(half_split.reshape(rows.shape)))


def test_tokenizer():
    assets = load_tokenizer(RESOLVED)
    assert (assets.bos_token, assets.eos_token, assets.add_bos) == ("<|im_start|>", "<|im_end|>", False)
    assert "You are a helpful AI assistant named SmolLM" in assets.chat_template
    text = "<|im_start|>user\nIt's 2024: naïve café!<|im_end|>\n"
    encoding = assets.tokenizer.encode(text)
    assert assets.tokenizer.decode(encoding.ids, skip_special_tokens=False) == text
    assert encoding.tokens[:3] == ["<|im_start|>", "user", "Ċ"]
    assert [t for t in encoding.tokens if t.isdigit()] == ["2", "0", "2", "4"]
    assert (encoding.ids[0], encoding.ids[-2]) == (1, 2)
