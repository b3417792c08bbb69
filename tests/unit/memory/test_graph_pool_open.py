"""Graph pools that cannot be had, and processes that end with one."""

import ctypes
import subprocess
import sys
import textwrap
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch

from fakes.cuda_blocks import FakeBlocks
from hotrack.core.errors import GraphPoolUnavailableError
from hotrack.memory import graph_pool
from hotrack.memory.graph_pool import GraphPool, open_graph_pool


def test_a_process_can_have_only_so_many_pools(fake: FakeBlocks) -> None:
    pools: list[GraphPool] = []

    def open_another() -> None:
        for _ in range(17):
            pools.append(GraphPool("cuda:0", driver=fake.table, synchronize=lambda: None))

    with pytest.raises(GraphPoolUnavailableError, match="too many"):
        open_another()
    assert all(pool.close() for pool in pools)


def test_without_a_compiler_the_reason_has_a_remedy(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, fake: FakeBlocks
) -> None:
    monkeypatch.setenv("HOTRACK_CACHE", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    with pytest.raises(GraphPoolUnavailableError, match=r"C compiler.*install gcc.*counts as residue"):
        GraphPool("cuda:0", driver=fake.table)


def test_a_graph_pool_that_cannot_be_had_is_a_line_in_the_log(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, fake: FakeBlocks
) -> None:
    monkeypatch.setattr(graph_pool, "driver_table", lambda: fake.table)
    fake.fail("cuDeviceGet")
    assert open_graph_pool(torch.device("cuda:0")) is None
    assert "stays on the device in every sleep: graph pool on cuda:0: cuDeviceGet" in caplog.text


def test_torch_that_does_not_come_for_memory_is_noticed(
    monkeypatch: pytest.MonkeyPatch, fake: FakeBlocks
) -> None:
    class Elsewhere:
        def __init__(self, _allocator: object = None) -> None:
            pass

    def refuses(_allocator: object = None) -> Elsewhere:
        raise RuntimeError("MemPool doesn't currently support expandable_segments.\nC++ frames")

    pool = GraphPool("cuda:0", driver=fake.table, synchronize=lambda: None)
    monkeypatch.setitem(vars(pool), "allocator", None)
    monkeypatch.setattr(torch.cuda, "device", lambda _device: nullcontext())
    monkeypatch.setattr(torch.cuda, "use_mem_pool", lambda _pool: nullcontext())
    empty = torch.empty(1)
    monkeypatch.setattr(torch, "empty", lambda *_args, **_options: empty)
    for mempool, why in ((Elsewhere, "did not ask for it"), (refuses, r"expandable_segments\. Take exp")):
        monkeypatch.setattr(torch.cuda, "MemPool", mempool)
        with pytest.raises(GraphPoolUnavailableError, match=rf"{why}.*PYTORCH_ALLOC_CONF"):
            _ = pool.mempool
    assert pool.close()


def test_without_a_driver_the_reason_has_a_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(_name: str) -> ctypes.CDLL:
        raise OSError("libcuda.so.1: no such file")

    monkeypatch.setattr(graph_pool.ctypes, "CDLL", missing)
    with pytest.raises(GraphPoolUnavailableError, match=r"no usable NVIDIA driver: libcuda.*residue"):
        graph_pool.driver_table.__wrapped__()


def test_the_interpreter_may_end_with_blocks_alive_and_a_fork_touches_nothing(fake: FakeBlocks) -> None:
    script = """
        import os, sys
        sys.path.insert(0, sys.argv[1])
        from fakes.cuda_blocks import PAGE, FakeBlocks
        from hotrack.memory.graph_pool import GraphPool
        from fakes.torch_allocator import TorchAllocator
        fake = FakeBlocks()
        fake.reset()
        pool = GraphPool("cuda:0", driver=fake.table, synchronize=lambda: None)
        user = TorchAllocator(pool)
        address = user.must_malloc(PAGE)
        child = os.fork()
        if child == 0:
            user.free(address)
            os._exit(10 + (user.malloc(PAGE) is None) + pool.handles()["freed_bytes"])
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 11
        assert pool.sleep() == PAGE
        class Late:
            def __del__(self):
                user.free(address)
        sys.late = Late()
    """
    subprocess.run(
        [sys.executable, "-W", "error", "-c", textwrap.dedent(script), str(Path(__file__).parents[2])],
        check=True,
        timeout=60,
    )
