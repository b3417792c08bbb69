"""Requests that a sleep interrupts and keeps: the tokens are those of an undisturbed run."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from fakes.cuda_driver import FakeDriver
from fakes.cuda_memory import fake_machine
from fakes.stepped_engine import SteppedEngine, request
from fakes.tiny_checkpoints import write_tiny
from hotrack.core.errors import WakeError
from hotrack.core.lifecycle import FinishReason
from hotrack.engine import build
from hotrack.memory import MemoryManager

CHUNK = 1 << 20
REQUESTS = [
    request("long", [(7 * i) % 500 for i in range(200)], 40),
    request("short", [5, 6, 7], 40),
    request("sampled", range(3, 60), 40, temperature=0.9, seed=11, repetition_penalty=1.2),
    request("chunked", [(11 * i) % 500 for i in range(300)], 20),
]
KINDS = ("cpu", "cuda")


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("model"), "qwen3_moe")


class Rig:
    """An engine on the CPU's memory, or on a fake GPU's."""

    def __init__(self, path: Path, kind: str, monkeypatch: pytest.MonkeyPatch, **options: object) -> None:
        self.driver = FakeDriver()
        if kind == "cuda":
            machine = fake_machine(self.driver, chunk_bytes=CHUNK)
            monkeypatch.setattr(build, "MemoryManager", lambda *_, **__: MemoryManager(machine=machine))
            # Pages of a GPU's weights are never dropped.
            monkeypatch.setattr(MemoryManager, "drop_pages", lambda *_: 0)
        self.engine = SteppedEngine(
            path, device="cpu", dtype="float32", num_threads=1, max_num_batched_tokens=64, **options
        )


@pytest.fixture(params=KINDS)
def engine(
    path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[SteppedEngine]:
    rig = Rig(path, request.param, monkeypatch)
    yield rig.engine
    rig.engine.close()


@pytest.fixture(scope="module")
def expected(path: Path) -> dict[str, list[int]]:
    engine = SteppedEngine(path, device="cpu", dtype="float32", num_threads=1, max_num_batched_tokens=64)
    found = engine.run(REQUESTS)
    engine.close()
    assert [len(tokens) for tokens in found.values()] == [40, 40, 40, 20]
    assert len({token for tokens in found.values() for token in tokens}) > 20
    return found


def begin(engine: SteppedEngine, tokens: int) -> None:
    """Everything submitted, and ``short`` so many tokens far: the others are in their prompts or behind."""
    engine.outputs.clear()
    engine.start(REQUESTS, lambda: len(engine.tokens("short")) >= tokens)


@pytest.mark.parametrize("level", [1, 2])
def test_they_go_on_with_the_same_tokens(
    engine: SteppedEngine, expected: dict[str, list[int]], level: int
) -> None:
    for tokens in (1, 9, 25):
        begin(engine, tokens)
        computed = engine.core.scheduler.counters.prompt_tokens
        slept = engine.do("sleep", level=level, mode="keep")
        assert slept["kept_bytes"] > 0
        assert slept["is_sleeping"]
        assert not engine.core.has_work
        assert not engine.do("wake")["is_sleeping"]
        assert engine.finish() == expected
        assert engine.core.scheduler.counters.preemptions == 0, "nothing was computed twice"
        assert engine.core.scheduler.counters.prompt_tokens <= computed + sum(len(r.prompt) for r in REQUESTS)
        assert engine.core.scheduler.kv.usage == 0


def test_kept_bytes_are_those_of_live_blocks(engine: SteppedEngine) -> None:
    begin(engine, 9)
    kv, rows = engine.core.scheduler.kv, engine.core.runner.kv.storage
    live = sum(len(blocks) * row.shape[1] for blocks, row in zip(kv.live_blocks(), rows, strict=True))
    assert 0 < live < sum(row.nbytes for row in rows) / 2
    assert engine.do("sleep", level=1, mode="keep")["kept_bytes"] == live
    engine.do("wake")


@pytest.mark.parametrize("nbytes", [1, 3 * CHUNK, 1 << 40])
def test_partial_sleep(engine: SteppedEngine, expected: dict[str, list[int]], nbytes: int) -> None:
    """KV goes first; what stays need not come back; nobody notices."""
    begin(engine, 9)
    total = sum(region.nbytes for region in engine.memory.regions)
    slept = engine.do("sleep", level=1, nbytes=nbytes, mode="keep")
    assert min(nbytes, total) <= slept["freed_bytes"] <= total
    assert slept["is_sleeping"]
    assert sum(slept["missing_bytes"].values()) == slept["freed_bytes"]
    assert slept["missing_bytes"]["kv_cache"] > 0
    engine.step(adds=[request("late", [1, 2], 3)])
    assert engine.outputs.pop("late")[0].error_code == "model_asleep"
    woke = engine.do("wake")
    assert woke["mapped_bytes"] == slept["freed_bytes"]
    assert woke["missing_bytes"] == {"weights": 0, "kv_cache": 0}
    assert engine.finish() == expected


def test_a_partial_sleep_can_go_deeper(engine: SteppedEngine, expected: dict[str, list[int]]) -> None:
    begin(engine, 9)
    first = engine.do("sleep", level=1, nbytes=CHUNK, mode="keep")
    second = engine.do("sleep", level=1, mode="keep")
    total = sum(region.nbytes for region in engine.memory.regions)
    assert first["freed_bytes"] + second["freed_bytes"] == total
    engine.do("wake", tags=["weights"])
    engine.do("wake", tags=["kv_cache"])
    assert engine.finish() == expected


@pytest.mark.parametrize("args", [{"nbytes": 0}, {"nbytes": 5, "level": 2}, {"nbytes": 5, "level": 0}])
def test_a_partial_sleep_that_makes_no_sense(engine: SteppedEngine, args: dict[str, int]) -> None:
    begin(engine, 1)
    assert engine.control("sleep", **args).error["code"] == "invalid_request"
    assert engine.core.scheduler.num_running, "nothing was aborted"
    engine.step(aborts=[r.request_id for r in REQUESTS])
    engine.finish()


def test_aborts_while_asleep(engine: SteppedEngine, expected: dict[str, list[int]]) -> None:
    begin(engine, 9)
    engine.do("sleep", level=1, mode="keep")
    engine.step(aborts=["long", "chunked"])
    assert engine.outputs["long"][-1].finish_reason is FinishReason.ABORT
    engine.do("wake")
    engine.step(adds=[request("new", [5, 6, 7], 40)])
    found = engine.finish()
    assert {name: found[name] for name in ("short", "sampled")} == {
        name: expected[name] for name in ("short", "sampled")
    }
    assert found["new"] == expected["short"]
    assert engine.core.scheduler.kv.usage == 0


def test_all_aborted_while_asleep_frees_the_host(engine: SteppedEngine) -> None:
    begin(engine, 9)
    engine.do("sleep", level=1, mode="keep")
    assert engine.memory._sleeper.kept
    engine.do("sleep", level=1, mode="abort")
    assert not engine.memory._sleeper.kept
    engine.do("wake")
    assert not engine.core.has_work


def test_a_wake_that_fails_keeps_them(
    engine: SteppedEngine, expected: dict[str, list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    begin(engine, 9)
    engine.do("sleep", level=1, mode="keep")
    with monkeypatch.context() as patch:

        def refuse() -> None:
            raise WakeError("a peer is gone")  # after all KV is back

        patch.setattr(engine.memory.comm, "reopen_exports", refuse)
        for _ in range(2):
            reply = engine.control("wake")
            assert reply.error is not None
            assert "a peer is gone" in reply.error["message"]
            assert engine.memory.sleeping_tags == ("weights", "kv_cache")
            assert not engine.core.has_work
    engine.do("wake")
    assert engine.finish() == expected


def test_a_rank_that_is_put_back_keeps_them(engine: SteppedEngine, expected: dict[str, list[int]]) -> None:
    """Another rank's wake fails, then another rank's sleep."""
    transitions = engine.core.transitions
    begin(engine, 9)
    slept = engine.do("sleep", level=1, nbytes=CHUNK, mode="keep")
    transitions._agree = lambda _: 0
    assert engine.control("wake").error["code"] == "wake_failed"
    assert engine.memory.missing_bytes == slept["missing_bytes"]
    transitions._agree = lambda ok: ok
    engine.do("wake")
    transitions._agree = lambda _: 0
    assert engine.control("sleep", level=1, mode="keep").error["code"] == "sleep_failed"
    transitions._agree = lambda ok: ok
    assert engine.finish() == expected


def test_streamed_with_kept_requests(
    path: Path, expected: dict[str, list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """KV that comes back makes a wake an ordinary one; without, it is over when the first tokens leave."""
    engine = Rig(path, "cuda", monkeypatch).engine
    engine.core.device_streams = True
    begin(engine, 9)
    engine.do("sleep", level=1, mode="keep")
    engine.do("wake", streamed=True)
    assert not engine.core.transitions.is_landing
    assert engine.finish() == expected
    assert not engine.landed
    engine.close()


def test_a_fault_at_every_call_of_the_driver(
    path: Path, expected: dict[str, list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = Rig(path, "cuda", monkeypatch)
    engine, at = rig.engine, 0
    begin(engine, 9)
    while True:
        rig.driver.arm(at)
        failed = engine.control("sleep", level=1, mode="keep").error is not None
        if failed:
            assert not engine.memory.is_sleeping
        elif engine.control("wake").error is not None:
            assert engine.memory.sleeping_tags == ("weights", "kv_cache")
            rig.driver.arm(None)
            engine.do("wake")
        elif len(rig.driver.calls) <= at:
            break
        at += 5
    rig.driver.arm(None)
    assert at > 100
    assert engine.finish() == expected
    engine.close()
