"""Graph memory and exports in the transitions of the memory manager."""

import ctypes
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest

from fakes.cuda_blocks import OUT_OF_MEMORY, PAGE, FakeBlocks
from fakes.cuda_driver import FakeDriver
from fakes.cuda_memory import fake_machine
from hotrack.core.errors import ChecksumError, SleepError, TransitionError, WakeError
from hotrack.core.lifecycle import EngineState
from hotrack.core.tensorspec import TensorSpec
from hotrack.memory import MemoryManager
from hotrack.memory.graph_pool import GraphPool

WEIGHT = TensorSpec("weight", (1 << 20,), "uint8")
KV_BYTES = 1 << 20


class Rig:
    """A manager with weights, KV, 3 pages of graph memory in two blocks, and two exports."""

    def __init__(self, blocks: FakeBlocks) -> None:
        self.blocks = blocks
        self.driver = FakeDriver(lag=False)
        self.done: list[str] = []
        self.fail: set[str] = set()
        self.pool = GraphPool("cuda:0", driver=blocks.table, synchronize=lambda: None)
        self._malloc = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p)(
            self.pool.function("malloc")
        )
        self._free = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p)(
            self.pool.function("free")
        )
        machine = replace(fake_machine(self.driver), graph_pool=lambda: self.pool)
        self.manager = MemoryManager(machine=machine)
        self.weight = self.manager.allocate_weights([WEIGHT])["weight"]
        self.manager.loading("weight").fill_(5)
        self.manager.allocate_bytes("kv_cache", KV_BYTES)
        self.manager.seal()
        assert self.manager.graph_pool is self.pool
        self._memory = [self._malloc(nbytes, 0, None) for nbytes in (PAGE, 2 * PAGE)]
        for name in "ab":
            self.manager.comm.export(name, self._step(f"close {name}"), self._step(f"reopen {name}"))
        self.pool.refill("ids", self._step("refill"))

    def _step(self, what: str) -> Callable[[], None]:
        def act() -> None:
            if what in self.fail:
                raise RuntimeError(f"cannot {what}")
            if what.startswith(("close", "reopen")):  # peers look at memory that is there
                assert all(region.mapped for region in self.manager.regions)
                assert self.pool.mapped
            self.done.append(what)

        return act

    def assert_awake(self) -> None:
        assert self.manager.state is EngineState.AWAKE
        assert self.pool.mapped
        assert self.manager.comm.exports_open
        assert int(self.weight.sum()) == 5 * WEIGHT.nbytes

    def assert_asleep(self) -> None:
        assert self.manager.state is EngineState.ASLEEP
        assert not self.pool.mapped
        assert not self.manager.comm.exports_open
        assert self.blocks.counts()["bytes"] == 0
        assert self.manager.handles()["handles"] == 0

    def close(self) -> None:
        self.driver.arm(None)
        self.blocks.reset()
        for memory in self._memory:
            self._free(memory, 0, 0, None)
        self.manager.close()


@pytest.fixture
def rig(fake: FakeBlocks) -> Iterator[Rig]:
    rig = Rig(fake)
    yield rig
    rig.close()
    if rig.pool._stats().broken == 0:
        assert fake.counts()["reservations"] == fake.counts()["contexts"] == 0


def test_exports_close_first_and_open_last(rig: Rig) -> None:
    before = rig.manager.handles()
    assert before["graph_blocks"] == 2
    assert before["graph_mapped_bytes"] == 3 * PAGE
    for _ in range(3):
        rig.done.clear()
        report = rig.manager.sleep()
        rig.assert_asleep()
        assert report.freed_bytes == WEIGHT.nbytes + KV_BYTES + 3 * PAGE
        report_awake = rig.manager.wake()
        rig.assert_awake()
        assert report_awake.mapped_bytes == report.freed_bytes
        assert rig.done == ["close a", "close b", "refill", "reopen b", "reopen a"]
        assert rig.manager.handles() == before


def test_a_second_sleep_and_a_second_wake_do_nothing(rig: Rig) -> None:
    rig.manager.sleep()
    assert not rig.manager.sleep().changed
    rig.manager.wake()
    rig.done.clear()
    assert not rig.manager.wake().changed
    assert rig.done == []
    rig.assert_awake()


def test_graphs_sleep_and_wake_with_the_last_region(rig: Rig) -> None:
    rig.manager.sleep(nbytes=1)
    assert rig.pool.mapped
    assert not rig.manager.comm.exports_open  # some of what peers saw is gone
    rig.manager.sleep()
    rig.assert_asleep()
    rig.manager.wake(["weights"])
    assert not rig.pool.mapped
    rig.manager.wake(["kv_cache"])
    rig.assert_awake()


def test_a_streamed_wake_opens_exports_when_it_is_verified(rig: Rig) -> None:
    rig.manager.sleep()
    rig.done.clear()
    rig.manager.wake(streamed=True)
    assert rig.pool.mapped
    assert rig.done == ["refill"]
    rig.manager.finish_wake()
    assert rig.done == ["refill", "reopen b", "reopen a"]
    rig.assert_awake()


@pytest.mark.parametrize("call", ["cuMemUnmap", "cuMemRelease"])
def test_graph_memory_that_does_not_go_leaves_everything_awake(rig: Rig, call: str) -> None:
    epoch = rig.manager.kv_epoch
    rig.blocks.fail(call, 2)
    with pytest.raises(SleepError, match=f"graph memory on cuda:0: {call}"):
        rig.manager.sleep()
    rig.assert_awake()
    assert rig.manager.kv_epoch == epoch
    assert rig.done == ["close a", "close b", "reopen b", "reopen a"]
    rig.manager.sleep()
    rig.assert_asleep()


@pytest.mark.parametrize("streamed", [False, True])
def test_graph_memory_that_does_not_come_leaves_everything_asleep(rig: Rig, streamed: bool) -> None:
    rig.manager.sleep()
    rig.blocks.fail("cuMemCreate", 2, OUT_OF_MEMORY)
    with pytest.raises(WakeError, match=r"graph memory .*CUDA_ERROR_OUT_OF_MEMORY"):
        rig.manager.wake(streamed=streamed)
    rig.assert_asleep()
    rig.manager.wake()
    rig.assert_awake()


def wake_and_finish(manager: MemoryManager, *, streamed: bool) -> None:
    manager.wake(streamed=streamed)
    manager.finish_wake()


def test_a_damaged_store_puts_graphs_back_to_sleep(rig: Rig) -> None:
    rig.manager.loading("weight")[77] ^= 1
    rig.manager.sleep()
    for streamed in (False, True):
        with pytest.raises(ChecksumError):
            wake_and_finish(rig.manager, streamed=streamed)
        rig.assert_asleep()


@pytest.mark.parametrize("what", ["close b", "reopen a", "refill"])
def test_an_export_or_a_refill_that_fails_is_undone(rig: Rig, what: str) -> None:
    rig.fail = {what}
    if what == "close b":
        with pytest.raises(SleepError, match="closing export 'b': cannot close b"):
            rig.manager.sleep()
        rig.assert_awake()
    else:
        rig.manager.sleep()
        with pytest.raises(WakeError, match=f"cannot {what}"):
            rig.manager.wake()
        rig.assert_asleep()
    rig.fail.clear()
    rig.manager.sleep()
    rig.manager.wake()
    rig.assert_awake()


def test_every_driver_call_of_a_sleep_and_of_a_wake_may_fail(rig: Rig) -> None:
    moves = (
        (rig.manager.sleep, rig.assert_awake, rig.assert_asleep, SleepError),
        (rig.manager.wake, rig.assert_asleep, rig.assert_awake, WakeError),
    )
    for at in range(200):
        failures = 0
        for move, assert_before, assert_after, error in moves:
            rig.driver.arm(at)
            try:
                move()
            except error:
                failures += 1
                rig.driver.arm(None)
                assert_before()
                move()
            rig.driver.arm(None)
            assert_after()
        if failures == 0:
            break
    assert 20 < at < 199


def test_graph_memory_that_can_neither_go_nor_come_back_is_the_end(rig: Rig) -> None:
    rig.blocks.fail("cuMemUnmap", 2)
    rig.blocks.fail("cuMemMap", 1, for_good=True)
    with pytest.raises(TransitionError, match="must be restarted") as caught:
        rig.manager.sleep()
    assert caught.value.code == "memory_failed"
    assert rig.manager.state is EngineState.FAILED


def test_a_cpu_has_no_graph_pool() -> None:
    manager = MemoryManager("cpu")
    assert manager.graph_pool is None
    assert manager.comm.nbytes == 0
    manager.close()
