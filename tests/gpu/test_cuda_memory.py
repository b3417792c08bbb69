"""Sleep and wake on a real GPU; small sizes. Run with ``pytest tests/gpu/test_cuda_memory.py``."""

import os
import signal
import threading
import time
from collections.abc import Iterator

import pytest
import torch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]

if torch.cuda.is_available():
    from hotrack.core.errors import ChecksumError, WakeError
    from hotrack.core.lifecycle import EngineState
    from hotrack.core.tensorspec import TensorSpec
    from hotrack.kernels.checksum import checksum
    from hotrack.memory.driver import CudaDriver, DriverError
    from hotrack.memory.kept import KeptRange
    from hotrack.memory.machine import SharedCopy, TritonKernels
    from hotrack.memory.manager import MemoryManager

MIB = 1 << 20
CHUNK = 8 * MIB
DEVICE = torch.device("cuda:0")


class Member:
    def __init__(self, layers: int = 12, layer_bytes: int = 6 * MIB + 4096, kv_bytes: int = 40 * MIB) -> None:
        torch.zeros(1, device=DEVICE)
        self.memory = MemoryManager(DEVICE, chunk_bytes=CHUNK, num_threads=4)
        self.specs = [TensorSpec(f"l{i}", (layer_bytes // 2,), "bfloat16") for i in range(layers)]
        self.specs += [TensorSpec("slots", (1000,), "int64"), TensorSpec("written", (77,), "float32")]
        self.weights = self.memory.allocate_weights(self.specs, mutable=("slots",))
        self.kv = self.memory.allocate_bytes("kv_cache", kv_bytes)
        generator = torch.Generator().manual_seed(3)
        self.expected = {}
        for spec in self.specs:
            data = torch.randint(0, 256, (spec.nbytes,), dtype=torch.uint8, generator=generator)
            target = self.weights[spec.name] if spec.name == "written" else self.memory.loading(spec.name)
            target.view(-1).view(torch.uint8).copy_(data)
            self.memory.loaded(spec.name)
            self.expected[spec.name] = data
        self.memory.seal()
        self.kv.fill_(9)
        torch.cuda.synchronize()
        self.handles = self.memory.handles()
        self.addresses = {name: tensor.data_ptr() for name, tensor in self.weights.items()}

    def check(self, *, kv: int | None = 0) -> None:
        assert self.memory.state is EngineState.AWAKE
        for name, wanted in self.expected.items():
            assert torch.equal(self.weights[name].view(-1).view(torch.uint8).cpu(), wanted), name
            assert self.weights[name].data_ptr() == self.addresses[name]
        assert kv is None or bool((self.kv == kv).all())
        assert self.memory.handles() == self.handles


@pytest.fixture
def member() -> Iterator[Member]:
    member = Member()
    yield member
    member.memory.close()


def free() -> int:
    return torch.cuda.mem_get_info(DEVICE)[0]


@pytest.mark.parametrize("nbytes", [8, 1024, 8 * 1023, 128 * 1024, 3 * MIB + 8, 40 * MIB])
def test_triton_checksum_is_the_twin(nbytes: int) -> None:
    data = torch.randint(0, 256, (nbytes,), dtype=torch.uint8, device=DEVICE)
    slots = torch.zeros(3, dtype=torch.int64, device=DEVICE)
    add = TritonKernels(DEVICE).checksum
    add(torch.cuda.current_stream().cuda_stream, data, slots, 1)
    found = [value % (1 << 64) for value in slots.tolist()]
    assert found == [0, checksum(data.cpu()), 0]
    assert checksum(data) == found[1]


@pytest.mark.parametrize("nbytes", [8, 8 * 1023, 3 * MIB + 8, 40 * MIB])
def test_a_kernel_pulls_what_is_pinned(nbytes: int) -> None:
    source = torch.randint(0, 256, (nbytes + 64,), dtype=torch.uint8).pin_memory()[64:]
    target = torch.zeros(nbytes + 64, dtype=torch.uint8, device=DEVICE)
    TritonKernels(DEVICE).pull(torch.cuda.current_stream().cuda_stream, target[:nbytes], source)
    assert torch.equal(target[:nbytes].cpu(), source)
    assert not target[nbytes:].any()


def test_checksum_sees_flips_and_exchanges() -> None:
    data = torch.arange(MIB, dtype=torch.uint8, device=DEVICE)
    before = checksum(data)
    data[MIB - 1] ^= 128
    assert checksum(data) != before
    data[MIB - 1] ^= 128
    words = data.view(torch.int64)
    words[[5, 6]] = words[[6, 5]]
    assert checksum(data) == before or words[5] != words[6]


def test_weights_are_cuda_tensors_that_kernels_use(member: Member) -> None:
    weight = member.weights["l0"]
    assert weight.device == DEVICE
    assert weight.dtype is torch.bfloat16
    matrix = torch.ones(4, 512, dtype=torch.bfloat16, device=DEVICE)
    assert (matrix @ weight[: 512 * 16].view(512, 16)).shape == (4, 16)
    member.check(kv=9)


def test_sleep_gives_memory_back_and_wake_brings_bytes_back(member: Member) -> None:
    total = sum(region.nbytes for region in member.memory.regions)
    for cycle in range(5):
        before = free()
        slept = member.memory.sleep(1)
        assert slept.freed_bytes == total
        assert abs(free() - before - total) <= 4 * MIB  # the driver's own page tables
        assert slept.device_before_bytes is None or (
            slept.device_after_bytes is not None
            and abs(slept.device_before_bytes - slept.device_after_bytes - total) <= 4 * MIB
        )
        woke = member.memory.wake()
        assert abs(free() - before) <= 4 * MIB
        assert woke.restored_bytes == member.memory.weight_bytes
        member.check()
        member.weights["slots"].fill_(cycle)
        member.expected["slots"] = member.weights["slots"].view(torch.uint8).cpu()


def test_host_memory_is_pinned_and_exact(member: Member) -> None:
    assert member.memory.handles()["registered_bytes"] == member.memory.weight_bytes
    weights = sum(spec.nbytes for spec in member.specs)
    assert member.memory.weight_bytes <= weights + 2 * 2 * MIB + len(member.specs) * 2 * MIB


def test_kernels_in_flight_on_another_stream_are_waited_for(member: Member) -> None:
    stream = torch.cuda.Stream(DEVICE)
    out = torch.empty_like(member.weights["l0"])
    with torch.cuda.stream(stream):
        torch.cuda._sleep(200_000_000)
        out.copy_(member.weights["l0"])
    member.memory.sleep(1)
    assert torch.equal(out.view(torch.uint8).cpu(), member.expected["l0"])
    member.memory.wake()
    member.check()


def test_streamed_wake_is_waited_for_on_the_stream(member: Member) -> None:
    member.memory.sleep(1)
    member.memory.wake(streamed=True)
    member.memory.wait_for(["l3"])
    landed = member.weights["l3"].clone()
    report = member.memory.finish_wake()
    assert torch.equal(landed.view(torch.uint8).cpu(), member.expected["l3"])
    assert report.copy_ms > 0
    member.check()


@pytest.mark.parametrize("streamed", [False, True])
def test_one_flipped_bit(member: Member, streamed: bool) -> None:
    member.memory.sleep(1)
    asleep = free()
    data = member.memory.loading("l5").view(torch.uint8)
    data[12345] ^= 4

    def wake() -> None:
        member.memory.wake(streamed=streamed)
        member.memory.finish_wake()

    with pytest.raises(ChecksumError, match="region 'weights'"):
        wake()
    assert free() == asleep
    data[12345] ^= 4
    member.memory.wake()
    member.check()


def test_no_room_names_bytes_and_holders(member: Member) -> None:
    member.memory.sleep(1)
    torch.cuda.empty_cache()
    total = sum(region.nbytes for region in member.memory.regions)
    ballast = [torch.empty((free() - total // 2) // (2 * MIB) * 2 * MIB, dtype=torch.uint8, device=DEVICE)]
    held = free()
    assert held < total
    with pytest.raises(WakeError, match=rf"need {total} bytes and the device has {held} left"):
        member.memory.wake()
    assert free() == held
    ballast.clear()
    torch.cuda.empty_cache()
    member.memory.wake()
    member.check()


def test_out_of_memory_in_the_middle_is_rolled_back(member: Member, monkeypatch: pytest.MonkeyPatch) -> None:
    member.memory.sleep(1)
    asleep = free()
    driver = member.memory._backend.driver
    real, calls = driver.mem_create, []

    def create(nbytes: int) -> int:
        calls.append(nbytes)
        if len(calls) == 7:
            raise DriverError("cuMemCreate", 2, "CUDA_ERROR_OUT_OF_MEMORY")
        return real(nbytes)

    with monkeypatch.context() as patch:
        patch.setattr(driver, "mem_create", create)
        with pytest.raises(WakeError, match=r"mapping chunk 7 of \d+ of region 'weights'.*bytes left"):
            member.memory.wake()
    assert free() == asleep
    member.memory.wake()
    member.check()


def test_partial_sleep_moves_no_more_than_asked(member: Member) -> None:
    before = free()
    member.memory.sleep(nbytes=40 * MIB + 3 * CHUNK)
    freed = sum(region.asleep.nbytes for region in member.memory.regions)
    assert abs(free() - before - freed) <= 4 * MIB
    assert freed in range(40 * MIB + 3 * CHUNK, 40 * MIB + 5 * CHUNK)
    assert torch.equal(member.weights["l0"].view(torch.uint8).cpu(), member.expected["l0"])
    report = member.memory.wake()
    assert report.mapped_bytes == freed
    assert report.bytes_copied in range(2 * CHUNK, 5 * CHUNK)
    member.check()


def test_kept_kv_comes_back(member: Member) -> None:
    member.kv.copy_(torch.randint(0, 256, (member.kv.numel(),), dtype=torch.uint8))
    wanted = member.kv.cpu()
    ranges = [KeptRange(member.kv, 5, 3 * MIB), KeptRange(member.kv, 20 * MIB + 1, 9 * MIB)]
    assert member.memory.sleep(1, keep=ranges).kept_bytes == 12 * MIB
    member.memory.wake()
    found = member.kv.cpu()
    for one in ranges:
        end = one.offset + one.nbytes
        assert torch.equal(found[one.offset : end], wanted[one.offset : end])
        found[one.offset : end] = 0
    assert not bool(found.any())
    member.check(kv=None)


def test_level_2_reloads(member: Member) -> None:
    def reload() -> None:
        for name, data in member.expected.items():
            member.memory.loading(name).view(-1).view(torch.uint8).copy_(data)
            member.memory.loaded(name)

    member.memory.reload = reload
    member.memory.sleep(2)
    assert member.memory.store_bytes == 0
    member.memory.wake()
    member.check()


def test_from_another_thread_and_with_expandable_tensors_around(member: Member) -> None:
    errors: list[BaseException] = []

    def cycle() -> None:
        try:
            member.memory.sleep(1)
            torch.ones(5 * MIB, device=DEVICE).sum().item()
            member.memory.wake()
        except BaseException as error:  # noqa: BLE001
            errors.append(error)

    thread = threading.Thread(target=cycle)
    thread.start()
    thread.join()
    assert not errors
    member.check()


def test_the_current_device_and_context_stay_as_they_were(member: Member) -> None:
    before = torch.cuda.current_device()
    member.memory.sleep(1)
    member.memory.wake()
    assert torch.cuda.current_device() == before
    other = CudaDriver(0)
    assert other.mem_get_info()[1] == torch.cuda.mem_get_info(DEVICE)[1]


def test_a_thousand_cycles_leak_nothing() -> None:
    member = Member(layers=2, kv_bytes=2 * MIB)
    member.memory.sleep(1)
    member.memory.wake()
    awake = free()
    for _ in range(1000):
        member.memory.sleep(1)
        member.memory.wake()
        assert free() == awake
        assert member.memory.handles() == member.handles
    member.check()
    member.memory.close()


def test_forked_children_do_not_see_the_pinned_copy(member: Member) -> None:
    address = member.memory._sleeper.weights[0].store.address
    pid = os.fork()
    if pid == 0:
        import ctypes

        ctypes.string_at(address, 1)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGSEGV
    member.memory.sleep(1)
    member.memory.wake()
    member.check()


def test_a_captured_graph_replays_after_wake(member: Member) -> None:
    weight = member.weights["l0"][: 512 * 16].view(512, 16)
    inputs = torch.randn(4, 512, device=DEVICE).to(torch.bfloat16)
    inputs @ weight
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = (inputs @ weight).nan_to_num()
    graph.replay()
    wanted = out.clone()
    for _ in range(3):
        member.memory.sleep(1)
        member.memory.wake()
        out.zero_()
        graph.replay()
        assert torch.equal(out, wanted)


def test_sleep_takes_milliseconds(member: Member) -> None:
    member.memory.sleep(1)
    member.memory.wake()
    start = time.perf_counter()
    member.memory.sleep(1)
    assert time.perf_counter() - start < 0.1


def test_a_shared_host_copy_is_found_again() -> None:
    shared = SharedCopy(f"gpu-test-{os.getpid()}", "v1")
    specs = [TensorSpec(f"l{i}", (5 * MIB + 8 * i,), "uint8") for i in range(9)]
    first = MemoryManager(DEVICE, chunk_bytes=CHUNK, shared=shared)
    weights = first.allocate_weights(specs)
    assert not first.attached
    for index, spec in enumerate(specs):
        first.loading(spec.name).fill_(index + 1)
    first.seal()
    first.close()
    second = MemoryManager(DEVICE, chunk_bytes=CHUNK, shared=shared)
    weights = second.allocate_weights(specs)
    assert second.attached
    second.seal()
    for _ in range(2):
        assert all(bool((weights[spec.name] == i + 1).all()) for i, spec in enumerate(specs))
        second.sleep(1)
        second.wake()
    second.reload = lambda: None
    second.sleep(2)  # removes the file
    second.close()
