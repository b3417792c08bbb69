"""One engine's memory per test."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from fakes.cuda_blocks import FakeBlocks
from fakes.sleeping_engine import Engine
from hotrack.kernels.native.compiler import NativeUnavailableError


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


@pytest.fixture(scope="session")
def built_blocks(tmp_path_factory: pytest.TempPathFactory) -> FakeBlocks:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HOTRACK_CACHE", str(tmp_path_factory.mktemp("cache")))
        try:
            return FakeBlocks()
        except NativeUnavailableError as error:
            pytest.skip(str(error))


@pytest.fixture
def fake(
    built_blocks: FakeBlocks, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> Iterator[FakeBlocks]:
    """The driver calls of graph pools; libraries are built into a cache of this test session."""
    monkeypatch.setenv("HOTRACK_CACHE", str(tmp_path_factory.getbasetemp() / "native"))
    built_blocks.start()
    yield built_blocks
    built_blocks.reset()
