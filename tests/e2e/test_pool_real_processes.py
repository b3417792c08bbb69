"""Pool, client, process and probe together: two small real servers on one budget of resident memory."""

import asyncio
import os
import signal
import sys

import aiohttp
import psutil
import pytest

import fakes.fake_engine_server
from hotrack.core.lifecycle import MemberState
from hotrack.members.spec import MIB, Deadlines, MemberSpec
from hotrack.plan.ledger import DeviceBudget
from hotrack.pool.policy import PoolPolicy
from hotrack.pool.pool import Pool

pytestmark = pytest.mark.e2e

SIZE = 96


def member(name: str) -> MemberSpec:
    command = (sys.executable, fakes.fake_engine_server.__file__, "--uds=${SOCKET}", f"--megabytes={SIZE}")
    return MemberSpec(
        name=name,
        command=command,
        swap_bytes=SIZE * MIB,
        tolerance_bytes=8 * MIB,
        deadlines=Deadlines(stop_s=2.0),
    )


async def answer(pool: Pool, model: str) -> str:
    async with pool.lease(model) as lease:
        connector = aiohttp.UnixConnector(path=str(lease.endpoint.uds))
        async with aiohttp.ClientSession(connector=connector) as session:
            url = lease.endpoint.base_url + "/v1/completions"
            async with session.post(url, json={"prompt": "x"}) as response:
                lease.first_byte()
                return str((await response.json())["choices"][0]["text"])


def test_two_servers_take_turns_and_survive_a_kill() -> None:
    async def main() -> list[int]:
        budget = DeviceBudget(200 * MIB)
        policy = PoolPolicy(min_residency_s=0.0, backoff_s=0.05)
        pool = Pool([member("a"), member("b")], policy, budgets={"default": budget})
        try:
            await pool.start(preload="a")
            for model in "baba":
                assert await answer(pool, model) == " Paris."
            for swap in pool.events.swaps()[3:]:
                assert (swap.result, swap.canary) == ("ok", "identical")
                assert swap.victim_bytes_before is not None
                assert swap.victim_bytes_after is not None
                fell = swap.victim_bytes_before - swap.victim_bytes_after
                assert fell == pytest.approx(SIZE * MIB, abs=8 * MIB)
                assert swap.first_token_ms is not None
            pids = [row.pid for row in pool.status()]
            assert pids[0] is not None
            os.kill(pids[0], signal.SIGKILL)  # awake
            for _ in range(500):
                if pool.status()[0].state is MemberState.FAILED:
                    break
                await asyncio.sleep(0.01)
            assert "SIGKILL" in pool.status()[0].last_error
            assert await answer(pool, "a") == " Paris."  # waits for the restart
            assert pool.status()[0].last_error == ""
            assert await answer(pool, "b") == " Paris."
            return [row.pid for row in pool.status() if row.pid is not None] + [p for p in pids if p]
        finally:
            await pool.close()

    for pid in asyncio.run(main()):
        assert not psutil.pid_exists(pid)
