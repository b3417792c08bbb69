"""Captured graphs on a device: their memory leaves, comes back at the same addresses, and they replay."""

import ctypes
import gc
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from hotrack.core.errors import WakeError
from hotrack.core.tensorspec import TensorSpec
from hotrack.memory import MemoryManager
from hotrack.memory.device_process import describe_holders, device_bytes, holders
from hotrack.memory.graph_pool import GraphPool

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
MIB = 1 << 20
ROOT = Path(__file__).parents[2]


@pytest.fixture
def pool() -> Iterator[GraphPool]:
    pool = GraphPool()
    yield pool
    if not pool.mapped:
        pool.wake()
    gc.collect()  # graphs of the test
    assert pool.close(), pool.handles()


class Decode:
    """A few layers with what graphs are made of: matrix products, reductions, sorts, copies and fills."""

    def __init__(self, pool: GraphPool, batch: int, *, width: int = 1024, layers: int = 3) -> None:
        generator = torch.Generator(device="cuda").manual_seed(batch)
        self.weights = [
            torch.randn(width, width, generator=generator, device="cuda", dtype=torch.bfloat16)
            for _ in range(layers)
        ]
        self.x = torch.randn(batch, width, generator=generator, device="cuda", dtype=torch.bfloat16)
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(2):
                self.forward()
        torch.cuda.current_stream().wait_stream(stream)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph, pool=pool.mempool.id, stream=stream):
            self.out = self.forward()

    def forward(self) -> Tensor:
        h = self.x
        for weight in self.weights:
            h = torch.nn.functional.rms_norm(h @ weight, (h.shape[-1],))
            scores = torch.softmax(h.float(), -1)
            counts = torch.zeros_like(scores)  # a memset
            counts.scatter_add_(1, torch.topk(scores, 8).indices, scores[:, :8])
            kept = torch.empty_like(scores)
            kept.copy_(counts)  # a memcpy
            h = h + kept.cumsum(1).to(h.dtype) + torch.sort(h, dim=1).values
        return h

    def replay(self) -> Tensor:
        self.graph.replay()
        torch.cuda.synchronize()
        return self.out.clone()


def poison(pool: GraphPool) -> None:
    """0xFF in every byte of the pool: NaN in any float type."""
    fill = ctypes.CDLL("libcuda.so.1").cuMemsetD8_v2
    fill.argtypes = (ctypes.c_uint64, ctypes.c_ubyte, ctypes.c_size_t)
    torch.cuda.synchronize()
    for address, nbytes in pool.blocks():
        assert fill(address, 255, nbytes) == 0
    torch.cuda.synchronize()


def free_bytes() -> int:
    torch.cuda.synchronize()
    return torch.cuda.mem_get_info()[0]


def same_bits(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.view(torch.uint8), b.view(torch.uint8))


def test_graphs_replay_bit_identically_after_every_wake(pool: GraphPool) -> None:
    models = [Decode(pool, batch) for batch in (16, 4, 1)]
    before = [model.replay() for model in models]
    assert all(bool(torch.isfinite(out).all()) for out in before)
    addresses = sorted(pool.blocks())
    assert addresses
    for _ in range(5):
        slept = pool.sleep()
        assert slept == pool.nbytes > 0
        assert pool.handles()["mapped_bytes"] == pool.handles()["handles"] == 0
        assert pool.wake() == slept
        assert sorted(pool.blocks()) == addresses
        poison(pool)
        assert all(bool(torch.isnan(model.out).all()) for model in models)
        for model, out in zip(models, before, strict=True):
            assert same_bits(model.replay(), out)


def test_the_memory_really_leaves_the_process(pool: GraphPool) -> None:
    before = free_bytes()
    with torch.cuda.use_mem_pool(pool.mempool):
        held = [torch.empty(n * 64 * MIB, dtype=torch.uint8, device="cuda") for n in (1, 2, 5)]
    assert pool.nbytes == 512 * MIB
    mine, free = device_bytes(), free_bytes()
    assert before - free >= 512 * MIB
    assert pool.sleep() == 512 * MIB
    assert free_bytes() - free == 512 * MIB
    if mine is not None:
        assert device_bytes() == mine - 512 * MIB
    pool.wake()
    assert free_bytes() == free
    assert device_bytes() == mine
    held[2].fill_(7)
    assert int(held[2].sum(dtype=torch.int64)) == 7 * 320 * MIB


def test_cycles_leave_nothing_behind(pool: GraphPool) -> None:
    model = Decode(pool, 8)
    out = model.replay()
    seen: set[tuple[int | None, int, tuple[int, ...]]] = set()
    slept, woken = [], []
    for _ in range(200):
        start = time.perf_counter()
        pool.sleep()
        middle = time.perf_counter()
        pool.wake()
        slept.append(middle - start)
        woken.append(time.perf_counter() - middle)
        assert same_bits(model.replay(), out)
        seen.add((device_bytes(), free_bytes(), tuple(pool.handles().values())))
    assert len(seen) == 1, seen
    times = [f"{name} {statistics.median(s) * 1e3:.2f} ms" for name, s in (("sleep", slept), ("wake", woken))]
    print(f"\n{pool.nbytes / MIB:.0f} MiB in {len(pool.blocks())} blocks: {', '.join(times)}")


def test_sleep_waits_for_kernels_in_flight_on_another_stream(pool: GraphPool) -> None:
    with torch.cuda.use_mem_pool(pool.mempool):
        target = torch.zeros(32 * MIB, dtype=torch.uint8, device="cuda")
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(200_000_000)
        target.fill_(1)
    pool.sleep()
    assert stream.query()
    pool.wake()


def test_static_inputs_in_the_pool_are_written_again(pool: GraphPool) -> None:
    with torch.cuda.use_mem_pool(pool.mempool):
        ids = torch.zeros(64, dtype=torch.int64, device="cuda")
    table = torch.randn(128, 256, device="cuda")
    kept = torch.arange(64, device="cuda")
    pool.refill("token ids", lambda: ids.copy_(kept))
    ids.copy_(kept)
    table[ids].sum()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool.mempool.id):
        out = table[ids] * 2
    graph.replay()
    expected = table[:64] * 2
    assert torch.equal(out, expected)
    pool.sleep()
    pool.wake()
    graph.replay()
    assert torch.equal(out, expected)


def test_out_of_memory_is_torchs_error_and_passes(pool: GraphPool) -> None:
    total = torch.cuda.mem_get_info()[1]
    with torch.cuda.use_mem_pool(pool.mempool):
        with pytest.raises(torch.cuda.OutOfMemoryError):
            torch.empty(2 * total, dtype=torch.uint8, device="cuda")
        assert "cuMemCreate" in (pool.last_error("malloc") or "")
        assert "CUDA_ERROR_OUT_OF_MEMORY" in (pool.last_error("malloc") or "")
        small = torch.ones(1024, device="cuda")
    assert float(small.sum()) == 1024


def test_out_of_memory_during_a_capture(pool: GraphPool) -> None:
    total = torch.cuda.mem_get_info()[1]
    x = torch.ones(1024, device="cuda")

    def capture() -> None:
        with torch.cuda.graph(torch.cuda.CUDAGraph(), pool=pool.mempool.id):
            x.mul(2)
            torch.empty(2 * total, dtype=torch.uint8, device="cuda")

    x.mul(2)
    with pytest.raises(torch.cuda.OutOfMemoryError):
        capture()
    model = Decode(pool, 2)  # captures go on working
    out = model.replay()
    pool.sleep()
    pool.wake()
    assert same_bits(model.replay(), out)


def test_allocating_and_freeing_while_asleep(pool: GraphPool) -> None:
    other = torch.cuda.MemPool(pool.allocator)
    with torch.cuda.use_mem_pool(other):
        freed = torch.empty(64 * MIB, dtype=torch.uint8, device="cuda")
    with torch.cuda.use_mem_pool(pool.mempool):
        kept = torch.empty(64 * MIB, dtype=torch.uint8, device="cuda")
    assert pool.sleep() == 128 * MIB
    with torch.cuda.use_mem_pool(pool.mempool), pytest.raises(torch.cuda.OutOfMemoryError):
        torch.empty(64 * MIB, dtype=torch.uint8, device="cuda")
    assert "the pool is asleep" in (pool.last_error("malloc") or "")
    del freed, other
    assert pool.nbytes == 64 * MIB
    assert pool.handles()["blocks"] == 1
    assert pool.wake() == 64 * MIB
    kept.fill_(3)
    torch.cuda.synchronize()


def test_a_wake_without_room_leaves_the_pool_asleep(pool: GraphPool) -> None:
    with torch.cuda.use_mem_pool(pool.mempool):
        held = [torch.empty(512 * MIB, dtype=torch.uint8, device="cuda") for _ in range(4)]
    pool.sleep()
    ballast = torch.empty(free_bytes() - 1024 * MIB, dtype=torch.uint8, device="cuda")
    free = free_bytes()
    for _ in range(3):
        with pytest.raises(WakeError, match="CUDA_ERROR_OUT_OF_MEMORY"):
            pool.wake()
        assert not pool.mapped
        assert free_bytes() == free
    del ballast
    torch.cuda.empty_cache()
    assert pool.wake() == 2048 * MIB
    held[3].fill_(1)
    torch.cuda.synchronize()


def test_a_thousand_captures_beside_a_freeing_thread_and_the_exit() -> None:
    done = run(str(ROOT / "tools/try_ctypes_allocator.py"), "--allocator", "c", "--limit", "90")
    print(f"\n{done.stdout}{done.stderr}")
    assert done.returncode == 0
    assert "deadlock: no, exit status 0" in done.stdout


@pytest.mark.parametrize("variable", ["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"])
def test_expandable_segments_coexist_or_are_refused_with_a_reason(variable: str) -> None:
    script = """
import torch
from hotrack.core.errors import GraphPoolUnavailableError
from hotrack.memory.graph_pool import GraphPool
pool = GraphPool()
try:
    mempool = pool.mempool
except GraphPoolUnavailableError as error:
    print("refused:", error)
else:
    x = torch.ones(1 << 20, device="cuda")
    (x * 2).cumsum(0)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=mempool.id):
        y = (x * 2).cumsum(0)
    graph.replay()
    before = y.clone()
    slept = pool.sleep()
    assert slept >= y.nbytes, slept
    pool.wake()
    graph.replay()
    assert torch.equal(y, before)
    print("coexists:", slept)
"""
    done = run("-c", script, **{variable: "expandable_segments:True"})
    print(f"\n{variable}: {done.stdout}{done.stderr}")
    assert done.returncode == 0
    assert done.stdout.startswith(("refused:", "coexists:"))


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])
    return subprocess.run(
        [sys.executable, *arguments],
        env={**os.environ, **environment, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=115,
        check=False,
    )


def test_nvml_knows_this_process_and_is_cheap(pool: GraphPool) -> None:
    mine = device_bytes()
    if mine is None:
        pytest.skip("NVML does not list this process")
    assert mine >= torch.cuda.memory_reserved()
    assert any(holder.pid == os.getpid() and holder.nbytes == mine for holder in holders())
    assert f"(pid {os.getpid()})" in describe_holders(limit=100)
    spent = []
    for _ in range(200):
        start = time.perf_counter()
        device_bytes()
        spent.append(time.perf_counter() - start)
    print(f"\ndevice_bytes: {statistics.median(spent) * 1e6:.0f} us, most {max(spent) * 1e6:.0f} us")
    assert statistics.median(spent) < 1e-3


def test_graphs_over_the_weights_of_a_memory_manager() -> None:
    manager = MemoryManager("cuda")
    width, layers, batch = 2048, 4, 8
    specs = [TensorSpec(f"layer{i}", (width, width), "bfloat16") for i in range(layers)]
    weights = manager.allocate_weights(specs)
    generator = torch.Generator().manual_seed(1)
    for name in weights:
        value = torch.randn(width, width, generator=generator) / width**0.5
        manager.loading(name).copy_(value.to(torch.bfloat16))
    manager.seal()
    kv = manager.allocate_bytes("kv_cache", 64 * MIB)
    pool = manager.graph_pool
    assert pool is not None
    x = torch.randn(batch, width, device="cuda", dtype=torch.bfloat16)

    def forward() -> Tensor:
        h = x
        for weight in weights.values():
            h = torch.nn.functional.silu(h @ weight)
        kv[: h.nbytes].copy_(h.view(torch.uint8).view(-1))
        return h.float().softmax(-1)

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        forward()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool.mempool.id, stream=stream):
        out = forward()
    graph.replay()
    torch.cuda.synchronize()
    wanted, handles = out.clone(), manager.handles()
    assert handles["graph_mapped_bytes"] > 0
    seen = set()
    for cycle in range(20):
        report = manager.sleep()
        assert manager.handles()["graph_mapped_bytes"] == 0
        assert report.freed_bytes >= width * width * 2 * layers + 64 * MIB + pool.nbytes
        manager.wake(streamed=cycle % 2 == 1)
        poison(pool)
        manager.wait_for(weights)
        graph.replay()
        manager.finish_wake()
        torch.cuda.synchronize()
        assert same_bits(out, wanted)
        assert manager.handles() == handles
        if cycle > 1:  # the first ones make torch cache what the comparison needs
            seen.add((report.device_before_bytes, report.device_after_bytes))
    assert len(seen) == 1, seen
    print(f"\ndevice bytes awake, asleep: {seen}")
    del graph, out, forward
    manager.close()
