"""A model with windows in the engine: blocks that no token sees any more are given back, and whatever
interrupts a request, its tokens are those of a plain run."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from fakes.paged_runner import PagedRunner, SequenceState, load_model
from fakes.stepped_engine import SteppedEngine, request
from fakes.tiny_checkpoints import tiny_config, tiny_weights, write_tiny
from hotrack.kvcache.spec import Window
from hotrack.modelspec import parse_config

FAMILY, SEED = "mimo_v2", 3
SHARED = [(7 * i) % 500 for i in range(64)]
PROMPTS = {
    "one": [9],
    "whole blocks": SHARED[:48],
    "long": [*SHARED, *((11 * i) % 500 for i in range(50))],
    "longer": [*SHARED, *((13 * i) % 500 for i in range(140))],
}
COUNT = 24
REQUESTS = [request(name, prompt, COUNT) for name, prompt in PROMPTS.items()]
OPTIONS = {"device": "cpu", "dtype": "float32", "num_threads": 1, "max_num_batched_tokens": 40}


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("model"), FAMILY, seed=SEED)


@pytest.fixture(scope="module")
def expected() -> dict[str, list[int]]:
    """One sequence at a time, its prompt in one step, no block ever given back."""
    config = tiny_config(FAMILY)
    model = load_model(parse_config(config), tiny_weights(config, seed=SEED))
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
    return found


@pytest.fixture
def engine(path: Path) -> Iterator[SteppedEngine]:
    engine = SteppedEngine(path, **OPTIONS)
    yield engine
    engine.close()


def cached(engine: SteppedEngine) -> dict[str, int]:
    return {name: outputs[0].num_cached_tokens for name, outputs in engine.outputs.items()}


def window_group(engine: SteppedEngine) -> int:
    groups = engine.core.runner.kv.groups
    return next(i for i, group in enumerate(groups) if isinstance(group.spec, Window))


def test_a_window_holds_only_what_is_seen(engine: SteppedEngine, expected: dict[str, list[int]]) -> None:
    kv, group = engine.core.scheduler.kv, window_group(engine)
    longest = REQUESTS[-1:]
    engine.start(longest, lambda: len(engine.tokens("longer")) >= 12)
    held = [len(blocks) for blocks in kv.live_blocks()]
    assert held[group] <= 3  # 20 tokens
    assert held[1 - group] >= 204 // 16
    # Read, they would show: what the window gave back is overwritten with something that is not a number.
    used = set(kv.live_blocks()[group].tolist())
    rows = engine.core.runner.kv.storage[group].view(torch.float32)
    rows[[row for row in range(len(rows)) if row not in used]] = torch.nan
    assert engine.finish() == {"longer": expected["longer"]}
    assert kv.usage == 0


def test_chunks_beside_decodes(engine: SteppedEngine, expected: dict[str, list[int]]) -> None:
    assert engine.run(REQUESTS) == expected
    assert engine.core.scheduler.kv.usage == 0


def test_prefix_hits(engine: SteppedEngine, expected: dict[str, list[int]]) -> None:
    assert engine.run(REQUESTS) == expected
    for _ in range(3):
        assert engine.run(REQUESTS) == expected
        hits = cached(engine)
        assert (hits["long"], hits["longer"], hits["one"]) == (112, 192, 0)
    told = [*PROMPTS["long"], *expected["long"]]
    engine.outputs.clear()
    first = engine.run([request("told", told, 8)])["told"]
    assert cached(engine)["told"] == 128  # prompt and answer
    engine.do("reset_prefix_cache")
    assert engine.run([request("told", told, 8)])["told"] == first
    assert cached(engine)["told"] == 0


def test_a_hit_needs_the_window_before_it(engine: SteppedEngine, expected: dict[str, list[int]]) -> None:
    """All blocks of the full layers are cached, those of the window are not: no hit there."""
    assert engine.run(REQUESTS[-1:]) == {"longer": expected["longer"]}
    holdings = engine.core.scheduler.kv._groups[window_group(engine)]
    holdings.pool.release(holdings.pool.allocate(holdings.pool.num_free))  # evicts every name
    engine.outputs.clear()
    assert engine.run(REQUESTS[-1:]) == {"longer": expected["longer"]}
    assert cached(engine)["longer"] == 0


@pytest.mark.parametrize("budget", [48, 128, 512])
def test_prompts_that_begin_alike_at_once(path: Path, expected: dict[str, list[int]], budget: int) -> None:
    engine = SteppedEngine(path, **OPTIONS | {"max_num_batched_tokens": budget})
    for order in (REQUESTS, REQUESTS[::-1], REQUESTS[1:] + REQUESTS[:1]):
        assert engine.run(order) == {r.request_id: expected[r.request_id] for r in order}
        engine.do("reset_prefix_cache")
    engine.close()


def test_preemption(path: Path) -> None:
    requests = [request(f"r{i}", [(17 * i + 5 * j) % 500 for j in range(60)], COUNT) for i in range(5)]
    engine = SteppedEngine(path, **OPTIONS, max_model_len=256)
    wanted = engine.run(requests)
    groups = engine.core.runner.kv.groups
    engine.close()
    rows = [12 if isinstance(group.spec, Window) else 17 for group in groups]
    room = sum(count * group.row_bytes for count, group in zip(rows, groups, strict=True))
    engine = SteppedEngine(path, **OPTIONS | {"max_model_len": 256, "kv_cache_memory_bytes": room})
    assert [len(storage) for storage in engine.core.runner.kv.storage] == rows
    for _ in range(2):
        assert engine.run(requests) == wanted
    assert engine.core.scheduler.counters.preemptions > 0
    assert engine.core.scheduler.kv.usage == 0
    engine.close()


@pytest.mark.parametrize("caching", [True, False])
def test_sleep_after_sleep(path: Path, expected: dict[str, list[int]], caching: bool) -> None:
    engine = SteppedEngine(path, **OPTIONS, enable_prefix_caching=caching)
    some = REQUESTS[1:3]
    wanted = {r.request_id: expected[r.request_id] for r in some}
    for cycle in range(4):
        assert engine.run(some) == wanted, f"{cycle=}"
        assert engine.do("sleep", level=1 + cycle % 2)["is_sleeping"]
        assert not engine.do("wake")["is_sleeping"]
        engine.outputs.clear()
    assert engine.run(REQUESTS) == expected
    engine.close()


@pytest.mark.parametrize("level", [1, 2])
def test_a_sleep_keeps_running_requests(
    engine: SteppedEngine, expected: dict[str, list[int]], level: int
) -> None:
    for tokens in (1, 7, 15):
        engine.outputs.clear()
        engine.start(REQUESTS, lambda tokens=tokens: len(engine.tokens("one")) >= tokens)
        assert engine.do("sleep", level=level, mode="keep")["kept_bytes"] > 0
        assert not engine.do("wake")["is_sleeping"]
        assert engine.finish() == expected
        assert engine.core.scheduler.counters.preemptions == 0


def test_tables_of_a_window_start_with_the_null_block(engine: SteppedEngine) -> None:
    engine.start(REQUESTS[-1:], lambda: len(engine.tokens("longer")) >= 4)
    table = engine.core.scheduler.kv.tables[window_group(engine)]
    (slot,) = np.flatnonzero(table.any(1))
    used = np.flatnonzero(table[slot])
    assert used[0] >= 10
    assert len(used) == used[-1] - used[0] + 1
    engine.finish()
