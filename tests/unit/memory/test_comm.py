import pytest

from hotrack.config.env import rank_environment
from hotrack.core.errors import SleepError, TransitionError, WakeError
from hotrack.memory.comm import CommRegion


class Peers:
    """Exports a, b and c; remembers what was done and fails where told."""

    def __init__(self) -> None:
        self.comm = CommRegion()
        self.done: list[str] = []
        self.fail: set[str] = set()
        for name in "abc":
            self.comm.export(name, self._do(f"close {name}"), self._do(f"reopen {name}"))

    def _do(self, what: str):  # type: ignore[no-untyped-def]
        def act() -> None:
            if what in self.fail:
                raise RuntimeError(f"cannot {what}")
            self.done.append(what)

        return act


def test_counted_memory() -> None:
    comm = CommRegion()
    comm.count("nccl", 512 << 20)
    comm.count("signal pads", 4096)
    assert comm.nbytes == (512 << 20) + 4096
    assert comm.counted == {"nccl": 512 << 20, "signal pads": 4096}
    assert comm.uncount("nccl") == 512 << 20
    assert comm.nbytes == 4096


def test_exports_close_in_order_and_reopen_in_reverse() -> None:
    peers = Peers()
    peers.comm.close_exports()
    assert not peers.comm.exports_open
    peers.comm.close_exports()  # twice is once
    peers.comm.reopen_exports()
    peers.comm.reopen_exports()
    assert peers.comm.exports_open
    assert peers.done == ["close a", "close b", "close c", "reopen c", "reopen b", "reopen a"]


def test_an_export_that_does_not_close_opens_the_others_again() -> None:
    peers = Peers()
    peers.fail = {"close c"}
    with pytest.raises(SleepError, match="closing export 'c': cannot close c"):
        peers.comm.close_exports()
    assert peers.comm.exports_open
    assert peers.done == ["close a", "close b", "reopen b", "reopen a"]
    peers.fail.clear()
    peers.comm.close_exports()
    assert peers.done[4:] == ["close a", "close b", "close c"]


def test_an_export_that_does_not_reopen_closes_the_others_again() -> None:
    peers = Peers()
    peers.comm.close_exports()
    peers.done.clear()
    peers.fail = {"reopen a"}
    with pytest.raises(WakeError, match="reopening export 'a': cannot reopen a"):
        peers.comm.reopen_exports()
    assert not peers.comm.exports_open
    assert peers.done == ["reopen c", "reopen b", "close b", "close c"]
    peers.fail.clear()
    peers.done.clear()
    peers.comm.reopen_exports()
    assert peers.done == ["reopen c", "reopen b", "reopen a"]


@pytest.mark.parametrize(
    ("closed", "fail"), [(False, {"close b", "reopen a"}), (True, {"reopen b", "close c"})]
)
def test_undoing_that_fails_is_final(closed: bool, fail: set[str]) -> None:
    peers = Peers()
    if closed:
        peers.comm.close_exports()
    peers.fail = fail
    with pytest.raises(TransitionError, match="must be restarted") as caught:
        (peers.comm.reopen_exports if closed else peers.comm.close_exports)()
    assert caught.value.code == "memory_failed"


def test_an_interrupt_stays_an_interrupt() -> None:
    peers = Peers()

    def interrupt() -> None:
        raise KeyboardInterrupt

    peers.comm.export("d", interrupt, interrupt)
    with pytest.raises(KeyboardInterrupt):
        peers.comm.close_exports()
    assert peers.comm.exports_open


def test_an_export_may_end_while_closed() -> None:
    peers = Peers()
    peers.comm.close_exports()
    peers.comm.unexport("b")
    peers.comm.reopen_exports()
    assert peers.done[3:] == ["reopen c", "reopen a"]
    with pytest.raises(AssertionError, match="exported already"):
        peers.comm.export("a", peers.comm.close_exports, peers.comm.close_exports)


def test_nccl_registers_no_buffers_in_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_LOCAL_REGISTER", "1")
    environment = rank_environment()
    assert environment["NCCL_GRAPH_REGISTER"] == environment["NCCL_LOCAL_REGISTER"] == "0"
    assert not any(name.startswith("NCCL_NVLS") for name in environment)
