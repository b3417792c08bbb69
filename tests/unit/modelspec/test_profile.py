"""What models take, from config.json alone, against what their publishers' files hold."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fakes.published_configs import (
    deepseek_v4_flash,
    mimo_v2_flash,
    qwen3_30b_a3b,
    qwen3_next,
    smollm2_135m,
)
from hotrack.core.errors import CheckpointError
from hotrack.modelspec import bytes as arithmetic
from hotrack.modelspec.load import profile_config
from hotrack.modelspec.parse import parse_config
from hotrack.modelspec.profile import CacheCost, Limit, Piece, Profile, Split
from hotrack.plan.fit import fit_gpus, shares

GIB = 1 << 30
SERVED = {
    "smollm2": smollm2_135m(),
    "qwen3-30b": qwen3_30b_a3b(),
    "qwen3-30b-fp8": qwen3_30b_a3b(fp8=True),
    "qwen3-next": qwen3_next(),
    "qwen3-next-fp8": qwen3_next(fp8=True),
    "mimo": mimo_v2_flash(),
}


def test_deepseek_v4_flash_0731_to_the_byte():
    """The published payload of the release with block drafts."""
    assert profile_config(deepseek_v4_flash(drafts="dspark")).num_bytes == 166_878_536_440


def test_deepseek_v4_flash_first_release():
    found = profile_config(deepseek_v4_flash())
    assert round(found.num_bytes / 1e9, 1) == 159.6
    assert round(found.per_gpu(4) / GIB, 1) == 38.1
    assert 43 <= found.per_gpu(1, 4) / GIB <= 44  # attention everywhere, experts dealt out
    assert dict(found.layers) == {
        "window only": 2,
        "compressed sparse (1:4)": 21,
        "heavily compressed (1:128)": 20,
    }
    assert [size for size in (1, 2, 3, 4, 8, 16) if found.allows_tensor_parallel(size)] == [1, 2, 4, 8]
    assert found.drafts == 1


def test_deepseek_v4_cache():
    """3,850 bytes per token, 3.2 MB of windows and 12.2 MB of open groups per request, on every rank."""
    found = profile_config(deepseek_v4_flash())
    assert found.bytes_per_token() == found.bytes_per_token(8) == 3850.25
    assert found.cache_bytes(0) == 43 * 128 * 584 + 21 * 80 * 1024 + 20 * 512 * 1024
    assert found.cache_bytes(131_072) - found.cache_bytes(0) == 131_072 * 3850.25
    assert found.cache_bytes(5) - found.cache_bytes(4) == 21 * (584 + 132)  # an entry that has begun


@pytest.mark.parametrize(
    ("config", "gigabytes", "tp4_gib"),
    [
        (smollm2_135m(), 0.269, None),
        (qwen3_30b_a3b(), 61.1, 14.2),
        (qwen3_30b_a3b(fp8=True), 31.2, 7.3),
        (qwen3_next(), 159.3, 37.2),
        (qwen3_next(fp8=True), 80.4, 18.8),
        (mimo_v2_flash(), 313.0, 73.2),  # with three draft layers, which are not counted here
        (mimo_v2_flash(store_dtype="mxfp4"), 171.0, 40.1),
    ],
)
def test_published_sizes(config, gigabytes, tp4_gib):
    found = profile_config(config)
    assert found.num_bytes / 1e9 == pytest.approx(gigabytes, rel=0.01)
    if tp4_gib is not None:
        assert found.per_gpu(4) / GIB == pytest.approx(tp4_gib, rel=0.015)


@pytest.mark.parametrize("config", SERVED.values(), ids=SERVED)
def test_a_profile_counts_what_the_spec_does(config):
    spec, found = parse_config(config), profile_config(config)
    assert found.num_parameters == arithmetic.num_parameters(spec)
    assert found.bytes_per_token() == arithmetic.kv_bytes_per_token(spec)
    assert found.cache_bytes(0) == arithmetic.state_bytes(spec)
    if not found.quantisation and spec.moe is None:
        assert found.num_bytes == arithmetic.weight_bytes(spec)
    assert found.per_gpu(1, bytes_per_parameter=2) == 2 * found.num_parameters


def test_cache_of_mimo_and_qwen3_next():
    mimo, following = profile_config(mimo_v2_flash()), profile_config(qwen3_next())
    assert (mimo.bytes_per_token(), mimo.bytes_per_token(4), mimo.bytes_per_token(8)) == (
        23_040,
        5_760,
        5_760,
    )
    assert round(mimo.cache_bytes(0) / 1e6, 1) == 25.6
    assert round(mimo.cache_bytes(0, 4) / 1e6, 1) == 6.4
    assert (following.bytes_per_token(), following.bytes_per_token(4)) == (24_576, 12_288)
    assert round(following.cache_bytes(0) / 1e6, 1) == 77.3
    assert round(following.cache_bytes(0, 4) / 1e6, 1) == 19.3


def test_shares_that_cut_blocks():
    """768 expert channels over 4 ranks are 192, one and a half blocks of 128."""
    found = profile_config(qwen3_30b_a3b(fp8=True))
    assert found.breaks_blocks(2) is None
    assert found.breaks_blocks(4) == Limit("expert channels", 768, 128)
    assert profile_config(qwen3_30b_a3b()).breaks_blocks(4) is None
    assert profile_config(qwen3_next(fp8=True)).breaks_blocks(8).what == "expert channels"
    narrow = {"moe_intermediate_size": 1536}  # 192 each of 8: blocks of 128 are cut, groups of 32 are not
    assert profile_config(mimo_v2_flash() | narrow).breaks_blocks(8).what == "expert channels"
    mimo = profile_config(mimo_v2_flash(store_dtype="mxfp4") | narrow)
    assert mimo.breaks_blocks(2) is None
    assert mimo.breaks_blocks(4) == mimo.breaks_blocks(8) == Limit("key channels", 4 * 192, 128, max_split=4)


def small(**fields) -> Profile:
    defaults = {
        "family": "test", "layers": (), "dtype": "bfloat16", "quantisation": "",
        "max_position_embeddings": 1000,
        "pieces": (
            Piece("a", 100, 200), Piece("b", 100, 200, Split.TENSOR), Piece("c", 100, 200, Split.KV_HEADS),
            Piece("d", 100, 200, Split.EXPERTS),
        ),
        "cache": (CacheCost(8, 4, request_bytes=16, max_split=2),),
        "num_kv_heads": 2, "hard": (Limit("heads", 12),),
    }  # fmt: skip
    return Profile(**defaults | fields)


@pytest.mark.parametrize(
    ("tp", "ep", "expected"),
    [(1, 0, 800), (2, 0, 500), (4, 0, 200 + 50 + 100 + 50), (1, 4, 650), (4, 2, 200 + 50 + 100 + 100)],
)
def test_how_weights_are_shared(tp, ep, expected):
    assert small().per_gpu(tp, ep) == expected


def test_how_long_a_request_fits():
    found = small()
    assert found.cache_bytes(1000) == 16 + 250 * 8
    assert found.cache_bytes(1000, 4) == (16 + 250 * 8) // 2  # two K/V heads, so two copies
    for room in (0, 15, 16, 23, 24, 500, 2015, 2016, 10**6):
        fits = found.tokens_in(room)
        assert fits == 0 or found.cache_bytes(fits) <= room
        assert fits == 1000 or found.cache_bytes(fits + 1) > room


def test_tensor_parallel_degrees():
    assert [n for n in range(1, 13) if small().allows_tensor_parallel(n)] == [1, 2, 4, 6, 12]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"compress_ratios": [0] * 42}, "compress_ratios must be at least 43 entries"),
        (
            {"compress_ratios": [0] * 43 + [8]},
            "at least 43 entries of 0, 4 or 128, found 8",
        ),
        ({"hidden_size": 0}, "hidden_size must be an integer between 1"),
        ({"num_experts_per_tok": 300}, "num_experts_per_tok must be an integer between 1 and 256"),
        ({"expert_dtype": "int3"}, "expert_dtype must be 'fp4' or 'fp8'"),
        ({"o_groups": None}, "'o_groups' is missing"),
    ],
)
def test_hostile_deepseek_v4_configs(change, message):
    with pytest.raises(CheckpointError, match=message):
        profile_config(deepseek_v4_flash() | change)


@pytest.mark.parametrize(
    ("quant", "message"),
    [
        ({"quant_method": "gptq"}, "quantised with 'gptq'"),
        ({"quant_method": "fp8", "fmt": "e5m2"}, "fmt must be 'e4m3'"),
        (
            {"quant_method": "fp8", "weight_block_size": [128]},
            "must be two positive integers",
        ),
        ({"quant_method": "fp8", "weight_block_size": [0, 128]}, "two positive integers"),
        (
            {"quant_method": "fp8", "weight_block_size": ["a", 1]},
            "must be at most 2 integers",
        ),
        ({"quant_method": "fp8", "store_dtype": "int4"}, "expert_dtype must be 'fp8', 'fp4' or 'mxfp4'"),
        ({"quant_method": "fp8", "mxfp4_block_size": 16}, "mxfp4_block_size must be 32"),
        ({"quant_method": "fp8", "ignored_layers": [3]}, "must be a list of module names"),
        ([], "quantization_config must be an object"),
    ],
)
def test_hostile_quantization_configs(quant, message):
    with pytest.raises(CheckpointError, match=message):
        parse_config(qwen3_30b_a3b() | {"quantization_config": quant})


ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 2**40) | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)
PUBLISHED = [
    deepseek_v4_flash(drafts="dspark"),
    mimo_v2_flash(),
    qwen3_next(fp8=True),
    qwen3_30b_a3b(fp8=True),
]


@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_a_field_that_says_anything_gives_numbers_or_an_error(data):
    config = dict(data.draw(st.sampled_from(PUBLISHED)))
    if data.draw(st.booleans()):
        quant = config["quantization_config"]
        changed = {data.draw(st.sampled_from(sorted(quant))): data.draw(ANYTHING)}
        config["quantization_config"] = quant | changed
    else:
        config[data.draw(st.sampled_from(sorted(config)))] = data.draw(ANYTHING)
    try:
        found = profile_config(config)
    except CheckpointError:
        return
    assert found.num_bytes > 0
    assert shares(found, found.max_position_embeddings)
    assert fit_gpus(found, [141 * GIB] * 3, 1000).weight_bytes > 0


def test_quantisation_as_published():
    spec = parse_config(mimo_v2_flash(store_dtype="mxfp4"))
    assert str(spec.quant) == "FP8 in blocks of 128x128, experts MXFP4"
    assert spec.quant.ignores("model.layers.3.self_attn.o_proj")
    assert not spec.quant.ignores("model.layers.3.self_attn.o_proj_other")
    assert not spec.quant.ignores("model.layers.33")
    assert str(parse_config(qwen3_30b_a3b() | {"quantization_config": {"quant_method": "fp8"}}).quant) == (
        "FP8 per tensor"
    )
