"""Measure the CUDA memory layer on one GPU and print JSON.

    PYTHONPATH=src python tools/bench_cuda_memory.py --gib 17

Every figure stands beside the floor of the same run: plain asynchronous copies from pinned memory. Weights
are synthetic: random bytes in tensors of 64 MiB. Host memory is touched once before anything is timed.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from hotrack.core.tensorspec import TensorSpec
from hotrack.memory.driver import CudaDriver
from hotrack.memory.host_memory import HostMemory
from hotrack.memory.machine import TritonKernels
from hotrack.memory.manager import MemoryManager

GIB, MIB = 1 << 30, 1 << 20
TENSOR_BYTES = 64 * MIB


def note(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def timed(work: Callable[[], Any]) -> float:
    """Milliseconds."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    work()
    return (time.perf_counter() - start) * 1e3


def spread(values: list[float]) -> dict[str, float]:
    return {
        "median": round(statistics.median(values), 3),
        "min": round(min(values), 3),
        "max": round(max(values), 3),
        "first": round(values[0], 3),
    }


def floor(driver: CudaDriver, nbytes: int, device: torch.device, repeats: int) -> dict[str, Any]:
    """Milliseconds to copy ``nbytes`` in pieces of 128 MiB from a pinned ring of 4 GiB, one synchronise."""
    piece = 128 * MIB
    ring = torch.empty(min(4 * GIB, nbytes), dtype=torch.uint8, pin_memory=True)
    ring.random_(0, 256)
    target = torch.empty(nbytes, dtype=torch.uint8, device=device)
    stream = driver.stream_create()

    def copy() -> None:
        for start in range(0, nbytes, piece):
            size = min(piece, nbytes - start)
            source = ring.data_ptr() + start % (ring.numel() - size + 1) // piece * piece
            driver.copy_to_device(target.data_ptr() + start, source, size, stream)
        driver.stream_synchronize(stream)

    copy()
    result = spread([timed(copy) for _ in range(repeats)])
    driver.stream_destroy(stream)
    return {"ms": result, "gb_per_s": round(nbytes / result["median"] / 1e6, 2)}


def pinning(driver: CudaDriver, nbytes: int, threads: int) -> dict[str, float]:
    """GiB/s of touching and of registering fresh memory with so many threads."""
    memory = HostMemory(nbytes)
    piece = max(2 * MIB, nbytes // threads // (2 * MIB) * 2 * MIB)
    starts = range(0, nbytes, piece)
    with ThreadPoolExecutor(threads) as pool:
        touch = timed(lambda: list(pool.map(lambda s: memory.touch(s, min(piece, nbytes - s)), starts)))
        register = timed(
            lambda: list(
                pool.map(lambda s: driver.host_register(memory.address + s, min(piece, nbytes - s)), starts)
            )
        )
        unregister = timed(lambda: [driver.host_unregister(memory.address + s) for s in starts])
    memory.close()
    rate = lambda ms: round(nbytes / GIB / ms * 1e3, 2)  # noqa: E731
    return {
        "touch_gib_per_s": rate(touch),
        "register_gib_per_s": rate(register),
        "unregister_gib_per_s": rate(unregister),
    }


def checksum_speed(device: torch.device, nbytes: int, repeats: int) -> dict[str, Any]:
    """The checksum kernel alone, in pieces of 128 MiB."""
    data = torch.empty(nbytes, dtype=torch.uint8, device=device)
    data.view(torch.int64).random_()
    slots = torch.zeros(1, dtype=torch.int64, device=device)
    add = TritonKernels(device).checksum
    stream = torch.cuda.current_stream(device).cuda_stream

    def run() -> None:
        for piece in data.split(128 * MIB):
            add(stream, piece, slots, 0)
        torch.cuda.synchronize()

    compile_ms = timed(run)
    result = spread([timed(run) for _ in range(repeats)])
    return {"first_ms": compile_ms, "ms": result, "gb_per_s": round(nbytes / result["median"] / 1e6, 1)}


def raw_unmap(driver: CudaDriver, nbytes: int, chunk: int, repeats: int) -> dict[str, Any]:
    """Ways to give ``nbytes`` back, milliseconds."""
    count = nbytes // chunk
    address = driver.address_reserve(count * chunk)
    results: dict[str, list[float]] = {}

    def map_all() -> list[int]:
        handles = []
        for index in range(count):
            handles.append(driver.mem_create(chunk))
            driver.mem_map(address + index * chunk, chunk, handles[-1])
            driver.mem_set_access(address + index * chunk, chunk)
        return handles

    def per_chunk() -> None:
        for index in range(count):
            driver.mem_unmap(address + index * chunk, chunk)

    def at_once() -> None:
        driver.mem_unmap(address, count * chunk)

    handles: list[int] = []

    def release() -> None:
        for handle in handles:
            driver.mem_release(handle)

    def sample(name: str, work: Callable[[], None]) -> None:
        results.setdefault(name, []).append(timed(work))

    for _ in range(repeats):
        sample("map", lambda: handles.__setitem__(slice(None), map_all()))
        sample("unmap_per_chunk", per_chunk)
        sample("release_after", release)
        handles[:] = map_all()
        sample("unmap_at_once", at_once)
        release()
        handles[:] = map_all()
        sample("release_early", release)
        sample("unmap_per_chunk_released_early", per_chunk)
        handles[:] = map_all()
        release()
        sample("unmap_at_once_released_early", at_once)
    driver.address_free(address, count * chunk)
    return {name: spread(values) for name, values in results.items()}


def fill(memory: MemoryManager, specs: list[TensorSpec], device: torch.device) -> int:
    """Random bytes through the pinned copy; returns a fingerprint of them."""
    total = 0
    for seed, spec in enumerate(specs):
        generator = torch.Generator(device).manual_seed(seed)
        words = torch.empty(spec.nbytes // 8, dtype=torch.int64, device=device).random_(generator=generator)
        memory.loading(spec.name).copy_(words.view(torch.uint8))
        memory.loaded(spec.name)
        total += int(words.sum().item())
    return total % (1 << 64)


def member(
    device: torch.device, nbytes: int, kv_bytes: int, chunk: int, cycles: int, threads: int
) -> dict[str, Any]:
    """A manager of its own: start, cycles of sleep and wake, a streamed wake, a partial sleep."""
    specs = [TensorSpec(f"t{i:04d}", (TENSOR_BYTES,), "uint8") for i in range(nbytes // TENSOR_BYTES)]
    start = time.perf_counter()
    memory = MemoryManager(device, chunk_bytes=chunk, num_threads=threads)
    weights = memory.allocate_weights(specs)
    allocated = time.perf_counter()
    if kv_bytes:
        memory.allocate_bytes("kv_cache", kv_bytes)
    wanted = fill(memory, specs, device)
    filled = time.perf_counter()
    memory.seal()
    sealed = time.perf_counter()
    check = lambda: sum(int(t.view(torch.int64).sum().item()) for t in weights.values()) % (1 << 64)  # noqa: E731
    assert check() == wanted
    torch.cuda.empty_cache()
    sleeps, wakes, reports = [], [], []
    handles = memory.handles()
    for _ in range(cycles):
        sleeps.append(timed(memory.sleep))
        asleep = memory.device_bytes()
        torch.cuda.synchronize()
        begin = time.perf_counter()
        report = memory.wake()
        wakes.append((time.perf_counter() - begin) * 1e3)
        reports.append(report)
        assert memory.handles() == handles
    slept = memory.sleep()
    begin = time.perf_counter()
    memory.wake(streamed=True)
    queued = time.perf_counter()
    memory.wait_for([specs[0].name])
    torch.cuda.current_stream(device).synchronize()
    first = time.perf_counter()
    memory.finish_wake()
    finished = time.perf_counter()
    partial = memory.sleep(nbytes=kv_bytes + nbytes // 2)
    half = memory.wake()
    assert check() == wanted
    result = {
        "allocate_ms": (allocated - start) * 1e3,
        "fill_ms": (filled - allocated) * 1e3,
        "seal_ms": (sealed - filled) * 1e3,
        "sleep_ms": spread(sleeps),
        "wake_ms": spread(wakes),
        "wake_map_ms": spread([r.map_ms for r in reports]),
        "wake_copy_ms": spread([r.copy_ms for r in reports]),
        "wake_verify_ms": spread([r.verify_ms for r in reports]),
        "sleep_report": {
            n: getattr(slept, n) for n in ("quiesce_ms", "copy_ms", "drop_ms", "unmap_ms", "total_ms")
        },
        "device_bytes_asleep": asleep,
        "streamed_ms": {
            "queued": (queued - begin) * 1e3,
            "first_tensor": (first - begin) * 1e3,
            "verified": (finished - begin) * 1e3,
        },
        "partial": {
            "freed_bytes": partial.freed_bytes,
            "sleep_ms": partial.total_ms,
            "bytes_copied": half.bytes_copied,
            "wake_ms": half.total_ms,
        },
        "store_bytes_per_weight_byte": memory.handles()["registered_bytes"] / nbytes,
        "handles": handles,
    }
    memory.close()
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gib", type=float, default=17)
    parser.add_argument("--kv-gib", type=float, default=0)
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--chunks", default="64,128,256,512", help="MiB, comma-separated")
    parser.add_argument("--pin-threads", default="1,2,4,8,16")
    parser.add_argument("--threads", type=int, default=8, help="that touch and register the host copy")
    parser.add_argument("--cycles", type=int, default=7)
    parser.add_argument("--no-raw", action="store_true", help="only the manager and the floor")
    args = parser.parse_args()
    device = torch.device(args.device)
    torch.cuda.set_device(device)
    torch.empty(1, device=device)
    nbytes = int(args.gib * GIB) // TENSOR_BYTES * TENSOR_BYTES
    driver = CudaDriver(device.index or 0)
    result: dict[str, Any] = {
        "device": torch.cuda.get_device_name(device),
        "torch": torch.__version__,
        "bytes": nbytes,
        "weights": "synthetic",
    }
    note("touching host memory once")
    warm = HostMemory(nbytes + 5 * GIB)
    with ThreadPoolExecutor(16) as pool:
        list(
            pool.map(lambda s: warm.touch(s, min(GIB, nbytes + 5 * GIB - s)), range(0, nbytes + 5 * GIB, GIB))
        )
    warm.close()
    note("floor")
    result["floor"] = floor(driver, nbytes, device, 5)
    torch.cuda.empty_cache()
    if not args.no_raw:
        note("pinning")
        result["pinning"] = {n: pinning(driver, 8 * GIB, int(n)) for n in args.pin_threads.split(",")}
        note("checksum")
        result["checksum"] = checksum_speed(device, nbytes, 5)
        torch.cuda.empty_cache()
        note("map and unmap")
        result["raw_ms"] = {c: raw_unmap(driver, nbytes, int(c) * MIB, 3) for c in args.chunks.split(",")}
    result["members"] = {}
    for chunk in args.chunks.split(","):
        note(f"member with chunks of {chunk} MiB")
        found = member(device, nbytes, int(args.kv_gib * GIB), int(chunk) * MIB, args.cycles, args.threads)
        found["wake_over_floor"] = round(found["wake_ms"]["median"] / result["floor"]["ms"]["median"], 4)
        result["members"][chunk] = found
        note(json.dumps(found))
    note("floor again")
    result["floor_after"] = floor(driver, nbytes, device, 5)
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
