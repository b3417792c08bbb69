"""Sleep and wake under faults: a typed error, and state and bytes as they were."""

import os
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fakes.memory import Faults, FaultyBackend, FaultyStore
from fakes.sleeping_engine import CHUNK, Engine
from hotrack.core.errors import (
    ChecksumError,
    ConfigError,
    HotrackError,
    SleepError,
    TransitionError,
    WakeError,
)
from hotrack.core.lifecycle import EngineState
from hotrack.memory import MemoryManager
from hotrack.memory.backend import MmapBackend


def test_level_2_wake_fails_without_or_with_broken_reload(engine: Engine) -> None:
    def broken() -> None:
        raise ConfigError("no such file")

    engine.memory.sleep(2)
    for reload, message in ((None, "no way to load"), (broken, "no such file")):
        engine.memory.reload = reload
        with pytest.raises(WakeError, match=message):
            engine.memory.wake()
        engine.check_asleep()
    engine.memory.wake(["kv_cache"])  # does not need the weights
    engine.check_asleep(("weights",))
    engine.memory.reload = engine.load
    engine.memory.wake()
    engine.check_awake(kv=0)


def test_failing_pack_rolls_the_wake_back(packed_engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = packed_engine
    engine.memory.sleep(1)

    def broken(names: Sequence[str]) -> None:
        raise MemoryError("no room for packed copies")

    with monkeypatch.context() as patch:
        patch.setattr(engine, "pack", broken)
        with pytest.raises(WakeError, match="no room for packed copies"):
            engine.memory.wake()
    engine.check_asleep()
    engine.memory.wake()
    engine.check_awake(kv=0)


def test_one_flipped_bit_is_found_and_a_repair_wakes(engine: Engine) -> None:
    engine.memory.sleep(1)
    store = engine.memory._sleeper.weights[0].store
    assert isinstance(store, FaultyStore)
    where = store.nbytes - MmapBackend.page_bytes - 1
    good = os.pread(store._fd, 1, where)
    os.pwrite(store._fd, bytes([good[0] ^ 16]), where)
    for _ in range(2):
        with pytest.raises(ChecksumError, match=r"chunk \d+ of \d+ of region 'weights': checksum is"):
            engine.memory.wake()
        engine.check_asleep()
    os.pwrite(store._fd, good, where)
    engine.memory.wake()
    engine.check_awake(kv=0)


def test_truncated_store_is_an_error(engine: Engine) -> None:
    engine.memory.sleep(1)
    store = engine.memory._sleeper.weights[0].store
    assert isinstance(store, FaultyStore)
    os.ftruncate(store._fd, CHUNK + 100)
    with pytest.raises(WakeError, match="the host store ends at byte"):
        engine.memory.wake()
    engine.check_asleep()


def test_wake_is_refused_when_the_device_has_no_room(engine: Engine) -> None:
    engine.memory.sleep(1)
    engine.backend.room = engine.memory.weight_bytes - 1
    with pytest.raises(WakeError, match=f"the device has {engine.backend.room} left"):
        engine.memory.wake()
    engine.check_asleep()
    engine.backend.room += 1
    engine.memory.wake()
    engine.check_awake(kv=0)


def check_message(error: HotrackError, call: str = "") -> None:
    """Names the region and what went wrong."""
    assert f"injected fault in {call}" in error.message
    assert "region '" in error.message


def count_calls(engine: Engine, steps: Sequence[str]) -> int:
    engine.faults.arm(None)
    run(engine, steps)
    return len(engine.faults.calls)


def run(engine: Engine, steps: Sequence[str]) -> None:
    for step in steps:
        if step == "wake":
            engine.memory.wake()
        else:
            engine.memory.sleep(int(step))


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("level", [1, 2])
def test_every_call_fails_once_and_nothing_changes(tmp_path: Path, level: int, packed: bool) -> None:
    """Sleep and wake with a fault at each backend and store call in turn: typed error, state and bytes as
    before."""
    engine = Engine(tmp_path, packed=packed)
    total = count_calls(engine, [str(level), "wake"])
    assert total > 20
    failures = set()
    for index in range(total):
        engine.kv.fill_(9)
        epoch = engine.memory.kv_epoch
        engine.faults.arm(index)
        try:
            engine.memory.sleep(level)
        except SleepError as error:
            check_message(error, engine.faults.calls[index])
            failures.add("sleep " + engine.faults.calls[index])
            engine.faults.arm(None)
            if engine.memory.kv_epoch > epoch:  # some of it was lost, and the manager says so
                engine.kv.fill_(9)
            engine.check_awake(kv=9)
            engine.memory.sleep(level)
        try:
            engine.memory.wake()
        except WakeError as error:
            check_message(error, engine.faults.calls[index])
            failures.add("wake " + engine.faults.calls[index])
            engine.check_asleep()
            engine.memory.wake()
        engine.faults.arm(None)
        engine.check_awake(kv=0)
    assert failures >= {"sleep unmap", "sleep release", "sleep resident_bytes", "wake map"}
    assert ("wake restore" if level == 1 else "wake save") in failures
    engine.memory.close()


def test_when_undoing_fails_too_the_manager_says_so_for_good(tmp_path: Path) -> None:
    total = count_calls(Engine(tmp_path), ["1", "wake"])
    failed = 0
    for index in range(total):
        engine = Engine(tmp_path)
        engine.faults.arm(index, forever=True)
        with pytest.raises(TransitionError):
            run(engine, ["1", "wake"])
        engine.faults.arm(None)
        if engine.memory.state is EngineState.FAILED:
            failed += 1
            for step in ("1", "wake"):
                with pytest.raises(TransitionError, match="must be restarted"):
                    run(engine, [step])
        elif engine.memory.is_sleeping:
            engine.memory.wake()
            engine.check_awake(kv=0)
        else:
            engine.check_awake(kv=9)
    assert failed > 5


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    steps=st.lists(
        st.tuples(st.sampled_from(["0", "1", "2", "wake", "w", "k"]), st.integers(0, 60)), max_size=12
    )
)
def test_random_walks_with_faults_agree_with_a_model(tmp_path: Path, steps: list[tuple[str, int]]) -> None:
    """State machine: what the manager says it is, it is; a failed step is no step."""
    engine = Engine(tmp_path, packed=True)
    asleep: set[str] = set()
    tags_of = {"wake": {"weights", "kv_cache"}, "w": {"weights"}, "k": {"kv_cache"}}
    for step, fault in steps:
        engine.faults.arm(fault)
        try:
            if step in tags_of:
                engine.memory.wake(sorted(tags_of[step]))
                asleep -= tags_of[step]
            else:
                engine.memory.sleep(int(step))
                asleep |= {"weights", "kv_cache"} if step != "0" else set()
        except HotrackError as error:
            check_message(error)
        engine.faults.arm(None)
        assert set(engine.memory.sleeping_tags) == asleep
        if "weights" not in asleep:
            engine.check_weights()
    engine.memory.wake()
    engine.check_weights()
    engine.memory.close()


def test_allocation_failures_are_config_errors(tmp_path: Path) -> None:
    faults = Faults()
    memory = MemoryManager(store_dir=tmp_path, backend=FaultyBackend(faults, CHUNK))
    for index in range(2):
        faults.arm(index)
        with pytest.raises(ConfigError, match=r"no room for 4096 bytes of kv_cache: .*injected fault"):
            memory.allocate_bytes("kv_cache", 100)
    assert memory.regions == []
    with pytest.raises(ConfigError, match="cpu and cuda"):
        MemoryManager("meta")
