"""A plain PyTorch Qwen3-MoE, small enough to read: training, cached decoding, Hugging Face tensor names.

The experts of a layer are two stacked weights. A token's hidden state goes through *all* experts and those
that the router did not choose are multiplied by zero: exact, no data-dependent shape, and at this size fast
(three matrix products per layer). Shapes: B rows, T tokens, N = B*T, H hidden, E experts, M expert width, D
head width.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn


@dataclass(frozen=True, slots=True)
class Config:
    """The numbers of ``config.json`` that this model reads."""

    vocab_size: int = 264
    hidden_size: int = 128
    num_hidden_layers: int = 4
    num_attention_heads: int = 4
    num_key_value_heads: int = 2
    head_dim: int = 32
    num_experts: int = 16
    num_experts_per_tok: int = 2
    moe_intermediate_size: int = 64
    max_position_embeddings: int = 1024
    rope_theta: float = 10000.0
    rms_norm_eps: float = 1e-6

    @classmethod
    def load(cls, path: Path) -> Config:
        """Read a checkpoint's ``config.json``."""
        values = json.loads(path.read_text())
        return cls(**{name: values[name] for name in cls.__slots__})


@dataclass(slots=True)
class Cache:
    """Keys and values of one layer, [B, kv heads, capacity, D] each."""

    keys: Tensor
    values: Tensor


@dataclass(slots=True)
class Routing:
    """What the routers of one forward pass did, and a way to overrule them.

    ``counts`` is [layers, E], the number of (token, expert) assignments, over the tokens that ``valid``
    marks ([N], or None for all). With ``random`` set, experts and their weights are drawn instead of
    routed.
    """

    counts: Tensor
    random: torch.Generator | None = None
    valid: Tensor | None = None


class RMSNorm(nn.Module):
    """Root mean square norm over the last dimension, computed in float32."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Normalise ``x`` [..., size]."""
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * wide.to(x.dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply NeoX rotary embedding to ``x`` [B, heads, T, D] with ``cos``, ``sin`` [B or 1, 1, T, D/2]."""
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)


class Attention(nn.Module):
    """Grouped-query attention with a norm on every query and key head."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        c = config
        self.shape = (c.num_attention_heads, c.num_key_value_heads, c.head_dim)
        self.q_proj = nn.Linear(c.hidden_size, c.num_attention_heads * c.head_dim, bias=False)
        self.k_proj = nn.Linear(c.hidden_size, c.num_key_value_heads * c.head_dim, bias=False)
        self.v_proj = nn.Linear(c.hidden_size, c.num_key_value_heads * c.head_dim, bias=False)
        self.o_proj = nn.Linear(c.num_attention_heads * c.head_dim, c.hidden_size, bias=False)
        self.q_norm = RMSNorm(c.head_dim, c.rms_norm_eps)
        self.k_norm = RMSNorm(c.head_dim, c.rms_norm_eps)

    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor, positions: Tensor | None, cache: Cache | None
    ) -> Tensor:
        """Attend from ``x`` [B, T, H]; with a cache, ``positions`` [B, T] says where its tokens go."""
        rows, length, _ = x.shape
        heads, kv_heads, dim = self.shape
        q = self.q_norm(self.q_proj(x).view(rows, length, heads, dim)).transpose(1, 2)
        k = self.k_norm(self.k_proj(x).view(rows, length, kv_heads, dim)).transpose(1, 2)
        v = self.v_proj(x).view(rows, length, kv_heads, dim).transpose(1, 2)
        q, k = rotate(q, cos, sin).to(v.dtype), rotate(k, cos, sin).to(v.dtype)
        mask = None
        if cache is not None and positions is not None:
            row = torch.arange(rows, device=x.device)[:, None]
            cache.keys[row, :, positions] = k.transpose(1, 2)
            cache.values[row, :, positions] = v.transpose(1, 2)
            k, v = cache.keys, cache.values
            mask = torch.arange(k.shape[2], device=x.device) <= positions[:, None, :, None]
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=True)
        projected: Tensor = self.o_proj(out.transpose(1, 2).reshape(rows, length, heads * dim))
        return projected


class SparseMoe(nn.Module):
    """Top-k routed experts, no shared expert; weights renormalised over the chosen ones."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        c = config
        self.top_k = c.num_experts_per_tok
        self.gate = nn.Linear(c.hidden_size, c.num_experts, bias=False)
        self.gate_up = nn.Parameter(torch.empty(2, c.num_experts, c.moe_intermediate_size, c.hidden_size))
        self.down = nn.Parameter(torch.empty(c.num_experts, c.moe_intermediate_size, c.hidden_size))

    def forward(self, x: Tensor, layer: int, routing: Routing | None) -> tuple[Tensor, Tensor]:
        """Map ``x`` [N, H] to ([N, H], [2]): the output, and the balance loss and the router's z-loss."""
        logits = self.gate(x).float()
        if routing is not None and routing.random is not None:
            logits = torch.randn(logits.shape, generator=routing.random).to(x.device)
        probs = logits.softmax(-1)
        top, chosen = probs.topk(self.top_k, dim=-1)
        used = torch.zeros_like(probs).scatter(-1, chosen, 1.0)
        weights = probs * used / top.sum(-1, keepdim=True)
        if routing is not None:
            counted = used if routing.valid is None else used[routing.valid]
            routing.counts[layer] += counted.sum(0).to(routing.counts)
        _, experts, width, hidden = self.gate_up.shape
        gate, up = F.linear(x, self.gate_up.view(-1, hidden)).view(-1, 2, experts, width).unbind(1)
        active = F.silu(gate) * up * weights.to(gate.dtype)[..., None]
        out = active.reshape(-1, experts * width) @ self.down.view(-1, hidden)
        balance = experts / self.top_k * (used.mean(0) * probs.mean(0)).sum()
        return out, torch.stack((balance, logits.logsumexp(-1).pow(2).mean()))


class Layer(nn.Module):
    """One pre-norm block."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = SparseMoe(config)

    def forward(
        self,
        x: Tensor,
        cos: Tensor,
        sin: Tensor,
        positions: Tensor | None,
        cache: Cache | None,
        index: int,
        routing: Routing | None,
    ) -> tuple[Tensor, Tensor]:
        """Map ``x`` [B, T, H] to ([B, T, H], the router's two losses [2]); ``index`` is the layer's place."""
        x = x + self.self_attn(self.input_layernorm(x), cos, sin, positions, cache)
        out, losses = self.mlp(self.post_attention_layernorm(x).flatten(0, 1), index, routing)
        return x + out.view_as(x), losses


class TinyMoe(nn.Module):
    """The whole model; parameter names follow Hugging Face's except for the stacked experts."""

    angles: Tensor

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        half = torch.arange(0, config.head_dim, 2).float() / config.head_dim
        angles = torch.outer(torch.arange(config.max_position_embeddings).float(), config.rope_theta**-half)
        self.register_buffer("angles", angles, persistent=False)

    def initialise(self, seed: int) -> None:
        """Draw all weights from ``seed``: variance 1/fan-in, less at the end of a block."""
        generator = torch.Generator().manual_seed(seed)
        shrink = 1 / math.sqrt(2 * self.config.num_hidden_layers)
        with torch.no_grad():
            for name, weight in self.named_parameters():
                if weight.dim() == 1:
                    continue
                fan_in = weight.shape[-2] if name.endswith("mlp.down") else weight.shape[-1]
                scale = shrink if name.endswith(("mlp.down", "o_proj.weight")) else 1.0
                drawn = torch.randn(weight.shape, generator=generator)
                weight.copy_(drawn * scale / math.sqrt(fan_in))

    def forward(
        self,
        ids: Tensor,
        positions: Tensor | None = None,
        caches: list[Cache] | None = None,
        routing: Routing | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Map ``ids`` [B, T] to logits [B, T, vocab] and the layers' mean (balance loss, z-loss) [2]."""
        length = ids.shape[1]
        angles = self.angles[:length][None] if positions is None else self.angles[positions]
        cos, sin = angles.cos()[:, None], angles.sin()[:, None]
        x = self.embed_tokens(ids)
        losses = torch.zeros(2, device=x.device)
        for index, layer in enumerate(self.layers):
            cache = None if caches is None else caches[index]
            x, aux = layer(x, cos, sin, positions, cache, index, routing)
            losses = losses + aux / len(self.layers)
        return self.lm_head(self.norm(x)), losses

    def new_caches(self, rows: int, capacity: int) -> list[Cache]:
        """Make empty caches for ``rows`` rows of up to ``capacity`` tokens."""
        c, like = self.config, self.lm_head.weight
        shape = (rows, c.num_key_value_heads, capacity, c.head_dim)
        return [Cache(like.new_zeros(shape), like.new_zeros(shape)) for _ in range(c.num_hidden_layers)]

    def to_hf(self) -> dict[str, Tensor]:
        """Return the weights as bfloat16 under Hugging Face's Qwen3-MoE names."""
        named: dict[str, Tensor] = {}
        for name, weight in self.state_dict().items():
            data = weight.detach().cpu().to(torch.bfloat16)
            full = name if name.startswith("lm_head") else f"model.{name}"
            if name.endswith("mlp.gate_up"):
                base = full.removesuffix("gate_up")
                for expert in range(data.shape[1]):
                    named[f"{base}experts.{expert}.gate_proj.weight"] = data[0, expert].contiguous()
                    named[f"{base}experts.{expert}.up_proj.weight"] = data[1, expert].contiguous()
            elif name.endswith("mlp.down"):
                base = full.removesuffix("down")
                for expert in range(data.shape[0]):
                    named[f"{base}experts.{expert}.down_proj.weight"] = data[expert].t().contiguous()
            else:
                named[full] = data.contiguous()
        return named

    def load_hf(self, named: dict[str, Tensor]) -> None:
        """Fill the weights from Hugging Face's names; a missing or spare tensor is an error."""
        spare = set(named)
        state: dict[str, Tensor] = {}

        def take(name: str) -> Tensor:
            spare.discard(name)
            return named[name]

        for name in self.state_dict():
            full = name if name.startswith("lm_head") else f"model.{name}"
            experts = [f"{full.rpartition('.')[0]}.experts.{e}" for e in range(self.config.num_experts)]
            if name.endswith("mlp.gate_up"):
                kinds = ("gate_proj", "up_proj")
                state[name] = torch.stack(
                    [torch.stack([take(f"{e}.{k}.weight") for e in experts]) for k in kinds]
                )
            elif name.endswith("mlp.down"):
                state[name] = torch.stack([take(f"{e}.down_proj.weight").t() for e in experts])
            else:
                state[name] = take(full)
        if spare:
            raise ValueError(f"tensors that no weight takes: {sorted(spare)[:5]}")
        self.load_state_dict(state)


def save_weights(model: TinyMoe, folder: Path) -> None:
    """Write ``model.safetensors`` in bfloat16."""
    save_file(model.to_hf(), folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "model.safetensors").chmod(0o644)


def load_model(folder: Path, dtype: torch.dtype, device: str) -> TinyMoe:
    """Read a checkpoint folder."""
    model = TinyMoe(Config.load(folder / "config.json"))
    model.load_hf(load_file(folder / "model.safetensors"))
    angles = model.angles
    model = model.to(device=device, dtype=dtype).eval()
    model.angles = angles.to(device)  # rotary angles stay in float32
    return model


@torch.inference_mode()
def greedy(
    model: TinyMoe, prompts: list[list[int]], stop: int, max_new: int, random_seed: int | None = None
) -> tuple[list[list[int]], Tensor]:
    """Continue every prompt greedily until ``stop``; also count routed tokens, [layers, E], on the host.

    Prompts of any length share one batch: each is padded on the right and its new tokens overwrite the
    padding in the cache.
    """
    device = model.lm_head.weight.device
    lengths = torch.tensor([len(p) for p in prompts], device=device)
    longest = int(lengths.max())
    ids = torch.zeros(len(prompts), longest, dtype=torch.long)
    for row, prompt in enumerate(prompts):
        ids[row, : len(prompt)] = torch.tensor(prompt)
    positions = torch.arange(longest, device=device).expand(len(prompts), -1)
    routing = Routing(
        torch.zeros(model.config.num_hidden_layers, model.config.num_experts, dtype=torch.double)
    )
    routing.valid = (positions < lengths[:, None]).flatten()
    if random_seed is not None:
        routing.random = torch.Generator().manual_seed(random_seed)
    caches = model.new_caches(len(prompts), longest + max_new)
    logits, _ = model(ids.to(device), positions, caches, routing)
    token = logits[torch.arange(len(prompts), device=device), lengths - 1].argmax(-1)
    out = [token]
    done = token == stop
    for step in range(max_new - 1):
        if bool(done.all()):
            break
        routing.valid = ~done
        logits, _ = model(token[:, None], (lengths + step)[:, None], caches, routing)
        token = logits[:, -1].argmax(-1)
        done |= token == stop
        out.append(token)
    columns = torch.stack(out, dim=1).tolist()
    answers = [row[: row.index(stop)] if stop in row else row for row in columns]
    return answers, routing.counts
