"""How many bytes a model needs, from its ModelSpec alone: planning needs no weights."""

from hotrack.core.tensorspec import DTYPE_BYTES
from hotrack.modelspec.spec import GatedDeltaSpec, ModelSpec


def num_parameters(spec: ModelSpec) -> int:
    """Parameters of the whole model; tied embeddings count once."""
    layers = sum(_layer_parameters(spec, layer) for layer in range(spec.num_layers))
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
    recurrent = spec.gated_delta.layers if spec.gated_delta else ()
    windowed = spec.windowed.layers if spec.windowed else ()
    layers = spec.num_layers - len(recurrent) - len(windowed)
    elements = (spec.head_dim + spec.value_dim) * spec.num_kv_heads * layers
    return elements * DTYPE_BYTES[dtype or spec.dtype]


def state_bytes(spec: ModelSpec, dtype: str | None = None) -> int:
    """Bytes one request keeps whatever its length, before sharding: the matrices (float32) and convolution
    inputs of recurrent layers, the keys and values in windows."""
    if (window := spec.windowed) is not None:
        entry = window.num_kv_heads * (spec.head_dim + spec.value_dim) * DTYPE_BYTES[dtype or spec.dtype]
        return len(window.layers) * window.window * entry
    delta = spec.gated_delta
    if delta is None:
        return 0
    matrices = delta.num_value_heads * delta.key_head_dim * delta.value_head_dim * DTYPE_BYTES["float32"]
    inputs = (delta.conv_kernel - 1) * delta.conv_channels * DTYPE_BYTES[dtype or spec.dtype]
    return len(delta.layers) * (matrices + inputs)


def _layer_parameters(spec: ModelSpec, layer: int) -> int:
    delta = spec.gated_delta
    mixer = (
        _delta_parameters(spec, delta)
        if delta and layer in delta.layers
        else _attention_parameters(spec, layer)
    )
    return mixer + _mlp_parameters(spec, layer) + 2 * spec.hidden_size  # two norms


def _attention_parameters(spec: ModelSpec, layer: int) -> int:
    window = spec.window_of(layer)
    hidden, q = spec.hidden_size, spec.num_heads * spec.head_dim
    kv_heads = spec.num_kv_heads if window is None else window.num_kv_heads
    kv = kv_heads * (spec.head_dim + spec.value_dim)
    gated_q = 2 * q if spec.output_gate else q
    attention = hidden * (gated_q + kv) + spec.num_heads * spec.value_dim * hidden
    if spec.full_sinks if window is None else window.sinks:
        attention += spec.num_heads
    if spec.attention_bias:
        attention += gated_q + kv + hidden
    if spec.qk_norm:
        attention += 2 * spec.head_dim
    return attention


def _delta_parameters(spec: ModelSpec, delta: GatedDeltaSpec) -> int:
    values = delta.num_value_heads * delta.value_head_dim
    projections = spec.hidden_size * (delta.conv_channels + values + 2 * delta.num_value_heads)
    per_head = 2 * delta.num_value_heads + delta.value_head_dim  # A_log, dt_bias; norm
    return projections + delta.conv_channels * delta.conv_kernel + per_head + values * spec.hidden_size


def _mlp_parameters(spec: ModelSpec, layer: int) -> int:
    hidden, moe = spec.hidden_size, spec.moe
    if moe and layer in moe.sparse_layers:
        experts = moe.num_experts * 3 * hidden * moe.intermediate_size
        shared = 3 * hidden * moe.shared_intermediate_size + (hidden if moe.shared_intermediate_size else 0)
        bias = moe.num_experts if moe.scoring == "sigmoid" else 0
        return experts + shared + moe.num_experts * hidden + bias  # router
    biases = 2 * spec.intermediate_size + hidden if spec.mlp_bias else 0
    return 3 * hidden * spec.intermediate_size + biases
