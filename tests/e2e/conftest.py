"""One tiny model and one running member for all tests that leave it as they found it: awake and idle."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from fakes.member_process import MemberProcess

MEMBER_FLAGS = ("--max-model-len", "1024", "--kv-cache-memory-bytes", "32MiB", "--served-model-name", "tiny")


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Qwen3-MoE checkpoint with a byte-level tokenizer and a chat template."""
    from fakes.tiny_checkpoints import write_tiny  # brings torch with it

    return write_tiny(tmp_path_factory.mktemp("models") / "tiny", "qwen3_moe")


@pytest.fixture(scope="session")
def member(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[MemberProcess]:
    with MemberProcess(tiny_model, *MEMBER_FLAGS, folder=tmp_path_factory.mktemp("member")) as process:
        yield process.wait_ready()
