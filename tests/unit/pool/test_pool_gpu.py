"""Members on a GPU, on virtual time with fake members: wakes that take requests before they have landed, and
sleeps that give back only what the next one lacks."""

import asyncio

import pytest

from fakes.clock import run_virtual
from fakes.fake_member import GIB, FakeMember, World
from fakes.pool_rig import Rig, spec
from hotrack.core.lifecycle import MemberState
from hotrack.members.spec import MIB, CanarySpec, MemberSpec
from hotrack.plan.ledger import DeviceBudget, measured
from hotrack.pool.entry import Entry
from hotrack.pool.memory_book import MemoryBook
from hotrack.pool.policy import PoolPolicy
from hotrack.pool.pool import make_ledger
from hotrack.pool.transitions import PARTIAL_MARGIN

QUIET = PoolPolicy(min_residency_s=0.0)
MARGIN_GIB = PARTIAL_MARGIN / GIB


def streaming(name: str, **changes: object) -> MemberSpec:
    return spec(name, device="cuda:0", streamed_wake=True, **changes)


def stream_rig(**changes: object) -> Rig:
    return Rig(specs=[streaming(name, **changes) for name in "ab"], policy=QUIET)


# ---- streamed wakes


def test_a_waiting_request_is_computed_before_the_wake_has_landed() -> None:
    async def main() -> None:
        async with stream_rig() as rig:
            rig["a"].wake_s = 10.0
            answer = await rig.request("a", 0.5)
            assert rig.world.count("wake:streamed", "a") == 1
            assert answer.admitted == answer.arrived  # beside the copies, not behind them
            assert answer.code == "ok"
            assert answer.ended - answer.arrived == pytest.approx(10.05, abs=0.01)  # landed, and the canary
            (swap,) = rig.swaps()
            assert (swap.canary, swap.result, swap.streamed) == ("identical", "ok", True)
            assert swap.first_token_ms == pytest.approx(0.0, abs=1.0)
            assert rig.state("a") is MemberState.READY

    run_virtual(main())


def test_no_answer_leaves_before_the_canary_passed() -> None:
    async def main() -> None:
        async with stream_rig() as rig:
            rig["a"].wake_s = 5.0
            async with rig.pool.lease("a") as lease:
                assert rig.state("a") is MemberState.VERIFYING
                waits = asyncio.ensure_future(lease.verified())
                await asyncio.sleep(4.9)
                assert not waits.done()
                await asyncio.sleep(0.2)
                assert await waits
                assert rig.state("a") is MemberState.READY
            async with rig.pool.lease("a") as lease:
                assert await lease.verified()  # at once

    run_virtual(main())


def test_requests_that_come_while_it_lands_join_in() -> None:
    async def main() -> None:
        async with stream_rig() as rig:
            rig["a"].wake_s = 5.0
            first = rig.spawn("a")
            await asyncio.sleep(1.0)
            second = await rig.request("a")
            assert second.admitted == second.arrived
            assert [(await first).code, second.code] == ["ok", "ok"]
            assert rig["a"].served == 2

    run_virtual(main())


def test_a_wake_that_lands_wrong_is_repeated_and_the_requests_wait_again() -> None:
    async def main() -> None:
        async with stream_rig() as rig:
            rig["a"].faults["land"] = ["error"]
            answer = await rig.request("a", 5.0)
            assert answer.code == "ok"
            assert rig.world.operations("wake:streamed", "wake") == [("a", "wake:streamed"), ("a", "wake")]
            assert rig["a"].served == 2
            (swap,) = rig.swaps()
            assert (swap.result, swap.canary, swap.streamed) == ("ok", "identical", False)
            assert rig.world.violations == []

    run_virtual(main())


def test_a_canary_that_fails_in_company_is_asked_once_more_alone() -> None:
    async def main() -> None:
        async with stream_rig() as rig:
            rig["a"].faults["ask"] = ["wrong", ""]
            answer = await rig.request("a", 0.2)
            assert answer.code == "ok"
            assert rig.world.count("wake:streamed", "a") == 1
            assert rig.world.count("wake", "a") == 0
            assert rig.world.count("sleep:abort", "a") == 0
            assert rig["a"].served == 2  # what it had computed beside the wrong answer was thrown away

    run_virtual(main())


def test_wrong_answers_for_good_reach_nobody() -> None:
    async def main() -> None:
        async with stream_rig() as rig:
            rig["a"].faults["ask"] = ["wrong"]
            rig["a"].sticky = True
            answer = await rig.request("a", 0.2)
            assert answer.code in ("wake_failed", "member_failed")
            assert rig.state("a") is MemberState.QUARANTINED

    run_virtual(main())


def test_a_process_that_dies_while_it_lands_takes_no_answer_with_it() -> None:
    async def main() -> None:
        async with stream_rig() as rig:
            rig["a"].faults["land"] = ["die"]
            answer = await rig.request("a", 3.0)
            assert answer.code == "ok"  # from the process that replaced it
            assert rig.world.count("launch", "a") == 1

    run_virtual(main())


def test_a_client_that_leaves_before_it_landed_leaves_no_trace() -> None:
    async def main() -> None:
        async with stream_rig() as rig:
            rig["a"].wake_s = 5.0
            gone = rig.spawn("a", 100.0)
            await asyncio.sleep(1.0)
            gone.cancel()
            await asyncio.gather(gone, return_exceptions=True)
            await asyncio.sleep(10.0)
            assert rig.state("a") is MemberState.READY
            assert all(row.num_in_flight == 0 for row in rig.pool.status())
            assert (await rig.request("b")).code == "ok"

    run_virtual(main())


def test_the_limit_of_requests_at_once_holds_while_it_lands() -> None:
    async def main() -> None:
        async with stream_rig(max_in_flight=1) as rig:
            rig["a"].wake_s = 5.0
            first, second = await rig.all("a", "a")
            assert first.admitted == first.arrived
            assert second.admitted is not None
            assert second.admitted >= first.ended

    run_virtual(main())


def test_without_a_canary_nothing_proves_that_it_landed_so_it_is_not_streamed() -> None:
    async def main() -> None:
        async with stream_rig(canary=CanarySpec(prompts=())) as rig:
            assert (await rig.request("a")).code == "ok"
            assert rig.world.operations("wake:streamed", "wake") == [("a", "wake")]

    run_virtual(main())


def test_a_pool_that_closes_lets_nobody_wait_for_a_landing() -> None:
    async def main() -> None:
        async with stream_rig() as rig:
            rig["a"].wake_s = 50.0
            waiting = rig.spawn("a")
            await asyncio.sleep(1.0)
            await rig.pool.close()
            assert (await waiting).code == "draining"

    run_virtual(main())


# ---- partial sleeps


def partial_rig(total: int = 96, **members: int) -> Rig:
    """Members of so many GiB awake and 1 GiB asleep."""
    world, specs = World(), []
    for name, size in members.items():
        one = spec(name, awake_bytes=None, residue_bytes=None, swap_bytes=None, partial_sleep=True)
        specs.append(one)
        FakeMember(one, world, awake_bytes=size * GIB)
    return Rig(specs=specs, policy=QUIET, world=world, total_bytes=total * GIB)


def held(rig: Rig) -> dict[str, float]:
    return {name: num_bytes / GIB for name, num_bytes in rig.world.held.items()}


def test_only_the_deficit_moves() -> None:
    async def main() -> None:
        async with partial_rig(a=60, b=50) as rig:
            assert held(rig) == {"a": 1, "b": 1}  # the first sleeps are whole: they measure the residue
            await rig.request("a")
            await rig.request("b")
            # 60 + 50 of 96: 14 are lacking
            assert held(rig) == pytest.approx({"a": 46 - MARGIN_GIB, "b": 50})
            await rig.request("a")
            assert held(rig) == pytest.approx({"a": 60, "b": 36 - MARGIN_GIB})
            await rig.request("b")
            assert held(rig) == pytest.approx({"a": 46 - MARGIN_GIB, "b": 50})
            row = next(row for row in rig.pool.status() if row.name == "a")
            assert row.memory_bytes == pytest.approx((46 - MARGIN_GIB) * GIB)
            assert row.residue_bytes == GIB
            assert rig.world.violations == []
            assert {swap.result for swap in rig.swaps()} == {"ok"}

    run_virtual(main())


def test_nothing_moves_when_both_fit() -> None:
    async def main() -> None:
        async with partial_rig(a=40, b=50) as rig:
            await rig.request("a")
            await rig.request("b")
            await rig.request("a")
            assert held(rig) == {"a": 40, "b": 50}
            assert rig.world.operations("sleep:wait", "sleep:abort") == []

    run_virtual(main())


def test_a_third_member_makes_both_go_deeper() -> None:
    async def main() -> None:
        async with partial_rig(a=60, b=50, c=90) as rig:
            await rig.request("a")
            await rig.request("b")
            assert held(rig)["a"] == pytest.approx(60 - 15 - MARGIN_GIB)  # c keeps 1
            assert (await rig.request("c")).code == "ok"
            assert held(rig)["c"] == 90
            assert held(rig)["a"] + held(rig)["b"] <= 6
            assert rig.world.count("stop") == 0
            for name in "abcba":
                assert (await rig.request(name)).code == "ok"
            assert rig.world.violations == []
            assert {swap.result for swap in rig.swaps()} == {"ok"}

    run_virtual(main())


def test_a_partial_sleeper_wakes_beside_who_is_awake_when_there_is_room_again() -> None:
    async def main() -> None:
        async with partial_rig(a=60, b=50, c=20) as rig:
            await rig.request("a")
            await rig.request("b")
            await rig.request("c")  # 50 and 20 fit, but not with what 'a' still holds
            assert held(rig)["b"] == 50
            assert held(rig)["a"] == pytest.approx(96 - 70 - MARGIN_GIB)
            assert rig.world.violations == []

    run_virtual(main())


def test_a_partial_sleep_that_frees_too_little_becomes_a_whole_one() -> None:
    async def main() -> None:
        async with partial_rig(a=60, b=50) as rig:
            await rig.request("a")
            rig["a"].faults["sleep"] = ["lie"]
            assert (await rig.request("b")).code == "ok"
            assert held(rig) == {"a": 1, "b": 50}
            (request,) = [swap for swap in rig.swaps() if swap.target == "b"]
            assert request.result == "ok"

    run_virtual(main())


def test_a_rolled_back_wake_of_a_partial_sleeper() -> None:
    async def main() -> None:
        async with partial_rig(a=60, b=50) as rig:
            await rig.request("a")
            await rig.request("b")
            rig["a"].faults["wake"] = ["error"]
            assert (await rig.request("a")).code == "wake_failed"
            await asyncio.sleep(5.0)
            assert (await rig.request("a")).code == "ok"
            assert (await rig.request("b")).code == "ok"
            assert rig.world.violations == []

    run_virtual(main())


def test_a_member_that_starts_cold_finds_the_whole_device() -> None:
    async def main() -> None:
        async with partial_rig(a=60, b=50) as rig:
            await rig.request("a")
            await rig.pool.unload("b")
            await rig.request("b")  # a new process sizes its KV cache by what is free
            assert held(rig) == {"a": 1, "b": 50}

    run_virtual(main())


def test_what_others_hold_is_no_part_of_the_budget() -> None:
    async def main() -> None:
        async with partial_rig(a=40, b=50) as rig:
            loop = rig.pool._loop_of["a"]
            await rig.request("a")
            used = 41 * GIB + 20 * GIB + 500 * MIB  # 'a', the residue of 'b', and a stranger
            loop.on_device_used(used + 30 * GIB, loop.num_swaps)  # 'a' was just growing
            assert "foreign" not in loop.fits("b").arithmetic
            loop.on_device_used(used, loop.num_swaps)
            loop.on_device_used(90 * GIB, loop.num_swaps - 1)  # somebody moved meanwhile
            loop.on_device_used(used, loop.num_swaps)
            assert "foreign 20.49 GiB (measured)" in loop.fits("b").arithmetic
            await rig.request("b")
            assert held(rig)["a"] < 40
            assert sum(held(rig).values()) <= 96 - 20.48

    run_virtual(main())


def test_what_others_held_at_the_start_counts_until_it_is_read_again() -> None:
    entries = {"a": Entry(FakeMember(spec("a"), World()))}
    entries["a"].memory_bytes = 40 * GIB
    budget = DeviceBudget(96 * GIB, foreign=measured(20 * GIB))
    book = MemoryBook(entries, make_ledger([spec("a")], budget))

    def foreign(used_gib: int) -> float:
        book.used(used_gib * GIB)
        return book.capacity.shares()["foreign"] / GIB

    assert [foreign(used) for used in (60, 45, 75, 70, 70, 30)] == [20, 5, 5, 30, 30, 0]


# ---- what is left asleep


def device_rig() -> Rig:
    specs = [
        spec(name, device="cuda:0", residue_bytes=None, swap_bytes=None, awake_bytes=None) for name in "ab"
    ]
    return Rig(specs=specs, policy=QUIET)


def test_a_context_that_grew_is_a_larger_residue_and_no_failure() -> None:
    async def main() -> None:
        async with device_rig() as rig:
            await rig.request("a")
            rig["a"].residue_bytes = 2 * GIB  # 1 GiB after the first sleep
            rig.world.hold("a", 61 * GIB)
            answer = await rig.request("b")
            assert answer.code == "ok"
            assert answer.ended - answer.arrived < 2.0
            assert rig.state("a") is MemberState.ASLEEP
            assert "residue a 2.00 GiB (measured)" in rig.pool._loop_of["b"].fits("b").arithmetic

    run_virtual(main())


@pytest.mark.parametrize("first", [True, False])
def test_a_sleep_that_keeps_what_it_promised_to_give_ends_the_process(first: bool) -> None:
    async def main() -> None:
        rig = device_rig()
        rig.boot = not first
        async with rig:
            await rig.request("a")
            rig["a"].faults["sleep"] = ["lie"]
            rig["a"].sticky = True
            assert (await rig.request("b")).code == "ok"
            assert rig.state("a") in (MemberState.FAILED, MemberState.STOPPED)
            assert rig.world.count("stop", "a") == 1
            assert rig.world.count("sleep:abort", "a") == 1  # asked twice
            assert rig.world.violations == []

    run_virtual(main())
