"""Why the allocator of captured graphs is not made of Python callbacks.

    python tools/try_ctypes_allocator.py [--allocator ctypes|c] [--captures 1000] [--limit 30]

Captures graphs, each in a memory pool of its own over the same allocator, while another thread frees tensors
and collects garbage; then ends the interpreter with graphs alive. torch calls the allocator with its mutex
held. A callback into Python then waits for the interpreter lock, and the thread that has it waits for the
mutex as soon as it frees a tensor. Prints whether the process got stuck; the exit status is 0 unless it
failed otherwise.
"""

import argparse
import collections
import ctypes
import gc
import subprocess
import sys
import threading
import time

import torch

from hotrack.memory.graph_pool import GraphPool

MALLOC = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p)
FREE = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p)
KEPT = 20  # graphs alive at a time
KEEP: list["Callbacks"] = []  # torch calls them until the process has ended


class Callbacks:
    """The pool's two functions behind Python functions."""

    def __init__(self, pool: GraphPool) -> None:
        malloc, free = MALLOC(pool.function("malloc")), FREE(pool.function("free"))
        self._malloc = MALLOC(lambda nbytes, device, stream: malloc(nbytes, device, stream))
        self._free = FREE(lambda memory, nbytes, device, stream: free(memory, nbytes, device, stream))
        addresses = (ctypes.cast(f, ctypes.c_void_p).value or 0 for f in (self._malloc, self._free))
        self.allocator = torch._C._cuda_customAllocator(*addresses)
        KEEP.append(self)


class FreeingThread(threading.Thread):
    """Frees tensors with the interpreter lock held, as every Python thread does, and collects garbage."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.stop = threading.Event()
        self.rounds = 0

    def run(self) -> None:
        while not self.stop.is_set():
            tensors = [torch.empty(256, device="cuda") for _ in range(64)]
            tensors.clear()
            self.rounds += 1
            if self.rounds % 50 == 0:
                gc.collect()


Captured = tuple[torch.cuda.CUDAGraph, torch.Tensor, torch.cuda.MemPool]
ALIVE: collections.deque[Captured] = collections.deque(maxlen=KEPT)  # to the very end of the process


def capture(x: torch.Tensor, allocator: "torch._C._cuda_CUDAAllocator") -> Captured:
    mempool = torch.cuda.MemPool(allocator)
    graph = torch.cuda.CUDAGraph()
    # Other threads may call what would break a capture of the whole process.
    graph.capture_begin(pool=mempool.id, capture_error_mode="thread_local")
    try:
        y = (x * 2 + 1).cumsum(0)
    finally:
        graph.capture_end()
    return graph, y, mempool


def worker(kind: str, captures: int) -> None:
    pool = GraphPool()
    callbacks = Callbacks(pool) if kind == "ctypes" else None
    allocator = callbacks.allocator if callbacks else pool.allocator
    x = torch.arange(1024, dtype=torch.float32, device="cuda")
    expected = (x * 2 + 1).cumsum(0)
    torch.cuda.synchronize()
    thread = FreeingThread()
    thread.start()
    started = time.perf_counter()
    with torch.cuda.stream(torch.cuda.Stream()):
        for i in range(1, captures + 1):
            ALIVE.append(capture(x, allocator))
            ALIVE[0][0].replay()
            if i % 100 == 0:
                check(pool, i, expected)
    seconds = time.perf_counter() - started
    thread.stop.set()
    thread.join()
    print(f"{captures} captures in {seconds:.1f} s beside {thread.rounds} rounds of freeing", flush=True)


def check(pool: GraphPool, captures: int, expected: torch.Tensor) -> None:
    freed, slept, woken = pool.trim(), pool.sleep(), pool.wake()
    assert slept == woken > 0, f"{slept=} {woken=}"
    graph, y, _ = ALIVE[0]
    graph.replay()
    assert torch.equal(y, expected), f"capture {captures}: wrong after a wake"
    print(f"{captures} captures, {freed >> 20} MiB trimmed, {slept >> 20} MiB slept", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--allocator", choices=("ctypes", "c"), default="ctypes")
    parser.add_argument("--captures", type=int, default=1000)
    parser.add_argument("--limit", type=float, default=30.0, help="seconds until it counts as stuck")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        worker(arguments.allocator, arguments.captures)
        return 0
    command = [sys.executable, "-X", "faulthandler", __file__, "--worker"]
    command += ["--allocator", arguments.allocator, "--captures", str(arguments.captures)]
    try:
        done = subprocess.run(command, timeout=arguments.limit, check=False)
    except subprocess.TimeoutExpired:
        print(f"{arguments.allocator} allocator: deadlock: yes (stuck after {arguments.limit:.0f} s)")
        return 0
    print(f"{arguments.allocator} allocator: deadlock: no, exit status {done.returncode}")
    return int(done.returncode != 0)


if __name__ == "__main__":
    sys.exit(main())
