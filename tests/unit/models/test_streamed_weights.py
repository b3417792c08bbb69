"""A forward pass behind weights that still arrive, on a device whose copies run only when waited for."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from fakes.cuda_driver import FakeDriver
from fakes.cuda_memory import fake_manager
from fakes.paged_runner import PagedRunner, SequenceState
from fakes.tiny_checkpoints import write_tiny
from hotrack.checkpoint.load import load_weights
from hotrack.checkpoint.open import open_checkpoint
from hotrack.checkpoint.targets import LoadTarget
from hotrack.core.errors import ChecksumError
from hotrack.distributed.tensor_parallel import TensorParallel
from hotrack.hub.resolve import resolve
from hotrack.memory import MemoryManager
from hotrack.models import CausalLM, build_model

CPU = torch.device("cpu")
IDS = torch.arange(3, 40)


class Rig:
    """A tiny model in a fake GPU's memory. ``waited``: the weights that were waited for."""

    def __init__(self, path: Path) -> None:
        self.driver = FakeDriver()
        self.memory: MemoryManager = fake_manager(self.driver)
        self.waited: set[str] = set()
        with open_checkpoint(resolve(str(path))) as checkpoint:
            self.model: CausalLM = build_model(
                checkpoint.spec,
                dtype=torch.float32,
                device=CPU,
                tp=TensorParallel(),
                allocate=self.memory.allocate_weights,
            )
            targets = {
                name: LoadTarget(self.memory.loading(name), target.sources)
                for name, target in self.model.load_plan().items()
            }
            load_weights(checkpoint, targets, num_threads=1, filled=self.memory.loaded)
        self.memory.seal()

    def wait_for(self, names: list[str]) -> None:
        self.memory.wait_for(names)
        self.driver.stream_synchronize(0)  # the stream that computes goes on
        self.waited |= set(names)

    def logits(self, *, waiting: bool = True) -> Tensor:
        runner = PagedRunner(self.model, num_blocks=16)
        batch = runner.batch([(SequenceState(), IDS)])
        if not waiting:
            return self.model.compute_logits(self.model.forward(batch, runner.kv))
        batch.wait_for = self.wait_for
        hidden = self.model.forward(batch, runner.kv)
        self.wait_for(self.model.stages.head)
        return self.model.compute_logits(hidden)

    def sleep_and_start_waking(self) -> None:
        self.memory.sleep(1)
        self.memory.wake(streamed=True)


@pytest.fixture(params=["llama", "qwen3", "qwen3_moe"])
def rig(request: pytest.FixtureRequest, tmp_path: Path) -> Rig:
    return Rig(write_tiny(tmp_path, request.param))


def test_every_weight_is_waited_for(rig: Rig) -> None:
    expected = rig.logits(waiting=False)
    assert expected.std() > 0.5
    for _ in range(2):
        rig.sleep_and_start_waking()
        assert torch.equal(rig.logits(), expected)
        assert rig.memory.finish_wake().changed
        assert torch.equal(rig.logits(waiting=False), expected)
    assert rig.waited == {spec.name for spec in rig.model.tensor_specs()}


def test_without_waiting_the_weights_are_not_there(rig: Rig) -> None:
    expected = rig.logits(waiting=False)
    rig.sleep_and_start_waking()
    assert not torch.equal(rig.logits(waiting=False), expected)
    rig.memory.finish_wake()


def test_a_damaged_copy_is_noticed_before_anything_leaves(rig: Rig) -> None:
    rig.memory.sleep(1)
    rig.memory.loading(rig.model.stages.layers[1][1]).flatten()[3] += 1.0
    rig.memory.wake(streamed=True)
    rig.logits()
    with pytest.raises(ChecksumError):
        rig.memory.finish_wake()
    assert rig.memory.is_sleeping
