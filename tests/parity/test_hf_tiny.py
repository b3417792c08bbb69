"""Logits of tiny random models against Hugging Face transformers, in float32."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from fakes.paged_runner import PagedRunner, SequenceState, load_model
from hotrack.kernels.cpu_ops import attention
from hotrack.models import CausalLM
from hotrack.modelspec.parse import parse_config

TOLERANCE = {"llama": 1e-4, "qwen3": 1e-4, "qwen3_moe": 1e-4, "qwen3_next": 2e-4, "mimo_v2_flash": 1e-4}
TOKENS = 150
FAMILIES = tuple(TOLERANCE)


@dataclass
class Reference:
    """A tiny model in both implementations, two prompts and transformers' logits for them [2, TOKENS, V]."""

    model: CausalLM
    ids: Tensor
    logits: Tensor
    tolerance: float

    @property
    def has_states(self) -> bool:
        """A prefix can only be shared where a step ended."""
        return self.model.spec.gated_delta is not None


def _config(family: str):
    from transformers import LlamaConfig, MiMoV2FlashConfig, Qwen3Config, Qwen3MoeConfig, Qwen3NextConfig

    common = {"vocab_size": 512, "num_hidden_layers": 4, "max_position_embeddings": 1024}
    if family == "llama":
        return LlamaConfig(
            **common, hidden_size=192, intermediate_size=512, num_attention_heads=3, num_key_value_heads=1,
            rope_theta=1e5, tie_word_embeddings=True, rms_norm_eps=1e-5,
        )  # fmt: skip
    if family == "mimo_v2_flash":
        return MiMoV2FlashConfig(
            **common | {"num_hidden_layers": 7}, hidden_size=128, intermediate_size=256,
            num_attention_heads=8, num_key_value_heads=2, head_dim=48, v_head_dim=32, sliding_window=32,
            moe_intermediate_size=64, n_routed_experts=16, num_experts_per_tok=3, n_group=4,
            topk_group=2, routed_scaling_factor=1.5,
        )  # fmt: skip
    common |= {
        "hidden_size": 128,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "rope_theta": 1e6,
    }
    if family == "qwen3":
        return Qwen3Config(**common, intermediate_size=256)
    common |= {"intermediate_size": 256, "moe_intermediate_size": 64, "num_experts_per_tok": 2}
    common |= {"num_experts": 8, "norm_topk_prob": True}
    if family == "qwen3_moe":
        return Qwen3MoeConfig(**common)
    return Qwen3NextConfig(
        **common | {"num_hidden_layers": 8}, shared_expert_intermediate_size=64, linear_num_key_heads=4,
        linear_num_value_heads=8, linear_key_head_dim=16, linear_value_head_dim=16,
    )  # fmt: skip


def _unfuse(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Checkpoint spelling of transformers' stacked experts."""
    out = {}
    for name, tensor in state.items():
        if name.endswith("experts.gate_up_proj"):
            for e, (gate, up) in enumerate(t.chunk(2) for t in tensor):
                stem = name.removesuffix("gate_up_proj")
                out[f"{stem}{e}.gate_proj.weight"], out[f"{stem}{e}.up_proj.weight"] = gate, up
        elif name.endswith("experts.down_proj"):
            for e, down in enumerate(tensor):
                out[f"{name.removesuffix('down_proj')}{e}.down_proj.weight"] = down
        else:
            out[name.replace("self_attn.sinks", "self_attn.attention_sink_bias")] = tensor
    return out


def _reference(family: str) -> Reference:
    from transformers import AutoModelForCausalLM

    config = _config(family)
    theirs = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    generator = torch.Generator().manual_seed(1)
    for name, param in theirs.named_parameters():
        noise = torch.randn(param.shape, generator=generator)
        if "norm" in name:  # Qwen3-Next has all but one kind of them around 0
            centre = 0 if family == "qwen3_next" and "linear_attn" not in name else 1
            param.data.copy_(centre + 0.2 * noise)
        elif name.endswith(("A_log", "dt_bias", "sinks")):
            param.data.copy_(noise)
        else:
            param.data.copy_(0.08 * noise)
    for name, buffer in theirs.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.copy_(0.3 * torch.randn(buffer.shape, generator=generator))
    ids = torch.randint(0, 512, (2, TOKENS), generator=generator)
    with torch.no_grad():
        logits = theirs(ids, use_cache=False).logits
    raw = {k: v for k, v in config.to_dict().items() if v is not None}
    spec = parse_config(raw | {"architectures": [type(theirs).__name__]})
    return Reference(load_model(spec, _unfuse(theirs.state_dict())), ids, logits, TOLERANCE[family])


@pytest.fixture(scope="module")
def references() -> dict[str, Reference]:
    return {family: _reference(family) for family in FAMILIES}


@pytest.fixture(params=FAMILIES)
def ref(request: pytest.FixtureRequest, references: dict[str, Reference]) -> Iterator[Reference]:
    reference = references[request.param]
    assert reference.logits.std() >= 0.5
    return reference


def gap(ours: Tensor, theirs: Tensor) -> float:
    return (ours - theirs).abs().max().item()


def prefill_gap(ref: Reference) -> float:
    return gap(PagedRunner(ref.model).step([(SequenceState(), ref.ids[0])]), ref.logits[0])


def test_prefill(ref: Reference) -> None:
    assert prefill_gap(ref) <= ref.tolerance


@pytest.mark.parametrize("chunk", [1, 3, 7, 16, 64])
def test_chunked_prefill(ref: Reference, chunk: int) -> None:
    runner, seq = PagedRunner(ref.model), SequenceState()
    tokens = TOKENS if chunk > 1 else 40
    got = torch.cat([runner.step([(seq, part)]) for part in ref.ids[0, :tokens].split(chunk)])
    assert gap(got, ref.logits[0, :tokens]) <= ref.tolerance


def test_decode_after_prefill(ref: Reference) -> None:
    runner, seq = PagedRunner(ref.model), SequenceState()
    runner.step([(seq, ref.ids[0, :33])])
    got = torch.cat([runner.step([(seq, ref.ids[0, i : i + 1])]) for i in range(33, 70)])
    assert gap(got, ref.logits[0, 33:70]) <= ref.tolerance


def test_full_prefix_hit(ref: Reference) -> None:
    """The blocks of an earlier sequence are shared and only the last token is computed."""
    runner, first = PagedRunner(ref.model), SequenceState()
    for part in ref.ids[0, :128].split(112):
        runner.step([(first, part)])
    if ref.has_states:  # there is none between blocks: the last one is computed again
        again = runner.fork(first, 112)
    else:
        again = runner.fork(first, 128)
        again.computed = 127
    start = again.computed
    assert gap(runner.step([(again, ref.ids[0, start:128])]), ref.logits[0, start:128]) <= ref.tolerance


def test_partial_prefix_hit(ref: Reference) -> None:
    runner, first = PagedRunner(ref.model), SequenceState()
    for part in ref.ids[0, :64].split(48):
        runner.step([(first, part)])
    again, other = runner.fork(first, 48), runner.fork(first, 48)
    assert gap(runner.step([(again, ref.ids[0, 48:100])]), ref.logits[0, 48:100]) <= ref.tolerance
    # Neither the parent nor a second sequence notices.
    got = runner.step([(first, ref.ids[0, 64:80]), (other, ref.ids[0, 48:60])])
    assert gap(got, torch.cat((ref.logits[0, 64:80], ref.logits[0, 48:60]))) <= ref.tolerance


def test_mixed_batch(ref: Reference) -> None:
    """Decodes of unequal context, a fresh prompt and a chunk with a prefix share each step."""
    runner = PagedRunner(ref.model)
    a, b, c, d = (SequenceState() for _ in range(4))
    runner.step([(a, ref.ids[0, :5]), (b, ref.ids[1, :90]), (c, ref.ids[1, :20])])
    for i in range(3):
        work = [(a, ref.ids[0, 5 + i : 6 + i]), (b, ref.ids[1, 90 + i : 91 + i])]
        work += [(c, ref.ids[1, 20 + 9 * i : 29 + 9 * i]), (d, ref.ids[0, 30 * i : 30 * i + 30])]
        want = [ref.logits[0, 5 + i : 6 + i], ref.logits[1, 90 + i : 91 + i]]
        want += [ref.logits[1, 20 + 9 * i : 29 + 9 * i], ref.logits[0, 30 * i : 30 * i + 30]]
        assert gap(runner.step(work), torch.cat(want)) <= ref.tolerance


# The tests above must be able to fail: take one ingredient away and the same comparison is far off.


def test_notices_missing_rope(ref: Reference, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(type(ref.model.ops), "apply_rope", lambda self, x, cos, sin: None)
    assert prefill_gap(ref) > 100 * ref.tolerance


@pytest.mark.parametrize("family", [family for family in FAMILIES if family != "mimo_v2_flash"])
def test_notices_missing_causal_mask(
    references: dict[str, Reference], family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ref = references[family]
    monkeypatch.setattr(attention, "causal_bias", lambda size, dtype: torch.zeros(size, size, dtype=dtype))
    assert prefill_gap(ref) > 100 * ref.tolerance


def test_notices_a_lost_state(references: dict[str, Reference]) -> None:
    ref = references["qwen3_next"]
    runner, seq = PagedRunner(ref.model), SequenceState()
    runner.step([(seq, ref.ids[0, :64])])
    seq.row = 0
    got = runner.step([(seq, ref.ids[0, 64:])])
    assert gap(got, ref.logits[0, 64:]) > 100 * ref.tolerance


def test_notices_a_missing_output_gate(
    references: dict[str, Reference], monkeypatch: pytest.MonkeyPatch
) -> None:
    ref = references["qwen3_next"]
    monkeypatch.setattr(type(ref.model.ops), "sigmoid_gate", lambda self, x, gate: x)
    assert prefill_gap(ref) > 100 * ref.tolerance


@pytest.mark.parametrize("which", ["q_norm", "k_norm"])
@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
def test_notices_missing_qk_norm(
    references: dict[str, Reference], family: str, which: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for layer in references[family].model.decoder_layers:
        monkeypatch.setattr(getattr(layer.self_attn, which), "kernel", lambda x: x)
    assert prefill_gap(references[family]) > 100 * references[family].tolerance


@pytest.mark.parametrize("missing", ["sinks", "value_scale", "window", "second rope", "bias", "groups"])
def test_notices_what_mimo_adds(
    references: dict[str, Reference], missing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ref = references["mimo_v2_flash"]
    for layer in ref.model.decoder_layers:
        attention, gate = layer.self_attn, getattr(layer.mlp, "gate", None)
        if missing == "sinks":
            monkeypatch.setattr(attention, "sinks", None)
        elif missing == "value_scale":
            monkeypatch.setattr(attention, "value_scale", 1.0)
        elif missing == "window" and attention.window:
            monkeypatch.setattr(attention, "window", replace(attention.window, window=33))
        elif missing == "second rope":
            monkeypatch.setattr(attention, "rotary", 0)
        elif missing == "bias" and gate:
            monkeypatch.setattr(gate.e_score_correction_bias, "data", torch.zeros(16))
        elif missing == "groups" and gate:
            monkeypatch.setattr(gate, "routing", replace(gate.routing, num_groups=1, top_groups=1))
    assert prefill_gap(ref) > 100 * ref.tolerance
