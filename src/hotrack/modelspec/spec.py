"""What hotrack knows about a model before it touches a weight (no torch, no third-party types)."""

from dataclasses import dataclass, field

from hotrack.modelspec.quant import QuantSpec


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
class WindowSpec:
    """Layers (their indices) in which a token sees only the last ``window`` tokens, itself included.

    ``sinks``: their heads have a learned score that takes part in the softmax without a value.
    """

    layers: tuple[int, ...]
    window: int
    num_kv_heads: int
    rope: RopeSpec
    sinks: bool


@dataclass(frozen=True, slots=True)
class MoeSpec:
    """A layer's experts. ``sparse_layers`` are the layer indices that have them; the others are dense.

    ``scoring`` 'softmax', or 'sigmoid' with a bias that corrects the choice: then experts come from the best
    ``top_groups`` of ``num_groups`` groups, and their weights are multiplied by ``routed_scaling``.
    ``shared_intermediate_size``: channels of one more expert that every token goes through, weighted by a
    sigmoid of its own; 0 when there is none.
    """

    num_experts: int
    top_k: int
    intermediate_size: int
    norm_topk_prob: bool
    sparse_layers: tuple[int, ...]
    shared_intermediate_size: int = 0
    scoring: str = "softmax"
    num_groups: int = 1
    top_groups: int = 1
    routed_scaling: float = 1.0


@dataclass(frozen=True, slots=True)
class GatedDeltaSpec:
    """Layers (their indices) that keep a matrix per value head instead of keys and values: gated DeltaNet.

    ``conv_kernel``: inputs that the causal convolution before it sees, the current one included.
    """

    layers: tuple[int, ...]
    num_key_heads: int
    num_value_heads: int
    key_head_dim: int
    value_head_dim: int
    conv_kernel: int

    @property
    def conv_channels(self) -> int:
        """q, k and v of all heads."""
        return 2 * self.num_key_heads * self.key_head_dim + self.num_value_heads * self.value_head_dim


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """A decoder-only model, normalised from config.json or GGUF metadata.

    family             'llama' | 'qwen3' | 'qwen3_moe' | 'qwen3_next' | 'mimo_v2_flash' | 'mimo_v2'
    source             the ``model_type`` as published, for messages
    dtype              the checkpoint's dtype name ('bfloat16', 'float16', 'float32')
    quant              how weights are stored, when not in ``dtype``
    output_gate        attention's output is multiplied by a sigmoid that its query projection also makes
    zero_centred_norm  RMSNorms are stored as their difference from 1
    v_head_dim         width of a value head; None: as wide as a key
    value_scale        values are multiplied by it
    fused_qkv          query, key and value projections are published as one tensor, dealt out to this many
                       ranks, each one's queries before its keys before its values; 0: as three tensors
    windowed           layers with a window; num_kv_heads and rope are those of the others
    full_sinks         heads of layers without a window have sinks, too
    unread             prefixes of published tensors that this version does not use (draft heads)
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
    output_gate: bool = False
    zero_centred_norm: bool = False
    hidden_act: str = "silu"
    moe: MoeSpec | None = None
    gated_delta: GatedDeltaSpec | None = None
    v_head_dim: int | None = None
    value_scale: float = 1.0
    fused_qkv: int = 0
    windowed: WindowSpec | None = None
    full_sinks: bool = False
    unread: tuple[str, ...] = ()
    dtype: str = "bfloat16"
    quant: QuantSpec | None = None
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()

    @property
    def value_dim(self) -> int:
        """Width of a value head."""
        return self.v_head_dim or self.head_dim

    def window_of(self, layer: int) -> WindowSpec | None:
        """The window of a layer's attention, if it has one."""
        return self.windowed if self.windowed and layer in self.windowed.layers else None
