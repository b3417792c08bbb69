"""Sleepers that hold more than the plan allows, on virtual time with fake members."""

import asyncio
from dataclasses import replace

import pytest

from fakes.clock import run_virtual
from fakes.fake_member import GIB, FakeMember, World
from fakes.pool_rig import Rig, spec
from hotrack.core.errors import ConfigError
from hotrack.core.lifecycle import MemberState
from hotrack.members.spec import MemberSpec
from hotrack.pool.policy import PoolPolicy

QUIET = PoolPolicy(min_residency_s=0.0)


def undeclared(name: str, **changes: object) -> MemberSpec:
    """Nothing is said about its residue: it counts as nothing until measured."""
    return spec(name, residue_bytes=None, swap_bytes=None, **changes)


def heavy_rig(policy: PoolPolicy = QUIET) -> Rig:
    """'a' keeps 40 GiB asleep, so that 'b' (60 GiB) does not fit beside it; 'c' (45 GiB) does."""
    world = World()
    specs = [undeclared("a"), undeclared("b"), undeclared("c", awake_bytes=45 * GIB)]
    FakeMember(specs[0], world, residue_bytes=40 * GIB)
    FakeMember(specs[2], world, awake_bytes=45 * GIB)
    return Rig(specs=specs, policy=policy, world=world)


def test_a_sleeper_too_heavy_for_the_next_boot_is_stopped() -> None:
    async def main() -> None:
        async with heavy_rig() as rig:
            states = [rig.state(name) for name in "abc"]
            assert states == [MemberState.STOPPED, MemberState.ASLEEP, MemberState.ASLEEP]
            assert [swap.result for swap in rig.pool.events.swaps()] == ["ok"] * 3

    run_virtual(main())


def test_a_victim_that_keeps_too_much_ends_and_the_other_gets_its_turn() -> None:
    async def main() -> None:
        async with heavy_rig() as rig:
            codes = [(await rig.request(name)).code for name in "abab"]
            assert codes == ["ok"] * 4
            assert rig.state("a") is MemberState.STOPPED
            assert rig.world.count("launch", "a") == 2  # it starts cold at each turn
            assert {swap.result for swap in rig.swaps()} == {"ok"}
            assert rig.world.violations == []

    run_virtual(main())


def test_a_heavy_sleeper_makes_room_when_its_residue_is_in_the_way() -> None:
    async def main() -> None:
        async with heavy_rig() as rig:
            await rig.request("a")
            assert (await rig.request("c")).code == "ok"  # fits beside the 40 GiB
            assert rig.state("a") is MemberState.ASLEEP
            assert (await rig.request("b")).code == "ok"
            assert rig.state("a") is MemberState.STOPPED
            assert set(rig.swaps()[-1].victims) == {"a", "c"}
            assert rig.state("c") is MemberState.ASLEEP
            assert rig.world.violations == []

    run_virtual(main())


def test_an_awake_member_known_to_keep_too_much_is_drained_and_stopped() -> None:
    async def main() -> None:
        async with heavy_rig() as rig:
            for name in "aca":  # measured asleep beside 'c', and awake again
                assert (await rig.request(name)).code == "ok"
            running = rig.spawn("a", 3.0)
            await asyncio.sleep(0.1)
            assert (await rig.request("b")).code == "ok"
            assert (await running).code == "ok"
            assert rig.state("a") is MemberState.STOPPED
            assert rig.world.count("sleep:wait", "a") == 1  # no sleep that was known to be useless
            assert rig.world.violations == []

    run_virtual(main())


def test_a_victim_quarantined_while_it_drains_is_ended_and_stays_quarantined() -> None:
    async def main() -> None:
        async with heavy_rig(replace(QUIET, max_failures=1)) as rig:
            for name in "aca":  # so that it is known to keep too much, and must end
                assert (await rig.request(name)).code == "ok"
            async with rig.pool.lease("a") as lease:
                waiting = rig.spawn("b")
                await asyncio.sleep(12)
                assert rig.state("a") is MemberState.DRAINING
                lease.engine_dead("rank 0 exited with status -9")
                assert (await waiting).code == "ok"
            assert rig.state("a") is MemberState.QUARANTINED
            assert (await rig.request("a")).code == "member_failed"
            assert rig.world.violations == []

    run_virtual(main())


def test_an_engine_of_somebody_else_cannot_be_ended_and_the_sum_is_said() -> None:
    async def main() -> None:
        world = World()
        external = undeclared("a", command=(), url="http://a")
        FakeMember(external, world, running=True, sleeping=True, residue_bytes=40 * GIB)
        async with Rig(specs=[external, undeclared("b")], policy=QUIET, world=world) as rig:
            await rig.request("a")
            answer = await rig.request("b")
            assert answer.code == "insufficient_memory"
            assert answer.error is not None
            assert "residue a 40.00 GiB (measured)" in answer.error.message
            assert world.count("stop", "a") == 0

    run_virtual(main())


def test_a_member_measured_larger_than_the_budget_is_refused_with_the_sum() -> None:
    async def main() -> None:
        world = World()
        specs = [undeclared("a", awake_bytes=None), undeclared("b", awake_bytes=None)]
        FakeMember(specs[0], world, awake_bytes=100 * GIB)
        async with Rig(specs=specs, policy=QUIET, world=world) as rig:
            with pytest.raises(ConfigError, match=r"a can never be awake .*pool a 100\.00 GiB \(measured\)"):
                rig.pool.check_measured()
        async with heavy_rig() as rig:
            rig.pool.check_measured()  # heavy sleepers can be ended

    run_virtual(main())


def test_a_residue_that_grew_is_noticed_when_the_reading_is_flat() -> None:
    async def main() -> None:
        world = World()
        FakeMember(undeclared("a"), world)
        async with Rig(specs=[undeclared("a"), spec("b")], policy=QUIET, world=world) as rig:
            await rig.request("a")
            rig["a"].residue_bytes = 3 * GIB  # 1 GiB after the first sleep
            answer = await rig.request("b")
            assert answer.code == "ok"
            assert answer.ended - answer.arrived < 4.0  # not two release deadlines of 5 s each
            assert rig.state("a") is MemberState.STOPPED or rig.state("a") is MemberState.FAILED
            (failed,) = [s for s in rig.swaps() if s.result == "sleep_failed"]
            assert failed.sleep_ms == pytest.approx(2_400, abs=200)  # two sleeps, a flat second after each
            assert "holds 3.00 GiB, expected at most 1.06 GiB" in failed.error

    run_virtual(main())
