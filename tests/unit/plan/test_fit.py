"""Which ways a model can be shared, and whether one fits on given devices."""

from fakes.published_configs import (
    deepseek_v4_flash,
    qwen3_30b_a3b,
    qwen3_next,
    smollm2_135m,
)
from hotrack.modelspec.load import profile_config
from hotrack.plan.fit import GPU_SHARE, fit_gpus, fit_host, loaded_bytes, shares

GIB = 1 << 30


def test_shares_stop_where_the_model_cannot_be_split():
    found = {share.num_gpus: share for share in shares(profile_config(deepseek_v4_flash()), 1000)}
    assert list(found) == [1, 2, 4, 8, 16]
    assert found[16].tensor_bytes is None  # 8 groups of the output projection
    assert found[16].context_bytes is None
    assert found[16].expert_bytes < found[8].expert_bytes
    assert found[1].expert_bytes is None
    assert [share.num_gpus for share in shares(profile_config(smollm2_135m()), 1000)] == [1]


def test_shares_say_what_is_cut():
    found = {share.num_gpus: share.cuts for share in shares(profile_config(qwen3_30b_a3b(fp8=True)), 1000)}
    assert found[2] == ""
    assert found[4] == "192 expert channels in blocks of 128"


def test_the_fewest_gpus_that_hold_a_whole_context():
    """Qwen3-Next in bfloat16 is 148 GiB: two GPUs of 141 GiB hold it, four would, too."""
    found = fit_gpus(profile_config(qwen3_next()), [141 * GIB] * 4, 262_144)
    assert (found.tensor_parallel_size, found.verdict) == (2, "fits")
    assert found.weight_bytes + profile_config(qwen3_next()).cache_bytes(262_144, 2) <= found.room_bytes


def test_a_context_that_does_not_fit_is_shortened():
    profile = profile_config(qwen3_30b_a3b())
    found = fit_gpus(profile, [66 * GIB], 40_960)
    assert found.verdict == "fits with a shorter context"
    assert 0 < found.context_tokens < 40_960
    room = found.room_bytes - found.weight_bytes
    assert profile.cache_bytes(found.context_tokens) <= room < profile.cache_bytes(found.context_tokens + 1)


def test_weights_that_do_not_fit():
    found = fit_gpus(profile_config(qwen3_30b_a3b()), [24 * GIB], 40_960)
    assert (found.verdict, found.context_tokens) == ("does not fit", 0)


def test_unequal_gpus_count_as_their_fullest():
    found = fit_gpus(profile_config(qwen3_next()), [141 * GIB, 100 * GIB], 1000)
    assert found.tensor_parallel_size == 2
    assert found.room_bytes == int(100 * GIB * GPU_SHARE)


def test_what_is_run_is_dequantised_and_what_is_not_counts_as_published():
    quantised, plain = profile_config(qwen3_30b_a3b(fp8=True)), profile_config(qwen3_30b_a3b())
    assert loaded_bytes(quantised) == loaded_bytes(plain) == plain.num_bytes
    unserved = profile_config(deepseek_v4_flash())
    if not unserved.served:
        assert loaded_bytes(unserved) == unserved.num_bytes


def test_on_the_cpu():
    profile = profile_config(smollm2_135m())
    assert fit_host(profile, GIB, 8192).verdict == "fits"
    assert fit_host(profile, profile.num_bytes, 8192).verdict == "does not fit"
