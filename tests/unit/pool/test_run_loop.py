"""The run loop without an event loop: every event is a method call, every consequence a recorded effect."""

from math import inf

import pytest

from fakes.effects import FakeEffects, ManualClock
from fakes.fake_member import FakeMember, World
from fakes.pool_rig import spec
from hotrack.core.errors import InsufficientMemoryError, SleepError, WakeError
from hotrack.core.lifecycle import MemberState
from hotrack.pool.capacity import OneAtATime
from hotrack.pool.policy import PoolPolicy
from hotrack.pool.request import Request, RequestState
from hotrack.pool.run_loop import Command, RunLoop
from hotrack.pool.transitions import Outcome

S = MemberState


class Bench:
    """Members 'a' (ready) and others asleep, on a manual clock."""

    def __init__(self, policy: PoolPolicy | None = None, names: str = "ab", **spec_changes: object) -> None:
        world = World()
        self.clock, self.effects = ManualClock(), FakeEffects()
        self.policy = policy or PoolPolicy(min_residency_s=0.0)
        members = [FakeMember(spec(name, **spec_changes), world) for name in names]
        self.loop = RunLoop(members, self.policy, OneAtATime(), self.clock, self.effects)
        for name in names:
            for state in (S.STARTING, S.VERIFYING, S.SUSPENDING, S.ASLEEP):
                self.loop.moved(name, state)
        self.request("a", "warm-up")
        self.finish()
        self.loop.on_served(self.last)
        self.calls.clear()

    @property
    def calls(self) -> list[tuple[str, str]]:
        return self.effects.calls

    def request(self, member: str, request_id: str, **values: float) -> Request:
        deadline = values.pop("deadline", inf)
        self.last = Request(
            member,
            request_id=request_id,
            arrived=self.clock.now(),
            deadline=deadline,
            priority=int(values.get("priority", 0)),
        )
        self.loop.on_request(self.last)
        return self.last

    def finish(self, error: Exception | None = None) -> None:
        """The running switch succeeds, or its wake is rolled back."""
        switch, self.effects.switch = self.effects.switch, None
        assert switch is not None
        for victim in switch.victims:
            self.loop.moved(victim, S.SUSPENDING)
            self.loop.moved(victim, S.ASLEEP)
        if switch.target:
            self.loop.moved(switch.target, S.WAKING)
            self.loop.moved(switch.target, S.ASLEEP if error else S.VERIFYING)
        self.loop.on_switch_done(Outcome(error))  # type: ignore[arg-type]

    def advance(self, seconds: float) -> None:
        self.clock.time += seconds
        if self.clock.time >= self.effects.timer:
            self.loop.on_timer()


def test_a_ready_member_grants_at_once_and_sets_no_timer() -> None:
    bench = Bench()
    request = bench.request("a", "1")
    assert bench.calls == [("grant", "1")]
    assert request.state is RequestState.GRANTED
    bench.loop.on_served(request)
    bench.loop.on_served(request)  # twice is harmless
    assert bench.loop.status()[0].num_in_flight == 0


def test_a_busy_victim_drains_then_the_switch_runs() -> None:
    bench = Bench(PoolPolicy(min_residency_s=0.0, max_wait_s=4.0))
    busy = bench.request("a", "1")
    bench.request("b", "2")
    assert bench.calls == [("grant", "1")]
    bench.advance(4.0)
    assert bench.loop.state("a") is S.DRAINING
    bench.request("a", "3")  # queues: the switch is due
    assert bench.calls == [("grant", "1")]
    bench.loop.on_served(busy)
    assert bench.calls[-1] == ("run", "a>b")
    bench.finish()
    assert bench.calls[-1] == ("grant", "2")


def test_the_quantum_ends_a_turn_only_when_somebody_else_waits() -> None:
    policy = PoolPolicy(min_residency_s=0.0, max_batch_requests=3, max_wait_s=1e3, max_residency_s=1e3)
    bench = Bench(policy)
    running = [bench.request("a", str(i)) for i in range(5)]  # quiet: no limit
    assert len(bench.calls) == 5
    bench.request("b", "b")
    assert bench.loop.state("a") is S.DRAINING
    for request in running:
        bench.loop.on_served(request)
    assert bench.calls[-1] == ("run", "a>b")


def test_a_batch_longer_than_the_quantum_is_served_in_turns() -> None:
    policy = PoolPolicy(min_residency_s=0.0, max_batch_requests=2, max_wait_s=1e3, max_residency_s=1e3)
    bench = Bench(policy)
    first = bench.request("a", "1")  # with the warm-up, the last of its turn
    waiting = [bench.request("b", str(i)) for i in (2, 3, 4)]
    bench.request("a", "5")
    assert bench.loop.state("a") is S.DRAINING
    bench.loop.on_served(first)
    bench.finish()
    assert bench.calls[-3:] == [("run", "a>b"), ("grant", "2"), ("grant", "3")]  # "5" waits, so "4" does too
    for request in waiting[:2]:
        bench.loop.on_served(request)
    bench.finish()
    assert bench.calls[-2:] == [("run", "b>a"), ("grant", "5")]


def test_a_better_priority_is_due_at_once_a_worse_one_waits() -> None:
    bench = Bench(PoolPolicy(min_residency_s=0.0, max_wait_s=1e3, max_residency_s=1e3))
    bench.request("a", "1")
    bench.request("b", "worse", priority=5)
    assert bench.loop.state("a") is S.READY
    bench.request("b", "better", priority=-1)
    assert bench.loop.state("a") is S.DRAINING


def test_old_requests_overtake_better_ones() -> None:
    bench = Bench(PoolPolicy(ageing_s=10.0, max_wait_s=1e3, min_residency_s=1e2, max_residency_s=1e3))
    bench.request("b", "old", priority=2)
    bench.advance(5.0)
    bench.request("b", "new", priority=0)
    bench.advance(20.0)
    bench.request("b", "newest", priority=0)
    bench.advance(100.0)
    bench.finish()
    assert [rid for kind, rid in bench.calls if kind == "grant"] == ["new", "old", "newest"]


def test_drain_deadline_abandons_then_aborts() -> None:
    bench = Bench(PoolPolicy(min_residency_s=0.0, max_wait_s=1.0, abort_grace_s=0.5))
    stuck = bench.request("a", "stuck")
    bench.request("b", "2")
    bench.advance(1.0)
    bench.advance(5.0)
    assert bench.calls[-1] == ("abandon", "stuck")
    bench.advance(0.5)
    assert bench.calls[-1] == ("run", "a>b")
    assert bench.effects.aborted
    bench.finish()
    bench.loop.on_served(stuck)  # its holder was slow: counted once, not twice
    assert [row.num_in_flight for row in bench.loop.status()] == [0, 1]


def test_max_in_flight_queues_the_rest_in_order() -> None:
    bench = Bench(max_in_flight=1)
    first = bench.request("a", "1")
    bench.request("a", "2")
    bench.request("a", "3")
    assert bench.calls == [("grant", "1")]
    bench.loop.on_served(first)
    assert bench.calls == [("grant", "1"), ("grant", "2")]


def test_a_queued_request_ends_at_its_deadline() -> None:
    bench = Bench(PoolPolicy(min_residency_s=0.0, max_wait_s=1e3, max_residency_s=1e3))
    bench.request("a", "busy")
    bench.request("b", "late", deadline=bench.clock.now() + 7.0)
    assert bench.effects.timer <= bench.clock.now() + 7.0
    bench.advance(7.0)
    assert bench.calls[-1][0] in ("deadline_exceeded", "run") or bench.loop.state("a") is S.DRAINING
    bench.advance(7.0)
    assert ("deadline_exceeded", "late") in bench.calls


def test_a_deadline_that_cannot_be_met_is_refused_at_the_door() -> None:
    bench = Bench()
    bench.request("b", "hopeless", deadline=bench.clock.now() + 0.01)
    assert bench.calls == [("deadline_exceeded", "hopeless")]


def test_a_draining_member_is_expected_back_after_a_wake_not_a_cold_start() -> None:
    bench = Bench(PoolPolicy(min_residency_s=0.0, max_wait_s=0.0))
    bench.request("a", "busy")
    bench.request("b", "1")
    assert bench.loop.state("a") is S.DRAINING
    assert bench.request("a", "2", deadline=bench.clock.now() + 20.0).state is RequestState.WAITING


def test_failed_wake_refuses_waiters_and_restores_the_holder() -> None:
    bench = Bench()
    bench.request("b", "1")
    bench.finish(WakeError("out of memory"))
    assert bench.calls[-2:] == [("wake_failed", "1"), ("run", ">a")]
    bench.finish()
    bench.request("b", "2", deadline=bench.clock.now() + bench.policy.backoff_s / 2)
    assert bench.calls[-1] == ("wake_failed", "2")  # the next attempt comes too late for it
    bench.request("b", "3")
    assert bench.calls[-1] == ("wake_failed", "2")  # backing off; this one can wait
    bench.advance(bench.policy.backoff_s)
    assert bench.calls[-1] == ("run", "a>b")
    bench.finish()
    assert bench.calls[-1] == ("grant", "3")


def test_waiters_of_a_member_in_back_off_do_not_hold_up_the_others() -> None:
    bench = Bench(PoolPolicy(min_residency_s=0.0, max_batch_requests=2, backoff_s=60.0))
    bench.request("b", "1")
    bench.finish(WakeError("out of memory"))
    bench.finish()  # 'a' is restored
    bench.request("b", "waits")
    for number in range(5):
        held = bench.request("a", f"a{number}")
        assert bench.calls[-1] == ("grant", f"a{number}")
        bench.loop.on_served(held)
    bench.advance(60.0)
    assert bench.calls[-1] == ("run", "a>b")


def test_failed_sleep_leaves_the_target_waiting_until_memory_is_back() -> None:
    bench = Bench()
    bench.request("b", "1")
    bench.effects.switch = None
    bench.loop.moved("a", S.SUSPENDING)
    bench.loop.failed("a", SleepError("kept 60 GiB"), holds=True)
    bench.loop.on_switch_done(Outcome(SleepError("kept 60 GiB"), victim_failed=True))
    assert bench.calls[-1] == ("insufficient_memory", "1")


def test_idle_ttl_puts_a_member_to_sleep() -> None:
    bench = Bench(ttl_s=30.0)
    request = bench.request("a", "1")
    bench.advance(29.0)
    bench.loop.on_served(request)
    bench.advance(2.0)
    assert bench.loop.state("a") is S.READY  # used 2 s ago
    for _ in range(60):
        if bench.effects.switch is None:
            bench.advance(1.0)
    assert bench.calls[-1] == ("run", "a>")
    assert bench.clock.now() == pytest.approx(100.0 + 29.0 + 30.0, abs=1.0)


def test_three_failures_in_a_row_quarantine_and_a_pardon_lifts_it() -> None:
    bench = Bench()
    for _ in range(3):
        bench.loop.on_exit("a", "exit code 1")
        bench.advance(bench.policy.max_backoff_s)
        if bench.effects.switch is not None:
            switch, bench.effects.switch = bench.effects.switch, None
            assert switch.target == "a"
            bench.loop.moved("a", S.STARTING)
            bench.loop.moved("a", S.VERIFYING)
            bench.loop.failed("a", WakeError("again"), holds=False)
            bench.loop.on_switch_done(Outcome(WakeError("again")))
    assert bench.loop.state("a") is S.QUARANTINED
    bench.request("a", "1")
    assert bench.calls[-1] == ("member_failed", "1")
    bench.loop.on_pardon("a")
    bench.request("a", "2")
    assert bench.calls[-1] == ("run", ">a")


@pytest.mark.parametrize("wrapped", [False, True])
def test_a_full_device_backs_off_and_brings_nobody_nearer_to_quarantine(wrapped: bool) -> None:
    bench = Bench()
    for number in range(bench.policy.max_failures):
        bench.request("b", str(number))
        full = InsufficientMemoryError("a stranger holds 90 GiB")
        error = WakeError("b did not wake") if wrapped else full
        error.__cause__ = full if wrapped else None
        bench.finish(error)
        bench.finish()  # 'a' is restored
        retry_in_s = bench.loop.status()[1].retry_in_s
        assert retry_in_s == pytest.approx(bench.policy.backoff_s * 2**number)
        assert retry_in_s is not None
        bench.advance(retry_in_s)
    bench.loop.on_exit("b", "exit code 1")
    assert bench.loop.state("b") is S.FAILED  # its first failure of its own


def test_operator_sleep_waits_for_its_turn_and_reports() -> None:
    bench = Bench()
    done: list[object] = []
    request = bench.request("a", "1")
    bench.loop.on_command(Command("sleep", "a", done.append))
    assert done == []
    bench.loop.on_served(request)
    bench.finish()
    assert done == [None]
    assert bench.loop.state("a") is S.ASLEEP
    bench.loop.on_command(Command("sleep", "a", done.append))
    assert done == [None, None]


def test_closing_refuses_everybody() -> None:
    bench = Bench()
    bench.request("b", "1")
    bench.loop.on_close()
    bench.request("a", "2")
    assert bench.calls[-2:] == [("draining", "1"), ("draining", "2")]
    assert bench.effects.timer == inf
