"""SwapScheduler: from an immutable picture of one device group and the time, what to do next. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import inf

from hotrack.core.lifecycle import MemberState
from hotrack.plan.ledger import Verdict
from hotrack.pool.capacity import Capacity
from hotrack.pool.events import Cause
from hotrack.pool.eviction import Holder, choose_victims
from hotrack.pool.policy import PoolPolicy

DOWN_STATES = frozenset({MemberState.STOPPED, MemberState.FAILED, MemberState.QUARANTINED})
SAFETY = 1.5  # on expected times, when a deadline depends on them
ASLEEP_STATES = frozenset({MemberState.ASLEEP, MemberState.STOPPED, MemberState.FAILED})


@dataclass(frozen=True, slots=True)
class MemberView:
    """One member at one instant; times are pool-clock seconds.

    ``oldest``: arrival of the request that waits longest; ``deadline``: earliest deadline given by a client
    among those waiting; ``waiting_priority`` / ``running_priority``: best (lowest) of each, inf when there
    is none.
    ``by_operator``: nobody but an operator waits.
    ``served``: requests admitted since ``ready_since``. ``retry_at``: not to be tried before. ``holds``: its
    process may hold memory although it is not awake (a failed sleeper). ``stoppable``: its process is ours to
    end. ``sleep_s``: expected seconds to put
    it to sleep; ``drain_s``: most that its drain may take; ``swap_s``: expected seconds to swap
    it in.
    """

    name: str
    state: MemberState
    num_waiting: int = 0
    oldest: float = inf
    deadline: float = inf
    waiting_priority: float = inf
    running_priority: float = inf
    request_id: str = ""
    by_operator: bool = False
    num_in_flight: int = 0
    served: int = 0
    ready_since: float = 0.0
    last_used: float = 0.0
    retry_at: float = 0.0
    pinned: bool = False
    ttl_s: float = 0.0
    holds: bool = False
    stoppable: bool = False
    swap_s: float = 1.0
    sleep_s: float = 0.0
    drain_s: float = 0.0

    @property
    def idle(self) -> bool:
        return not self.num_in_flight and not self.num_waiting

    @property
    def absent(self) -> bool:
        """No process, so not even a residue."""
        return self.state in DOWN_STATES and not self.holds

    @property
    def stuck(self) -> bool:
        """Memory that cannot be counted on to come back."""
        return self.holds and self.state in (MemberState.FAILED, MemberState.QUARANTINED, MemberState.UNKNOWN)

    @property
    def priority(self) -> float:
        return min(self.waiting_priority, self.running_priority)


@dataclass(frozen=True, slots=True)
class GroupView:
    members: Sequence[MemberView]
    capacity: Capacity


@dataclass(frozen=True, slots=True)
class Switch:
    """Victims drain and sleep, then ``target`` (if any) is started or woken. ``then_sleep``: put the target
    back to sleep once verified. ``stop``: victims end as processes instead of sleeping. ``cold``: those of
    the victims, awake or asleep already, that end as processes because even asleep they hold too much."""

    cause: Cause
    target: str | None = None
    victims: tuple[str, ...] = ()
    request_id: str = ""
    then_sleep: bool = False
    stop: bool = False
    cold: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Room:
    """Who gives memory back for a target; see ``Switch.cold``."""

    victims: tuple[str, ...]
    cold: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Refuse:
    """``target`` can never be awake as things are: its waiters must be told, with the arithmetic."""

    target: str
    verdict: Verdict


@dataclass(frozen=True, slots=True)
class Wait:
    """Nothing to do before ``until`` (inf: before the next event)."""

    until: float = inf


Decision = Switch | Refuse | Wait


@dataclass(frozen=True, slots=True)
class SwapScheduler:
    policy: PoolPolicy = field(default_factory=PoolPolicy)

    def decide(self, view: GroupView, now: float) -> Decision:
        """The next step of a group in which no transition runs."""
        wait_until = inf
        for target in self._waiting(view, now):
            if target.retry_at > now:
                wait_until = min(wait_until, target.retry_at)
                continue
            room = self.room(view, target.name)
            if room is None:
                return Refuse(target.name, self.verdict_alone(view, target.name))
            awake = [m for m in view.members if m.name in room.victims and m.state is MemberState.READY]
            due_at, cause = self._due(target, awake, now)
            if due_at <= now:
                cause = Cause.OPERATOR if target.by_operator else cause
                return Switch(cause, target.name, room.victims, target.request_id, cold=room.cold)
            wait_until = min(wait_until, due_at)
        return self._housekeeping(view, now, wait_until)

    def victims(self, view: GroupView, target: str) -> tuple[str, ...] | None:
        """Who must sleep so that ``target`` fits; None when not even everybody's sleep is enough."""
        awake = {m.name for m in view.members if m.state is MemberState.READY}
        stuck = {m.name for m in view.members if m.stuck}
        absent = {m.name for m in view.members if m.absent}
        holders = [
            Holder(m.name, m.idle, m.last_used, m.pinned)
            for m in view.members
            if m.name in awake and m.name != target
        ]

        def fits_without(victims: frozenset[str]) -> bool:
            up = (awake - victims) | stuck | {target}
            return view.capacity.fits(up, absent=absent - {target}).fits

        return choose_victims(holders, fits_without)

    def room(self, view: GroupView, target: str) -> Room | None:
        """Like ``victims``, but where sleepers' residues break the sum, some of those end as processes."""
        victims = self.victims(view, target)
        if victims is not None:
            return Room(victims)
        candidates = [
            Holder(m.name, m.state is MemberState.ASLEEP, m.last_used)  # sleepers before awake ones
            for m in view.members
            if m.name != target and _may_stop(m)
        ]
        beside, absent = _beside(view, target)
        cold = choose_victims(
            candidates, lambda stopped: view.capacity.fits(beside, absent=absent | stopped).fits
        )
        if cold is None:
            return None
        others = [
            Holder(m.name, m.idle, m.last_used)
            for m in view.members
            if m.state is MemberState.READY and not m.pinned and m.name not in (target, *cold)
        ]
        names = frozenset(holder.name for holder in others)
        asleep_too = choose_victims(
            others,
            lambda gone: view.capacity.fits(beside | (names - gone), absent=absent | set(cold)).fits,
        )
        return Room((*cold, *(asleep_too or ())), frozenset(cold))

    def verdict_alone(self, view: GroupView, target: str) -> Verdict:
        """The sum that refuses ``target``: beside it only members that can neither sleep nor end."""
        beside, absent = _beside(view, target)
        stoppable = {m.name for m in view.members if m.name != target and _may_stop(m)}
        return view.capacity.fits(beside, absent=absent | stoppable)

    def _waiting(self, view: GroupView, now: float) -> list[MemberView]:
        """Candidates, most urgent first: overdue ones by age, then by priority, then by most waiting work
        per second of swap, then by age."""

        def urgency(m: MemberView) -> tuple[float, ...]:
            if now - m.oldest >= self.policy.max_wait_s:
                return (0, m.oldest)
            return (1, m.waiting_priority, -m.num_waiting / max(m.swap_s, 1e-3), m.oldest)

        return sorted((m for m in view.members if m.num_waiting and m.state in ASLEEP_STATES), key=urgency)

    def _due(self, target: MemberView, victims: Sequence[MemberView], now: float) -> tuple[float, Cause]:
        """When the switch must begin, and why. Nothing to evict: now."""
        if not victims:
            return now, Cause.REQUEST
        due_at, cause = target.oldest + self.policy.max_wait_s, Cause.MAX_WAIT
        if target.waiting_priority < min(v.priority for v in victims):
            due_at, cause = now, Cause.PRIORITY
        turn_over = max(self._turn_ends(v) for v in victims)
        if turn_over < due_at:
            idle = all(v.idle for v in victims)
            due_at, cause = turn_over, Cause.REQUEST if idle else Cause.QUANTUM
        held_until = max(v.ready_since + self.policy.min_residency_s for v in victims)
        due_at = max(due_at, held_until)
        swap_s = SAFETY * (target.swap_s + sum(v.sleep_s for v in victims))
        swap_s += max(0.0 if v.idle else v.drain_s for v in victims)
        latest = target.deadline - swap_s
        if latest < due_at and target.deadline < due_at + swap_s:
            due_at, cause = max(latest, now), Cause.DEADLINE
        return due_at, cause

    def _turn_ends(self, member: MemberView) -> float:
        if member.idle or member.served >= self.policy.max_batch_requests:
            return -inf
        return member.ready_since + self.policy.max_residency_s

    def _housekeeping(self, view: GroupView, now: float, wait_until: float) -> Decision:
        """Idle members sleep after their ttl; failed ones restart where that disturbs nobody."""
        for m in view.members:
            if m.state is MemberState.READY and m.ttl_s > 0 and not m.pinned:
                idle_since = m.last_used if m.idle else now  # a request that ends sets no timer: look again
                if idle_since + m.ttl_s <= now:
                    return Switch(Cause.IDLE, victims=(m.name,))
                wait_until = min(wait_until, idle_since + m.ttl_s)
            if m.state is MemberState.FAILED and self.victims(view, m.name) == ():
                if m.retry_at <= now:
                    return Switch(Cause.RESTART, m.name, then_sleep=not m.num_waiting)
                wait_until = min(wait_until, m.retry_at)
        return Wait(wait_until)


def _may_stop(m: MemberView) -> bool:
    """A sleeper, or an awake member that may be evicted, whose process is ours."""
    return m.stoppable and (m.state is MemberState.ASLEEP or (m.state is MemberState.READY and not m.pinned))


def _beside(view: GroupView, target: str) -> tuple[set[str], set[str]]:
    """Who is awake with ``target`` in any case (it included), and who holds nothing."""
    stays = {m.name for m in view.members if m.stuck or (m.pinned and m.state is MemberState.READY)}
    absent = {m.name for m in view.members if m.absent}
    return stays | {target}, absent - {target}
