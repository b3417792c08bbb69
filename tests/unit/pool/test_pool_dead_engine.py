"""What follows when a member says that its engine is gone, and what an operator is told about it."""

import asyncio

import pytest

from fakes.clock import run_virtual
from fakes.fake_member import World
from fakes.pool_rig import Rig, spec
from hotrack.core.errors import MemberFailedError
from hotrack.core.lifecycle import MemberState
from hotrack.members.spec import Deadlines
from hotrack.pool.events import Cause, RequestsCut, StateChanged
from hotrack.pool.policy import PoolPolicy

QUIET = PoolPolicy(min_residency_s=0.0)


def test_engine_dead_fails_the_member_at_once_and_it_is_restarted() -> None:
    async def main() -> None:
        async with Rig(policy=QUIET) as rig:
            async with rig.pool.lease("a") as lease:
                lease.engine_dead("rank 0 exited with status -9")
                assert rig.state("a") is MemberState.FAILED
                assert "rank 0 exited" in rig.pool.status()[0].last_error
            assert (await rig.request("a")).code == "ok"  # waits for the new process, within its deadline
            assert rig.world.operations("stop", "launch") == [("a", "stop"), ("a", "launch")]
            assert rig.pool.status()[0].last_error == ""
            reasons = [e.reason for e in rig.pool.events.history() if isinstance(e, StateChanged)]
            assert any("rank 0 exited" in reason for reason in reasons)

    run_virtual(main())


def test_a_late_word_about_an_earlier_process_harms_nobody() -> None:
    async def main() -> None:
        async with Rig(policy=QUIET) as rig, rig.pool.lease("a") as first, rig.pool.lease("a") as second:
            first.engine_dead("gone")
            assert (await rig.request("a")).code == "ok"
            second.engine_dead("gone")
            assert rig.state("a") is MemberState.READY

    run_virtual(main())


def test_a_failed_member_is_not_said_to_sleep() -> None:
    async def main() -> None:
        async with Rig(policy=QUIET) as rig:
            rig["a"].die()
            with pytest.raises(MemberFailedError, match="it is failed: a ended unexpectedly"):
                await rig.pool.sleep("a")
            await rig.pool.sleep("b")  # asleep already

    run_virtual(main())


def test_waiters_hear_at_once_when_their_member_is_given_up() -> None:
    async def main() -> None:
        policy = PoolPolicy(min_residency_s=0.0, max_failures=1)
        async with Rig(specs=[spec("a", max_in_flight=1), spec("b")], policy=policy) as rig:
            running = rig.spawn("a", 5.0)
            await asyncio.sleep(1.0)
            waiting = rig.spawn("a")
            await asyncio.sleep(0.1)
            rig["a"].die()
            assert (await waiting).code == "member_failed"
            assert (await waiting).ended == pytest.approx(rig.clock.now(), abs=0.1)
            assert (await running).code == "dropped"

    run_virtual(main())


def test_an_operators_wake_is_recorded_as_one() -> None:
    async def main() -> None:
        async with Rig(policy=QUIET) as rig:
            await rig.pool.wake("a")
            await rig.request("b")
            assert [swap.cause for swap in rig.swaps()] == [Cause.OPERATOR, Cause.REQUEST]

    run_virtual(main())


def test_the_default_drain_deadline_cuts_a_stream_after_30_seconds() -> None:
    async def main() -> None:
        specs = [spec("a", deadlines=Deadlines()), spec("b", deadlines=Deadlines())]
        async with Rig(specs=specs, policy=QUIET) as rig:
            endless = rig.spawn("a", 1e6)
            await asyncio.sleep(2.0)
            other = await rig.request("b")
            assert (await endless).code == "drain_timeout"
            (swap,) = [swap for swap in rig.swaps() if swap.target == "b"]
            # The holder's grace to end its answer follows the cut, unless it ends at once as here.
            assert swap.drain_ms == pytest.approx(30_000, abs=50)
            assert other.code == "ok"
            (cut,) = [e for e in rig.pool.events.history() if isinstance(e, RequestsCut)]
            assert cut.time == pytest.approx(swap.time + 30.0, abs=0.05)
            assert rig.world.violations == []

    run_virtual(main())


def test_a_stream_that_ends_in_29_seconds_is_not_cut() -> None:
    async def main() -> None:
        world = World()
        specs = [spec("a", deadlines=Deadlines()), spec("b", deadlines=Deadlines())]
        policy = PoolPolicy(min_residency_s=0.0, max_wait_s=0.0)
        async with Rig(specs=specs, policy=policy, world=world) as rig:
            long = rig.spawn("a", 30.0)
            await asyncio.sleep(2.0)
            assert (await rig.request("b")).code == "ok"
            assert (await long).code == "ok"
            assert not [e for e in rig.pool.events.history() if isinstance(e, RequestsCut)]

    run_virtual(main())
