"""Acceptance cases of the rotation pool, on virtual time with fake members."""

import asyncio
from dataclasses import replace
from itertools import pairwise

import pytest

from fakes.clock import run_virtual
from fakes.fake_member import GIB, FakeMember, World
from fakes.pool_rig import Rig, spec
from hotrack.core.lifecycle import MemberState
from hotrack.pool.events import CanaryRan, Cause, RequestsCut
from hotrack.pool.policy import PoolPolicy

QUIET = PoolPolicy(min_residency_s=0.0)


def test_boot_starts_verifies_and_sleeps_one_after_the_other() -> None:
    async def main() -> None:
        async with Rig() as rig:
            assert [rig.state(n) for n in "ab"] == [MemberState.ASLEEP, MemberState.ASLEEP]
            assert rig.world.violations == []
            assert [s.canary for s in rig.pool.events.swaps()] == ["recorded", "recorded"]
            assert rig.world.held == {"a": GIB, "b": GIB}

    run_virtual(main())


def test_a01_a_long_stream_ends_before_its_member_sleeps() -> None:
    async def main() -> None:
        async with Rig(policy=QUIET) as rig:
            long = rig.spawn("a", 3.0)
            await asyncio.sleep(1.0)
            other = await rig.request("b")
            first = await long
            assert (first.code, other.code) == ("ok", "ok")
            assert other.admitted is not None
            assert first.ended < other.admitted
            order = rig.world.operations("wake", "sleep:wait", "sleep:abort")
            assert order == [("a", "wake"), ("a", "sleep:wait"), ("b", "wake")]
            assert rig.world.violations == []
            swap = rig.swaps()[-1]
            assert (swap.victims, swap.target, swap.result, swap.canary) == (("a",), "b", "ok", "identical")
            assert (swap.victim_bytes_before, swap.victim_bytes_after) == (60 * GIB, GIB)
            assert (swap.target_bytes_before, swap.target_bytes_after) == (GIB, 60 * GIB)
            assert swap.sleep_ms == pytest.approx(200)
            assert swap.first_token_ms == pytest.approx(0)

    run_virtual(main())


def test_a02_drain_deadline_ends_the_stream_with_an_error() -> None:
    async def main() -> None:
        policy = PoolPolicy(min_residency_s=0.0, max_wait_s=1.0)
        async with Rig(policy=policy) as rig:
            endless = rig.spawn("a", 1e6)
            await asyncio.sleep(2.0)
            other = await rig.request("b")
            assert (await endless).code == "drain_timeout"
            assert other.code == "ok"
            assert other.ended - other.arrived == pytest.approx(1.0 + 5.0 + 0.2 + 0.5 + 0.05 + 0.1, abs=0.1)
            cut = [e for e in rig.pool.events.history() if isinstance(e, RequestsCut)]
            assert [(e.member, e.count) for e in cut] == [("a", 1)]
            # Whoever holds the lease counts how it ended; the pool would count it a second time.
            assert b'code="drain_timeout"' not in rig.pool.render_metrics()

    run_virtual(main())


def test_a03_requests_are_served_in_batches_per_member() -> None:
    async def main() -> None:
        async with Rig("abc", QUIET) as rig:
            answers = await rig.all(*"abaacabc")
            assert {a.code for a in answers} == {"ok"}
            assert rig.world.count("wake") <= 3
            for name in "abc":
                admitted = [a.admitted for a in answers if a.model == name]
                assert admitted == sorted(admitted)

    run_virtual(main())


def test_a04_steady_traffic_does_not_starve_another_member() -> None:
    async def main() -> None:
        async with Rig(policy=PoolPolicy(min_residency_s=0.0, max_wait_s=10.0, max_residency_s=1e4)) as rig:
            await rig.request("a")
            other = rig.spawn("b")
            stream = []
            for _ in range(300):
                stream.append(rig.spawn("a", 0.25))
                await asyncio.sleep(0.1)
            answer = await other
            assert answer.admitted is not None
            assert answer.admitted - answer.arrived <= 10.0 + 5.0 + 1.0
            assert {a.code for a in await asyncio.gather(*stream)} == {"ok"}
            assert rig.world.violations == []

    run_virtual(main())


def test_a05_min_residency_prevents_thrash() -> None:
    async def main() -> None:
        async with Rig(policy=PoolPolicy(min_residency_s=5.0)) as rig:
            stream = []
            for second in range(60):
                stream.append(rig.spawn("ab"[second % 2]))
                await asyncio.sleep(1.0)
            assert {a.code for a in await asyncio.gather(*stream)} == {"ok"}
            swaps = [s for s in rig.swaps() if s.victims]
            assert len(swaps) <= 12
            assert all(b.time - a.time >= 5.0 for a, b in pairwise(swaps))

    run_virtual(main())


def test_a05_a_deadline_cuts_min_residency_short_and_says_so() -> None:
    async def main() -> None:
        async with Rig(policy=PoolPolicy(min_residency_s=60.0)) as rig:
            await rig.all("a", "b")  # both wake times are measured now
            answer = await rig.request("a", deadline_s=8.0)
            assert answer.code == "ok"
            assert rig.swaps()[-1].cause is Cause.DEADLINE

    run_virtual(main())


def test_a06_a_full_queue_refuses_at_once_with_retry_after() -> None:
    async def main() -> None:
        async with Rig(policy=PoolPolicy(min_residency_s=0.0, max_queue=8)) as rig:
            answers = await rig.all(*["a"] * 100)
            refused = [a for a in answers if a.code == "queue_full"]
            assert len(refused) == 92
            for a in refused:
                assert a.ended == a.arrived
                assert a.error is not None
                assert a.error.retry_after_s is not None
                assert a.error.retry_after_s >= 0.5
            assert sum(a.code == "ok" for a in answers) == 8

    run_virtual(main())


def test_a07_the_only_waiter_leaves_before_the_wake() -> None:
    async def main() -> None:
        async with Rig(policy=PoolPolicy(min_residency_s=0.0, max_wait_s=0.5)) as rig:
            busy = rig.spawn("a", 4.0)
            await asyncio.sleep(1.0)
            waiter = rig.spawn("b")
            await asyncio.sleep(1.0)
            assert rig.state("a") is MemberState.DRAINING
            waiter.cancel()
            await asyncio.sleep(0.1)
            assert rig.state("a") is MemberState.READY
            assert (await busy).code == "ok"
            await asyncio.sleep(60)
            assert rig.world.count("wake", "b") == 0
            assert rig.state("a") is MemberState.READY

    run_virtual(main())


def test_a08_a_started_wake_ends_in_a_defined_state() -> None:
    async def main() -> None:
        async with Rig(policy=QUIET) as rig:
            waiter = rig.spawn("b")
            await asyncio.sleep(0.2)
            assert rig.state("b") is MemberState.WAKING
            waiter.cancel()
            await asyncio.sleep(5)
            assert rig.state("b") is MemberState.READY
            assert rig["b"].served == 0

    run_virtual(main())


def test_a09_auto_wake_off() -> None:
    async def main() -> None:
        async with Rig(specs=[spec("a", auto_wake=False)]) as rig:
            answer = await rig.request("a")
            assert answer.code == "model_asleep"
            assert rig.world.calls == []
            await rig.pool.wake("a")
            assert (await rig.request("a")).code == "model_asleep" or rig.state("a") is MemberState.READY

    run_virtual(main())


def external(world: World, name: str, **state: bool) -> FakeMember:
    return FakeMember(spec(name, command=(), url=f"http://{name}"), world, start_s=0.0, running=True, **state)


def test_a10_a_lying_sleeper_keeps_its_peer_asleep() -> None:
    async def main() -> None:
        world = World()
        liar = external(world, "a", sleeping=True)
        async with Rig(specs=[liar.spec, spec("b")], policy=QUIET, world=world) as rig:
            assert (await rig.request("a")).code == "ok"
            liar.faults["sleep"], liar.sticky = ["lie"], True
            answer = await rig.request("b")
            assert answer.code == "insufficient_memory"
            assert rig.world.count("wake", "b") == 0
            assert rig.state("a") is MemberState.FAILED
            row = rig.pool.status()[0]
            assert "holds 60.00 GiB, expected at most 1.06 GiB" in row.last_error
            assert answer.error is not None
            assert row.last_error in answer.error.message
            assert rig.world.violations == []

    run_virtual(main())


def test_a10_a_lying_sleeper_of_ours_is_stopped_before_its_peer_wakes() -> None:
    async def main() -> None:
        async with Rig(policy=QUIET) as rig:
            await rig.request("a")
            rig["a"].faults["sleep"] = ["lie", "lie"]
            assert (await rig.request("b")).code == "ok"
            order = rig.world.operations("stop", "wake")
            assert order == [("a", "wake"), ("a", "stop"), ("b", "wake")]
            assert rig.world.violations == []

    run_virtual(main())


def test_a11_the_peer_waits_for_the_measured_release() -> None:
    async def main() -> None:
        async with Rig(policy=QUIET) as rig:
            await rig.request("a")
            rig["a"].faults["sleep"] = ["lag"]
            answer = await rig.request("b")
            assert answer.code == "ok"
            swap = rig.swaps()[-1]
            assert swap.sleep_ms == pytest.approx(3_200, abs=50)
            assert rig.world.violations == []

    run_virtual(main())


def test_a12_a_failed_wake_rolls_back_and_restores_the_previous_member() -> None:
    async def main() -> None:
        async with Rig(policy=replace(QUIET, max_failures=9)) as rig:
            await rig.request("a")
            rig["b"].faults["wake"], rig["b"].sticky = ["error"], True
            answer = await rig.request("b")
            assert answer.code == "wake_failed"
            assert answer.error is not None
            assert (answer.error.retry_after_s or 0) >= 1.0
            await asyncio.sleep(2)
            assert (rig.state("a"), rig.state("b")) == (MemberState.READY, MemberState.ASLEEP)
            assert rig.swaps()[-1].cause is Cause.RESTORE
            assert rig.world.held["b"] == GIB
            rig["b"].faults["wake"], rig["b"].sticky = ["error", "error"], False
            retries = await rig.all(*["b"] * 50)
            assert {r.code for r in retries} == {"wake_failed"}
            assert rig.world.count("wake", "b") == 2  # one attempt for all of them
            late = await rig.all(*["b"] * 50)  # within the back-off
            assert {r.code for r in late} == {"wake_failed"}
            assert (await rig.request("b")).code == "ok"  # waits for the next attempt
            assert rig.pool.status()[1].last_error == ""
            assert any("out of memory" in swap.error for swap in rig.swaps())
            assert rig.world.violations == []

    run_virtual(main())


def test_a13_a_failed_sleep_then_a_lying_wake_serves_nobody() -> None:
    async def main() -> None:
        async with Rig(policy=QUIET) as rig:
            await rig.request("a")
            rig["a"].faults["sleep"] = ["error_after"]
            assert (
                await rig.request("b")
            ).code == "ok"  # the second, aborting sleep is believed once measured
            rig["a"].faults["wake"] = ["lie"]
            before = rig["a"].served
            answer = await rig.request("a")
            assert answer.code == "wake_failed"
            assert rig["a"].served == before
            assert (rig.state("a"), rig["a"].sleeping) == (
                MemberState.ASLEEP,
                True,
            )  # rolled back and measured
            await asyncio.sleep(120)
            assert (await rig.request("a")).code == "ok"
            assert rig.world.violations == []

    run_virtual(main())


@pytest.mark.parametrize("limits", [{}, {"swap_bytes": None}])
def test_a14_wrong_answers_after_a_wake_reach_nobody(limits: dict[str, None]) -> None:
    async def main() -> None:
        async with Rig(specs=[spec("a", **limits), spec("b")], policy=QUIET) as rig:
            rig["a"].faults["ask"], rig["a"].sticky = ["wrong"], True
            answer = await rig.request("a")
            assert answer.code == "wake_failed"
            assert rig["a"].served == 0
            assert rig.state("a") is MemberState.QUARANTINED
            assert rig.world.count("wake", "a") == 2
            assert rig.world.count("launch", "a") == 1
            evidence = [
                e.evidence for e in rig.pool.events.history() if isinstance(e, CanaryRan) and e.evidence
            ]
            assert "expected 'a answers', got '!!!!'" in evidence[-1]
            assert (await rig.request("a")).code == "member_failed"
            assert (await rig.request("b")).code == "ok"
            rig["a"].faults.clear()
            await rig.pool.wake("a")
            assert (await rig.request("a")).code == "ok"

    run_virtual(main())


def test_a14_one_bad_wake_is_repaired_by_a_second_one() -> None:
    async def main() -> None:
        async with Rig(policy=QUIET) as rig:
            rig["a"].faults["wake"] = ["wrong"]
            assert (await rig.request("a")).code == "ok"
            assert rig.world.count("wake", "a") == 2
            assert rig.world.count("launch", "a") == 0

    run_virtual(main())


def test_a14_a_member_that_needs_a_restart_after_each_wake_is_given_up() -> None:
    async def main() -> None:
        async with Rig(policy=QUIET) as rig:
            rig["a"].faults["wake"], rig["a"].sticky = ["wrong"], True
            codes = [(await rig.request(name)).code for name in "abababa"]
            assert codes == ["ok", "ok", "ok", "ok", "wake_failed", "ok", "member_failed"]
            assert rig.state("a") is MemberState.QUARANTINED
            assert rig.world.count("launch", "a") == 2

    run_virtual(main())


def test_a15_death_on_the_first_answer_restarts_it() -> None:
    async def main() -> None:
        async with Rig(policy=QUIET) as rig:
            await rig.request("b")
            rig["a"].faults["ask"] = ["die"]
            answer = await rig.request("a")
            assert answer.code == "ok"
            assert rig.world.count("launch", "a") == 1
            assert (await rig.request("b")).code == "ok"
            assert rig.world.violations == []

    run_virtual(main())


def test_a21_death_while_asleep_is_seen_and_healed() -> None:
    async def main() -> None:
        async with Rig(policy=QUIET) as rig:
            await rig.request("b")
            rig["a"].die()
            assert rig.state("a") is MemberState.FAILED
            refused = await rig.request("a", deadline_s=2.0)
            assert refused.code == "member_failed"
            assert refused.error is not None
            assert (refused.error.retry_after_s or 0) >= 5.0  # back-off and the measured start time
            assert rig.pool.status()[0].last_error
            assert (await rig.request("a")).code == "ok"  # its deadline lets it wait for the restart
            assert rig.pool.status()[0].last_error == ""

    run_virtual(main())


def test_a22_states_are_rebuilt_from_the_engines() -> None:
    async def main() -> None:
        world = World()
        asleep = external(world, "a", sleeping=True)
        half = external(world, "b", sleeping=True)
        world.held["b"] = 30 * GIB  # a wake was interrupted
        awake = external(world, "c", sleeping=False)
        world.held["c"] = 20 * GIB
        awake.awake_bytes = 60 * GIB
        gone = external(world, "d")
        gone.running = False
        world.held.pop("d")
        members = [asleep, half, awake, gone]
        async with Rig(specs=[m.spec for m in members], policy=QUIET, world=world, boot=False) as rig:
            assert {rig.state(n) for n in "abcd"} == {MemberState.UNKNOWN}
            early = rig.spawn("c")
            await rig.pool.start()
            assert rig.state("a") is MemberState.ASLEEP
            assert rig.state("b") is MemberState.ASLEEP
            assert world.held["b"] == GIB
            assert rig.state("d") is MemberState.FAILED
            assert (await early).code == "ok"
            assert [(await rig.request(n)).code for n in "abc"] == ["ok", "ok", "ok"]
            assert world.count("stop") == 0
            assert world.violations == []

    run_virtual(main())


def test_a23_fifty_requests_cause_one_wake() -> None:
    async def main() -> None:
        async with Rig(policy=QUIET) as rig:
            answers = await rig.all(*["a"] * 50)
            assert {a.code for a in answers} == {"ok"}
            assert rig.world.count("wake") == 1

    run_virtual(main())
