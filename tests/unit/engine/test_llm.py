"""LLM on a tiny random checkpoint, in this process."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from fakes.tiny_checkpoints import write_tiny
from hotrack.core.errors import (
    ConfigError,
    ContextLengthError,
    InsufficientMemoryError,
    ModelAsleepError,
    RequestError,
)
from hotrack.core.sampling import SamplingParams
from hotrack.engine.llm import LLM

GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("llm") / "tiny", "qwen3_moe")


@pytest.fixture(scope="module")
def llm(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HOTRACK_STORE_DIR", str(tmp_path_factory.mktemp("store")))
        with LLM(str(model), max_model_len=64, max_num_seqs=4, num_threads=1) as llm:
            yield llm


def test_generate_takes_text_and_token_ids_and_keeps_the_order(llm: LLM) -> None:
    text = "hello there"
    ids = llm.assets.tokenizer.encode(text).ids
    one, two, three = llm.generate([text, ids, [7, 8, 9]], GREEDY)
    assert one.prompt == text
    assert one.prompt_token_ids == ids == two.prompt_token_ids
    assert one.outputs[0].token_ids == two.outputs[0].token_ids
    assert len(three.outputs[0].token_ids) == 8
    assert three.outputs[0].finish_reason == "length"
    assert three.outputs[0].text == llm.assets.tokenizer.decode(three.outputs[0].token_ids)
    assert llm.generate([7, 8, 9], GREEDY)[0].outputs[0].token_ids == three.outputs[0].token_ids


def test_n_completions_differ_and_repeat_with_the_seed(llm: LLM) -> None:
    params = SamplingParams(n=3, seed=5, max_tokens=8, ignore_eos=True)
    first, again = (llm.generate([[7, 8, 9]], params)[0] for _ in range(2))
    tokens = [tuple(output.token_ids) for output in first.outputs]
    assert len(set(tokens)) == 3
    assert tokens == [tuple(output.token_ids) for output in again.outputs]
    assert [output.index for output in first.outputs] == [0, 1, 2]


def test_logprobs_have_the_sampled_token_and_its_rank(llm: LLM) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True, logprobs=2, prompt_logprobs=0)
    (result,) = llm.generate([[7, 8, 9]], params)
    for token, entries in zip(result.outputs[0].token_ids, result.outputs[0].logprobs, strict=True):
        assert entries[token].rank == 1
        assert entries[token].logprob == max(entry.logprob for entry in entries.values())
    assert result.prompt_logprobs[0] is None
    assert [list(entries) for entries in result.prompt_logprobs[1:]] == [[8], [9]]


def test_a_stop_string_ends_the_text_before_it(llm: LLM) -> None:
    (free,) = llm.generate([[40, 41, 42]], SamplingParams(temperature=0.0, max_tokens=32, ignore_eos=True))
    text = free.outputs[0].text
    stop = text[4:6]
    at = text.find(stop)
    params = SamplingParams(temperature=0.0, max_tokens=32, ignore_eos=True, stop=(stop,))
    (cut,) = llm.generate([[40, 41, 42]], params)
    assert cut.outputs[0].text == text[:at]
    assert cut.outputs[0].finish_reason == "stop"
    assert cut.outputs[0].stop_reason == stop
    assert len(cut.outputs[0].token_ids) < 32


def test_chat_renders_the_template(llm: LLM) -> None:
    (result,) = llm.chat([{"role": "user", "content": "hi"}], GREEDY)
    assert "<|im_start|>user\nhi" in llm.assets.tokenizer.decode(
        result.prompt_token_ids, skip_special_tokens=False
    )
    assert len(result.outputs[0].token_ids) == 8


@pytest.mark.parametrize("level", [1, 2])
def test_sleep_and_wake_keep_the_tokens(llm: LLM, level: int) -> None:
    before = llm.generate([[7, 8, 9]], GREEDY)[0].outputs[0].token_ids
    assert llm.sleep(level)["is_sleeping"]
    with pytest.raises(ModelAsleepError):
        llm.generate([[7, 8, 9]], GREEDY)
    assert llm.wake_up(["weights"])["sleeping_tags"] == ["kv_cache"]
    assert not llm.wake_up()["is_sleeping"]
    assert llm.generate([[7, 8, 9]], GREEDY)[0].outputs[0].token_ids == before


def test_bad_prompts_are_refused(llm: LLM) -> None:
    with pytest.raises(ContextLengthError, match="64"):
        llm.generate([[7] * 64], GREEDY)
    with pytest.raises(RequestError, match="100000"):
        llm.generate([[100000]], GREEDY)
    assert llm.stats()["running"] == 0


def test_what_does_not_fit_is_refused_at_start(model: Path, tmp_path: Path, monkeypatch: object) -> None:
    monkeypatch.setenv("HOTRACK_STORE_DIR", str(tmp_path))
    with pytest.raises(InsufficientMemoryError, match="max-model-len"):
        LLM(str(model), max_model_len=64, kv_cache_memory_bytes=20_000, num_threads=1)
    with pytest.raises(ConfigError, match="2048"):
        LLM(str(model), max_model_len=5000, num_threads=1)
