"""A model with recurrent layers in the engine: whatever interrupts a request, its tokens are those of a plain
run."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from fakes.paged_runner import PagedRunner, SequenceState, load_model
from fakes.stepped_engine import SteppedEngine, request
from fakes.tiny_checkpoints import tiny_config, tiny_weights, write_tiny
from hotrack.core.lifecycle import FinishReason
from hotrack.core.request import unpack_tokens
from hotrack.modelspec import parse_config

SHARED = [(7 * i) % 500 for i in range(64)]
PROMPTS = {
    "one": [9],
    "short": [5, 6, 7],
    "whole blocks": SHARED[:48],
    "long": [*SHARED, *((11 * i) % 500 for i in range(50))],
    "longer": [*SHARED, *((13 * i) % 500 for i in range(140))],
}
COUNT = 24
REQUESTS = [request(name, prompt, COUNT) for name, prompt in PROMPTS.items()]
OPTIONS = {"device": "cpu", "dtype": "float32", "num_threads": 1, "max_num_batched_tokens": 40}


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("model"), "qwen3_next", seed=8)


@pytest.fixture(scope="module")
def expected() -> dict[str, list[int]]:
    """One sequence at a time, its prompt in one step, without a scheduler."""
    config = tiny_config("qwen3_next")
    model = load_model(parse_config(config), tiny_weights(config, seed=8))
    found: dict[str, list[int]] = {}
    for name, prompt in PROMPTS.items():
        runner, seq, tokens = PagedRunner(model), SequenceState(), []
        new = torch.tensor(prompt)
        for _ in range(COUNT):
            logits = runner.step([(seq, new)])[-1]
            first, second = logits.topk(2).values
            assert first - second > 2e-3, f"{name}: choose another seed, this token is a toss-up"
            new = logits.argmax()[None]
            tokens.append(int(new))
        found[name] = tokens
    assert len({token for tokens in found.values() for token in tokens}) > 20
    return found


@pytest.fixture
def engine(path: Path) -> Iterator[SteppedEngine]:
    engine = SteppedEngine(path, **OPTIONS)
    yield engine
    engine.close()


def cached(engine: SteppedEngine) -> dict[str, int]:
    return {name: outputs[0].num_cached_tokens for name, outputs in engine.outputs.items()}


def test_chunks_beside_decodes(engine: SteppedEngine, expected: dict[str, list[int]]) -> None:
    assert engine.run(REQUESTS) == expected
    assert engine.core.scheduler.kv.usage == 0


def test_prefix_hits(engine: SteppedEngine, expected: dict[str, list[int]]) -> None:
    assert engine.run(REQUESTS) == expected
    for _ in range(3):
        assert engine.run(REQUESTS) == expected
        hits = cached(engine)
        # The last whole block but one token of every prompt was a step's end.
        assert hits["long"] >= 96
        assert hits["longer"] >= 192
        assert (hits["one"], hits["short"]) == (0, 0)
    # A prompt that goes on from an answer.
    told = [*PROMPTS["long"], *expected["long"]]
    engine.outputs.clear()
    first = engine.run([request("told", told, 8)])["told"]
    assert cached(engine)["told"] >= 96
    engine.do("reset_prefix_cache")
    assert engine.run([request("told", told, 8)])["told"] == first
    assert cached(engine)["told"] == 0


@pytest.mark.parametrize("budget", [48, 128, 512])
def test_prompts_that_begin_alike_at_once(path: Path, expected: dict[str, list[int]], budget: int) -> None:
    """A state is there when the step that writes it is over, not for others of the same step."""
    engine = SteppedEngine(path, **OPTIONS | {"max_num_batched_tokens": budget})
    some = [r for r in REQUESTS if r.request_id in ("whole blocks", "long", "longer")]
    for order in (some, some[::-1], some[1:] + some[:1]):
        wanted = {r.request_id: expected[r.request_id] for r in order}
        assert engine.run(order) == wanted
        engine.do("reset_prefix_cache")
    engine.close()


def test_preemption_and_few_rows(path: Path, expected: dict[str, list[int]]) -> None:
    """Blocks or rows of states run out: who has to wait or to start again says the same in the end."""
    preemptions = []
    for kib in (305, 312, 320, 350, 400):
        options = {"max_model_len": 256, "kv_cache_memory_bytes": kib << 10, "max_num_seqs": 8}
        engine = SteppedEngine(path, **OPTIONS | options)
        for _ in range(2):
            assert engine.run(REQUESTS) == expected
            assert engine.core.scheduler.kv.usage == 0
        preemptions.append(engine.core.scheduler.counters.preemptions)
        engine.close()
    assert 0 in preemptions
    assert max(preemptions) > 0


def test_aborted_requests_leave_nothing(engine: SteppedEngine, expected: dict[str, list[int]]) -> None:
    for steps in (1, 2, 5, 9):
        engine.step(adds=REQUESTS)
        for _ in range(steps):
            engine.step()
        engine.step(aborts=[r.request_id for r in REQUESTS])
        engine.finish()
        assert engine.core.scheduler.kv.usage == 0
    assert engine.run(REQUESTS) == expected


@pytest.mark.parametrize("caching", [True, False])
def test_sleep_after_sleep(path: Path, expected: dict[str, list[int]], caching: bool) -> None:
    engine = SteppedEngine(path, **OPTIONS, enable_prefix_caching=caching)
    some = [r for r in REQUESTS if r.request_id in ("short", "long")]
    wanted = {r.request_id: expected[r.request_id] for r in some}
    for cycle in range(4):
        assert engine.run(some) == wanted, f"{cycle=}"
        assert engine.do("sleep", level=1 + cycle % 2)["is_sleeping"]
        assert not engine.do("wake")["is_sleeping"]
        if caching:
            engine.run(some[-1:])
            assert cached(engine)["long"] == 0, "what was cached went with the memory"
    assert engine.run(REQUESTS) == expected
    engine.close()


@pytest.mark.parametrize("level", [1, 2])
def test_a_sleep_keeps_running_requests(
    engine: SteppedEngine, expected: dict[str, list[int]], level: int
) -> None:
    for tokens in (1, 7, 15):
        engine.outputs.clear()
        engine.start(REQUESTS, lambda tokens=tokens: len(engine.tokens("short")) >= tokens)
        slept = engine.do("sleep", level=level, mode="keep")
        assert slept["kept_bytes"] > 0
        assert not engine.do("wake")["is_sleeping"]
        assert engine.finish() == expected
        assert engine.core.scheduler.counters.preemptions == 0, "nothing was computed twice"


def test_every_output_is_whole(engine: SteppedEngine) -> None:
    engine.run(REQUESTS)
    for outputs in engine.outputs.values():
        assert outputs[-1].finish_reason is FinishReason.LENGTH
        assert sum(len(unpack_tokens(output.tokens)) for output in outputs) == COUNT
