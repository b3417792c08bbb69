import ctypes
import threading
from collections.abc import Iterator

import pytest

from fakes.cuda_blocks import OUT_OF_MEMORY, PAGE, FakeBlocks
from fakes.torch_allocator import TorchAllocator
from hotrack.core.errors import GraphPoolUnavailableError, SleepError, TransitionError, WakeError
from hotrack.memory import graph_pool
from hotrack.memory.graph_pool import GraphPool

NOTHING = {"reservations": 0, "handles": 0, "mappings": 0, "bytes": 0, "contexts": 0}


@pytest.fixture
def pool(fake: FakeBlocks) -> Iterator[GraphPool]:
    pool = GraphPool("cuda:0", driver=fake.table, synchronize=lambda: None)
    yield pool
    fake.reset()
    user = TorchAllocator(pool)
    for address in BLOCKS:
        user.free(address)
    BLOCKS.clear()
    assert pool.close()
    assert fake.counts() == NOTHING


BLOCKS: list[int] = []  # what the test leaves to the fixture


@pytest.fixture
def user(pool: GraphPool) -> TorchAllocator:
    return TorchAllocator(pool)


def fill(user: TorchAllocator, sizes: tuple[int, ...] = (1, PAGE, 3 * PAGE - 5)) -> list[int]:
    """Blocks with a different byte in each."""
    for value, nbytes in enumerate(sizes, 1):
        BLOCKS.append(user.must_malloc(nbytes))
        ctypes.memset(BLOCKS[-1], value, nbytes)
    return list(BLOCKS)


def first_bytes(addresses: list[int]) -> list[int]:
    return [ctypes.string_at(address, 1)[0] for address in addresses]


def test_sleep_gives_everything_back_and_wake_maps_the_same_addresses(
    fake: FakeBlocks, pool: GraphPool, user: TorchAllocator
) -> None:
    addresses = fill(user)
    assert pool.nbytes == pool.handles()["mapped_bytes"] == 5 * PAGE
    sizes = (PAGE, PAGE, 3 * PAGE)
    assert sorted(pool.blocks()) == sorted(zip(addresses, sizes, strict=True))
    for cycle in range(1, 4):
        assert pool.sleep() == 5 * PAGE
        assert not pool.mapped
        assert fake.counts() == {"reservations": 3, "handles": 0, "mappings": 0, "bytes": 0, "contexts": 1}
        assert pool.handles() == {"blocks": 3, "handles": 0, "mapped_bytes": 0, "freed_bytes": 0}
        assert pool.nbytes == 5 * PAGE
        assert pool.contents_epoch == cycle
        assert pool.sleep() == 0
        assert pool.wake() == 5 * PAGE
        assert pool.mapped
        assert pool.wake() == 0
        assert fake.counts()["bytes"] == 5 * PAGE
        ctypes.memset(addresses[2], 255, 3 * PAGE)  # all of it is writable again


def test_freed_memory_waits_for_a_moment_when_the_device_is_idle(
    fake: FakeBlocks, pool: GraphPool, user: TorchAllocator
) -> None:
    first, second, third = fill(user)
    user.free(second)
    assert fake.counts()["mappings"] == 3  # a kernel may still be writing there
    assert pool.handles()["freed_bytes"] == PAGE
    assert pool.trim() == PAGE
    assert fake.counts()["reservations"] == 2
    user.free(third)
    assert pool.sleep() == 4 * PAGE
    assert fake.counts()["reservations"] == 1
    assert pool.nbytes == PAGE
    BLOCKS[:] = [first]


def test_freeing_while_asleep_drops_the_reservation(
    fake: FakeBlocks, pool: GraphPool, user: TorchAllocator
) -> None:
    first, second, third = fill(user)
    pool.sleep()
    user.free(second)
    assert fake.counts()["reservations"] == 2
    fake.fail("cuMemAddressFree")
    user.free(third)
    assert (
        pool.last_error("free")
        == f"cuMemAddressFree of {3 * PAGE} bytes at {third:#x}: CUDA_ERROR_INVALID_VALUE"
    )
    assert pool.wake() == PAGE
    pool.trim()  # tries again
    assert fake.counts()["reservations"] == 1
    BLOCKS[:] = [first]


@pytest.mark.parametrize(
    ("nbytes", "device", "asleep", "why"),
    [
        (1, 0, True, "the pool is asleep"),
        (1, 1, False, "the pool belongs to another device"),
        (0, 0, False, "not a size"),
        (-1, 0, False, "not a size"),
    ],
)
def test_malloc_refuses(
    pool: GraphPool, user: TorchAllocator, nbytes: int, device: int, asleep: bool, why: str
) -> None:
    if asleep:
        pool.sleep()
    assert user.malloc(nbytes, device) is None
    assert why in (pool.last_error("malloc") or "")
    assert pool.handles()["blocks"] == 0


def test_free_of_a_foreign_pointer_changes_nothing(pool: GraphPool, user: TorchAllocator) -> None:
    [address] = fill(user, (1,))
    user.free(address + 512)
    assert "not a block of this pool" in (pool.last_error("free") or "")
    user.free(0)
    user.free(address)
    user.free(address)  # twice
    assert pool.trim() == PAGE
    BLOCKS.clear()


@pytest.mark.parametrize(
    "call", ["cuCtxPushCurrent_v2", "cuMemAddressReserve", "cuMemCreate", "cuMemMap", "cuMemSetAccess"]
)
def test_malloc_leaves_nothing_behind_when_the_driver_refuses(
    fake: FakeBlocks, pool: GraphPool, user: TorchAllocator, call: str
) -> None:
    fill(user)
    start = fake.counts()
    fake.fail(call)
    assert user.malloc(PAGE) is None
    assert call.removesuffix("_v2") in (pool.last_error("malloc") or "")
    assert fake.counts() == start
    assert pool.nbytes == 5 * PAGE


def test_out_of_memory_is_named_and_says_what_a_trim_would_give(
    fake: FakeBlocks, pool: GraphPool, user: TorchAllocator
) -> None:
    fake.reset(capacity=2 * PAGE)
    [address] = fill(user, (2 * PAGE,))
    user.free(address)
    assert user.malloc(PAGE) is None
    error = pool.last_error("malloc") or ""
    assert error == (
        f"{error.partition(':')[0]}: CUDA_ERROR_OUT_OF_MEMORY ({2 * PAGE} bytes were freed and not trimmed)"
    )
    assert "cuMemCreate" in error
    pool.trim()
    BLOCKS[:] = [user.must_malloc(PAGE)]


@pytest.mark.parametrize("undone", ["cuMemUnmap", "cuMemRelease", "cuMemAddressFree"])
def test_what_a_failed_malloc_could_not_give_back_goes_with_the_next_trim(
    fake: FakeBlocks, pool: GraphPool, user: TorchAllocator, undone: str
) -> None:
    fake.fail("cuMemSetAccess")
    fake.fail(undone, 2 if undone == "cuMemUnmap" else 1, for_good=True)
    if undone == "cuMemUnmap":
        fake.fail(undone, 1, for_good=True)
    assert user.malloc(PAGE) is None
    assert "cuMemSetAccess" in (pool.last_error("malloc") or "")
    fake.reset()
    assert fake.counts()["reservations"] == 1
    pool.trim()
    assert fake.counts()["reservations"] == 0


@pytest.mark.parametrize("move", ["trim", "sleep"])
@pytest.mark.parametrize(
    ("call", "nth"),
    [("cuCtxPushCurrent_v2", 1)]
    + [(call, nth) for call in ("cuMemUnmap", "cuMemRelease", "cuMemAddressFree") for nth in (1, 2)],
)
def test_freed_memory_that_the_driver_keeps_can_be_given_back_later(
    fake: FakeBlocks, pool: GraphPool, user: TorchAllocator, call: str, nth: int, move: str
) -> None:
    addresses = fill(user)
    for address in addresses[1:]:
        user.free(address)
    BLOCKS[:] = addresses[:1]
    fake.fail(call, nth)
    with pytest.raises(SleepError, match=call.removesuffix("_v2")):
        getattr(pool, move)()
    assert pool.mapped
    assert first_bytes(addresses[:1]) == [1]
    assert pool.contents_epoch == 0
    pool.trim()
    assert fake.counts() == {"reservations": 1, "handles": 1, "mappings": 1, "bytes": PAGE, "contexts": 1}


@pytest.mark.parametrize("nth", [1, 2, 3])
@pytest.mark.parametrize("call", ["cuMemUnmap", "cuMemRelease"])
def test_a_sleep_that_fails_is_undone(
    fake: FakeBlocks, pool: GraphPool, user: TorchAllocator, call: str, nth: int
) -> None:
    addresses = fill(user)
    start = fake.counts()
    fake.fail(call, nth)
    with pytest.raises(SleepError, match=f"{call} of .* CUDA_ERROR_INVALID_VALUE"):
        pool.sleep()
    assert pool.mapped
    assert fake.counts() == start
    if call == "cuMemUnmap":
        assert first_bytes(addresses) == [1, 2, 3]
    assert pool.contents_epoch == (call == "cuMemRelease")
    for address in addresses:
        ctypes.memset(address, 9, PAGE)
    assert pool.sleep() == 5 * PAGE
    pool.wake()


@pytest.mark.parametrize("nth", [1, 2, 3])
@pytest.mark.parametrize("call", ["cuMemCreate", "cuMemMap", "cuMemSetAccess"])
def test_a_wake_that_fails_is_undone(
    fake: FakeBlocks, pool: GraphPool, user: TorchAllocator, call: str, nth: int
) -> None:
    addresses = fill(user)
    pool.sleep()
    start = fake.counts()
    fake.fail(call, nth, OUT_OF_MEMORY)
    with pytest.raises(WakeError, match=f"graph memory on cuda:0: {call} of .* CUDA_ERROR_OUT_OF_MEMORY"):
        pool.wake()
    assert not pool.mapped
    assert fake.counts() == start
    assert pool.wake() == 5 * PAGE
    for address in addresses:
        ctypes.memset(address, 9, PAGE)


def test_wake_with_half_the_memory_taken(fake: FakeBlocks, pool: GraphPool, user: TorchAllocator) -> None:
    fill(user)
    pool.sleep()
    fake.reset(capacity=3 * PAGE)
    for _ in range(3):
        with pytest.raises(WakeError, match="CUDA_ERROR_OUT_OF_MEMORY"):
            pool.wake()
        assert fake.counts()["bytes"] == 0
    fake.reset()
    assert pool.wake() == 5 * PAGE


@pytest.mark.parametrize(
    ("move", "first", "undo"),
    [
        ("sleep", "cuMemUnmap", "cuMemMap"),
        ("sleep", "cuMemRelease", "cuMemCreate"),
        ("wake", "cuMemCreate", "cuMemUnmap"),
        ("wake", "cuMemMap", "cuMemRelease"),
    ],
)
def test_a_failure_that_cannot_be_undone_is_final(fake: FakeBlocks, move: str, first: str, undo: str) -> None:
    pool = GraphPool("cuda:0", driver=fake.table, synchronize=lambda: None)
    user = TorchAllocator(pool)
    fill(user, (PAGE, PAGE, PAGE))
    BLOCKS.clear()
    if move == "wake":
        pool.sleep()
    fake.fail(first, 2)
    fake.fail(undo, 1, for_good=True)
    with pytest.raises(TransitionError, match="must be restarted") as caught:
        getattr(pool, move)()
    assert caught.value.code == "memory_failed"
    fake.reset()
    with pytest.raises(TransitionError, match="could not be undone"):
        pool.sleep()
    with pytest.raises(TransitionError, match="could not be undone"):
        pool.wake()
    assert user.malloc(PAGE) is None
    assert not pool.close()


def test_a_pool_that_cannot_be_opened_says_why_and_what_to_do(fake: FakeBlocks) -> None:
    for call in ("cuDeviceGet", "cuDevicePrimaryCtxRetain", "cuMemGetAllocationGranularity"):
        fake.fail(call)
        with pytest.raises(GraphPoolUnavailableError, match=rf"{call}.*INVALID_VALUE; start without"):
            GraphPool("cuda:0", driver=fake.table)
    assert fake.counts() == NOTHING


def test_refills_run_in_order_and_a_failing_one_puts_the_pool_back_to_sleep(
    fake: FakeBlocks, pool: GraphPool, user: TorchAllocator
) -> None:
    [address] = fill(user, (PAGE,))
    order: list[str] = []

    def fails() -> None:
        raise RuntimeError("no")

    pool.refill("ids", lambda: (order.append("ids"), ctypes.memset(address, 7, PAGE))[0])
    pool.refill("flags", lambda: order.append("flags"))
    pool.sleep()
    pool.wake()
    assert order == ["ids", "flags"]
    assert first_bytes([address]) == [7]
    pool.refill("flags", fails)
    pool.sleep()
    with pytest.raises(WakeError, match="writing 'flags' again failed: no"):
        pool.wake()
    assert not pool.mapped
    assert fake.counts()["bytes"] == 0
    fake.fail("cuMemUnmap")
    with pytest.raises(TransitionError, match="must be restarted"):
        pool.wake()
    pool.refill("flags", None)


def test_torch_allocates_and_frees_on_eight_threads_beside_sleep_and_wake(
    fake: FakeBlocks, pool: GraphPool, user: TorchAllocator
) -> None:
    stop = threading.Event()
    kept: list[list[int]] = [[] for _ in range(8)]
    served, refused = [0] * 8, [0] * 8

    def work(index: int) -> None:
        mine = kept[index]
        while not stop.is_set():
            address = user.malloc(PAGE)
            if address is None:
                refused[index] += 1
            else:
                served[index] += 1
                mine.append(address)
            if len(mine) > 4:
                user.free(mine.pop(0))

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(40):
            pool.sleep()
            assert pool.handles()["mapped_bytes"] == 0
            pool.wake()
            pool.trim()
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    assert sum(served) > 0
    left = [address for mine in kept for address in mine]
    assert len(set(left)) == len(left)
    assert pool.nbytes == len(left) * PAGE
    BLOCKS[:] = left


def test_pools_do_not_share_blocks_and_a_slot_is_used_again(
    fake: FakeBlocks, pool: GraphPool, user: TorchAllocator
) -> None:
    fill(user)
    others = [GraphPool("cuda:1", driver=fake.table, synchronize=lambda: None) for _ in range(3)]
    address = TorchAllocator(others[0]).malloc(PAGE, device=1)
    assert address is not None
    assert others[0].sleep() == PAGE
    assert pool.mapped
    assert not others[0].close()
    TorchAllocator(others[0]).free(address)
    assert all(other.close() for other in others)
    again = GraphPool("cuda:0", driver=fake.table, synchronize=lambda: None)
    assert again._index == others[0]._index
    assert again.mapped
    assert again.close()


def test_out_of_memory_in_a_wake_names_who_holds_the_memory(
    monkeypatch: pytest.MonkeyPatch, fake: FakeBlocks, pool: GraphPool, user: TorchAllocator
) -> None:
    monkeypatch.setattr(graph_pool, "describe_holders", lambda device: f"held by trainer (pid 7) on {device}")
    fill(user)
    pool.sleep()
    fake.fail("cuMemCreate", code=OUT_OF_MEMORY)
    with pytest.raises(WakeError, match=r"CUDA_ERROR_OUT_OF_MEMORY; held by trainer \(pid 7\) on cuda:0$"):
        pool.wake()
    fake.fail("cuMemCreate")
    with pytest.raises(WakeError, match=r"CUDA_ERROR_INVALID_VALUE$"):
        pool.wake()
