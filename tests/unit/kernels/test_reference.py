"""The reference kernels against their definitions."""

import torch
import torch.nn.functional as F

from hotrack.kernels.paged import LayerKV, PagedBatch
from hotrack.kernels.reference.attention import paged_attention, write_kv
from hotrack.kernels.reference.moe import moe_experts, softmax_topk
from hotrack.kernels.reference.norm import rms_norm
from hotrack.kernels.reference.rope import apply_rope, rope_tables


def one_sequence(tokens: int, k_dim: int = 8, v_dim: int = 4) -> tuple[LayerKV, PagedBatch]:
    kv = LayerKV(torch.zeros(8, 2, 4, k_dim), torch.zeros(8, 2, 4, v_dim), None, None)
    table = torch.tensor([[5, 2, 7, 1]], dtype=torch.int32)
    positions = torch.arange(tokens)
    slots = table[0, positions // 4].long() * 4 + positions % 4
    return kv, PagedBatch(table, slots, [tokens], [tokens], 0, 4, 0)


def test_attention_is_causal_softmax_of_scaled_scores() -> None:
    torch.manual_seed(0)
    kv, batch = one_sequence(13)
    q, k, v = torch.randn(13, 4, 8), torch.randn(13, 2, 8), torch.randn(13, 2, 4)
    write_kv(torch.cat((k.flatten(1), v.flatten(1)), 1), kv, batch.slot_mapping)
    got = paged_attention(q, kv, batch, 0.3)
    keys, values = k.repeat_interleave(2, 1), v.repeat_interleave(2, 1)
    want = F.scaled_dot_product_attention(
        q.transpose(0, 1), keys.transpose(0, 1), values.transpose(0, 1), is_causal=True, scale=0.3
    )
    assert torch.allclose(got, want.transpose(0, 1), atol=1e-6)


def test_a_window_hides_what_is_behind_it() -> None:
    torch.manual_seed(0)
    kv, batch = one_sequence(13)
    q, k, v = torch.randn(13, 4, 8), torch.randn(13, 2, 8), torch.randn(13, 2, 4)
    write_kv(torch.cat((k.flatten(1), v.flatten(1)), 1), kv, batch.slot_mapping)
    before = paged_attention(q, kv, batch, 0.3, window=3)
    k[:10], v[:10] = 9.0, 9.0
    write_kv(torch.cat((k.flatten(1), v.flatten(1)), 1), kv, batch.slot_mapping)
    after = paged_attention(q, kv, batch, 0.3, window=3)
    assert torch.equal(before[12], after[12])
    assert not torch.equal(before[11], after[11])


def test_rms_norm_by_hand() -> None:
    got = rms_norm(torch.tensor([[3.0, 4.0]]), torch.tensor([1.0, 2.0]), 0.0)
    assert torch.allclose(got, torch.tensor([[3.0, 8.0]]) / 12.5**0.5)


def test_rope_turns_pairs_half_a_head_apart() -> None:
    cos, sin = rope_tables(torch.tensor([0, 2]), torch.tensor([1.0, 0.5]), 1.0, torch.float32)
    x = torch.tensor([[[1.0, 0.0, 0.0, 2.0]]]).expand(2, 1, 4)
    got = apply_rope(x, cos, sin)
    assert torch.equal(got[0], x[0])
    angle = torch.tensor([2.0, 1.0])
    want = torch.stack((angle[0].cos(), -2 * angle[1].sin(), angle[0].sin(), 2 * angle[1].cos()))
    assert torch.allclose(got[1, 0], want)


def test_router_weights_are_a_softmax_over_all_experts() -> None:
    logits = torch.tensor([[0.0, 2.0, 1.0]])
    ids, weights = softmax_topk(logits, 2, False)
    assert ids.tolist() == [[1, 2]]
    assert torch.allclose(weights, logits.softmax(-1)[:, [1, 2]])
    assert torch.allclose(softmax_topk(logits, 2, True)[1].sum(-1), torch.ones(1))


def test_experts_are_weighted_sums_of_swiglu() -> None:
    torch.manual_seed(0)
    x, gate_up, down = torch.randn(5, 6), torch.randn(3, 8, 6), torch.randn(3, 6, 4)
    ids, weights = torch.randint(0, 3, (5, 2)), torch.rand(5, 2)
    got = moe_experts(x, gate_up, down, ids, weights)
    for t in range(5):
        want = torch.zeros(6)
        for e, w in zip(ids[t], weights[t], strict=True):
            gate, up = (gate_up[e] @ x[t]).chunk(2)
            want += w * (down[e] @ (F.silu(gate) * up))
        assert torch.allclose(got[t], want, atol=1e-5)
