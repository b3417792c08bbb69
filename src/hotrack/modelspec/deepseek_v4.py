"""The profile of DeepSeek-V4 (DeepSeek-AI, 2026) from its config.json: every published tensor."""

from collections.abc import Iterator

from hotrack.modelspec.fields import Fields
from hotrack.modelspec.profile import CacheCost, Limit, Piece, Profile, Split
from hotrack.modelspec.storage import Size, fp8, mxfp4, plain

BLOCK = (128, 128)
CSA, HCA = 4, 128  # tokens that one compressed entry stands for
NOPE_BLOCK = 64  # cached values that share a scale
BF16, FLOAT32, INT64 = 2, 4, 8
WIDTH, HEADS, LAYERS = 1 << 20, 1 << 14, 4096


class DeepseekV4:
    """Dimensions under short names: ``H`` hidden size, ``E`` experts, ``inner`` channels of one."""

    def __init__(self, fields: Fields) -> None:
        self.layers = fields.integer("num_hidden_layers", high=LAYERS)
        self.H = fields.integer("hidden_size", high=WIDTH)
        self.heads = fields.integer("num_attention_heads", high=HEADS)
        self.head_dim = fields.integer("head_dim", high=4096)
        self.rope_dim = fields.integer("qk_rope_head_dim", high=self.head_dim)
        self.q_rank = fields.integer("q_lora_rank", high=WIDTH)
        self.o_groups = fields.integer("o_groups", high=HEADS)
        self.o_rank = fields.integer("o_lora_rank", high=WIDTH)
        self.window = fields.integer("sliding_window", high=1 << 24)
        self.index_heads = fields.integer("index_n_heads", high=HEADS)
        self.index_dim = fields.integer("index_head_dim", high=4096)
        self.streams = fields.integer("hc_mult", high=64)
        self.E = fields.integer("n_routed_experts", high=HEADS)
        self.top_k = fields.integer("num_experts_per_tok", high=self.E)
        self.shared = fields.integer("n_shared_experts", high=64, low=0, default=1)
        self.inner = fields.integer("moe_intermediate_size", high=WIDTH)
        self.hash_layers = fields.integer("num_hash_layers", high=LAYERS, low=0, default=0)
        self.vocab = fields.integer("vocab_size", high=1 << 22)
        self.positions = fields.integer("max_position_embeddings", high=1 << 28)
        ratios = fields.integers("compress_ratios", high=1 << 16, max_len=2 * LAYERS)
        unknown = [r for r in ratios if r not in (0, CSA, HCA)]
        if len(ratios) < self.layers or unknown:
            expected = f"at least {self.layers} entries of 0, {CSA} or {HCA}"
            raise fields.fail("compress_ratios", expected, unknown[0] if unknown else list(ratios))
        self.ratios = ratios[: self.layers]
        self.drafts = len(ratios) - self.layers  # each draft block has an entry, too
        self.block_drafts = fields.get("dspark_block_size") is not None
        self.markov_rank = fields.integer("dspark_markov_rank", high=WIDTH, default=256)
        targets = fields.integers("dspark_target_layer_ids", high=LAYERS, max_len=LAYERS)
        self.draft_inputs = len(targets) or 1
        quant = fields.section("quantization_config")
        self.scale_bytes = 1 if quant.text("scale_fmt", default="float") == "ue8m0" else FLOAT32
        kind = fields.text("expert_dtype", default="fp8")
        if kind not in ("fp4", "fp8"):
            raise fields.fail("expert_dtype", "'fp4' or 'fp8'", kind)
        self.fp4_experts = kind == "fp4"

    def linear(self, rows: int, columns: int) -> Size:
        return fp8(rows, columns, BLOCK, self.scale_bytes)

    def expert(self, rows: int, columns: int) -> Size:
        return mxfp4(rows, columns) if self.fp4_experts else self.linear(rows, columns)

    @property
    def head_mix(self) -> int:
        """What collapses the streams before a head: a matrix, its base and its scale."""
        return self.streams * self.streams * self.H + self.streams + 1


def deepseek_v4_profile(fields: Fields) -> Profile:
    """Raises CheckpointError for a field that is missing or out of range."""
    c = DeepseekV4(fields)
    sums: dict[tuple[str, Split], Size] = {}
    for part, size, split in _weights(c):
        old = sums.get((part, split), Size(0, 0))
        sums[part, split] = Size(old.parameters + size.parameters, old.num_bytes + size.num_bytes)
    kinds = {"window only": 0, f"compressed sparse (1:{CSA})": CSA, f"heavily compressed (1:{HCA})": HCA}
    experts = "MXFP4" if c.fp4_experts else "FP8"
    return Profile(
        family="deepseek_v4",
        layers=tuple((kind, c.ratios.count(ratio)) for kind, ratio in kinds.items()),
        dtype="bfloat16",
        quantisation=f"FP8 in blocks of {BLOCK[0]}x{BLOCK[1]}, experts {experts}",
        pieces=tuple(Piece(part, *size, split) for (part, split), size in sums.items()),
        cache=_cache(c),
        max_position_embeddings=c.positions,
        num_kv_heads=1,
        hard=(
            Limit("attention heads", c.heads),
            Limit("groups of the output projection", c.o_groups),
            Limit("expert channels", c.inner),
        ),
        soft=(
            Limit("expert channels", c.inner, 32 if c.fp4_experts else BLOCK[1]),
            Limit("shared expert channels", c.shared * c.inner, BLOCK[1]),
        ),
        num_experts=c.E,
        top_k=c.top_k,
        shared_experts=c.shared,
        drafts=c.drafts,
        served=False,
    )


Weights = Iterator[tuple[str, Size, Split]]


def _weights(c: DeepseekV4) -> Weights:
    yield "embeddings and head", plain(c.vocab * c.H, BF16) * 2, Split.TENSOR
    yield "norms", plain(c.H, BF16), Split.WHOLE
    yield "hyper-connections", plain(c.head_mix, FLOAT32), Split.WHOLE
    for layer, ratio in enumerate(c.ratios):
        yield from _block(c, hashed=layer < c.hash_layers)
        if ratio:
            yield from _compressor(c, ratio)
        if ratio == CSA:
            yield from _indexer(c)
    for _ in range(c.drafts):
        for _part, size, split in _block(c, hashed=False):
            yield "draft blocks", size, split
    if c.drafts:
        yield from _draft_heads(c)


def _block(c: DeepseekV4, *, hashed: bool) -> Weights:
    out_width = c.heads * c.head_dim // c.o_groups
    yield "attention", c.linear(c.q_rank, c.H), Split.WHOLE  # wq_a
    yield "attention", c.linear(c.head_dim, c.H), Split.WHOLE  # wkv: one head, key and value in one
    yield "attention", c.linear(c.heads * c.head_dim, c.q_rank), Split.TENSOR  # wq_b
    yield "attention", c.linear(c.o_groups * c.o_rank, out_width), Split.TENSOR  # wo_a
    yield "attention", c.linear(c.H, c.o_groups * c.o_rank), Split.TENSOR  # wo_b
    yield "norms", plain(c.heads, FLOAT32), Split.TENSOR  # sinks
    yield "norms", plain(c.q_rank + c.head_dim + 2 * c.H, BF16), Split.WHOLE
    mixes = c.streams * (2 + c.streams)  # pre, post and the mixing matrix
    yield "hyper-connections", plain(2 * (mixes * c.streams * c.H + mixes + 3), FLOAT32), Split.WHOLE
    yield "routers", plain(c.E * c.H, BF16), Split.WHOLE
    if hashed:  # experts by token id instead of a correction bias
        yield "routers", plain(c.vocab * c.top_k, INT64), Split.WHOLE
    else:
        yield "routers", plain(c.E, FLOAT32), Split.WHOLE
    shared = c.shared * c.inner
    yield "shared experts", c.linear(shared, c.H) * 2, Split.TENSOR
    yield "shared experts", c.linear(c.H, shared), Split.TENSOR
    yield "experts", c.expert(c.inner, c.H) * (2 * c.E), Split.EXPERTS
    yield "experts", c.expert(c.H, c.inner) * c.E, Split.EXPERTS


def _compressor(c: DeepseekV4, ratio: int) -> Weights:
    width = c.head_dim * (2 if ratio == CSA else 1)  # sparse entries overlap: two halves
    yield "compressors and indexers", plain(2 * width * c.H + c.head_dim, BF16), Split.WHOLE
    yield "compressors and indexers", plain(ratio * width, FLOAT32), Split.WHOLE


def _indexer(c: DeepseekV4) -> Weights:
    width = 2 * c.index_dim
    yield "compressors and indexers", c.linear(c.index_heads * c.index_dim, c.q_rank), Split.WHOLE
    values = c.index_heads * c.H + 2 * width * c.H + c.index_dim
    yield "compressors and indexers", plain(values, BF16), Split.WHOLE
    yield "compressors and indexers", plain(CSA * width, FLOAT32), Split.WHOLE


def _draft_heads(c: DeepseekV4) -> Weights:
    yield "draft heads", plain(c.head_mix, FLOAT32), Split.WHOLE
    if not c.block_drafts:
        yield "draft heads", c.linear(c.H, c.H) * 2, Split.WHOLE  # of the embedding and of the streams
        yield "draft heads", plain(3 * c.H, BF16), Split.WHOLE
        return
    yield "draft heads", c.linear(c.H, c.draft_inputs * c.H), Split.WHOLE
    yield "draft heads", plain(2 * c.vocab * c.markov_rank, BF16), Split.WHOLE
    yield "draft heads", plain(c.H + c.markov_rank + 2 * c.H, BF16), Split.WHOLE  # confidence, two norms


def _cache(c: DeepseekV4) -> tuple[CacheCost, ...]:
    """Every rank holds all of it: there is one K/V head. Rows have FP8 values with a scale per 64,
    padded to 8 bytes of scales, and the rotated dims in bfloat16; index keys FP8 with a float32 scale."""
    nope = c.head_dim - c.rope_dim
    row = nope + -(-(nope // NOPE_BLOCK) // 8) * 8 + BF16 * c.rope_dim
    index_row = c.index_dim + FLOAT32
    sparse, heavy = c.ratios.count(CSA), c.ratios.count(HCA)
    # An open group keeps its inputs and their scores in float32; sparse entries overlap, so two groups.
    open_rows = 2 * CSA * 2 * 2 * (c.head_dim + c.index_dim) * FLOAT32
    open_bytes = sparse * open_rows + heavy * HCA * 2 * c.head_dim * FLOAT32
    return (
        CacheCost(sparse * (row + index_row), CSA),
        CacheCost(heavy * row, HCA),
        CacheCost(request_bytes=c.layers * c.window * row + open_bytes),
    )
