"""A streamed wake: steps are submitted while weights land, and nothing leaves before they are verified."""

from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import zmq

from fakes.fake_device import generate, make_request
from fakes.fake_engine import FakeEngine, FakeMemory
from hotrack.core.errors import ChecksumError
from hotrack.core.lifecycle import FinishReason
from hotrack.engine.messages import Control
from hotrack.engine.rank import LANDING_IDLE_MS, FrameFeed, run_leader
from hotrack.memory.reports import WakeReport
from hotrack.models.causal_lm import Stages

PROMPT = [1, 2, 3, 4, 5, 6, 7]


class Landing:
    """Gives a FakeEngine's memory and model what a device that streams has."""

    def __init__(self, engine: FakeEngine) -> None:
        self.log: list[str] = []
        self.fail = False
        self._memory: FakeMemory = engine.memory
        self._wake = engine.memory.wake
        engine.memory.wake = self.wake
        engine.memory.wait_for = self.wait_for
        engine.memory.finish_wake = self.finish_wake
        engine.model.stages = Stages(["embed"], [["layer"]], ["norm"], ["head"])
        engine.core.device_streams = True

    def wake(self, tags: Sequence[str] | None = None, *, streamed: bool = False) -> WakeReport:
        self.log.append("streamed" if streamed else "wake")
        self._memory.is_landing = streamed
        return self._wake(tags)

    def wait_for(self, names: Sequence[str]) -> None:
        self.log += names

    def finish_wake(self) -> WakeReport:
        self.log.append("finish")
        self._memory.is_landing = False
        if self.fail:
            self._memory.sleep(1)
            raise ChecksumError("weights came back wrong")
        return self._wake(())


@pytest.fixture
def engine() -> Iterator[FakeEngine]:
    with FakeEngine() as engine:
        engine.landing = Landing(engine)
        assert engine.control("sleep", level=1).error is None
        yield engine


def test_tokens_come_after_the_verdict(engine: FakeEngine) -> None:
    request = make_request("r", PROMPT, 5)
    reply = engine.control("wake", streamed=True)
    assert not reply.result["is_sleeping"]
    assert engine.landing.log == ["streamed"]
    engine.step(adds=[request])
    assert "finish" not in engine.landing.log
    assert "r" not in engine.outputs
    assert engine.run()["r"] == generate(request, 64)
    assert engine.landing.log[0] == "streamed"
    assert engine.landing.log[-1] == "finish"
    assert set(engine.landing.log[1:-1]) == {"head"}
    (landed,) = engine.landed
    assert landed.error is None
    assert landed.report["is_sleeping"] is False


def test_a_wrong_byte_fails_the_requests_and_the_model_sleeps(engine: FakeEngine) -> None:
    engine.landing.fail = True
    engine.control("wake", streamed=True)
    engine.run([make_request("r", PROMPT, 5), make_request("s", PROMPT, 5)])
    for name in "rs":
        (output,) = engine.outputs[name]
        assert (output.tokens, output.finish_reason) == (b"", FinishReason.ERROR)
        assert output.error_code == "checksum_mismatch"
    assert engine.core.transitions.is_sleeping
    assert [landed.error["code"] for landed in engine.landed] == ["checksum_mismatch"]
    assert not engine.core.has_work
    engine.landing.fail = False
    request = make_request("t", PROMPT, 5)
    engine.control("wake", streamed=True)
    assert engine.run([request])["t"] == generate(request, 64)  # nothing of the bad run was kept


def test_a_control_ends_the_landing_first(engine: FakeEngine) -> None:
    engine.control("wake", streamed=True)
    assert engine.control("sleep", level=1).result["is_sleeping"]
    assert engine.landing.log == ["streamed", "finish"]


def test_requests_that_slept_go_on_behind_the_weights(engine: FakeEngine) -> None:
    engine.control("wake")
    request = make_request("r", PROMPT, 9)
    engine.step(adds=[request])
    for _ in range(3):
        engine.step()
    engine.control("sleep", level=1, mode="keep")
    engine.control("wake", streamed=True)
    assert engine.run()["r"] == generate(request, 64)
    assert engine.landing.log[-1] == "finish"


def test_streamed_is_an_ordinary_wake_elsewhere() -> None:
    with FakeEngine() as engine:
        engine.control("sleep", level=1)
        assert not engine.control("wake", streamed=True).result["is_sleeping"]
        assert not engine.core.transitions.is_landing


class Link:
    """The server's end: what it sends at which turn (None: nothing within the wait), and what it hears."""

    def __init__(self, *turns: Control | None) -> None:
        self.turns = list(turns)
        self.waits: list[int | None] = []
        self.heard: list[object] = []

    def receive(self, *, wait_ms: int | None) -> list[Control]:
        self.waits.append(wait_ms)
        message = self.turns.pop(0)
        return [] if message is None else [message]

    def send(self, message: object) -> None:
        self.heard.append(message)


def test_a_wake_that_nobody_uses_is_verified_all_the_same(engine: FakeEngine, tmp_path: Path) -> None:
    link = Link(Control("w", "wake", {"streamed": True}), None, Control("s", "shutdown"))
    run_leader(engine.core, link, FrameFeed(zmq.Context.instance(), str(tmp_path), 1))
    assert link.waits == [None, LANDING_IDLE_MS, None]
    assert engine.landing.log == ["streamed", "finish"]
    kinds = [type(message).__name__ for message in link.heard]
    assert kinds == ["ControlReply", "WakeLanded", "ControlReply", "ControlReply"]
