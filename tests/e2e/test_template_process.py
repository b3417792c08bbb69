"""The process that renders chat templates: hostile ones cost their own request, and nothing else."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import psutil
import pytest

from hotrack.core.errors import RequestError
from hotrack.openai.requests import ChatMessage
from hotrack.server.chat_template import ChatTemplate

pytestmark = pytest.mark.e2e
HELLO = [ChatMessage(role="user", content="hello")]
# Behaves unless the message says otherwise.
MOODY = (
    "{% if messages[0].content == 'loop' %}"
    "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
    "{% elif messages[0].content == 'memory' %}{{ 'a' * 10**10 }}"
    "{% elif messages[0].content == 'doubling' %}"
    "{% set ns = namespace(s='aaaaaaaa') %}{% for i in range(60) %}{% set ns.s = ns.s ~ ns.s %}{% endfor %}"
    "{% else %}{{ messages[0].content }}{% endif %}"
)


@asynccontextmanager
async def started(source: str, timeout_s: float) -> AsyncIterator[ChatTemplate]:
    template = ChatTemplate(source, {}, timeout_s=timeout_s)
    await template.start()
    try:
        yield template
    finally:
        await template.close()


@pytest.mark.parametrize(
    ("mood", "reason"),
    [("loop", "did not finish within 1 s"), ("memory", "memory"), ("doubling", "memory|1 s")],
)
def test_a_hostile_render_is_ended_and_the_next_one_works(mood: str, reason: str) -> None:
    async def scenario() -> None:
        async with started(MOODY, 1.0) as template:
            begun = time.monotonic()
            with pytest.raises(RequestError, match=reason) as caught:
                await template.render([ChatMessage(role="user", content=mood)])
            assert caught.value.code == "chat_template_error"
            assert time.monotonic() - begun < 8
            assert await template.render(HELLO) == "hello"

    asyncio.run(scenario())


def test_a_render_that_is_cancelled_does_not_answer_the_next_one() -> None:
    async def scenario() -> None:
        async with started(MOODY, 30.0) as template:
            stuck = asyncio.create_task(template.render([ChatMessage(role="user", content="loop")]))
            await asyncio.sleep(0.1)
            stuck.cancel()
            with pytest.raises(asyncio.CancelledError):
                await stuck
            assert await template.render(HELLO) == "hello"

    asyncio.run(scenario())


def test_a_killed_process_is_replaced() -> None:
    async def scenario() -> None:
        async with started(MOODY, 10.0) as template:
            assert await template.render(HELLO) == "hello"
            [worker] = [p for p in psutil.Process().children() if "template_worker" in " ".join(p.cmdline())]
            worker.kill()
            with pytest.raises(RequestError, match="its process ended"):
                await template.render(HELLO)
            assert await template.render(HELLO) == "hello"

    asyncio.run(scenario())


def test_concurrent_renders_get_their_own_answers() -> None:
    async def scenario() -> None:
        async with started(MOODY, 10.0) as template:
            texts = [f"{i}" * 5000 for i in range(20)]
            renders = [template.render([ChatMessage(role="user", content=text)]) for text in texts]
            assert await asyncio.gather(*renders) == texts

    asyncio.run(scenario())
