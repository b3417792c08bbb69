"""config.json -> ModelSpec for the families hotrack serves, in old and new spellings of every field."""

from hotrack.core.errors import CheckpointError
from hotrack.modelspec.fields import Fields, shorten
from hotrack.modelspec.mimo import with_mimo
from hotrack.modelspec.quant import parse_quant
from hotrack.modelspec.spec import GatedDeltaSpec, ModelSpec, MoeSpec, RopeSpec

ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "qwen3_next": "Qwen3NextForCausalLM",
    "mimo_v2_flash": "MiMoV2FlashForCausalLM",
    "mimo_v2": "MiMoV2ForCausalLM",
}
# Defaults of the published config classes; the other families derive hidden_size / num_attention_heads.
HEAD_DIMS = {"qwen3": 128, "qwen3_next": 256, "mimo_v2_flash": 192, "mimo_v2": 192}
PARTIAL_ROTARY = {"qwen3_next": 0.25, "mimo_v2_flash": 0.334, "mimo_v2": 0.334}
LAYER_TYPES = {
    "qwen3_next": ("full_attention", "linear_attention"),
    "mimo_v2_flash": ("full_attention", "sliding_attention"),
    "mimo_v2": ("full_attention", "sliding_attention"),
}
MAX_VOCAB = 1 << 22
MAX_WIDTH = 1 << 20
MAX_LAYERS = 4096
MAX_HEADS = 1 << 14
MAX_HEAD_DIM = 4096
MAX_EXPERTS = 1 << 14
MAX_POSITIONS = 1 << 28
MAX_CONV_KERNEL = 64
DTYPES = ("bfloat16", "float16", "float32")


def parse_config(config: dict[str, object], where: str = "config.json") -> ModelSpec:
    """Normalise a ``config.json`` object.

    Raises CheckpointError naming the field, what was found and what is accepted; for an unknown architecture
    the supported ones.
    """
    fields = Fields(config, where)
    family = _family(fields)
    hybrid = family == "qwen3_next"
    _refuse_unsupported(fields, LAYER_TYPES.get(family, ("full_attention",)))
    num_heads = fields.integer("num_attention_heads", high=MAX_HEADS)
    hidden_size = fields.integer("hidden_size", high=MAX_WIDTH)
    head_dim = fields.integer(
        "head_dim",
        high=MAX_HEAD_DIM,
        default=HEAD_DIMS.get(family, max(hidden_size // num_heads, 1)),
    )
    num_layers = fields.integer("num_hidden_layers", high=MAX_LAYERS)
    vocab_size = fields.integer("vocab_size", high=MAX_VOCAB)
    eos = fields.integers("eos_token_id", high=vocab_size - 1, max_len=1024)
    bos = fields.integers("bos_token_id", high=vocab_size - 1, max_len=1)
    spec = ModelSpec(
        family=family,
        source=fields.text("model_type", default=family),
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=fields.integer("num_key_value_heads", high=MAX_HEADS, default=num_heads),
        head_dim=head_dim,
        intermediate_size=fields.integer("intermediate_size", high=MAX_WIDTH),
        rms_norm_eps=fields.number("rms_norm_eps", "layernorm_epsilon", low=0.0, high=1.0, default=1e-6),
        max_position_embeddings=fields.integer("max_position_embeddings", high=MAX_POSITIONS),
        rope=_rope(fields, head_dim, PARTIAL_ROTARY.get(family)),
        tie_word_embeddings=fields.flag("tie_word_embeddings", default=False),
        qk_norm=family != "llama",
        attention_bias=fields.flag("attention_bias", default=False),
        mlp_bias=family == "llama" and fields.flag("mlp_bias", default=False),
        output_gate=hybrid,
        zero_centred_norm=hybrid,
        moe=_moe(fields, num_layers, hybrid) if hybrid or family == "qwen3_moe" else None,
        gated_delta=_gated_delta(fields, num_layers) if hybrid else None,
        unread=("mtp.",) if hybrid else (),
        dtype=_dtype(fields),
        quant=parse_quant(fields, family),
        bos_token_id=bos[0] if bos else None,
        eos_token_ids=eos,
    )
    if family.startswith("mimo_v2"):
        spec = with_mimo(spec, fields)
    check_spec(spec, where)
    return spec


def check_spec(spec: ModelSpec, where: str) -> None:
    """What must hold between fields, whatever file they came from."""
    for kv_heads in (spec.num_kv_heads, spec.windowed.num_kv_heads if spec.windowed else spec.num_kv_heads):
        if spec.num_heads % kv_heads:
            raise CheckpointError(
                f"{where}: num_attention_heads {spec.num_heads} is not a multiple of "
                f"num_key_value_heads {kv_heads}"
            )
    if spec.rope.dim % 2 or not spec.rope.dim:
        raise CheckpointError(
            f"{where}: head_dim must be even for rotary embeddings, found {spec.head_dim}, "
            f"of which {spec.rope.dim} are rotated"
        )
    delta = spec.gated_delta
    if delta and delta.num_value_heads % delta.num_key_heads:
        raise CheckpointError(
            f"{where}: linear_num_value_heads {delta.num_value_heads} is not a multiple of "
            f"linear_num_key_heads {delta.num_key_heads}"
        )
    if spec.moe and spec.moe.top_k > spec.moe.num_experts:
        raise CheckpointError(
            f"{where}: num_experts_per_tok is {spec.moe.top_k}, but num_experts is {spec.moe.num_experts}"
        )


def _family(fields: Fields) -> str:
    model_type = fields.text("model_type", default="")
    listed = fields.get("architectures")
    names = listed if isinstance(listed, list) else []
    by_architecture = {architecture: family for family, architecture in ARCHITECTURES.items()}
    family = model_type or next((by_architecture[n] for n in names if n in by_architecture), "")
    if family not in ARCHITECTURES or (names and ARCHITECTURES[family] not in names):
        found = ", ".join(shorten(n) for n in names[:4]) or "no architectures"
        supported = ", ".join(f"{a} ({f})" for f, a in ARCHITECTURES.items())
        raise CheckpointError(
            f"{fields.where}: unsupported architecture {found} (model_type {shorten(model_type)!r}); "
            f"hotrack serves {supported}",
            code="unsupported_architecture",
        )
    return family


def _refuse_unsupported(fields: Fields, layer_types_served: tuple[str, ...]) -> None:
    """Options that change the computation in a way these families' code does not implement."""
    if (activation := fields.text("hidden_act", default="silu")) != "silu":
        raise CheckpointError(
            f"{fields.where}: hidden_act {shorten(activation)!r} is not supported; 'silu' is"
        )
    layer_types = fields.get("layer_types")
    windowed = isinstance(layer_types, list) and any(t not in layer_types_served for t in layer_types)
    if windowed or fields.flag("use_sliding_window", default=False):
        raise CheckpointError(f"{fields.where}: sliding-window attention is not supported for this family")


def _dtype(fields: Fields) -> str:
    name = fields.text("dtype", "torch_dtype", default="bfloat16").removeprefix("torch.")
    if name not in DTYPES:
        raise fields.fail("dtype", f"one of {', '.join(DTYPES)}", name)
    return name


def _rope(fields: Fields, head_dim: int, partial: float | None = None) -> RopeSpec:
    """``rope_parameters`` (newer), or ``rope_theta`` and ``rope_scaling`` (older). ``partial``: the share of
    a head that is rotated unless the file says otherwise; None: always all of it."""
    scaling = fields.section("rope_parameters", "rope_scaling")
    theta_source = scaling if scaling.get("rope_theta") is not None else fields
    theta = theta_source.number("rope_theta", low=1.0, high=1e12, default=10_000.0)
    dim = int(head_dim * _rotated_share(scaling, fields, partial))
    kind = scaling.text("rope_type", "type", default="default")
    if kind == "default":
        return RopeSpec(theta=theta, dim=dim)
    if kind not in ROPE_PARAMS:
        known = ", ".join(ROPE_PARAMS)
        raise CheckpointError(
            f"{scaling.where}: rope type {shorten(kind)!r} is not supported; default, {known} are"
        )
    factor = scaling.number("factor", low=1.0, high=1e4)
    return RopeSpec(theta=theta, dim=dim, kind=kind, factor=factor, params=ROPE_PARAMS[kind](scaling))


def _rotated_share(scaling: Fields, fields: Fields, default: float | None) -> float:
    source = scaling if scaling.get("partial_rotary_factor") is not None else fields
    found = source.number("partial_rotary_factor", low=0.0, high=1.0, default=default or 1.0)
    if default is None and found != 1.0:
        raise source.fail("partial_rotary_factor", "1 for this family", found)
    return found


def _linear_params(_: Fields) -> dict[str, float]:
    return {}


def _llama3_params(scaling: Fields) -> dict[str, float]:
    params = {
        "low_freq_factor": scaling.number("low_freq_factor", low=1e-6, high=1e6),
        "high_freq_factor": scaling.number("high_freq_factor", low=1e-6, high=1e6),
        "original_max_position_embeddings": _original_positions(scaling),
    }
    if params["high_freq_factor"] <= params["low_freq_factor"]:
        raise CheckpointError(f"{scaling.where}: high_freq_factor must be larger than low_freq_factor")
    return params


def _yarn_params(scaling: Fields) -> dict[str, float]:
    if scaling.get("mscale", "mscale_all_dim") is not None:
        raise CheckpointError(f"{scaling.where}: yarn with mscale is not supported for this family")
    params = {
        "original_max_position_embeddings": _original_positions(scaling),
        "beta_fast": scaling.number("beta_fast", low=1e-3, high=1e6, default=32.0),
        "beta_slow": scaling.number("beta_slow", low=1e-3, high=1e6, default=1.0),
        "truncate": float(scaling.flag("truncate", default=True)),
    }
    if scaling.get("attention_factor") is not None:
        params["attention_factor"] = scaling.number("attention_factor", low=1e-6, high=1e6)
    return params


def _original_positions(scaling: Fields) -> float:
    return scaling.number("original_max_position_embeddings", low=1.0, high=float(MAX_POSITIONS))


ROPE_PARAMS = {"linear": _linear_params, "llama3": _llama3_params, "yarn": _yarn_params}


def _moe(fields: Fields, num_layers: int, hybrid: bool) -> MoeSpec:
    step = fields.integer("decoder_sparse_step", high=MAX_LAYERS, default=1)
    dense = fields.integers("mlp_only_layers", high=MAX_LAYERS, max_len=MAX_LAYERS)
    return MoeSpec(
        num_experts=fields.integer("num_experts", "num_local_experts", high=MAX_EXPERTS),
        top_k=fields.integer("num_experts_per_tok", high=MAX_EXPERTS),
        intermediate_size=fields.integer("moe_intermediate_size", high=MAX_WIDTH),
        norm_topk_prob=fields.flag("norm_topk_prob", default=hybrid),
        sparse_layers=tuple(i for i in range(num_layers) if i not in dense and (i + 1) % step == 0),
        shared_intermediate_size=fields.integer("shared_expert_intermediate_size", high=MAX_WIDTH)
        if hybrid
        else 0,
    )


def _gated_delta(fields: Fields, num_layers: int) -> GatedDeltaSpec:
    return GatedDeltaSpec(
        layers=_delta_layers(fields, num_layers),
        num_key_heads=fields.integer("linear_num_key_heads", high=MAX_HEADS, default=16),
        num_value_heads=fields.integer("linear_num_value_heads", high=MAX_HEADS, default=32),
        key_head_dim=fields.integer("linear_key_head_dim", high=MAX_HEAD_DIM, default=128),
        value_head_dim=fields.integer("linear_value_head_dim", high=MAX_HEAD_DIM, default=128),
        conv_kernel=fields.integer("linear_conv_kernel_dim", low=2, high=MAX_CONV_KERNEL, default=4),
    )


def _delta_layers(fields: Fields, num_layers: int) -> tuple[int, ...]:
    """``layer_types`` (newer), or every layer but each ``full_attention_interval``-th (older)."""
    types = fields.get("layer_types")
    if types is None:
        interval = fields.integer("full_attention_interval", high=MAX_LAYERS, default=4)
        return tuple(i for i in range(num_layers) if (i + 1) % interval)
    if not isinstance(types, list) or len(types) != num_layers:
        raise fields.fail("layer_types", f"a list of {num_layers} layer types", types)
    return tuple(i for i, kind in enumerate(types) if kind == "linear_attention")
