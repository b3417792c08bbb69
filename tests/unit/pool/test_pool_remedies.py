"""What is tried after a failure, how often, and who pays for it."""

import asyncio
import logging
from dataclasses import replace

import pytest

from fakes.clock import run_virtual
from fakes.fake_member import GIB
from fakes.pool_rig import Rig, spec
from hotrack.core.errors import ConfigError
from hotrack.core.lifecycle import MemberState
from hotrack.members.spec import MIB
from hotrack.pool.policy import PoolPolicy

QUIET = PoolPolicy(min_residency_s=0.0)


@pytest.mark.parametrize("fault", ["hang", "timeout"])
def test_a_process_that_does_not_answer_is_not_asked_to_wake_again(fault: str) -> None:
    """Its server says that it sleeps, and its memory is gone; a rank hangs."""

    async def main() -> None:
        async with Rig(policy=QUIET) as rig:
            await rig.request("a")
            rig["b"].faults["wake"] = [fault]
            answer = await rig.request("b")
            assert answer.code == "wake_failed"
            assert rig.world.operations("stop") == [("b", "stop")]
            assert "b" not in rig.world.held
            assert (await rig.request("b")).code == "ok"
            assert rig.world.count("launch", "b") == 1
            assert (await rig.request("a")).code == "ok"
            assert rig.world.violations == []

    run_virtual(main())


def test_a_process_that_fails_to_wake_gets_a_successor_and_then_nobody() -> None:
    async def main() -> None:
        async with Rig(policy=QUIET) as rig:
            await rig.request("a")
            rig["b"].sticky, rig["b"].faults["wake"] = True, ["error"]
            for _ in range(2):
                assert (await rig.request("b")).code == "wake_failed"
                await asyncio.sleep(1.5)
            assert rig.world.count("stop", "b") == 1
            rig["b"].faults["launch"] = ["error"]
            assert (await rig.request("b")).code in ("wake_failed", "member_failed")
            assert rig.state("b") is MemberState.QUARANTINED
            assert "b" not in rig.world.held
            assert (await rig.request("b")).code == "member_failed"
            assert rig.world.count("launch", "b") == 1
            assert (await rig.request("a")).code == "ok"

    run_virtual(main())


def test_a_successor_that_works_is_as_good_as_new() -> None:
    async def main() -> None:
        async with Rig(policy=QUIET) as rig:
            await rig.request("a")
            rig["b"].faults["wake"] = ["error", "error"]
            for _ in range(2):
                assert (await rig.request("b")).code == "wake_failed"
                await asyncio.sleep(1.5)
            assert (await rig.request("b")).code == "ok"
            await rig.request("a")
            rig["b"].faults["wake"] = ["error"]
            assert (await rig.request("b")).code == "wake_failed"
            assert rig.state("b") is MemberState.ASLEEP  # counted from the beginning

    run_virtual(main())


@pytest.mark.parametrize("on_probe", [False, True])
def test_waiters_do_not_pay_for_another_members_death(on_probe: bool) -> None:
    """It fails while it drains for them, its process lives on and holds its memory."""

    async def main() -> None:
        async with Rig(policy=QUIET) as rig:
            async with rig.pool.lease("a") as lease:
                rig.world.calls.clear()
                waiting = rig.spawn("b")
                await asyncio.sleep(12)
                assert rig.state("a") is MemberState.DRAINING
                if on_probe:
                    for _ in range(3):
                        rig.pool._loop_of["a"].on_probe("a", healthy=False, memory_bytes=60 * GIB)
                else:
                    lease.engine_dead("rank 0 exited with status -9")
                assert (await waiting).code == "ok"
            assert rig.world.operations("stop", "wake")[:2] == [("a", "stop"), ("b", "wake")]
            assert (await rig.request("a")).code == "ok"
            assert rig.world.violations == []

    run_virtual(main())


def test_waiters_hear_who_holds_the_memory_if_it_cannot_be_ended() -> None:
    async def main() -> None:
        async with Rig(policy=QUIET) as rig, rig.pool.lease("a") as lease:
            waiting = rig.spawn("b")
            await asyncio.sleep(12)
            assert rig.state("a") is MemberState.DRAINING
            rig["a"].sticky, rig["a"].faults["stop"] = True, ["error"]
            lease.engine_dead("rank 0 exited with status -9")
            answer = await waiting
            assert answer.code == "insufficient_memory"
            assert answer.error is not None
            assert "a is failed and may still hold memory" in answer.error.message
            rig["a"].faults["stop"] = []

    run_virtual(main())


def test_a_quarantined_member_stays_quarantined_when_its_process_is_ended() -> None:
    async def main() -> None:
        async with Rig(policy=replace(QUIET, max_failures=1)) as rig:
            async with rig.pool.lease("a") as lease:
                lease.engine_dead("rank 0 exited with status -9")
            await asyncio.sleep(1.0)
            assert rig.state("a") is MemberState.QUARANTINED
            assert "a" not in rig.world.held
            assert (await rig.request("a")).code == "member_failed"
            assert (await rig.request("b")).code == "ok"

    run_virtual(main())


def test_more_memory_than_configured_is_said_at_the_first_start(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        specs = [spec("a", awake_bytes=50 * GIB, tolerance_bytes=64 * MIB), spec("b")]
        async with Rig(specs=specs, policy=QUIET) as rig:
            answer = await rig.request("a")
            assert answer.error is not None
            assert "write `awake: 61440MiB`" in answer.error.message
            assert rig.state("a") is MemberState.QUARANTINED
            assert "a" not in rig.world.held
            await asyncio.sleep(100)
            assert rig["a"]._launches == 1
            assert (await rig.request("b")).code == "ok"

    with caplog.at_level(logging.INFO, logger="hotrack"):
        run_virtual(main())
    assert sum("write `awake" in record.getMessage() for record in caplog.records) == 1


def test_a_lost_gpu_does_not_end_the_watch_over_the_others(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def lost() -> None:
        raise ConfigError("gpu0: NVML does not tell its memory: GPU is lost")

    async def main() -> None:
        async with Rig(policy=QUIET) as rig:
            monkeypatch.setattr(rig["a"], "memory_bytes", lost)
            await asyncio.sleep(12)
            rig["b"]._gone()  # nobody is told
            await asyncio.sleep(60)
            assert rig.world.count("launch", "b") == 1  # noticed, and replaced

    with caplog.at_level(logging.WARNING, logger="hotrack"):
        run_virtual(main())
    assert sum("GPU is lost" in record.getMessage() for record in caplog.records) == 1


def test_a_failed_wake_whose_memory_cannot_be_read_ends_the_process() -> None:
    async def main() -> None:
        async with Rig(policy=QUIET) as rig:
            await rig.request("a")
            read, member = rig["b"].memory_bytes, rig["b"]
            member.faults["wake"] = ["error"]

            async def lost_after_the_wake() -> int | None:
                if rig.world.count("wake", "b") and not rig.world.count("stop", "b"):
                    raise ConfigError("gpu0: NVML does not tell its memory")
                return await read()

            member.memory_bytes = lost_after_the_wake  # type: ignore[method-assign]
            assert (await rig.request("b")).code == "wake_failed"
            assert rig.world.operations("stop") == [("b", "stop")]
            assert (await rig.request("b")).code == "ok"
            assert rig.world.count("launch", "b") == 1

    run_virtual(main())
