"""No message is left lying, however notices, reads and sends fall together."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
import uvloop
import zmq

from hotrack.core.runtime_dir import RuntimeDir
from hotrack.engine.link import RankSocket, end_context

LOOPS = [asyncio.new_event_loop, uvloop.new_event_loop]


def play(new_loop: Callable[[], Any], body: Callable[["Ends"], Any]) -> None:
    async def scenario() -> None:
        ends = Ends()
        try:
            await body(ends)
        finally:
            ends.close()

    with asyncio.Runner(loop_factory=new_loop) as runner:
        runner.run(scenario())


class Ends:
    """Both ends of one socket; ``heard``: what came; ``on_message`` is called after that."""

    def __init__(self) -> None:
        self.directory = RuntimeDir()
        endpoint = f"ipc://{self.directory.path}/s"
        self.heard: list[bytes] = []
        self._news = asyncio.Event()
        self.on_message: Callable[[bytes], None] = lambda data: None
        self.link = RankSocket(endpoint, self._receive, asyncio.get_running_loop())
        self._context = zmq.Context()
        self.rank = self._context.socket(zmq.PAIR)
        self.rank.set_hwm(0)
        self.rank.connect(endpoint)

    def _receive(self, data: bytes) -> None:
        self.heard.append(data)
        self._news.set()
        self.on_message(data)

    async def until(self, num_heard: int) -> None:
        async with asyncio.timeout(10):
            while len(self.heard) < num_heard:
                self._news.clear()
                await self._news.wait()

    def close(self) -> None:
        self.link.close()
        self.link.close()
        self.rank.close(linger=0)
        end_context(self._context)
        self.directory.remove()


@pytest.mark.parametrize("new_loop", LOOPS)
def test_bursts_arrive_whole_and_in_order(new_loop: Any) -> None:
    async def body(ends: Ends) -> None:
        total = 0
        for size in (1, 2, 500, 1, 1, 300):
            for number in range(total, total + size):
                ends.rank.send(b"%d" % number)
            total += size
            await ends.until(total)
        assert ends.heard == [b"%d" % number for number in range(total)]

    play(new_loop, body)


@pytest.mark.parametrize("new_loop", LOOPS)
def test_a_send_does_not_swallow_the_notice_of_an_answer(new_loop: Any) -> None:
    async def body(ends: Ends) -> None:
        ends.rank.send(b"hello")
        await ends.until(1)
        for number in range(300):
            ends.rank.send(b"%d" % number)  # on its way while the other end sends
            ends.link.send(b"x")
            await ends.until(number + 2)
        for _ in range(300):
            assert ends.rank.recv() == b"x"

    play(new_loop, body)


@pytest.mark.parametrize("new_loop", LOOPS)
def test_answers_from_within_a_message(new_loop: Any) -> None:
    async def body(ends: Ends) -> None:
        ends.on_message = ends.link.send
        for number in range(100):
            ends.rank.send(b"%d" % number)
        await ends.until(100)
        assert [ends.rank.recv() for _ in range(100)] == [b"%d" % number for number in range(100)]

    play(new_loop, body)


def test_a_message_that_cannot_be_handled_does_not_hold_up_the_next() -> None:
    async def body(ends: Ends) -> None:
        errors: list[dict[str, Any]] = []
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: errors.append(context))

        def fail(data: bytes) -> None:
            if data == b"bad":
                raise ValueError("bad")

        ends.on_message = fail
        for data in (b"good", b"bad", b"better"):
            ends.rank.send(data)
        await ends.until(3)
        assert [type(error["exception"]) for error in errors] == [ValueError]

    play(asyncio.new_event_loop, body)


def test_nobody_at_the_other_end() -> None:
    async def body(ends: Ends) -> None:
        ends.rank.send(b"hello")
        await ends.until(1)
        ends.rank.close(linger=0)
        for _ in range(100):
            ends.link.send(b"x")
            await asyncio.sleep(0)

    play(asyncio.new_event_loop, body)
