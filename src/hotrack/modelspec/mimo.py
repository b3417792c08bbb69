"""What MiMo-V2's config.json says beside the common fields, as published and as transformers writes it."""

from dataclasses import replace

from hotrack.core.errors import CheckpointError
from hotrack.modelspec.fields import Fields, shorten
from hotrack.modelspec.spec import ModelSpec, MoeSpec, RopeSpec, WindowSpec

MAX_WINDOW = 1 << 24
FUSED_RANKS = 4  # the publisher's tensor-parallel ranks


def with_mimo(spec: ModelSpec, fields: Fields) -> ModelSpec:
    """``spec`` with MiMo-V2's layers: windows with sinks, values of their own width, sigmoid routing.

    Published files count the window without the token itself (``sliding_window_size``), transformers' files
    with it (``sliding_window``).

    Raises CheckpointError for a layer list of the wrong length, or an option that is not served.
    """
    _refuse(spec, fields)
    windowed = WindowSpec(
        layers=_windowed_layers(fields, spec.num_layers),
        window=_window(fields),
        num_kv_heads=fields.integer("swa_num_key_value_heads", high=1 << 14, default=2 * spec.num_kv_heads),
        rope=_rope(fields, "sliding_attention", "swa_rope_theta", 1e4, spec.head_dim),
        sinks=fields.flag("add_swa_attention_sink_bias", default=True),
    )
    return replace(
        spec,
        qk_norm=False,
        rope=_rope(fields, "full_attention", "rope_theta", 5e6, spec.head_dim),
        v_head_dim=fields.integer("v_head_dim", high=4096, default=128),
        value_scale=fields.number("attention_value_scale", low=0.0, high=1e3, default=1.0),
        fused_qkv=_fused(fields, spec.num_heads, (spec.num_kv_heads, windowed.num_kv_heads)),
        windowed=windowed if windowed.layers else None,
        full_sinks=fields.flag("add_full_attention_sink_bias", default=False),
        moe=_moe(fields, spec.num_layers),
        unread=("model.mtp.",),
    )


def _refuse(spec: ModelSpec, fields: Fields) -> None:
    """What the code of this family does not implement."""
    same = {
        "swa_num_attention_heads": spec.num_heads,
        "swa_head_dim": spec.head_dim,
        "swa_v_head_dim": fields.integer("v_head_dim", high=4096, default=128),
    }
    for name, wanted in same.items():
        if (found := fields.get(name)) not in (None, wanted):
            raise fields.fail(name, f"{wanted}, as in layers without a window", found)
    for name, served in (("scoring_func", "sigmoid"), ("topk_method", "noaux_tc")):
        if (text := fields.text(name, default=served)) != served:
            raise CheckpointError(f"{fields.where}: {name} {shorten(text)!r} is not supported; {served!r} is")
    if fields.get("n_shared_experts") not in (None, 0):
        raise fields.fail("n_shared_experts", "null for this family", fields.get("n_shared_experts"))


def _listed(fields: Fields, name: str, length: int) -> list[object] | None:
    values = fields.get(name)
    if values is not None and (not isinstance(values, list) or len(values) != length):
        raise fields.fail(name, f"a list with an entry for each of {length} layers", values)
    return values


def _windowed_layers(fields: Fields, num_layers: int) -> tuple[int, ...]:
    """``hybrid_layer_pattern`` (published), ``layer_types`` (transformers), or all but the first and every
    sixth."""
    pattern = _listed(fields, "hybrid_layer_pattern", num_layers)
    types = _listed(fields, "layer_types", num_layers)
    if types is not None:
        return tuple(i for i, kind in enumerate(types) if kind == "sliding_attention")
    if pattern is not None:
        return tuple(i for i, windowed in enumerate(pattern) if windowed == 1)
    return tuple(i for i in range(num_layers) if i and (i + 1) % 6)


def _window(fields: Fields) -> int:
    if fields.get("sliding_window_size") is not None:
        return fields.integer("sliding_window_size", high=MAX_WINDOW) + 1
    return fields.integer("sliding_window", high=MAX_WINDOW)


def _rope(fields: Fields, kind: str, theta_name: str, theta: float, head_dim: int) -> RopeSpec:
    nested = fields.section("rope_parameters").section(kind)
    if (scaling := nested.text("rope_type", default="default")) != "default":
        raise CheckpointError(
            f"{nested.where}: rope type {shorten(scaling)!r} is not supported for this family"
        )
    share = fields.number("partial_rotary_factor", low=0.0, high=1.0, default=0.334)
    share = nested.number("partial_rotary_factor", low=0.0, high=1.0, default=share)
    published = fields.number(theta_name, low=1.0, high=1e12, default=theta)
    return RopeSpec(
        theta=nested.number("rope_theta", low=1.0, high=1e12, default=published), dim=int(head_dim * share)
    )


def _fused(fields: Fields, num_heads: int, kv_heads: tuple[int, ...]) -> int:
    layout = fields.text("attention_projection_layout", default="split")
    if layout not in ("split", "fused_qkv"):
        raise fields.fail("attention_projection_layout", "'split' or 'fused_qkv'", layout)
    if layout == "split":
        return 0
    if any(count % FUSED_RANKS for count in (num_heads, *kv_heads)):
        raise CheckpointError(
            f"{fields.where}: fused_qkv deals heads out to {FUSED_RANKS} ranks, which does not divide "
            f"{num_heads} query or {kv_heads} key/value heads"
        )
    return FUSED_RANKS


def _moe(fields: Fields, num_layers: int) -> MoeSpec:
    num_experts = fields.integer("n_routed_experts", "num_local_experts", high=1 << 14)
    num_groups = fields.integer("n_group", high=num_experts, default=1)
    if num_experts % num_groups or (num_groups > 1 and num_experts // num_groups < 2):
        raise fields.fail(
            "n_group", f"a divisor of {num_experts} experts, at least two in a group", num_groups
        )
    return MoeSpec(
        num_experts=num_experts,
        top_k=fields.integer("num_experts_per_tok", high=1 << 14),
        intermediate_size=fields.integer("moe_intermediate_size", high=1 << 20),
        norm_topk_prob=fields.flag("norm_topk_prob", default=True),
        sparse_layers=_sparse_layers(fields, num_layers),
        scoring="sigmoid",
        num_groups=num_groups,
        top_groups=fields.integer("topk_group", high=num_groups, default=1),
        routed_scaling=fields.number("routed_scaling_factor", low=0.0, high=1e3, default=1.0),
    )


def _sparse_layers(fields: Fields, num_layers: int) -> tuple[int, ...]:
    """``moe_layer_freq`` (published), ``mlp_layer_types`` (transformers), or all but the first."""
    types = _listed(fields, "mlp_layer_types", num_layers)
    if types is not None:
        return tuple(i for i, kind in enumerate(types) if kind == "sparse")
    freq = _listed(fields, "moe_layer_freq", num_layers)
    if freq is not None:
        return tuple(i for i, sparse in enumerate(freq) if sparse == 1)
    return tuple(range(1, num_layers))
