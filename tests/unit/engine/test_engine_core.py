"""The engine on a deterministic model: output does not depend on how the work was cut, and controls keep
their word.
"""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fakes.fake_device import VOCAB, generate, make_request
from fakes.fake_engine import FakeEngine
from hotrack.core.errors import EngineDeadError
from hotrack.core.lifecycle import FinishReason
from hotrack.core.request import EngineRequest, pack_tokens, unpack_tokens
from hotrack.core.sampling import SamplingParams


def sampled(
    request_id: str, prompt: list[int], max_tokens: int, seed: int, **options: object
) -> EngineRequest:
    params = SamplingParams(max_tokens=max_tokens, temperature=1.0, seed=seed, **options)
    return EngineRequest(request_id, pack_tokens(prompt), params, max_tokens)


REQUESTS = [
    make_request("greedy", [1, 2, 3, 4, 5, 6, 7], 12),
    make_request("again", [1, 2, 3, 4, 5, 6, 7], 9),
    sampled("seven", [1, 2, 3], 12, seed=7),
    sampled("penal", [1, 2, 3, 4, 9], 12, seed=8, repetition_penalty=1.3, frequency_penalty=0.2),
    sampled("top", [4], 12, seed=9, top_k=5, top_p=0.9, min_tokens=3, logit_bias={2: 1.5}),
]


def baseline() -> dict[str, list[int]]:
    tokens = {}
    for request in REQUESTS:
        with FakeEngine(depth=0, caching=False, budget=64) as engine:
            tokens |= engine.run([request])
    return tokens


BASELINE = baseline()


def test_the_model_is_what_the_fake_says() -> None:
    assert BASELINE["greedy"] == generate(REQUESTS[0], 64)
    assert len(set(BASELINE["seven"])) > 2


@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 20),
    st.integers(0, 1),
    st.booleans(),
    st.integers(8, 30),
    st.integers(1, 5),
    st.permutations(REQUESTS),
)
def test_tokens_do_not_depend_on_the_cut(
    budget: int, depth: int, caching: bool, blocks: int, seqs: int, order: list[EngineRequest]
) -> None:
    with FakeEngine(
        blocks=blocks, seqs=seqs, budget=budget, max_len=28, depth=depth, caching=caching
    ) as engine:
        engine.step(adds=order[:2])
        engine.step(adds=order[2:])
        assert engine.run() == BASELINE
        assert engine.core.scheduler.kv.usage == 0


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 18), st.integers(0, 1))
def test_cancellation_at_any_step(at: int, depth: int) -> None:
    with FakeEngine(depth=depth, budget=3) as engine:
        engine.step(adds=REQUESTS)
        for _ in range(at):
            engine.step()
        ended = [o.finish_reason for o in engine.outputs.get("penal", [])][-1:] not in ([], [None])
        engine.step(aborts=["penal", "no such request"])
        tokens = engine.run()
        assert tokens.pop("penal", []) == BASELINE["penal"][: len(engine.tokens("penal"))]
        assert tokens == {k: v for k, v in BASELINE.items() if k != "penal"}
        reason = engine.outputs["penal"][-1].finish_reason
        assert reason is (FinishReason.LENGTH if ended else FinishReason.ABORT) or (
            reason is FinishReason.LENGTH and len(engine.tokens("penal")) == 12
        )
        assert engine.core.scheduler.kv.usage == 0


def test_logprobs_cover_each_token_and_each_request_gets_its_count() -> None:
    with FakeEngine() as engine:
        engine.run([make_request("two", [1, 2], 3, logprobs=2), make_request("none", [1, 2], 3)])
        assert all(output.logprobs is None for output in engine.outputs["none"])
        for output in engine.outputs["two"]:
            (entry,) = output.logprobs
            assert len(entry.logprobs) == 3
            assert unpack_tokens(entry.token_ids)[0] == unpack_tokens(output.tokens)[0]
            assert entry.rank == 1


@pytest.mark.parametrize("budget", [2, 64])
def test_prompt_logprobs_come_once_with_the_first_token(budget: int) -> None:
    prompt = [1, 2, 3, 4, 5, 6, 7, 8, 9]
    with FakeEngine(budget=budget) as engine:
        engine.run(
            [make_request("warm", prompt, 2)]
        )  # its prefix must not be reused: those logits are needed
        engine.run([make_request("r", prompt, 3, prompt_logprobs=1)])
        first, *rest = engine.outputs["r"]
        assert [unpack_tokens(entry.token_ids)[0] for entry in first.prompt_logprobs] == prompt[1:]
        assert all(len(entry.logprobs) == 2 for entry in first.prompt_logprobs)
        assert all(output.prompt_logprobs is None for output in rest)


def test_prompt_logprobs_survive_a_preemption_in_the_middle_of_the_prompt() -> None:
    prompt = list(range(16))
    with FakeEngine(blocks=9, budget=2, max_len=32, caching=False) as engine:
        engine.run([make_request("old", [1, 2, 3, 4], 24), make_request("r", prompt, 2, prompt_logprobs=0)])
        assert engine.core.scheduler.counters.preemptions > 0
        first = engine.outputs["r"][0]
        assert [unpack_tokens(entry.token_ids)[0] for entry in first.prompt_logprobs] == prompt[1:]


def test_bad_requests_are_answered_at_once() -> None:
    with FakeEngine() as engine:
        engine.step(
            adds=[
                make_request("big", [VOCAB], 1),
                make_request("negative", [-1], 1),
                make_request("long", [1] * 64, 1),
                make_request("bias", [1], 1, logit_bias={VOCAB: 1.0}),
            ]
        )
        codes = {name: outputs[0].error_code for name, outputs in engine.outputs.items()}
        assert codes == {
            "big": "invalid_request",
            "negative": "invalid_request",
            "long": "context_length_exceeded",
            "bias": "invalid_request",
        }
        assert not engine.core.has_work


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("level", [0, 1, 2])
@pytest.mark.parametrize("after", [0, 1, 4, 9])
def test_kept_requests_continue_with_identical_tokens(depth: int, level: int, after: int) -> None:
    with FakeEngine(depth=depth, budget=6) as engine:
        engine.step(adds=REQUESTS)
        for _ in range(after):
            engine.step()
        assert engine.control("sleep", level=level, mode="keep").error is None
        assert not engine.core.has_work
        assert engine.model.asleep == (level > 0)
        if level:
            late = make_request("late", [1], 1)
            engine.step(adds=[late])
            assert engine.outputs["late"][0].error_code == "model_asleep"
            del engine.outputs["late"]
            partly = engine.control("wake", tags=["weights"])
            assert partly.result["sleeping_tags"] == ["kv_cache"]
            assert not engine.core.has_work
        assert engine.control("wake").error is None
        assert engine.run() == BASELINE
        assert engine.memory.levels == [level] * (level > 0)


def test_sleep_with_abort_ends_requests_and_is_idempotent() -> None:
    with FakeEngine() as engine:
        engine.step(adds=REQUESTS)
        engine.step()
        first = engine.control("sleep", level=1)
        again = engine.control("sleep", level=1)
        assert first.result["is_sleeping"]
        assert again.result["is_sleeping"]
        assert {o[-1].finish_reason for o in engine.outputs.values()} == {FinishReason.ABORT}
        engine.control("wake")
        engine.control("wake")
        engine.outputs.clear()
        assert engine.run(REQUESTS) == BASELINE


def test_sleep_with_wait_finishes_requests_first_and_refuses_new_ones() -> None:
    with FakeEngine() as engine:
        engine.step(adds=REQUESTS)
        reply = engine.control("sleep", level=1, mode="wait")
        assert reply.error is None
        assert {name: engine.tokens(name) for name in BASELINE} == BASELINE
        assert reply.result["wait_ms"] > 0
    with FakeEngine() as engine:
        engine.step(adds=REQUESTS[:1])
        from hotrack.engine.messages import Control

        engine.step(controls=[Control("c", "sleep", {"mode": "wait"})], adds=[make_request("late", [1], 1)])
        assert engine.outputs["late"][0].error_code == "draining"
        engine.control("wake")
        assert engine.replies["c"].error is not None
        engine.run()
        assert engine.tokens("greedy") == BASELINE["greedy"]


def test_failed_wake_leaves_everything_asleep() -> None:
    with FakeEngine() as engine:
        engine.control("sleep", level=1)
        engine.memory.fail_next = "wake"
        assert engine.control("wake").error["code"] == "wake_failed"
        assert engine.model.asleep
        assert engine.memory.sleeping_tags
        assert engine.control("wake").error is None
        assert engine.run(REQUESTS) == BASELINE


def test_failed_sleep_leaves_requests_running() -> None:
    with FakeEngine() as engine:
        engine.step(adds=REQUESTS)
        for _ in range(5):
            engine.step()
        engine.memory.fail_next = "sleep"
        assert engine.control("sleep", level=1, mode="keep").error["code"] == "sleep_failed"
        assert engine.run() == BASELINE


def test_a_rank_that_could_transition_is_put_back_when_another_could_not() -> None:
    with FakeEngine() as engine:
        engine.core.transitions._agree = lambda ok: 0
        assert engine.control("sleep", level=1).error["code"] == "sleep_failed"
        assert not engine.memory.sleeping_tags
        engine.core.transitions._agree = lambda ok: ok
        engine.control("sleep", level=1)
        engine.core.transitions._agree = lambda ok: 0
        assert engine.control("wake").error["code"] == "wake_failed"
        assert engine.memory.sleeping_tags == ("kv_cache", "weights")


def test_unknown_control_is_refused() -> None:
    with FakeEngine() as engine:
        assert engine.control("dance").error["code"] == "invalid_request"
        assert engine.control("stats").result["running"] == 0


def test_device_failure_is_an_engine_dead_error() -> None:
    with FakeEngine() as engine:
        engine.model.fail_after = 2
        with pytest.raises(EngineDeadError, match="injected"):
            engine.run(REQUESTS)


def test_prefix_cache_reset_forgets() -> None:
    prompt = list(np.arange(9) % VOCAB)
    with FakeEngine() as engine:
        engine.run([make_request("a", prompt, 1)])
        engine.run([make_request("b", prompt, 1)])
        assert engine.outputs["b"][0].num_cached_tokens == 8
        engine.control("reset_prefix_cache")
        engine.run([make_request("c", prompt, 1)])
        assert engine.outputs["c"][0].num_cached_tokens == 0
