"""The CUDA path on a fake driver: bytes, counts, and a fault at every call."""

from collections import Counter
from collections.abc import Callable
from contextlib import suppress

import pytest
import torch

from fakes.cuda_driver import FakeDriver
from fakes.cuda_memory import CHUNK, fake_manager
from hotrack.core.errors import (
    ChecksumError,
    ConfigError,
    HotrackError,
    RequestError,
    SleepError,
    TransitionError,
    WakeError,
)
from hotrack.core.lifecycle import EngineState
from hotrack.core.tensorspec import TensorSpec
from hotrack.memory import KeptRange, MemoryManager, process

SPECS = [
    TensorSpec("embed", (300, 128), "bfloat16"),
    TensorSpec("empty", (0, 7), "float32"),
    TensorSpec("norm", (577,), "bfloat16"),
    TensorSpec("big", (201, 1013), "float32"),
    TensorSpec("bytes", (3,), "uint8"),
    TensorSpec("slots", (33,), "int64"),
]
KV_BYTES = 3 * CHUNK + 5


def raw(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1).view(torch.uint8)


class CudaEngine:
    def __init__(self, **options: object) -> None:
        self.driver = FakeDriver(**options)  # type: ignore[arg-type]
        self.memory = fake_manager(self.driver)
        self.weights = self.memory.allocate_weights(SPECS, mutable=("slots",))
        self.kv = self.memory.allocate_bytes("kv_cache", KV_BYTES)
        self.memory.reload = self.load
        self.load()
        self.memory.seal()
        self.expected = {name: raw(tensor).clone() for name, tensor in self.weights.items() if tensor.numel()}
        self.kv.fill_(9)
        self.counts = self.driver.counts()

    def load(self) -> None:
        generator = torch.Generator().manual_seed(1)
        for spec in SPECS:
            target = self.memory.loading(spec.name) if spec.name != "norm" else self.weights["norm"]
            if target.numel():
                raw(target).random_(0, 256, generator=generator)
            if spec.name in ("embed", "big", "norm"):
                self.memory.loaded(spec.name)  # of "norm" nobody asked where to write it

    def check_weights(self) -> None:
        for name, wanted in self.expected.items():
            assert torch.equal(raw(self.weights[name]), wanted), name

    def check_awake(self, kv: int | None) -> None:
        assert self.memory.state is EngineState.AWAKE
        assert not self.memory.is_sleeping
        self.check_weights()
        assert kv is None or bool((self.kv == kv).all())
        self.check_counts(asleep=False)

    def check_asleep(self) -> None:
        assert self.memory.state is EngineState.ASLEEP
        assert self.memory.sleeping_tags == ("weights", "kv_cache")
        self.check_counts(asleep=True)

    def check_counts(self, *, asleep: bool) -> None:
        wanted = dict(self.counts)
        if asleep:
            wanted |= {"handles": 0, "handle_bytes": 0, "mappings": 0}
        found = self.driver.counts()
        assert {**found, "events": 0} == {**wanted, "events": 0}


@pytest.fixture
def engine() -> CudaEngine:
    return CudaEngine()


def test_loaded_bytes_reach_the_device_and_come_back(engine: CudaEngine) -> None:
    generator = torch.Generator().manual_seed(1)
    for spec in SPECS:
        if spec.nbytes:
            wanted = torch.empty(spec.nbytes, dtype=torch.uint8).random_(0, 256, generator=generator)
            assert torch.equal(engine.expected[spec.name], wanted), spec.name
    slept = engine.memory.sleep(1)
    engine.check_asleep()
    assert slept.freed_bytes == sum(region.nbytes for region in engine.memory.regions)
    assert slept.device_before_bytes is not None
    assert slept.device_after_bytes == slept.device_before_bytes - slept.freed_bytes
    woke = engine.memory.wake()
    engine.check_awake(kv=0)
    assert woke.bytes_copied == woke.restored_bytes == engine.memory.weight_bytes
    assert not engine.memory.sleep(0).changed
    assert not engine.memory.wake().changed
    engine.memory.close()
    assert not any(
        engine.driver.counts()[name] for name in ("handles", "mappings", "registrations", "events")
    )


def test_immutable_weights_are_never_copied_to_the_host_by_a_sleep(engine: CudaEngine) -> None:
    engine.driver.copied.clear()
    engine.memory.sleep(1)
    slots = engine.memory.regions[1]
    assert sum(n for way, n in engine.driver.copied if way == "to host" and n > 64) == slots.nbytes
    engine.memory.wake()
    engine.weights["slots"].fill_(77)
    engine.expected["slots"] = raw(engine.weights["slots"]).clone()
    engine.memory.sleep(1)
    engine.memory.wake()
    engine.check_awake(kv=0)


def test_padding_and_tensors_across_chunks() -> None:
    driver = FakeDriver()
    memory = fake_manager(driver)
    specs = [TensorSpec(f"t{i}", (CHUNK // 3 + i,), "uint8") for i in range(12)]
    weights = memory.allocate_weights(specs)
    for index, spec in enumerate(specs):
        memory.loading(spec.name).fill_(index + 1)
        memory.loaded(spec.name)
    uploaded = [n for way, n in driver.copied if way == "to device"]
    assert len(uploaded) >= 3, "chunks go up while the next tensors are loaded"
    memory.seal()
    for _ in range(2):
        assert all(bool((weights[s.name] == i + 1).all()) for i, s in enumerate(specs))
        memory.sleep()
        memory.wake()
    memory.close()


def test_no_wake_pulls_first(engine: CudaEngine) -> None:
    """What a process pulls first waits for the compiler."""
    assert "pulled" in {way for way, _ in engine.driver.copied}


def test_the_first_fifth_of_a_wake_is_pulled(engine: CudaEngine) -> None:
    engine.memory.sleep(1)
    engine.driver.copied.clear()
    engine.memory.wake()
    engine.check_awake(kv=0)
    ways = [way for way, _ in engine.driver.copied if way != "to host"]
    assert ways == sorted(ways), "first pulled, then copied"
    moved = Counter[str]()
    for way, nbytes in engine.driver.copied:
        moved[way] += nbytes
    total = moved["pulled"] + moved["to device"]
    assert 0.2 * total <= moved["pulled"] < 0.2 * total + CHUNK


def test_streamed_wake(engine: CudaEngine) -> None:
    stream = 0
    engine.memory.sleep(1)
    engine.memory.wake(streamed=True)
    assert engine.memory.state is EngineState.WAKING
    assert not engine.memory.is_sleeping
    engine.memory.wait_for(["embed"])
    engine.driver._run(stream)  # what the model computes next comes behind this
    assert torch.equal(raw(engine.weights["embed"]), engine.expected["embed"])
    assert not bool(engine.kv.any())
    assert not torch.equal(raw(engine.weights["big"]), engine.expected["big"]), "nobody waited for it"
    report = engine.memory.finish_wake()
    engine.check_awake(kv=0)
    assert report.changed
    assert report.restored_bytes == engine.memory.weight_bytes
    assert not engine.memory.finish_wake().changed
    engine.memory.wait_for(["embed"])


@pytest.mark.parametrize("after", ["sleep", "wake", "finish"])
def test_streamed_wake_of_damaged_bytes(engine: CudaEngine, after: str) -> None:
    engine.memory.sleep(1)
    raw(engine.memory.loading("big"))[-1] ^= 1
    engine.memory.wake(streamed=True)
    call: Callable[[], object] = {
        "sleep": engine.memory.sleep,
        "wake": engine.memory.wake,
        "finish": engine.memory.finish_wake,
    }[after]
    with pytest.raises(ChecksumError, match=r"chunk \d+ of \d+ of region 'weights'"):
        call()
    engine.check_asleep()
    raw(engine.memory.loading("big"))[-1] ^= 1
    engine.memory.wake()
    engine.check_awake(kv=0)


def test_partial_sleep_takes_kv_first_then_the_last_weights(engine: CudaEngine) -> None:
    kv = engine.memory.regions[-1]
    assert not engine.memory.sleep(nbytes=0).changed
    assert not engine.memory.sleep(nbytes=-5).changed
    engine.check_awake(kv=9)
    epoch = engine.memory.kv_epoch
    report = engine.memory.sleep(nbytes=CHUNK + 1)
    assert report.freed_bytes in range(CHUNK + 1, 2 * CHUNK + 1)
    assert engine.memory.sleeping_tags == ("kv_cache",)
    assert engine.memory.kv_epoch == epoch + 1
    engine.check_weights()
    report = engine.memory.sleep(nbytes=kv.nbytes - report.freed_bytes + 1)
    assert engine.memory.sleeping_tags == ("weights", "kv_cache")
    report = engine.memory.sleep(nbytes=2 * CHUNK)
    first = engine.memory.regions[0]
    assert first.awake.indices == tuple(range(len(first.awake.indices))), "the first layers stay"
    asleep = sum(region.asleep.nbytes for region in engine.memory.regions)
    woke = engine.memory.wake()
    assert woke.mapped_bytes == asleep
    assert 0 < woke.bytes_copied < engine.memory.weight_bytes
    engine.check_awake(kv=0)
    engine.memory.sleep(nbytes=KV_BYTES + CHUNK)
    engine.memory.sleep(1)
    engine.check_asleep()
    engine.memory.wake()
    engine.check_awake(kv=0)
    with pytest.raises(RequestError, match="partial"):
        engine.memory.sleep(2, nbytes=5)


def test_no_room_says_what_is_needed_and_who_has_it(engine: CudaEngine) -> None:
    engine.memory.sleep(1)
    total = sum(region.nbytes for region in engine.memory.regions)
    engine.driver.capacity = engine.driver.used + total - 1
    with pytest.raises(
        WakeError, match=rf"need {total} bytes and the device has {total - 1} left; held by tra"
    ):
        engine.memory.wake()
    engine.check_asleep()
    engine.driver.capacity += 1
    engine.memory.wake()
    engine.check_awake(kv=0)


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("nbytes", [None, KV_BYTES + CHUNK])
def test_every_driver_call_fails_once_and_nothing_changes(streamed: bool, nbytes: int | None) -> None:
    engine = CudaEngine()

    def wake() -> None:
        engine.memory.wake(streamed=streamed)
        if streamed:
            engine.memory.wait_for(["embed", "big"])
            engine.memory.finish_wake()

    def cycle() -> None:
        engine.memory.sleep(1, nbytes=nbytes)
        wake()

    engine.driver.arm(None)
    cycle()
    total = len(engine.driver.calls)
    assert total > 40
    failed = set()
    for index in range(total):
        engine.kv.fill_(9)
        epoch = engine.memory.kv_epoch
        engine.driver.arm(index)
        try:
            engine.memory.sleep(1, nbytes=nbytes)
        except SleepError:
            failed.add("sleep " + engine.driver.calls[index])
            engine.driver.arm(None)
            engine.check_awake(kv=9 if engine.memory.kv_epoch == epoch else None)
            engine.memory.sleep(1, nbytes=nbytes)
        held = engine.driver.used
        try:
            wake()
        except WakeError:
            failed.add("wake " + engine.driver.calls[index])
            engine.driver.arm(None)
            if engine.memory.state is EngineState.WAKING:  # wait_for refused: the wake goes on
                engine.memory.finish_wake()
            else:
                assert engine.driver.used == held
                assert engine.memory.is_sleeping
                engine.memory.wake()
        engine.driver.arm(None)
        engine.check_awake(kv=0)
    assert failed >= {"sleep context_synchronize", "sleep mem_unmap", "sleep mem_release"}
    assert failed >= {
        "wake " + call for call in ("mem_create", "mem_map", "mem_set_access", "copy_to_device")
    }
    assert failed >= {
        "wake " + call for call in ("event_record", "launch", "copy_to_host", "stream_synchronize")
    }
    engine.memory.close()


def test_every_driver_call_of_a_reload_fails_once() -> None:
    engine = CudaEngine()
    engine.memory.sleep(2)
    engine.driver.arm(None)
    engine.memory.wake()
    total = len(engine.driver.calls)
    for index in range(total):
        engine.memory.sleep(2)
        asleep = engine.driver.counts()
        engine.driver.arm(index)
        with pytest.raises(WakeError, match="CUDA_ERROR"):
            engine.memory.wake()
        engine.driver.arm(None)
        assert engine.driver.counts() == asleep, engine.driver.calls[-1]
        engine.memory.wake()
        engine.check_awake(kv=0)


def test_a_broken_device_fails_for_good() -> None:
    engine = CudaEngine()
    engine.memory.sleep(1)
    engine.driver.arm(20, forever=True, code=700)
    with pytest.raises(TransitionError, match="CUDA_ERROR_ILLEGAL_ADDRESS"):
        engine.memory.wake()
    engine.driver.arm(None)
    assert engine.memory.state is EngineState.FAILED
    with pytest.raises(TransitionError, match="must be restarted"):
        engine.memory.wake()


def test_start_fails_cleanly_at_every_call() -> None:
    driver = FakeDriver()

    def start(memory: MemoryManager) -> None:
        memory.allocate_weights(SPECS)
        memory.seal()

    clean = driver.counts()
    memory = fake_manager(driver)
    driver.arm(None)
    start(memory)
    total = len(driver.calls)
    memory.close()
    assert driver.counts() == clean
    for index in range(total):
        memory = fake_manager(driver)
        driver.arm(index)
        with pytest.raises((ConfigError, SleepError), match="CUDA_ERROR"):
            start(memory)
        driver.arm(None)
        memory.close()
        assert driver.counts() == clean, index


def test_interrupt_in_the_middle_of_a_wake(engine: CudaEngine) -> None:
    engine.memory.sleep(1)

    def interrupt(call: str) -> None:
        if call == "copy_to_device" and engine.driver.copied.count(("to device", CHUNK)) > 8:
            engine.driver.on_call = lambda call: None
            raise KeyboardInterrupt

    engine.driver.copied.clear()
    engine.driver.on_call = interrupt
    for _ in range(20):
        try:
            engine.memory.wake()
        except KeyboardInterrupt:
            engine.check_asleep()
            break
        engine.memory.sleep()
    else:
        pytest.fail("never interrupted")
    engine.memory.wake()
    engine.check_awake(kv=0)


def test_five_hundred_cycles_leak_nothing() -> None:
    driver = FakeDriver(lag=False)
    memory = fake_manager(driver)
    weights = memory.allocate_weights([TensorSpec("w", (CHUNK + 8,), "uint8")])
    memory.allocate_bytes("kv_cache", 100)
    memory.loading("w").random_(0, 256)
    memory.seal()
    wanted = weights["w"].clone()
    memory.sleep()
    memory.wake()
    awake, handles = driver.counts(), memory.handles()
    for cycle in range(500):
        memory.sleep()
        assert not driver.handles
        memory.wake()
        assert driver.counts() == awake
        assert memory.handles() == handles
        assert cycle % 100 or torch.equal(weights["w"], wanted)
    memory.close()


def test_errors_outside_the_package_are_ours(engine: CudaEngine) -> None:
    engine.memory.sleep(1)
    engine.driver.fail_on("mem_create", 2)
    with pytest.raises(
        HotrackError, match=r"mapping chunk 3 of \d+ of region 'weights': .*; held by trainer"
    ):
        engine.memory.wake()
    engine.check_asleep()


def test_kept_kv_comes_back_and_the_rest_is_zero(engine: CudaEngine) -> None:
    engine.kv.random_(1, 256)
    wanted = engine.kv.clone()
    ranges = [KeptRange(engine.kv, 3, CHUNK), KeptRange(engine.kv, 2 * CHUNK, 70)]
    report = engine.memory.sleep(1, keep=ranges)
    assert report.kept_bytes == CHUNK + 70
    engine.memory.wake(["weights"])
    engine.memory.wake(streamed=True)
    assert engine.memory.state is EngineState.AWAKE, "not streamed"
    assert torch.equal(engine.kv[3 : CHUNK + 3], wanted[3 : CHUNK + 3])
    assert torch.equal(engine.kv[2 * CHUNK : 2 * CHUNK + 70], wanted[2 * CHUNK : 2 * CHUNK + 70])
    assert not engine.kv[CHUNK + 3 : 2 * CHUNK].any()
    engine.check_awake(kv=None)
    with pytest.raises(SleepError, match="in no KV region"):
        engine.memory.sleep(1, keep=[KeptRange(engine.kv, 10, 100 * CHUNK)])
    engine.check_awake(kv=None)


def test_kept_kv_survives_a_fault_at_every_call(engine: CudaEngine) -> None:
    wanted = torch.randint(0, 256, (CHUNK,), dtype=torch.uint8)
    ranges = [KeptRange(engine.kv, 100, CHUNK)]

    def cycle() -> None:
        engine.memory.sleep(1, keep=ranges)
        engine.memory.wake()

    engine.driver.arm(None)
    cycle()
    for index in range(len(engine.driver.calls)):
        engine.kv[100 : 100 + CHUNK] = wanted
        engine.driver.arm(index)
        try:
            engine.memory.sleep(1, keep=ranges)
        except SleepError:
            engine.driver.arm(None)
            assert torch.equal(engine.kv[100 : 100 + CHUNK], wanted)
            engine.check_awake(kv=None)
            engine.memory.sleep(1, keep=ranges)
        with suppress(WakeError):
            engine.memory.wake()
        engine.driver.arm(None)
        engine.memory.wake()  # awake already: gives back host memory that the driver did not let go
        assert torch.equal(engine.kv[100 : 100 + CHUNK], wanted), index
        engine.check_awake(kv=None)


def test_damaged_kept_bytes_are_found(engine: CudaEngine) -> None:
    engine.memory.sleep(1, keep=[KeptRange(engine.kv, 0, 1000)])
    data = engine.memory._sleeper.kept[0].buffer.data
    data[7] ^= 1
    with pytest.raises(ChecksumError, match="kept bytes of region 'kv_cache'"):
        engine.memory.wake()
    assert engine.memory.sleeping_tags == ("weights", "kv_cache")
    data[7] ^= 1
    engine.memory.wake()
    assert bool((engine.kv[:1000] == 9).all())
    assert not engine.kv[1000:].any()
    engine.check_awake(kv=None)


def test_kept_kv_that_finds_no_room_on_the_host(engine: CudaEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(process, "available_bytes", lambda: 10)
        with pytest.raises(SleepError, match=r"no host memory for the 1000 bytes of KV .*mode=wait"):
            engine.memory.sleep(1, keep=[KeptRange(engine.kv, 0, 1000)])
    engine.check_awake(kv=9)
