"""The profile of every family that hotrack serves, from its ModelSpec."""

from collections import Counter

from hotrack.core.tensorspec import DTYPE_BYTES
from hotrack.modelspec.bytes import kv_bytes_per_token
from hotrack.modelspec.profile import CacheCost, Limit, Piece, Profile, Split
from hotrack.modelspec.spec import GatedDeltaSpec, ModelSpec, MoeSpec
from hotrack.modelspec.storage import Size, fp8, mxfp4, plain

FLOAT32 = DTYPE_BYTES["float32"]


def profile_of(spec: ModelSpec) -> Profile:
    """What ``spec`` takes, without the draft heads that it does not describe."""
    pieces = _Pieces(spec)
    kinds: Counter[str] = Counter()
    for layer in range(spec.num_layers):
        kinds[_mixer(spec, layer, pieces)] += 1
        kinds[_mlp(spec, layer, pieces)] += 1
        pieces.add("norms", plain(2 * spec.hidden_size, pieces.element))
    embeddings = 1 if spec.tie_word_embeddings else 2
    pieces.add(
        "embeddings and head",
        plain(spec.vocab_size * spec.hidden_size, pieces.element) * embeddings,
        Split.TENSOR,
    )
    pieces.add("norms", plain(spec.hidden_size, pieces.element))
    hard, soft = _limits(spec)
    return Profile(
        family=spec.family,
        layers=tuple(kinds.items()),
        dtype=spec.dtype,
        quantisation="" if spec.quant is None else str(spec.quant),
        pieces=pieces.found(),
        cache=_cache(spec),
        max_position_embeddings=spec.max_position_embeddings,
        num_kv_heads=spec.num_kv_heads,
        hard=hard,
        soft=soft,
        num_experts=spec.moe.num_experts if spec.moe else 0,
        top_k=spec.moe.top_k if spec.moe else 0,
        shared_experts=1 if spec.moe and spec.moe.shared_intermediate_size else 0,
        unread=bool(spec.unread),
        loaded_dtype=spec.dtype,
    )


class _Pieces:
    """Sums sizes by part and split."""

    def __init__(self, spec: ModelSpec) -> None:
        self.spec = spec
        self.element = DTYPE_BYTES[spec.dtype]
        self._sizes: dict[tuple[str, Split], Size] = {}

    def add(self, part: str, size: Size, split: Split = Split.WHOLE) -> None:
        old = self._sizes.get((part, split), Size(0, 0))
        self._sizes[part, split] = Size(old.parameters + size.parameters, old.num_bytes + size.num_bytes)

    def linear(self, module: str, rows: int, columns: int) -> Size:
        """A projection whose published name is ``module``, in the format that it is published in."""
        quant = self.spec.quant
        if quant is None or quant.ignores(module):
            return plain(rows * columns, self.element)
        return fp8(rows, columns, quant.block or (rows, columns), quant.scale_bytes)

    def expert(self, module: str, rows: int, columns: int) -> Size:
        if self.spec.quant is not None and self.spec.quant.experts == "mxfp4":
            return mxfp4(rows, columns)
        return self.linear(module, rows, columns)

    def found(self) -> tuple[Piece, ...]:
        return tuple(Piece(part, *size, split) for (part, split), size in self._sizes.items())


def _mixer(spec: ModelSpec, layer: int, pieces: _Pieces) -> str:
    if spec.gated_delta is not None and layer in spec.gated_delta.layers:
        _gated_delta(spec, spec.gated_delta, layer, pieces)
        return "gated DeltaNet"
    window, prefix = spec.window_of(layer), f"model.layers.{layer}.self_attn."
    kv_heads = spec.num_kv_heads if window is None else window.num_kv_heads
    hidden, q = spec.hidden_size, spec.num_heads * spec.head_dim
    made = 2 * q if spec.output_gate else q
    out = spec.num_heads * spec.value_dim
    pieces.add("attention", pieces.linear(prefix + "q_proj", made, hidden), Split.TENSOR)
    for name, width in (("k_proj", spec.head_dim), ("v_proj", spec.value_dim)):
        pieces.add("attention", pieces.linear(prefix + name, kv_heads * width, hidden), Split.KV_HEADS)
    pieces.add("attention", pieces.linear(prefix + "o_proj", hidden, out), Split.TENSOR)
    extra = 2 * spec.head_dim if spec.qk_norm else 0
    if spec.attention_bias:
        extra += made + kv_heads * (spec.head_dim + spec.value_dim) + hidden
    if spec.full_sinks if window is None else window.sinks:
        extra += spec.num_heads
    pieces.add("norms", plain(extra, pieces.element))
    return "full attention" if window is None else f"window of {window.window}"


def _gated_delta(spec: ModelSpec, delta: GatedDeltaSpec, layer: int, pieces: _Pieces) -> None:
    prefix, hidden = f"model.layers.{layer}.linear_attn.", spec.hidden_size
    values = delta.num_value_heads * delta.value_head_dim
    rows = delta.conv_channels + values
    pieces.add("gated DeltaNet", pieces.linear(prefix + "in_proj_qkvz", rows, hidden), Split.TENSOR)
    pieces.add("gated DeltaNet", pieces.linear(prefix + "out_proj", hidden, values), Split.TENSOR)
    per_head = 2 * delta.num_value_heads * (hidden + 1)  # in_proj_ba, A_log, dt_bias
    pieces.add(
        "gated DeltaNet",
        plain(per_head + delta.conv_channels * delta.conv_kernel, pieces.element),
        Split.TENSOR,
    )
    pieces.add("norms", plain(delta.value_head_dim, pieces.element))


def _mlp(spec: ModelSpec, layer: int, pieces: _Pieces) -> str:
    prefix, hidden = f"model.layers.{layer}.mlp.", spec.hidden_size
    if spec.moe is not None and layer in spec.moe.sparse_layers:
        _sparse(spec, spec.moe, prefix, pieces)
        return "sparse feed-forward"
    for name, (rows, columns) in _gated(hidden, spec.intermediate_size).items():
        pieces.add("feed-forward", pieces.linear(prefix + name, rows, columns), Split.TENSOR)
    if spec.mlp_bias:
        pieces.add("norms", plain(2 * spec.intermediate_size + hidden, pieces.element))
    return "dense feed-forward"


def _sparse(spec: ModelSpec, moe: MoeSpec, prefix: str, pieces: _Pieces) -> None:
    hidden, shared = spec.hidden_size, moe.shared_intermediate_size
    for name, (rows, columns) in _gated(hidden, moe.intermediate_size).items():
        each = pieces.expert(f"{prefix}experts.0.{name}", rows, columns)
        pieces.add("experts", each * moe.num_experts, Split.EXPERTS)
    if shared:
        for name, (rows, columns) in _gated(hidden, shared).items():
            size = pieces.linear(f"{prefix}shared_expert.{name}", rows, columns)
            pieces.add("shared expert", size, Split.TENSOR)
        pieces.add("routers", plain(hidden, pieces.element))
    if moe.scoring == "sigmoid":  # routes in float32, with a bias per expert
        pieces.add("routers", plain(moe.num_experts * (hidden + 1), FLOAT32))
    else:
        pieces.add("routers", plain(moe.num_experts * hidden, pieces.element))


def _gated(hidden: int, inner: int) -> dict[str, tuple[int, int]]:
    return {"gate_proj": (inner, hidden), "up_proj": (inner, hidden), "down_proj": (hidden, inner)}


def _cache(spec: ModelSpec) -> tuple[CacheCost, ...]:
    element = DTYPE_BYTES[spec.dtype]
    found = [CacheCost(kv_bytes_per_token(spec), max_split=spec.num_kv_heads)]
    if (window := spec.windowed) is not None:
        entry = window.num_kv_heads * (spec.head_dim + spec.value_dim) * element
        size = len(window.layers) * window.window * entry
        found.append(CacheCost(request_bytes=size, max_split=window.num_kv_heads))
    if (delta := spec.gated_delta) is not None:
        matrices = delta.num_value_heads * delta.key_head_dim * delta.value_head_dim * FLOAT32
        inputs = (delta.conv_kernel - 1) * delta.conv_channels * element
        size = len(delta.layers) * (matrices + inputs)
        found.append(CacheCost(request_bytes=size, max_split=delta.num_key_heads))
    return tuple(found)


def _limits(spec: ModelSpec) -> tuple[tuple[Limit, ...], tuple[Limit, ...]]:
    """What tensor parallelism must divide, and what must also be whole blocks to stay quantised."""
    moe, quant = spec.moe, spec.quant
    inner = []
    if moe is None or len(moe.sparse_layers) < spec.num_layers:
        inner.append(Limit("feed-forward channels", spec.intermediate_size))
    if moe is not None:
        inner.append(Limit("expert channels", moe.intermediate_size))
        if moe.shared_intermediate_size:
            inner.append(Limit("shared expert channels", moe.shared_intermediate_size))
    heads = [Limit("attention heads", spec.num_heads)]
    if spec.windowed is not None:
        heads.append(Limit("key/value heads in windows", spec.windowed.num_kv_heads))
    if spec.gated_delta is not None:
        heads.append(Limit("key heads of gated DeltaNet", spec.gated_delta.num_key_heads))
    if quant is None or quant.block is None:
        return (*heads, *inner), ()
    block = max(quant.block)
    group = {"expert channels": 32} if quant.experts == "mxfp4" else {}
    soft = [Limit(i.what, i.size, group.get(i.what, block)) for i in inner]
    soft.append(Limit("query channels", spec.num_heads * spec.head_dim, block))
    counts = {spec.num_kv_heads, spec.windowed.num_kv_heads if spec.windowed else spec.num_kv_heads}
    for count in sorted(counts):
        soft.append(Limit("key channels", count * spec.head_dim, block, max_split=count))
        soft.append(Limit("value channels", count * spec.value_dim, block, max_split=count))
    return (*heads, *inner), tuple(soft)
