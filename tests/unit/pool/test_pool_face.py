"""Pool's public methods, on virtual time."""

import asyncio
from typing import Any

import pytest

from fakes.clock import VirtualClock, run_virtual
from fakes.fake_member import GIB, FakeMember, World
from fakes.pool_rig import Rig, spec
from hotrack.core.errors import ConfigError, MemberFailedError, ModelNotFoundError, SleepError
from hotrack.core.lifecycle import MemberState
from hotrack.plan.ledger import DeviceBudget
from hotrack.pool.events import Cause, Event, EventLog, StateChanged, SwapDone
from hotrack.pool.policy import PoolPolicy
from hotrack.pool.pool import Pool

QUIET = PoolPolicy(min_residency_s=0.0)


def test_unknown_models_are_named_and_aliases_work() -> None:
    async def main() -> None:
        async with Rig(specs=[spec("a", aliases=("chat",)), spec("b")]) as rig:
            with pytest.raises(ModelNotFoundError, match="no model 'c'; this pool has a, b"):
                rig.pool.lease("c")
            async with rig.pool.lease("chat") as lease:
                assert (lease.member, lease.endpoint.base_url) == ("a", "http://a")
                assert lease.swap is not None
            assert rig.pool.resolve("chat") == "a"

    run_virtual(main())


def test_a_budget_that_fits_neither_is_refused_at_load() -> None:
    with pytest.raises(ConfigError, match=r"pool a 60\.00 GiB .* too much"):
        Pool(
            [spec("a"), spec("b")],
            budgets={"default": DeviceBudget(40 * GIB)},
            clock=VirtualClock(),
            connect=World().connect,
        )
    with pytest.raises(ConfigError, match="'gpus'"):
        Pool([spec("a")], budgets={"gpus": DeviceBudget(90 * GIB)}, connect=World().connect)


def test_members_that_fit_together_stay_awake_together() -> None:
    async def main() -> None:
        async with Rig(policy=QUIET, total_bytes=200 * GIB) as rig:
            await rig.all("a", "b", "a", "b")
            assert [rig.state(n) for n in "ab"] == [MemberState.READY] * 2
            assert rig.world.count("sleep:wait") == 0

    run_virtual(main())


def test_groups_swap_independently() -> None:
    async def main() -> None:
        specs = [spec(f"{n}{i}", device_group=f"gpu-{n}") for n in "ab" for i in range(2)]
        async with Rig(specs=specs, policy=QUIET, total_bytes=None) as rig:
            rig.world.capacity_bytes = 200 * GIB
            start = rig.clock.now()
            answers = await rig.all("a0", "b0", "a1", "b1")
            assert {a.code for a in answers} == {"ok"}
            assert rig.clock.now() - start == pytest.approx(1.6, abs=0.2)  # as long as one group alone

    run_virtual(main())


def test_operator_sleep_wake_and_unload() -> None:
    async def main() -> None:
        async with Rig(policy=QUIET) as rig:
            await rig.pool.wake("a")
            assert rig.state("a") is MemberState.READY
            await rig.pool.sleep("a")
            assert rig.state("a") is MemberState.ASLEEP
            await rig.pool.unload("a")
            assert rig.state("a") is MemberState.STOPPED
            assert "a" not in rig.world.held
            assert (await rig.request("a")).code == "ok"
            assert rig.swaps()[-1].start_ms == pytest.approx(5000, abs=50)
            rig["a"].faults["sleep"], rig["a"].sticky = ["error"], True
            with pytest.raises(SleepError, match="did not give its memory back"):
                await rig.pool.sleep("a")

    run_virtual(main())


def test_an_engine_that_cannot_sleep_is_stopped_instead() -> None:
    async def main() -> None:
        async with Rig(specs=[spec("a", sleep_level=None), spec("b", sleep_level=None)], policy=QUIET) as rig:
            assert rig.state("a") is MemberState.STOPPED  # not started before somebody asks
            assert [a.code for a in await rig.all("a", "b", "a")] == ["ok"] * 3
            assert rig.world.operations("launch", "stop") == [("a", "launch"), ("a", "stop"), ("b", "launch")]
            assert rig.world.violations == []

    run_virtual(main())


def test_pinned_members_are_never_evicted() -> None:
    async def main() -> None:
        async with Rig(specs=[spec("a", pinned=True, ttl_s=1.0), spec("b")], policy=QUIET) as rig:
            await rig.request("a")
            answer = await rig.request("b")
            assert answer.code == "insufficient_memory"
            await asyncio.sleep(100)
            assert rig.state("a") is MemberState.READY

    run_virtual(main())


def test_a_member_that_hangs_is_ended_and_comes_back() -> None:
    async def main() -> None:
        async with Rig(policy=QUIET) as rig:
            await rig.request("a")
            rig["a"]._healthy_at = 1e9  # alive, but no answer
            await asyncio.sleep(30)
            assert [swap.cause for swap in rig.swaps()][-2:] == [Cause.PROBE, Cause.RESTART]
            assert rig.world.operations("stop", "launch") == [("a", "stop"), ("a", "launch")]
            assert (await rig.request("a")).code == "ok"

    run_virtual(main())


def test_an_external_engine_may_come_late_and_blocks_nobody_until_then() -> None:
    async def main() -> None:
        world = World()
        late = FakeMember(spec("a", command=(), url="http://a"), world, start_s=0.0)
        async with Rig(specs=[late.spec, spec("b")], world=world, policy=QUIET) as rig:
            assert rig.state("a") is MemberState.FAILED
            assert (await rig.request("b")).code == "ok"
            await asyncio.sleep(200)
            assert rig.state("a") is MemberState.FAILED  # not given up
            late.running = True
            world.held["a"] = GIB
            late.sleeping = True
            await rig.pool.sleep("b")
            await asyncio.sleep(400)
            assert rig.state("a") is MemberState.ASLEEP
            assert (await rig.request("a")).code == "ok"
            assert world.violations == []

    run_virtual(main())


def test_a_lost_external_engine_counts_until_the_operator_says_it_is_gone() -> None:
    async def main() -> None:
        world = World()
        far = FakeMember(
            spec("a", command=(), url="http://a"), world, start_s=0.0, running=True, sleeping=True
        )
        async with Rig(specs=[far.spec, spec("b")], world=world, policy=QUIET) as rig:
            assert (await rig.request("a")).code == "ok"
            with pytest.raises(MemberFailedError, match="stop it where it was started"):
                await rig.pool.unload("a")
            assert (await rig.request("a")).code == "ok"
            far.running = False  # nobody knows what became of its memory
            await asyncio.sleep(30)
            assert rig.state("a") is MemberState.FAILED
            answer = await rig.request("b")
            assert answer.code == "insufficient_memory"
            assert answer.error is not None
            assert "a is failed and may still hold memory" in answer.error.message
            await rig.pool.unload("a")
            world.held.pop("a")
            assert (await rig.request("b")).code == "ok"

    run_virtual(main())


def test_nothing_is_granted_after_close() -> None:
    async def main() -> None:
        async with Rig(policy=QUIET) as rig:
            await rig.request("a")
            await rig.pool.close()
            assert (await rig.request("a")).code == "draining"

    run_virtual(main())


def test_a_start_that_fails_is_reported_with_its_last_words() -> None:
    async def main() -> None:
        world = World()
        broken = FakeMember(spec("a"), world)
        broken.faults["launch"], broken.sticky = ["die"], True
        async with Rig(world=world, policy=QUIET) as rig:
            row = rig.pool.status()[0]
            assert row.state is MemberState.FAILED
            assert "its last output: loading | ready" in row.last_error
            assert (await rig.request("b")).code == "ok"

    run_virtual(main())


def test_more_memory_than_declared_is_refused_with_numbers() -> None:
    async def main() -> None:
        world = World()
        FakeMember(spec("a"), world, awake_bytes=70 * GIB)
        async with Rig(world=world, policy=QUIET) as rig:
            assert (
                "holds 70.00 GiB awake, its configuration allows 60.00 GiB" in rig.pool.status()[0].last_error
            )

    run_virtual(main())


def test_a_cancelled_grant_gives_its_place_back() -> None:
    async def main() -> None:
        async with Rig(specs=[spec("a", max_in_flight=1), spec("b")], policy=QUIET) as rig:
            first = rig.spawn("a", 1.0)
            second = rig.spawn("a", 1.0)
            await asyncio.sleep(1.0)
            await first
            second.cancel()  # in the very turn in which it was granted
            await asyncio.sleep(0.1)
            assert rig.pool.status()[0].num_in_flight == 0
            assert (await rig.request("a")).code == "ok"

    run_virtual(main())


def test_close_is_prompt_and_ends_everything() -> None:
    async def main() -> None:
        async with Rig(policy=QUIET) as rig:
            waiting = rig.spawn("a")
            await asyncio.sleep(0.1)  # the wake is under way
            await rig.pool.close()
            await rig.pool.close()
            assert (await waiting).code == "draining"
            assert rig.world.held == {}
            assert (await rig.request("a")).code == "draining"

    run_virtual(main())


def test_events_are_kept_and_streamed_and_a_slow_subscriber_loses_the_oldest() -> None:
    async def main() -> None:
        log = EventLog(history=3, backlog=2)
        stream = log.subscribe()
        first = asyncio.ensure_future(anext(stream))
        await asyncio.sleep(0)

        def event(i: int) -> Event:
            return StateChanged(float(i), "a", MemberState.STOPPED, MemberState.STARTING)

        for i in range(5):
            log.publish(event(i))
        assert log.history() == [event(2), event(3), event(4)]
        assert [await first, await anext(stream)] == [event(3), event(4)]
        await stream.aclose()  # type: ignore[attr-defined]

    run_virtual(main())


def test_metrics_follow_the_events() -> None:
    async def main() -> None:
        async with Rig(policy=QUIET) as rig:
            await rig.all("a", "b")
            rig.pool.metrics.count_request("a", "200")
            text = rig.pool.render_metrics().decode()
            for line in (
                'pool_member_state{member="b",state="ready"} 1.0',
                'pool_swaps_total{cause="request",from="a",result="ok",to="b"} 1.0',
                'pool_canary_total{member="a",result="identical"} 1.0',
                'pool_member_cycles_total{member="a"} 2.0',
                'pool_gpu_bytes{kind="residue",member="a"} 1.073741824e+09',
                'pool_requests_total{code="200",member="a"} 1.0',
                'pool_transition_seconds_count{member="b",phase="wake"} 1.0',
                'pool_queue_wait_seconds_count{member="a"} 1.0',
            ):
                assert line in text, line

    run_virtual(main())


def test_history_of_swaps_carries_the_request_that_caused_it() -> None:
    async def main() -> None:
        async with Rig(policy=QUIET) as rig:
            await rig.request("a", request_id="req-7")
            done = [e for e in rig.pool.events.history() if isinstance(e, SwapDone)][-1]
            assert (done.swap.request_id, done.swap.cause, done.swap.result) == ("req-7", Cause.REQUEST, "ok")

    run_virtual(main())


def test_lease_arguments() -> None:
    async def main() -> None:
        async with Rig(policy=QUIET) as rig:
            arguments: dict[str, Any] = {"priority": -1, "deadline_s": 0.1, "request_id": "x"}
            answer = await rig.request("a", **arguments)
            assert answer.code == "deadline_exceeded"
            assert answer.error is not None
            assert answer.error.retry_after_s is not None

    run_virtual(main())
