"""Sleep and wake: bytes come back and memory really goes."""

import os
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from fakes.memory import Faults, FaultyBackend
from fakes.sleeping_engine import CHUNK, MUTABLE, SPECS, Engine, same_bytes
from hotrack.core.errors import RequestError, SleepError, WakeError
from hotrack.core.heap import trim_heap
from hotrack.core.lifecycle import EngineState
from hotrack.core.tensorspec import TensorSpec
from hotrack.memory import KeptRange, MemoryManager
from hotrack.memory import process as memory_process
from hotrack.memory.backend import MmapBackend


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
    trim_heap()


def test_partial_sleep_takes_kv_first_then_the_last_weights(engine: Engine) -> None:
    kv, first = engine.memory.regions[2], engine.memory.regions[0]
    assert not engine.memory.sleep(nbytes=0).changed
    engine.check_awake(kv=9)
    engine.memory.sleep(nbytes=CHUNK)
    assert engine.memory.sleeping_tags == ("kv_cache",)
    assert first.mapped
    engine.check_weights()
    engine.memory.sleep(nbytes=kv.nbytes)
    assert engine.memory.sleeping_tags == ("weights", "kv_cache")
    assert first.awake.indices == tuple(range(len(first.awake.indices)))
    assert first.awake.indices, "the first layers stay"
    left = first.resident_in(first.awake)
    assert first.resident_bytes() == left
    asleep = sum(region.asleep.nbytes for region in engine.memory.regions)
    woke = engine.memory.wake()
    assert woke.mapped_bytes == asleep
    assert 0 < woke.bytes_copied < engine.memory.weight_bytes
    engine.check_weights()
    engine.memory.sleep(nbytes=kv.nbytes + CHUNK)
    engine.memory.sleep(1)
    engine.check_asleep()
    engine.memory.wake()
    engine.check_awake(kv=0)


def test_partial_sleep_of_packed_weights_takes_all_of_them(packed_engine: Engine) -> None:
    engine = packed_engine
    kv_bytes = sum(region.nbytes for region in engine.memory.regions[2:])
    engine.memory.sleep(nbytes=kv_bytes)
    engine.check_weights()
    engine.memory.wake()
    engine.memory.sleep(nbytes=kv_bytes + 1)
    engine.check_asleep()
    engine.memory.wake()
    engine.check_awake(kv=0)


def test_kept_kv_comes_back_and_the_rest_is_zero(engine: Engine) -> None:
    engine.kv.random_(1, 256)
    wanted = engine.kv.clone()
    report = engine.memory.sleep(1, keep=[KeptRange(engine.kv, 3, 100), KeptRange(engine.kv[CHUNK:], 5, 70)])
    assert report.kept_bytes == 170
    engine.check_asleep()
    engine.memory.wake()
    wanted[:3] = wanted[103 : CHUNK + 5] = wanted[CHUNK + 75 :] = 0
    assert torch.equal(engine.kv, wanted)


def test_what_is_kept_stays_on_the_host_until_a_wake_succeeds(engine: Engine) -> None:
    engine.kv.random_(1, 256)
    wanted, everything = engine.kv.clone(), [KeptRange(engine.kv, 0, engine.kv.nbytes)]
    engine.memory.sleep(1, keep=everything)
    assert engine.memory.missing_bytes["kv_cache"] >= engine.kv.nbytes
    engine.faults.arm(0)
    calls = 0
    while True:
        engine.faults.arm(calls)
        try:
            engine.memory.wake()
            break
        except WakeError:
            calls += 1
            engine.check_asleep()
    assert calls > 3
    engine.faults.arm(None)
    assert torch.equal(engine.kv, wanted)
    assert engine.memory.missing_bytes == {"weights": 0, "kv_cache": 0}


def test_kept_kv_of_a_wake_that_fails_at_its_end(engine: Engine) -> None:
    engine.kv.random_(1, 256)
    wanted = engine.kv.clone()
    engine.memory.sleep(1, keep=[KeptRange(engine.kv, 0, engine.kv.nbytes)])

    def refuse() -> None:
        raise SleepError("a peer is gone")

    reopen, engine.memory.comm.reopen_exports = engine.memory.comm.reopen_exports, refuse
    with pytest.raises(WakeError, match="a peer is gone"):
        engine.memory.wake()
    engine.check_asleep()
    engine.memory.comm.reopen_exports = reopen
    engine.memory.wake()
    assert torch.equal(engine.kv, wanted)


def test_a_partial_sleep_saves_only_what_goes(engine: Engine) -> None:
    engine.kv.random_(1, 256)
    wanted, everything = engine.kv.clone(), [KeptRange(engine.kv, 0, engine.kv.nbytes)]
    first = engine.memory.sleep(1, nbytes=CHUNK, keep=everything)
    assert 0 < first.kept_bytes <= 2 * CHUNK < engine.kv.nbytes
    assert engine.memory.missing_bytes == {"weights": 0, "kv_cache": first.freed_bytes}
    second = engine.memory.sleep(1, keep=everything)
    assert first.kept_bytes + second.kept_bytes == engine.kv.nbytes
    assert not engine.memory.sleep(1, keep=everything).changed
    engine.memory.wake()
    assert torch.equal(engine.kv, wanted)
    engine.check_weights()


def test_what_nobody_wants_any_more_is_dropped(engine: Engine) -> None:
    engine.kv.fill_(7)
    engine.memory.sleep(1, keep=[KeptRange(engine.kv, 0, 100)])
    engine.memory.sleep(1)
    engine.memory.wake()
    assert not engine.kv.any()
