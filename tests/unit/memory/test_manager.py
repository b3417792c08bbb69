"""Sleep and wake: bytes come back, memory really goes, and every failure leaves things as they were."""

import os
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from fakes.memory import Faults, FaultyBackend, FaultyStore
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
from hotrack.memory import MemoryManager
from hotrack.memory import process as memory_process
from hotrack.memory.backend import MmapBackend

CHUNK = 64 << 10
SPECS = [
    TensorSpec("embed", (300, 128), "bfloat16"),
    TensorSpec("empty", (0, 7), "float32"),
    TensorSpec("scalar", (), "float32"),
    TensorSpec("norm", (577,), "bfloat16"),
    TensorSpec("big", (101, 1013), "float32"),
    TensorSpec("bytes", (3,), "uint8"),
    TensorSpec("slots", (33,), "int64"),
]
MUTABLE = ("slots",)


class Engine:
    """A manager with filled weights and a KV cache, and what they should hold."""

    def __init__(self, store_dir: Path, *, packed: bool = False, **options: object) -> None:
        self.faults = Faults()
        self.backend = FaultyBackend(self.faults, CHUNK)
        self.memory = MemoryManager(
            store_dir=store_dir,
            backend=self.backend,
            make_store=partial(FaultyStore, self.faults),
            **options,  # type: ignore[arg-type]
        )
        self.weights = self.memory.allocate_weights(SPECS, mutable=MUTABLE)
        self.kv = self.memory.allocate_bytes("kv_cache", 3 * CHUNK + 5)
        self.workspace = self.memory.allocate_bytes("workspace", 10)
        self.addresses = {name: t.data_ptr() for name, t in self.weights.items()}
        self.load()
        self.expected = {name: t.clone() for name, t in self.weights.items()}
        self.kv.fill_(9)
        self.memory.reload = self.load
        self.copies: dict[str, Tensor] = {}
        self.packs = packed
        if packed:
            self.memory.packed = self
        self.memory.seal()
        if packed:
            self.pack(list(self.weights))

    def load(self) -> None:
        generator = torch.Generator().manual_seed(1)
        for tensor in self.weights.values():
            raw = torch.randint(0, 256, (tensor.nbytes,), generator=generator, dtype=torch.uint8)
            if tensor.numel():
                tensor.view(-1).view(torch.uint8).copy_(raw)

    # PackedCopies
    def drop(self) -> None:
        self.copies.clear()

    def pack(self, names: Sequence[str]) -> None:
        for name in names:
            self.copies[name] = self.weights[name].clone()
        self.memory.drop_pages([name for name in names if name == "big"])

    def check_weights(self) -> None:
        for name, tensor in self.weights.items():
            assert tensor.data_ptr() == self.addresses[name]
            if self.packs:
                assert same_bytes(self.copies[name], self.expected[name]), name
            if not (self.packs and name == "big"):
                assert same_bytes(tensor, self.expected[name]), name

    def check_awake(self, *, kv: int) -> None:
        assert not self.memory.is_sleeping
        assert self.memory.state is EngineState.AWAKE
        self.check_weights()
        assert torch.equal(self.kv, torch.full_like(self.kv, kv))

    def check_asleep(self, tags: tuple[str, ...] = ("weights", "kv_cache")) -> None:
        assert self.memory.sleeping_tags == tags
        assert self.memory.state is EngineState.ASLEEP
        self.faults.arm(None)
        for region in self.memory.regions:
            if region.tag in tags:
                assert region.resident_bytes() == 0
        if "weights" in tags:
            assert not self.copies


def same_bytes(a: Tensor, b: Tensor) -> bool:
    """Bit equality: random bytes are often NaN."""
    a, b = a.contiguous().view(-1), b.contiguous().view(-1)
    return torch.equal(a.view(torch.uint8), b.view(torch.uint8)) if a.numel() else True


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Engine]:
    engine = Engine(tmp_path)
    yield engine
    engine.faults.arm(None)
    engine.memory.close()


@pytest.fixture
def packed_engine(tmp_path: Path) -> Iterator[Engine]:
    engine = Engine(tmp_path, packed=True)
    yield engine
    engine.faults.arm(None)
    engine.memory.close()


def test_tensors_are_views_in_order_and_aligned(engine: Engine) -> None:
    assert list(engine.weights) == [spec.name for spec in SPECS]
    for spec in SPECS:
        tensor = engine.weights[spec.name]
        assert tuple(tensor.shape) == spec.shape
        assert tensor.dtype is getattr(torch, spec.dtype)
        assert tensor.is_contiguous()
        assert tensor.data_ptr() % 64 == 0 or not tensor.numel()
    fixed = [engine.addresses[s.name] for s in SPECS if s.name not in MUTABLE and s.nbytes]
    assert fixed == sorted(fixed)
    assert engine.weights["big"].data_ptr() % MmapBackend.page_bytes == 0


def test_level_1_round_trip(engine: Engine) -> None:
    epoch = engine.memory.kv_epoch
    slept = engine.memory.sleep(1)
    engine.check_asleep()
    assert slept.changed
    assert slept.tags == ("weights", "kv_cache")
    assert slept.freed_bytes == sum(r.nbytes for r in engine.memory.regions)
    assert slept.store_bytes == engine.memory.weight_bytes
    assert engine.memory.kv_epoch == epoch + 1
    woke = engine.memory.wake()
    engine.check_awake(kv=0)
    assert woke.changed
    assert woke.restored_bytes == engine.memory.weight_bytes
    assert woke.mapped_bytes == slept.freed_bytes
    assert (slept.cycle, woke.cycle) == (1, 1)
    assert not engine.workspace.any()


def test_views_made_before_sleep_stay_valid(engine: Engine) -> None:
    views = [engine.weights["big"].t()[3:50:2], engine.weights["embed"][7:9], engine.weights["norm"][::5]]
    expected = [view.clone() for view in views]
    addresses = [view.data_ptr() for view in views]
    engine.memory.sleep(1)
    engine.memory.wake()
    assert [view.data_ptr() for view in views] == addresses
    assert all(same_bytes(view, wanted) for view, wanted in zip(views, expected, strict=True))


def test_partial_wake_by_tag(engine: Engine) -> None:
    engine.memory.sleep(1)
    assert engine.memory.wake(["weights"]).tags == ("weights",)
    engine.check_asleep(("kv_cache",))
    engine.check_weights()
    assert not engine.memory.wake(["weights"]).changed
    assert engine.memory.wake(["kv_cache"]).restored_bytes == 0
    engine.check_awake(kv=0)


def test_sleep_with_weights_only_awake(engine: Engine) -> None:
    engine.memory.sleep(1)
    engine.memory.wake(["weights"])
    report = engine.memory.sleep(1)
    assert report.freed_bytes == engine.memory.weight_bytes
    engine.check_asleep()
    engine.memory.wake()
    engine.check_awake(kv=0)


def test_double_sleep_and_double_wake_do_nothing_and_say_so(engine: Engine) -> None:
    assert not engine.memory.wake().changed
    assert engine.memory.sleep(1).changed
    again = engine.memory.sleep(1)
    assert not again.changed
    assert again.freed_bytes == 0
    assert again.cycle == 1
    assert engine.memory.wake().changed
    assert not engine.memory.wake().changed
    engine.check_awake(kv=0)


def test_level_0_touches_no_memory(engine: Engine) -> None:
    engine.faults.arm(0, forever=True)
    assert not engine.memory.sleep(0).changed
    assert not engine.memory.wake().changed
    engine.check_awake(kv=9)


def test_level_2_drops_the_store_and_reloads(packed_engine: Engine) -> None:
    engine = packed_engine
    assert engine.memory.sleep(2).store_bytes == 0
    engine.check_asleep()
    assert engine.memory.wake().reload_ms > 0
    engine.check_awake(kv=0)
    assert engine.memory.store_bytes == engine.memory.weight_bytes
    engine.memory.sleep(1)  # the new copy was sealed
    engine.memory.wake()
    engine.check_awake(kv=0)


def test_level_1_sleeper_can_go_deeper(engine: Engine) -> None:
    engine.memory.sleep(1)
    report = engine.memory.sleep(2)
    assert report.changed
    assert report.freed_bytes == 0
    assert engine.memory.store_bytes == 0
    assert not engine.memory.sleep(2).changed
    engine.memory.wake()
    engine.check_awake(kv=0)


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


def test_sleep_is_refused_when_weights_could_not_come_back(tmp_path: Path) -> None:
    engine = Engine(tmp_path, enable_sleep_mode=False)
    assert engine.memory.store_bytes == 0
    with pytest.raises(SleepError, match="--enable-sleep-mode"):
        engine.memory.sleep(1)
    engine.memory.sleep(2)
    engine.memory.wake()
    engine.check_awake(kv=0)
    engine.memory.reload = None
    with pytest.raises(SleepError, match="no way to load"):
        engine.memory.sleep(2)
    engine.check_awake(kv=0)
    engine.memory.close()


def test_unsealed_weights_do_not_sleep(tmp_path: Path) -> None:
    memory = MemoryManager(store_dir=tmp_path)
    memory.allocate_weights([TensorSpec("w", (10,), "float32")])
    with pytest.raises(SleepError, match="never sealed"):
        memory.sleep(1)
    assert memory.state is EngineState.AWAKE
    memory.close()


def test_unknown_tag_and_level(engine: Engine) -> None:
    with pytest.raises(RequestError, match="unknown tag 'weight'"):
        engine.memory.wake(["weight"])
    with pytest.raises(RequestError, match="level must be 0, 1 or 2, got 3"):
        engine.memory.sleep(3)
    engine.check_awake(kv=9)


def test_mutable_tensors_keep_their_last_values(engine: Engine) -> None:
    for cycle in range(3):
        engine.weights["slots"].fill_(cycle)
        engine.expected["slots"].fill_(cycle)
        engine.memory.sleep(1)
        engine.memory.wake()
        engine.check_weights()


def test_packed_copies_are_dropped_and_made_again(packed_engine: Engine) -> None:
    engine = packed_engine
    region = engine.memory.regions[0]
    raw = region.resident_bytes()
    assert raw < region.nbytes - engine.weights["big"].nbytes + 2 * MmapBackend.page_bytes + CHUNK
    for _ in range(3):
        engine.memory.sleep(1)
        engine.check_asleep()
        report = engine.memory.wake()
        assert report.prepack_ms > 0
        engine.check_awake(kv=0)
        assert region.resident_bytes() == raw


def test_packing_is_fed_in_order_while_later_chunks_are_still_asleep(tmp_path: Path) -> None:
    """A wake never holds all raw bytes and all packed copies at once."""
    specs = [TensorSpec(f"layer{i}", (CHUNK,), "uint8") for i in range(40)]
    memory = MemoryManager(store_dir=tmp_path, backend=FaultyBackend(Faults(), CHUNK))
    weights = memory.allocate_weights(specs)
    memory.seal()
    seen: list[str] = []
    peak = 0

    class Packer:
        def drop(self) -> None:
            pass

        def pack(self, names: Sequence[str]) -> None:
            nonlocal peak
            for name in names:
                assert not weights[name].any()
            peak = max(peak, memory.regions[0].resident_bytes())
            seen.extend(names)
            memory.drop_pages(names)

    memory.packed = Packer()
    memory.sleep(1)
    memory.wake()
    assert seen == [spec.name for spec in specs]
    assert peak <= 8 * CHUNK, "at most a few chunks run ahead of the packing"
    assert memory.regions[0].resident_bytes() == 0
    memory.close()


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
    with pytest.raises(ConfigError, match="cpu only"):
        MemoryManager("cuda")


def test_transitions_do_not_nest(packed_engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = packed_engine
    monkeypatch.setattr(engine, "drop", lambda: engine.memory.wake())
    with pytest.raises(SleepError, match="one owner"):
        engine.memory.sleep(1)
    monkeypatch.undo()
    engine.check_awake(kv=9)


def test_fifty_cycles_leak_nothing(tmp_path: Path) -> None:
    """64 MiB of random weights: equal bytes each time, RSS falls and returns, descriptors and RSS stay
    flat."""
    size = 64 << 20
    memory = MemoryManager(store_dir=tmp_path)
    specs = [TensorSpec(f"w{i}", (size // 8 + 37 * i,), "uint8") for i in range(8)]
    weights = memory.allocate_weights(specs)
    memory.allocate_bytes("kv_cache", 1 << 20)
    generator = torch.Generator().manual_seed(2)
    for tensor in weights.values():
        tensor.random_(0, 256, generator=generator)
    sums = {name: int(t.view(-1)[:: 4096 + 1].long().sum()) for name, t in weights.items()}
    memory.seal()
    awake_rss, asleep_rss, descriptors = [], [], []
    for _ in range(50):
        slept = memory.sleep(1)
        woke = memory.wake()
        assert slept.rss_before_bytes - slept.rss_after_bytes > 0.95 * size
        awake_rss.append(woke.rss_after_bytes)
        asleep_rss.append(slept.rss_after_bytes)
        descriptors.append(len(os.listdir("/proc/self/fd")))
        assert {name: int(t.view(-1)[:: 4096 + 1].long().sum()) for name, t in weights.items()} == sums
    assert len(set(descriptors)) == 1
    assert max(awake_rss[5:]) - min(awake_rss[5:]) < 0.02 * awake_rss[5]
    assert max(asleep_rss[5:]) - min(asleep_rss[5:]) < 0.02 * asleep_rss[5] + (4 << 20)
    memory.close()


def test_process_readers() -> None:
    before = memory_process.rss_bytes()
    block = torch.ones(16 << 20, dtype=torch.uint8)
    assert memory_process.rss_bytes() - before > 15 << 20
    assert memory_process.available_bytes() > 0
    del block
    memory_process.trim_heap()
