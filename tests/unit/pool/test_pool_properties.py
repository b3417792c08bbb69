"""Random arrivals, aborts and faults on virtual time: what must hold whatever happens."""

import asyncio
from collections import Counter
from dataclasses import dataclass

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fakes.clock import run_virtual
from fakes.pool_rig import Answer, Rig, spec
from hotrack.core.lifecycle import MEMBER_MOVES, MemberState
from hotrack.members.spec import MemberSpec
from hotrack.pool.events import StateChanged
from hotrack.pool.policy import PoolPolicy

EXAMPLES = 30  # a few thousand were run while this was written
KNOWN_CODES = {
    "ok",
    "cancelled",
    "dropped",
    "drain_timeout",
    "queue_full",
    "wake_failed",
    "member_failed",
    "insufficient_memory",
    "deadline_exceeded",
    "canary_mismatch",
}


@dataclass(frozen=True)
class Arrival:
    gap_s: float
    model: str
    seconds: float
    abort_after_s: float | None
    priority: int


def arrivals(models: str, longest_s: float) -> st.SearchStrategy[list[Arrival]]:
    one = st.builds(
        Arrival,
        gap_s=st.sampled_from([0.0, 0.0, 0.1, 0.7, 3.0]),
        model=st.sampled_from(models),
        seconds=st.sampled_from([0.0, 0.2, 2.0, longest_s]),
        abort_after_s=st.one_of(st.none(), st.none(), st.sampled_from([0.0, 0.3, 1.5])),
        priority=st.sampled_from([0, 0, 0, -1, 1]),
    )
    return st.lists(one, min_size=1, max_size=25)


FAULTS = {
    "sleep": ["", "error", "error_after", "lie", "lag", "hang", "die"],
    "wake": ["", "error", "lie", "wrong", "hang", "die"],
    "ask": ["", "wrong", "error", "hang", "die"],
    "launch": ["", "die"],
    "land": ["", "error", "die"],
}
fault_plans = st.fixed_dictionaries(
    {operation: st.lists(st.sampled_from(kinds), max_size=4) for operation, kinds in FAULTS.items()}
)


async def client(rig: Rig, arrival: Arrival) -> Answer | str:
    task = rig.spawn(arrival.model, arrival.seconds, priority=arrival.priority)
    if arrival.abort_after_s is not None:
        await asyncio.wait([task], timeout=arrival.abort_after_s)
        task.cancel()
    try:
        return await task
    except asyncio.CancelledError:
        return "cancelled"


async def play(rig: Rig, plan: list[Arrival]) -> list[Answer | str]:
    tasks = []
    for arrival in plan:
        await asyncio.sleep(arrival.gap_s)
        tasks.append(asyncio.get_running_loop().create_task(client(rig, arrival)))
    return list(await asyncio.wait_for(asyncio.gather(*tasks), 5_000))


def check_moves(rig: Rig) -> None:
    for event in rig.pool.events.history():
        if isinstance(event, StateChanged):
            assert event.new in MEMBER_MOVES[event.old]


def check_at_rest(rig: Rig) -> None:
    """Nothing is left behind: no lease, no waiter, no member between two states."""
    for row in rig.pool.status():
        assert (row.num_waiting, row.num_in_flight) == (0, 0)
        assert row.state in {
            MemberState.READY,
            MemberState.ASLEEP,
            MemberState.STOPPED,
            MemberState.FAILED,
            MemberState.QUARANTINED,
        }
    assert sum(row.state is MemberState.READY for row in rig.pool.status()) <= 1


relaxed = settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck))


def gpu_specs(names: str) -> list[MemberSpec]:
    """Nothing is declared; wakes are streamed, sleeps give back what is lacking."""
    unknown = {"awake_bytes": None, "residue_bytes": None, "swap_bytes": None}
    return [spec(name, device="cuda", streamed_wake=True, partial_sleep=True, **unknown) for name in names]


@pytest.mark.parametrize("on_gpu", [False, True])
@relaxed
@given(plan=arrivals("abc", 30.0), faults_a=fault_plans, faults_b=fault_plans)
def test_every_request_ends_once_whatever_fails(
    on_gpu: bool, plan: list[Arrival], faults_a: dict[str, list[str]], faults_b: dict[str, list[str]]
) -> None:
    async def main() -> None:
        policy = PoolPolicy(
            min_residency_s=0.5,
            max_wait_s=4.0,
            max_queue=10,
            max_batch_requests=4,
            poll_s=0.1,
            probe_interval_s=60.0,
        )
        async with Rig("abc", policy, gpu_specs("abc") if on_gpu else None) as rig:
            for name, faults in (("a", faults_a), ("b", faults_b)):
                for operation, kinds in faults.items():
                    rig[name].faults[operation] = list(kinds)
            answers = await play(rig, plan)
            codes = Counter(a if isinstance(a, str) else a.code for a in answers)
            assert sum(codes.values()) == len(plan)
            assert set(codes) <= KNOWN_CODES, codes
            assert rig.world.violations == []
            await asyncio.sleep(2_000)
            check_at_rest(rig)
            check_moves(rig)
            assert (await rig.request("c")).code == "ok"  # the member without faults always comes back

    run_virtual(main())


@relaxed
@given(plan=arrivals("ab", 8.0))
def test_nobody_starves_and_nobody_is_cut_without_a_drain(plan: list[Arrival]) -> None:
    async def main() -> None:
        policy = PoolPolicy(min_residency_s=0.5, max_wait_s=4.0, max_residency_s=1e4)
        async with Rig("ab", policy) as rig:
            answers = await play(
                rig, [Arrival(a.gap_s, a.model, a.seconds, a.abort_after_s, 0) for a in plan]
            )
            drain_s, swap_s = 5.0 + policy.abort_grace_s, 1.0
            for answer in answers:
                if isinstance(answer, str):
                    continue
                assert answer.code in ("ok", "drain_timeout"), answer
                assert answer.admitted is not None
                # Somebody else's switch may have begun just before; then it is this one's turn.
                bound = policy.max_wait_s + 2 * (drain_s + swap_s)
                assert answer.admitted - answer.arrived <= bound
                if answer.code == "drain_timeout":
                    assert answer.ended - answer.admitted >= 5.0
            assert rig.world.violations == []
            await asyncio.sleep(100)
            check_at_rest(rig)

    run_virtual(main())
