"""Pool, client, process, NVML reader and the budget of a pool file together: small real servers whose
resident memory a made-up driver reports as memory of its GPU."""

import asyncio
import sys

import aiohttp
import psutil
import pytest

import fakes.fake_engine_server
from fakes.nvml import FakeGpu, FakeNvml
from hotrack.config.pool_file import load_pool_text
from hotrack.core.lifecycle import MemberState
from hotrack.gateway.devices import find_budgets
from hotrack.members.gpu import Gpus
from hotrack.members.member import MemberFactory
from hotrack.members.probe import process_bytes
from hotrack.members.spec import MIB, Deadlines, MemberSpec
from hotrack.pool.policy import PoolPolicy
from hotrack.pool.pool import Pool
from hotrack.pool.transitions import PARTIAL_MARGIN

SIZE = 160
CONFIG = load_pool_text("""
models:
  a: {cmd: 'x ${PORT}', memory: {device: cuda}}
  b: {cmd: 'x ${PORT}', memory: {device: cuda}}
pool: {memory: {margin: 8MiB}}
""")


class HostAsGpu(FakeNvml):
    """Every server of a test holds on the GPU what it holds in memory."""

    def look(self) -> None:
        children = psutil.Process().children(recursive=True)
        held = {child.pid: process_bytes(child.pid) for child in children}
        self.gpus[0].held = {pid: num_bytes for pid, num_bytes in held.items() if num_bytes is not None}

    def nvmlDeviceGetMemoryInfo(self, gpu: FakeGpu) -> object:
        self.look()
        return super().nvmlDeviceGetMemoryInfo(gpu)

    def nvmlDeviceGetComputeRunningProcesses(self, gpu: FakeGpu) -> list[object]:
        self.look()
        return super().nvmlDeviceGetComputeRunningProcesses(gpu)


def member(name: str, *, partial: bool) -> MemberSpec:
    command = (sys.executable, fakes.fake_engine_server.__file__, "--uds=${SOCKET}", f"--megabytes={SIZE}")
    return MemberSpec(
        name=name,
        command=command,
        device="cuda",
        partial_sleep=partial,
        streamed_wake=True,
        resets_itself=True,
        tolerance_bytes=8 * MIB,
        deadlines=Deadlines(stop_s=2.0),
    )


async def answer(pool: Pool, model: str) -> str:
    async with pool.lease(model) as lease:
        connector = aiohttp.UnixConnector(path=str(lease.endpoint.uds))
        async with aiohttp.ClientSession(connector=connector) as session:
            url = lease.endpoint.base_url + "/v1/completions"
            async with session.post(url, json={"prompt": "x"}) as response:
                assert await lease.verified()
                lease.first_byte()
                return str((await response.json())["choices"][0]["text"])


@pytest.mark.parametrize("partial", [False, True])
def test_two_servers_take_turns_on_what_others_leave_of_a_gpu(partial: bool) -> None:
    async def main() -> None:
        card = FakeGpu("GPU-0", total=500 * MIB, driver_bytes=40 * MIB, hidden=60 * MIB)
        nvml = HostAsGpu(card)
        gpus = Gpus(lambda: nvml)
        budgets = find_budgets(CONFIG, gpus)
        budget = budgets.of["default"]
        assert budget.foreign.num_bytes == 100 * MIB + sum(num or 0 for num in card.held.values())
        specs = [member(name, partial=partial) for name in "ab"]
        policy = PoolPolicy(min_residency_s=0.0, probe_interval_s=0.05)
        pool = Pool(specs, policy, budgets=budgets.of, gpus=budgets.gpus, connect=MemberFactory(gpus=gpus))
        try:
            await pool.start(preload="a")
            # Room for 1.6 members: the rest of the GPU is somebody else's.
            residue = max(row.residue_bytes or 0 for row in pool.status())
            card.hidden = card.total - card.driver_bytes - 8 * MIB - (2 * residue + SIZE * MIB * 8 // 5)
            await asyncio.sleep(0.3)  # the pool has looked
            start = len(pool.events.swaps())
            for model in "baba":
                assert await answer(pool, model) == " Paris."
            swaps = pool.events.swaps()[start:]
            assert [(s.result, s.canary, s.streamed) for s in swaps] == [("ok", "identical", True)] * 4
            for swap in swaps:
                assert swap.victim_bytes_before is not None
                assert swap.victim_bytes_after is not None
                fell = swap.victim_bytes_before - swap.victim_bytes_after
                lacking = SIZE * MIB * 2 // 5 + PARTIAL_MARGIN
                assert fell == pytest.approx(lacking if partial else SIZE * MIB, abs=12 * MIB)
            states = {row.name: row for row in pool.status()}
            assert (states["a"].state, states["b"].state) == (MemberState.READY, MemberState.ASLEEP)
            assert states["a"].device == "cuda"
            rows = [line.rsplit(" ", 1) for line in pool.render_metrics().decode().splitlines()]
            shares = {name: float(value) for name, value in rows if name.startswith("pool_device_bytes{")}
            assert shares['pool_device_bytes{group="default",kind="total"}'] == card.total
            foreign = shares['pool_device_bytes{group="default",kind="foreign"}']
            assert foreign == pytest.approx(card.hidden + card.driver_bytes, abs=8 * MIB)
        finally:
            await pool.close()

    asyncio.run(main())
