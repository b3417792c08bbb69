"""Fifty sleeps of every family, by turns at levels 1 and 2: the tokens are those of an engine that never
slept, and prefix hits are those of an engine that has just been built."""

from pathlib import Path

import pytest

from fakes.stepped_engine import SteppedEngine, request
from fakes.tiny_checkpoints import write_tiny

CYCLES = 50
SHARED = [(7 * i) % 500 for i in range(64)]
FIRST = request("first", [*SHARED, *((11 * i) % 500 for i in range(30))], 8)
SECOND = request("second", [*SHARED, *((13 * i) % 500 for i in range(40))], 8)
OPTIONS = {"device": "cpu", "dtype": "float32", "num_threads": 1, "max_num_batched_tokens": 64}


def cached(engine: SteppedEngine, name: str) -> int:
    return engine.outputs[name][0].num_cached_tokens


@pytest.mark.parametrize("family", ["llama", "qwen3", "qwen3_moe", "qwen3_next", "mimo_v2"])
def test_tokens_and_hits_are_those_of_a_new_engine(tmp_path: Path, family: str) -> None:
    path = write_tiny(tmp_path, family)
    engine = SteppedEngine(path, **OPTIONS)
    expected = engine.run([FIRST]) | engine.run([SECOND])
    hit = cached(engine, "second")
    assert hit >= 48
    assert len({token for tokens in expected.values() for token in tokens}) >= 5
    for cycle in range(CYCLES):
        assert engine.do("sleep", level=1 + cycle % 2)["is_sleeping"]
        assert not engine.do("wake")["is_sleeping"]
        engine.outputs.clear()
        assert engine.run([FIRST]) == {"first": expected["first"]}, f"{cycle=}"
        assert cached(engine, "first") == 0, "what was cached went with the memory"
        assert engine.run([SECOND])["second"] == expected["second"], f"{cycle=}"
        assert cached(engine, "second") == hit
    engine.close()
