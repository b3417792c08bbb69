"""An engine on one GPU: sleeps that keep requests, partial sleeps, and restarts with a shared host copy."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from fakes.stepped_engine import SteppedEngine, request
from fakes.tiny_checkpoints import write_tiny
from hotrack.core.errors import WakeError
from hotrack.core.host_copies import copy_name, copy_path
from hotrack.core.lifecycle import FinishReason
from hotrack.engine import build

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.filterwarnings("ignore"),
]
CHUNK = 128 << 20
KV_BYTES = 3 * CHUNK
REQUESTS = [
    request("long", [(7 * i) % 500 for i in range(200)], 40),
    request("short", [5, 6, 7], 40),
    request("sampled", range(3, 60), 40, temperature=0.9, seed=11, repetition_penalty=1.2),
    request("chunked", [(11 * i) % 500 for i in range(300)], 20),
]
DIES = """
import os, signal, sys
from pathlib import Path
from fakes.stepped_engine import SteppedEngine, request

path, name = Path(sys.argv[1]), sys.argv[2]
engine = SteppedEngine(path, device="cuda", dtype="float32", host_copy="shared", served_model_name=name)
print(engine.run([request("a", range(3, 40), 12)])["a"], flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("model"), "qwen3_moe")


def start(path: Path, **options: object) -> SteppedEngine:
    return SteppedEngine(
        path,
        device="cuda",
        dtype="float32",
        max_num_batched_tokens=64,
        kv_cache_memory_bytes=KV_BYTES,
        **options,
    )


@pytest.fixture(scope="module")
def engine(path: Path) -> Iterator[SteppedEngine]:
    engine = start(path)
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def expected(engine: SteppedEngine) -> dict[str, list[int]]:
    found = engine.run(REQUESTS)
    assert [len(tokens) for tokens in found.values()] == [40, 40, 40, 20]
    assert len({token for tokens in found.values() for token in tokens}) > 20
    return found


def begin(engine: SteppedEngine, tokens: int) -> None:
    """Everything submitted, and ``short`` so many tokens far: the others are in their prompts or behind."""
    engine.do("reset_prefix_cache")
    engine.outputs.clear()
    engine.start(REQUESTS, lambda: len(engine.tokens("short")) >= tokens)


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("level", [1, 2])
def test_kept_requests_go_on(
    engine: SteppedEngine, expected: dict[str, list[int]], level: int, streamed: bool
) -> None:
    total = sum(region.nbytes for region in engine.memory.regions)
    kv = next(region for region in engine.memory.regions if region.tag == "kv_cache")
    for tokens in (1, 9, 25):
        begin(engine, tokens)
        free = torch.cuda.mem_get_info()[0]
        slept = engine.do("sleep", level=level, mode="keep")
        assert 0 < slept["kept_bytes"] < kv.nbytes
        assert torch.cuda.mem_get_info()[0] - free >= slept["freed_bytes"] >= total  # and graphs
        assert not engine.do("wake", streamed=streamed)["is_sleeping"]
        assert engine.finish() == expected
        assert engine.core.scheduler.counters.preemptions == 0


@pytest.mark.parametrize("nbytes", [1, 2 * CHUNK, 1 << 40])
def test_partial_sleep(engine: SteppedEngine, expected: dict[str, list[int]], nbytes: int) -> None:
    begin(engine, 9)
    total = sum(region.nbytes for region in engine.memory.regions)
    kv = next(region for region in engine.memory.regions if region.tag == "kv_cache")
    free = torch.cuda.mem_get_info()[0]
    slept = engine.do("sleep", level=1, nbytes=nbytes, mode="keep")
    assert min(nbytes, total) <= slept["freed_bytes"] < min(nbytes, total) + 2 * CHUNK
    assert torch.cuda.mem_get_info()[0] - free >= slept["freed_bytes"]
    assert sum(slept["missing_bytes"].values()) <= slept["freed_bytes"]
    assert (slept["missing_bytes"]["weights"] == 0) is (nbytes <= kv.nbytes)  # KV goes first
    woke = engine.do("wake")
    assert woke["mapped_bytes"] == slept["freed_bytes"]
    assert woke["missing_bytes"] == {"weights": 0, "kv_cache": 0}
    assert engine.finish() == expected


def test_aborts_while_asleep_and_a_wake_that_fails(
    engine: SteppedEngine, expected: dict[str, list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    begin(engine, 9)
    engine.do("sleep", level=1, mode="keep")
    engine.step(aborts=["long"])
    assert engine.outputs["long"][-1].finish_reason is FinishReason.ABORT

    def refuse() -> None:
        raise WakeError("a peer is gone")  # after everything is back

    free = torch.cuda.mem_get_info()[0]
    with monkeypatch.context() as patch:
        patch.setattr(engine.memory.comm, "reopen_exports", refuse)
        assert "a peer is gone" in engine.control("wake").error["message"]
    assert engine.memory.sleeping_tags == ("weights", "kv_cache")
    assert torch.cuda.mem_get_info()[0] >= free
    engine.do("wake")
    found = engine.finish()
    assert {name: found[name] for name in found if name != "long"} == {
        name: expected[name] for name in expected if name != "long"
    }


def test_pinned_memory_of_kept_requests_comes_back(engine: SteppedEngine) -> None:
    begin(engine, 9)
    before = engine.memory.handles()
    for _ in range(3):
        engine.do("sleep", level=1, mode="keep")
        engine.do("wake")
    assert engine.memory.handles() | {"events": 0} == before | {"events": 0}
    engine.finish()


def test_a_streamed_wake_reports_when_it_has_landed(
    engine: SteppedEngine, expected: dict[str, list[int]]
) -> None:
    engine.do("sleep", level=1)
    engine.landed.clear()
    engine.do("wake", streamed=True)
    assert engine.core.transitions.is_landing
    assert not engine.landed
    assert engine.run(REQUESTS) == expected
    (landed,) = engine.landed
    assert landed.error is None
    assert landed.report["changed"]
    assert landed.report["device_after_bytes"] is None or landed.report["device_after_bytes"] > 0


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """An entry per reading of the model files."""
    found: list[int] = []
    original = build.load_weights

    def load(*args: object, **options: object) -> object:
        found.append(1)
        return original(*args, **options)

    monkeypatch.setattr(build, "load_weights", load)
    return found


def test_a_restart_finds_the_host_copy(path: Path, reads: list[int]) -> None:
    """The first process reads the model and is killed; who comes next does not."""
    name = f"gpu-test/{os.getpid()}"
    file = copy_path(copy_name(name))
    root = Path(__file__).parents[2]
    where = [*(str(root / folder) for folder in ("src", "tests", "tools")), *filter(None, sys.path)]
    try:
        done = subprocess.run(
            [sys.executable, "-c", DIES, str(path), name],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(where)},
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert done.returncode == -9, done.stderr
        assert file.stat().st_mode & 0o777 == 0o600
        for _ in range(2):
            engine = start(path, host_copy="shared", served_model_name=name)
            for _ in range(2):
                assert str(engine.run([request("a", range(3, 40), 12)])["a"]) == done.stdout.strip()
                engine.do("sleep", level=1)
                engine.do("wake")
            engine.close()
        assert not reads
        start(path, served_model_name=name).close()  # has no use for it
        assert not file.exists()
    finally:
        file.unlink(missing_ok=True)


def test_a_damaged_host_copy_is_replaced(path: Path, reads: list[int]) -> None:
    name = f"gpu-test/{os.getpid()}-damaged"
    file = copy_path(copy_name(name))
    try:
        first = start(path, host_copy="shared", served_model_name=name)
        tokens = first.run(REQUESTS)
        first.close()
        with file.open("r+b") as copy:
            copy.seek(-(1 << 20), os.SEEK_END)
            byte = copy.read(1)[0]
            copy.seek(-(1 << 20), os.SEEK_END)
            copy.write(bytes([byte ^ 1]))
        second = start(path, host_copy="shared", served_model_name=name)
        assert len(reads) == 2
        assert second.run(REQUESTS) == tokens
        second.do("sleep", level=2)
        assert not file.exists()
        second.do("wake")
        assert second.run(REQUESTS) == tokens
        second.close()
        third = start(path, host_copy="shared", served_model_name=name)
        assert len(reads) == 3
        assert third.run(REQUESTS) == tokens
        third.close()
    finally:
        file.unlink(missing_ok=True)
