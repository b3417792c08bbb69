"""What hotrack knows about a model before it touches a weight (no torch, no third-party types)."""

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """Rotary embedding. ``dim`` rotated dims per head (NeoX half-split order), ``kind`` 'default' | 'linear'
    | 'llama3' | 'yarn'."""

    theta: float
    dim: int
    kind: str = "default"
    factor: float = 1.0
    params: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class MoeSpec:
    """A layer's experts. ``sparse_layers`` are the layer indices that have them; the others are dense."""

    num_experts: int
    top_k: int
    intermediate_size: int
    norm_topk_prob: bool
    sparse_layers: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """A decoder-only model, normalised from config.json or GGUF metadata.

    ``family``: 'llama' | 'qwen3' | 'qwen3_moe'. ``dtype``: the checkpoint's dtype name ('bfloat16',
    'float16', 'float32').
    ``source``: the ``model_type`` as published, for messages.
    """

    family: str
    source: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    rms_norm_eps: float
    max_position_embeddings: int
    rope: RopeSpec
    tie_word_embeddings: bool
    qk_norm: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    hidden_act: str = "silu"
    moe: MoeSpec | None = None
    dtype: str = "bfloat16"
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
