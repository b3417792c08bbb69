"""The sampler against a naive numpy twin, and the promises it makes about seeds, ties and bad logits."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from hotrack.core.errors import RequestError
from hotrack.core.request import unpack_tokens
from hotrack.core.sampling import SamplingParams
from hotrack.engine.sampler import INVALID_TOKEN, Sampler, SamplerOutput, compute_logprobs
from hotrack.engine.sampling_batch import SamplingState, uniforms

FloatArray = npt.NDArray[np.float64]


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(11)


def sample(
    logits: Tensor,
    params: Sequence[SamplingParams],
    *,
    prompt: Sequence[int] = (),
    output: Sequence[int] = (),
    eos: Sequence[int] = (),
) -> SamplerOutput:
    state = SamplingState(len(params), logits.shape[-1])
    for slot, p in enumerate(params):
        state.add(slot, p, prompt_token_ids=prompt, output_token_ids=output, eos_token_ids=eos)
    return Sampler()(logits, state.select(range(len(params))))


def naive_probs(
    row: FloatArray, p: SamplingParams, prompt: Sequence[int], output: Sequence[int]
) -> FloatArray:
    """Probabilities by the book: one token at a time, full sorts, float64."""
    x = row.astype(np.float64).copy()
    for token, bias in p.logit_bias.items():
        x[token] += bias
    for token in set(prompt) | set(output):
        x[token] = x[token] / p.repetition_penalty if x[token] > 0 else x[token] * p.repetition_penalty
    for token in set(output):
        x[token] -= p.frequency_penalty * list(output).count(token) + p.presence_penalty
    x = x / p.temperature
    probs = np.exp(x - x.max())
    probs[probs < p.min_p * probs.max()] = 0.0
    if 0 < p.top_k < len(x):
        probs[probs < np.sort(probs)[-p.top_k]] = 0.0
    probs /= probs.sum()
    if p.top_p < 1.0:
        order = np.argsort(-probs, kind="stable")
        size = int(np.sum(np.cumsum(probs[order]) < p.top_p)) + 1
        probs[probs < probs[order[min(size, len(x)) - 1]]] = 0.0
    return probs / probs.sum()


def naive_token(row: FloatArray, p: SamplingParams, prompt: Sequence[int], output: Sequence[int]) -> int:
    assert p.seed is not None
    probs = naive_probs(row, p, prompt, output)
    u = uniforms(np.array([p.seed]), np.array([len(output)]))[0]
    return int(np.searchsorted(np.cumsum(probs), u, side="right"))


FEATURES = {
    "plain": {},
    "temperature": {"temperature": 0.3},
    "hot": {"temperature": 5.0},
    "top_k": {"top_k": 7},
    "top_k_large": {"top_k": 900, "temperature": 3.0},
    "top_k_beyond_vocab": {"top_k": 10_000},
    "top_p": {"top_p": 0.7},
    "top_p_flat": {"top_p": 0.95, "temperature": 20.0},
    "top_p_almost_one": {"top_p": 1 - 1e-12, "temperature": 20.0},
    "top_p_tiny": {"top_p": 1e-9},
    "min_p": {"min_p": 0.05},
    "min_p_one": {"min_p": 1.0},
    "all_three": {"top_k": 40, "top_p": 0.9, "min_p": 0.01},
    "penalties": {"repetition_penalty": 1.3, "presence_penalty": 0.7, "frequency_penalty": -0.4},
    "logit_bias": {"logit_bias": {3: 4.0, 8: -100.0}},
    "everything": {
        "temperature": 1.5,
        "top_k": 30,
        "top_p": 0.8,
        "min_p": 0.001,
        "repetition_penalty": 0.8,
        "frequency_penalty": 0.5,
        "logit_bias": {1: 2.0},
    },
}
VOCAB = 1003  # not a multiple of the block of the cumulative sum
PROMPT = (1, 2, 3, 500, 2)
OUTPUT = (7, 7, 3, 1002)


@pytest.mark.parametrize("feature", FEATURES)
def test_feature_matches_naive_twin(feature: str) -> None:
    rows = 48
    logits = torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(5)) * 3
    params = [SamplingParams(seed=1000 + i, **FEATURES[feature]) for i in range(rows)]
    before = logits.clone()
    tokens = sample(logits, params, prompt=PROMPT, output=OUTPUT).tokens
    expected = [naive_token(r, p, PROMPT, OUTPUT) for r, p in zip(logits.numpy(), params, strict=True)]
    assert tokens.dtype == torch.int32
    assert tokens.tolist() == expected
    assert torch.equal(logits, before), "the sampler must not write into the model's logits"


def test_mixed_batch_matches_each_row_alone() -> None:
    """Every feature in one batch, greedy rows between them: no row may see its neighbours' settings."""
    params = []
    for i, options in enumerate(FEATURES.values()):
        params += [SamplingParams(seed=i, **options), SamplingParams(temperature=0.0, repetition_penalty=1.1)]
    logits = torch.randn(len(params), VOCAB) * 3
    together = sample(logits, params, prompt=PROMPT, output=OUTPUT).tokens
    alone = [
        int(sample(logits[i : i + 1], [p], prompt=PROMPT, output=OUTPUT).tokens) for i, p in enumerate(params)
    ]
    assert together.tolist() == alone


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(-(2**63), 2**64 - 1),
    vocab=st.integers(1, 700),
    levels=st.integers(1, 6),
    temperature=st.floats(0.01, 5),
    top_k=st.integers(-1, 800),
    top_p=st.floats(0.01, 1.0),
    min_p=st.floats(0, 1),
)
def test_tied_logits_match_naive_twin(
    seed: int, vocab: int, levels: int, temperature: float, top_k: int, top_p: float, min_p: float
) -> None:
    """Few distinct logits, as bf16 models give: ties are kept or dropped together."""
    logits = torch.randint(
        0, levels, (1, vocab), generator=torch.Generator().manual_seed(seed % 2**32)
    ).float()
    p = SamplingParams(seed=seed, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    token = int(sample(logits, [p]).tokens)
    kept = np.flatnonzero(naive_probs(logits[0].numpy(), p, (), ()) > 0)
    values = logits[0].numpy()
    assert 0 <= token < vocab
    # One level of slack: where a sum of probabilities meets top_p exactly, float32 may end on either side.
    assert values[token] >= values[kept].min() - 1


def test_more_ties_than_candidates_are_all_kept() -> None:
    logits = torch.zeros(64, 500)
    logits[:, 100:300] = 1.0
    params = [SamplingParams(seed=i, top_k=5) for i in range(64)]
    expected = [naive_token(row, p, (), ()) for row, p in zip(logits.numpy(), params, strict=True)]
    assert sample(logits, params).tokens.tolist() == expected
    assert len(set(expected)) > 40


@pytest.mark.parametrize("options", [{}, {"top_p": 0.9}, {"top_k": 20}, {"min_p": 0.02}])
def test_sampled_distribution_passes_chi_square(options: dict[str, float]) -> None:
    draws = 20_000
    row = torch.randn(64, generator=torch.Generator().manual_seed(1)) * 1.5
    state = SamplingState(draws, 64)
    for slot in range(draws):
        state.add(slot, SamplingParams(seed=slot, **options), prompt_token_ids=())
    tokens = Sampler()(row.expand(draws, 64), state.select(range(draws))).tokens
    observed = np.bincount(tokens.numpy(), minlength=64)
    expected = naive_probs(row.numpy(), SamplingParams(**options), (), ()) * draws
    assert observed[expected == 0].sum() == 0
    seen = expected > 0
    statistic = float(((observed[seen] - expected[seen]) ** 2 / expected[seen]).sum())
    freedom = int(seen.sum()) - 1
    # Wilson-Hilferty: within 4 standard deviations of what a true sample gives.
    z = ((statistic / freedom) ** (1 / 3) - (1 - 2 / (9 * freedom))) / np.sqrt(2 / (9 * freedom))
    assert abs(z) < 4, f"{statistic=} {freedom=}"


def test_uniforms_depend_on_seed_and_position_only_and_look_uniform() -> None:
    seeds, positions = np.meshgrid(np.arange(-100, 100), np.arange(200))
    u = uniforms(seeds.ravel(), positions.ravel())
    assert u.min() >= 0
    assert u.max() < 1
    assert len(np.unique(u)) == u.size, "two (seed, position) pairs share a number"
    assert abs(u.mean() - 0.5) < 4 / np.sqrt(12 * u.size)
    table = u.reshape(seeds.shape)
    for a, b in ((table[:, 1:], table[:, :-1]), (table[1:], table[:-1]), (table[1:, 1:], table[:-1, :-1])):
        assert abs(np.corrcoef(a.ravel(), b.ravel())[0, 1]) < 0.03
    assert uniforms(np.array([5]), np.array([9]))[0] == table[9, 105]


def test_first_splitmix64_output_is_the_published_one() -> None:
    """Reference value of SplitMix64 with seed 1234567: 6457827717110365317."""
    from hotrack.engine.sampling_batch import _GOLDEN, _mix64

    assert int(_mix64(np.array([1234567], np.uint64) + _GOLDEN)[0]) == 6457827717110365317


def test_seeded_sequence_is_the_same_whatever_the_batch() -> None:
    """Generate alone, then in the middle of a changing crowd: same logits, same tokens."""
    steps, vocab = 30, 515
    mine = torch.randn(steps, vocab) * 2
    p = SamplingParams(seed=99, temperature=0.9, top_p=0.95, repetition_penalty=1.2)

    def run(crowd: bool) -> list[int]:
        state = SamplingState(8, vocab)
        state.add(5, p, prompt_token_ids=[1, 2])
        tokens = []
        for step in range(steps):
            slots = [5]
            if crowd:
                state.add(step % 5, SamplingParams(seed=step, top_k=3 + step), prompt_token_ids=[step])
                slots = [step % 5, 5, 6] if step % 2 else [5, step % 5]
                state.add(6, SamplingParams(temperature=0.0), prompt_token_ids=[])
            logits = torch.randn(len(slots), vocab)
            logits[slots.index(5)] = mine[step]
            out = Sampler()(logits, state.select(slots)).tokens
            state.append(slots, out)
            tokens.append(int(out[slots.index(5)]))
        return tokens

    assert run(crowd=False) == run(crowd=True)


def test_resumed_sequence_continues_as_if_never_preempted() -> None:
    vocab = 300
    logits = torch.randn(12, vocab)
    p = SamplingParams(seed=3, presence_penalty=1.0, frequency_penalty=0.5, min_tokens=8, stop_token_ids=(4,))
    logits[:, 4] = 50.0  # always wins once min_tokens lets it
    whole = SamplingState(1, vocab)
    whole.add(0, p, prompt_token_ids=[1], eos_token_ids=[2])
    tokens: list[int] = []
    for step in range(12):
        out = Sampler()(logits[step : step + 1], whole.select([0])).tokens
        whole.append([0], out)
        resumed = SamplingState(3, vocab)
        resumed.add(2, p, prompt_token_ids=[1], output_token_ids=tokens, eos_token_ids=[2])
        assert torch.equal(Sampler()(logits[step : step + 1], resumed.select([2])).tokens, out)
        tokens.append(int(out))
    assert 4 not in tokens[:8]
    assert tokens[8] == 4


def test_min_tokens_forbids_eos_and_stop_ids_even_against_bias() -> None:
    logits = torch.zeros(1, 10)
    p = SamplingParams(temperature=0.0, min_tokens=2, stop_token_ids=(5, 99), logit_bias={5: 100.0, 7: 1.0})
    assert sample(logits, [p], eos=[6]).tokens.tolist() == [7]
    assert sample(logits, [p], output=[1, 1], eos=[6]).tokens.tolist() == [5]


def test_penalties_use_counts_of_appended_tokens() -> None:
    state = SamplingState(2, 6)
    state.add(0, SamplingParams(temperature=0.0, frequency_penalty=1.0), prompt_token_ids=[0])
    state.add(1, SamplingParams(temperature=0.0), prompt_token_ids=[0])
    logits = torch.tensor([[3.0, 2.5, 0, 0, 0, 0]]).repeat(2, 1)
    got = []
    for _ in range(4):
        out = Sampler()(logits, state.select([0, 1])).tokens
        state.append([0, 1], out)
        got.append(out.tolist())
    assert got == [[0, 0], [1, 0], [0, 0], [1, 0]]


def test_slot_reuse_leaves_nothing_behind() -> None:
    state = SamplingState(1, 50)
    heavy = SamplingParams(
        seed=1,
        repetition_penalty=2.0,
        logit_bias={1: 100.0},
        min_tokens=3,
        min_p=0.5,
        top_k=2,
        top_p=0.5,
        logprobs=3,
    )
    state.add(0, heavy, prompt_token_ids=[1], eos_token_ids=[2])
    state.append([0], torch.tensor([1], dtype=torch.int32))
    state.add(0, SamplingParams(temperature=0.0), prompt_token_ids=[])
    batch = state.select([0])
    assert batch.num_random == 0
    assert batch.bias is None
    assert batch.penalties is None
    assert batch.logprobs_rows is None
    state.add(0, heavy, prompt_token_ids=[7, 7], eos_token_ids=[])
    penalties = state.select([0]).penalties
    assert penalties is not None
    assert not penalties.output_counts.any()
    assert penalties.tokens.unique().tolist() == [7]


def test_counts_survive_growth() -> None:
    """Many sequences with long histories, added while others run: the tables grow under them."""
    vocab, state = 40, SamplingState(20, 40)
    p = SamplingParams(temperature=0.0, frequency_penalty=0.25, repetition_penalty=1.5)
    histories: dict[int, list[int]] = {}
    generator = np.random.default_rng(0)
    for step in range(150):
        if step % 9 == 0:
            prompt = generator.integers(0, vocab, 1 + step % 5).tolist()
            state.add(step // 9, p, prompt_token_ids=prompt)
            histories[step // 9] = [len(prompt), *prompt]
        slots = sorted(histories)
        logits = torch.randn(len(slots), vocab)
        tokens = Sampler()(logits, state.select(slots)).tokens
        state.append(slots, tokens)
        for row, slot in enumerate(slots):
            num_prompt, *history = histories[slot]
            p_random = SamplingParams(frequency_penalty=0.25, repetition_penalty=1.5)
            expected = naive_probs(logits[row].numpy(), p_random, history[:num_prompt], history[num_prompt:])
            assert int(tokens[row]) == int(expected.argmax())
            histories[slot].append(int(tokens[row]))


def test_logprobs_are_raw_sampled_first_with_rank() -> None:
    logits = torch.randn(4, 40)
    params = [
        SamplingParams(seed=1, temperature=3.0, logprobs=2, logit_bias={3: 5.0}),
        SamplingParams(temperature=0.0),
        SamplingParams(temperature=0.0, logprobs=0),
        SamplingParams(seed=2, top_k=1, logprobs=4),
    ]
    out = sample(logits, params)
    assert out.logprobs is not None
    expected = logits.double().log_softmax(-1)
    for i, row in enumerate((0, 2, 3)):
        token = int(out.tokens[row])
        ids, values = out.logprobs.token_ids[i].tolist(), out.logprobs.logprobs[i].tolist()
        assert ids[0] == token
        assert ids[1:] == expected[row].topk(4).indices.tolist()
        np.testing.assert_allclose(values, expected[row][ids], atol=1e-5)
        assert int(out.logprobs.ranks[i]) == int((expected[row] >= expected[row, token]).sum())
    wire = out.logprobs.tolist(num_logprobs=2)[0]
    assert unpack_tokens(wire.token_ids).tolist() == out.logprobs.token_ids[0, :3].tolist()
    assert len(wire.logprobs) == 3
    assert sample(logits, [SamplingParams(temperature=0.0)] * 4).logprobs is None


def test_prompt_logprobs_helper() -> None:
    logits, prompt = torch.randn(5, 30), torch.tensor([3, 1, 4, 1, 5], dtype=torch.int32)
    got = compute_logprobs(logits, prompt, 30 + 20)
    assert got.token_ids[:, 0].tolist() == prompt.tolist()
    reference = logits.log_softmax(-1)[torch.arange(5), prompt.long()]
    torch.testing.assert_close(got.logprobs[:, 0], reference)
    assert got.token_ids.shape == (5, 31)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_bad_logits_give_invalid_token_for_that_row_only(temperature: float, bad: float) -> None:
    logits = torch.randn(4, 300)
    logits[1, 17] = bad
    logits[2] = -torch.inf
    params = [SamplingParams(temperature=temperature, seed=i, top_p=0.9) for i in range(4)]
    tokens = sample(logits, params).tokens.tolist()
    assert tokens[1] == tokens[2] == INVALID_TOKEN
    assert tokens[0] >= 0
    assert tokens[3] >= 0


def test_minus_infinity_logits_are_never_sampled() -> None:
    logits = torch.full((200, 600), -torch.inf)
    logits[:, 511] = 0.0
    logits[:, 599] = 0.0
    for options in ({}, {"top_p": 0.99}, {"top_k": 5}, {"min_p": 0.9}):
        params = [SamplingParams(seed=i, **options) for i in range(200)]
        assert set(sample(logits, params).tokens.tolist()) == {511, 599}


@pytest.mark.parametrize("temperature", [1e-30, 1e-5])
def test_tiny_temperature_is_greedy(temperature: float) -> None:
    logits = torch.randn(8, 1000) * 50
    params = [SamplingParams(seed=i, temperature=temperature, top_p=0.5) for i in range(8)]
    assert sample(logits, params).tokens.tolist() == logits.argmax(-1).tolist()


def test_logit_bias_outside_the_vocabulary_is_refused() -> None:
    state = SamplingState(1, 10)
    for token in (-1, 10):
        with pytest.raises(RequestError, match=f"token {token}; this model has tokens 0 to 9"):
            state.add(0, SamplingParams(temperature=0.0, logit_bias={token: 1.0}), prompt_token_ids=[])


def test_empty_batch() -> None:
    state = SamplingState(1, 10)
    assert Sampler()(torch.zeros(0, 10), state.select([])).tokens.shape == (0,)
