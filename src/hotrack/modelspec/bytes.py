"""How many bytes a model needs, from its ModelSpec alone: planning needs no weights."""

from hotrack.core.tensorspec import DTYPE_BYTES
from hotrack.modelspec.spec import ModelSpec


def num_parameters(spec: ModelSpec) -> int:
    """Parameters of the whole model; tied embeddings count once."""
    sparse = set(spec.moe.sparse_layers) if spec.moe else set()
    layers = sum(_layer_parameters(spec, sparse=i in sparse) for i in range(spec.num_layers))
    embeddings = spec.vocab_size * spec.hidden_size * (1 if spec.tie_word_embeddings else 2)
    return embeddings + layers + spec.hidden_size


def num_active_parameters(spec: ModelSpec) -> int:
    """Parameters one token passes through: top-k experts only; the head, not the embedding lookup."""
    inactive = 0
    if spec.moe:
        per_expert = 3 * spec.hidden_size * spec.moe.intermediate_size
        inactive = len(spec.moe.sparse_layers) * (spec.moe.num_experts - spec.moe.top_k) * per_expert
    lookup = 0 if spec.tie_word_embeddings else spec.vocab_size * spec.hidden_size
    return num_parameters(spec) - inactive - lookup


def weight_bytes(spec: ModelSpec, dtype: str | None = None) -> int:
    """Bytes of all parameters in ``dtype`` (torch's name; None: the checkpoint's own), before sharding."""
    return num_parameters(spec) * DTYPE_BYTES[dtype or spec.dtype]


def kv_bytes_per_token(spec: ModelSpec, dtype: str | None = None) -> int:
    """Bytes of keys and values one token keeps in all layers, before sharding and block rounding."""
    elements = 2 * spec.num_kv_heads * spec.head_dim * spec.num_layers
    return elements * DTYPE_BYTES[dtype or spec.dtype]


def _layer_parameters(spec: ModelSpec, *, sparse: bool) -> int:
    hidden, q = spec.hidden_size, spec.num_heads * spec.head_dim
    kv = spec.num_kv_heads * spec.head_dim
    attention = hidden * (q + 2 * kv) + q * hidden
    if spec.attention_bias:
        attention += q + 2 * kv + hidden
    if spec.qk_norm:
        attention += 2 * spec.head_dim
    if sparse and spec.moe:
        experts = spec.moe.num_experts * 3 * hidden * spec.moe.intermediate_size
        mlp = experts + spec.moe.num_experts * hidden  # router
    else:
        mlp = 3 * hidden * spec.intermediate_size
        if spec.mlp_bias:
            mlp += 2 * spec.intermediate_size + hidden
    return attention + mlp + 2 * hidden  # two norms
