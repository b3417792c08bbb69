"""One engine's memory per test."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from fakes.sleeping_engine import Engine


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
