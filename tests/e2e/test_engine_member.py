"""The real client, process and probe against a small real HTTP server in another process."""

import asyncio
import os
import signal
import stat
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

import fakes.fake_engine_server
from fakes.nvml import FakeGpu, FakeNvml
from hotrack.core.errors import MemberFailedError
from hotrack.core.lifecycle import SleepMode
from hotrack.members.canary import CanaryAnswer
from hotrack.members.gpu import Gpus
from hotrack.members.member import EngineMember, MemberFactory
from hotrack.members.spec import MIB, Deadlines, MemberSpec

pytestmark = pytest.mark.e2e

SERVER = fakes.fake_engine_server.__file__


@asynccontextmanager
async def running(
    *flags: str, listen: str = "--uds=${SOCKET}", **changes: Any
) -> AsyncIterator[EngineMember]:
    command = (sys.executable, SERVER, listen, *flags)
    deadlines = changes.pop("deadlines", Deadlines(stop_s=5.0, canary_s=5.0))
    spec = MemberSpec(name="fake", command=command, deadlines=deadlines, **changes)
    member = MemberFactory()(spec)
    assert isinstance(member, EngineMember)
    await member.launch()
    try:
        await until_healthy(member)
        yield member
    finally:
        await member.stop()


async def until_healthy(member: EngineMember) -> None:
    for _ in range(1000):
        if await member.healthy():
            return
        assert member.alive, member.logs()
        await asyncio.sleep(0.01)
    raise AssertionError(member.logs())


async def until_gone(pid: int) -> None:
    for _ in range(500):
        if not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
            return
        await asyncio.sleep(0.01)
    raise AssertionError(f"process {pid} is still there")


def test_a_cycle_over_a_private_socket() -> None:
    async def main() -> None:
        async with running("--megabytes=64") as member:
            socket = member.endpoint.uds
            assert socket is not None
            assert stat.S_IMODE(socket.parent.stat().st_mode) == 0o700
            pid = member.pid
            assert pid is not None
            assert os.getsid(pid) == pid
            awake = await member.memory_bytes()
            assert await member.ask("x", 2) == CanaryAnswer(" Paris.", (" Paris", "."), -0.25)
            await member.sleep(SleepMode.WAIT)
            assert await member.is_sleeping()
            asleep = await member.memory_bytes()
            assert awake is not None
            assert asleep is not None
            assert awake - asleep == pytest.approx(64 * MIB, abs=4 * MIB)
            await member.wake_up()
            assert not await member.is_sleeping()
            assert "fake engine is up" in member.logs()
        assert not socket.parent.exists()
        await until_gone(pid)

    asyncio.run(main())


def test_level_2_wakes_weights_reloads_them_then_wakes_the_rest() -> None:
    async def main() -> None:
        async with running(sleep_level=2) as member:
            await member.sleep(SleepMode.WAIT)
            await member.wake_up()
            order = ["wake_up weights", "reload_weights", "wake_up kv_cache", "reset_prefix_cache"]
            for _ in range(200):
                if member.logs()[1:] == order:
                    break
                await asyncio.sleep(0.01)  # the log is on its way
            assert member.logs()[1:] == order

    asyncio.run(main())


def test_empty_bodies_and_a_missing_reset_endpoint_are_accepted() -> None:
    async def main() -> None:
        async with running("--bare", listen="--port=${PORT}") as member:
            assert member.endpoint.uds is None
            await member.sleep(SleepMode.ABORT)
            assert await member.is_sleeping()
            await member.wake_up()
            assert not await member.is_sleeping()

    asyncio.run(main())


@pytest.mark.parametrize(("fail", "message"), [("wake_up", "answered 500: .*failed"), ("reset", "not reset")])
def test_refusals_are_errors(fail: str, message: str) -> None:
    async def main() -> None:
        async with running(f"--fail={fail}") as member:
            with pytest.raises(MemberFailedError, match=message):
                await member.wake_up()

    asyncio.run(main())


def test_a_hanging_answer_ends_at_its_deadline() -> None:
    async def main() -> None:
        async with running(deadlines=Deadlines(canary_s=0.2, stop_s=0.2)) as member:
            with pytest.raises(MemberFailedError, match=r"no answer within 0\.2 s"):
                await member.ask("hang", 1)

    asyncio.run(main())


def test_a_crash_is_told_once_and_the_member_can_be_launched_again() -> None:
    async def main() -> None:
        async with running() as member:
            codes: list[int] = []
            member.watch(codes.append)
            with pytest.raises(MemberFailedError):
                await member.ask("die", 1)
            for _ in range(500):
                if codes:
                    break
                await asyncio.sleep(0.01)
            assert codes == [-signal.SIGKILL]
            assert not member.alive
            assert await member.memory_bytes() is None
            assert not await member.healthy()
            await member.stop()
            await member.launch()
            await until_healthy(member)
        assert codes == [-signal.SIGKILL]  # a stop that was asked for is no crash

    asyncio.run(main())


def test_stop_kills_what_ignores_sigterm_and_what_it_left_behind() -> None:
    async def main() -> None:
        async with running("--ignore-sigterm", deadlines=Deadlines(stop_s=0.3)) as member:
            child = int((await member.ask("fork", 1)).text)
            pid = member.pid
            assert pid is not None
            await member.stop()
            await until_gone(pid)
            await until_gone(child)

    asyncio.run(main())


def test_a_program_that_does_not_exist() -> None:
    async def main() -> None:
        member = MemberFactory()(MemberSpec(name="ghost", command=("/no/such/program",)))
        with pytest.raises(MemberFailedError, match="ghost: cannot start '/no/such/program'"):
            await member.launch()

    asyncio.run(main())


def test_an_external_engine_is_not_ours_to_stop() -> None:
    async def main() -> None:
        member = MemberFactory()(MemberSpec(name="far", url="http://127.0.0.1:9/"))
        assert member.alive
        assert member.endpoint.base_url == "http://127.0.0.1:9"
        assert not await member.healthy()
        assert await member.memory_bytes() is None
        with pytest.raises(MemberFailedError, match="stop it where it was started"):
            await member.stop()
        await member.close()

    asyncio.run(main())


def test_logs_go_to_a_file_too(tmp_path: Path) -> None:
    async def main() -> None:
        code = "print('x' * 20000); print('short')"
        member = MemberFactory(tmp_path)(MemberSpec(name="org/talker", command=(sys.executable, "-c", code)))
        done = asyncio.Event()
        member.watch(lambda code: done.set())
        await member.launch()
        await asyncio.wait_for(done.wait(), 20)
        assert member.logs()[-1] == "short"
        assert (tmp_path / "org_talker.log").read_text().endswith("short\n")
        await member.stop()

    asyncio.run(main())


KILLED_GATEWAY = """
import asyncio, sys
from hotrack.members.process import MemberProcess
from hotrack.members.spec import MemberSpec

async def main():
    command = (sys.executable, "-c", "import time; time.sleep(600)")
    process = MemberProcess(MemberSpec(name="m", command=command))
    await process.start()
    print(process.pid, flush=True)
    await asyncio.sleep(600)

asyncio.run(main())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="parent-death signal is Linux")
def test_kill_9_of_the_gateway_leaves_no_orphan() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", KILLED_GATEWAY], stdout=subprocess.PIPE, text=True
    ) as gateway:
        assert gateway.stdout is not None
        pid = int(gateway.stdout.readline())
        assert psutil.pid_exists(pid)
        gateway.kill()
        gateway.wait()
    until = time.monotonic() + 5
    while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < until, "the member outlived its gateway"
        time.sleep(0.01)


def gpu_member(*flags: str, gpu: FakeGpu, **changes: Any) -> EngineMember:
    command = (sys.executable, SERVER, "--uds=${SOCKET}", *flags)
    spec = MemberSpec(name="fake", command=command, device="cuda:0", **changes)
    member = MemberFactory(gpus=Gpus(lambda: FakeNvml(gpu)))(spec)
    assert isinstance(member, EngineMember)
    return member


def test_a_member_on_a_gpu_is_measured_there_and_its_word_is_compared(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def main() -> None:
        gpu = FakeGpu("GPU-0")
        member = gpu_member("--word=600", gpu=gpu, resets_itself=True)
        await member.launch()
        try:
            await until_healthy(member)
            assert member.pid is not None
            gpu.held = {member.pid: 600 * MIB}
            await member.sleep(SleepMode.WAIT, 5 * MIB)
            assert await member.memory_bytes() == 600 * MIB
            assert caplog.records == []
            gpu.held = {member.pid: 700 * MIB}
            for _ in range(2):
                await member.wake_up(streamed=True)
                assert await member.memory_bytes() == 700 * MIB  # the driver's word counts
            doubts = [record.getMessage() for record in caplog.records]
            assert doubts == [
                "fake says that it holds 600 MiB on its device, the driver says 700 MiB; the driver counts"
            ]
            await asyncio.sleep(0.05)  # the log is on its way
            assert member.logs()[1:] == [f"sleep {5 * MIB}", "wake_up streamed", "wake_up streamed"]
        finally:
            await member.stop()
        assert await member.memory_bytes() is None

    asyncio.run(main())


def test_where_nobody_else_can_tell_its_word_counts() -> None:
    async def main() -> None:
        command = (sys.executable, SERVER, "--uds=${SOCKET}", "--word=600")
        spec = MemberSpec(name="fake", command=command, device="cuda:0")
        member = MemberFactory(gpus=Gpus(lambda: None))(spec)
        assert isinstance(member, EngineMember)
        await member.launch()
        try:
            await until_healthy(member)
            assert await member.memory_bytes() is None
            await member.sleep(SleepMode.WAIT)
            assert await member.memory_bytes() == 600 * MIB
            far = MemberSpec(name="far", url="http://member", device="cuda:0")
            external = MemberFactory(gpus=Gpus(lambda: FakeNvml(FakeGpu("GPU-0"))))(far)
            assert isinstance(external, EngineMember)
            external._endpoint = member.endpoint
            await external.wake_up()
            assert await external.memory_bytes() == 600 * MIB
            await external.close()
        finally:
            await member.stop()

    asyncio.run(main())
