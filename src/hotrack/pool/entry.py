"""Everything the run loop knows about one member. Only the run loop writes to it."""

from bisect import insort
from collections import deque
from math import inf
from statistics import median

from hotrack.core.errors import HotrackError, InsufficientMemoryError
from hotrack.core.lifecycle import MemberState, check_member_move
from hotrack.members.member import Member
from hotrack.pool.events import SwapRecord
from hotrack.pool.policy import PoolPolicy
from hotrack.pool.request import Request, RequestState
from hotrack.pool.scheduler import DOWN_STATES, MemberView
from hotrack.pool.status import MemberStatus

GUESS_S = {"wake": 2.0, "sleep": 1.0, "start": 30.0}  # until measured
HISTORY = 9
FAILED_STATES = frozenset({MemberState.FAILED, MemberState.QUARANTINED})
COLD = DOWN_STATES | {MemberState.STARTING}


class Entry:
    __slots__ = (
        "awake_bytes",
        "early",
        "first_swap",
        "holds",
        "last_error",
        "last_failed_swap",
        "last_used",
        "leases",
        "member",
        "memory_bytes",
        "missed_probes",
        "num_cycles",
        "num_failures",
        "num_postponed",
        "queue",
        "ready_since",
        "residue_bytes",
        "retry_at",
        "served",
        "spec",
        "state",
        "times",
    )

    def __init__(self, member: Member) -> None:
        self.member = member
        self.spec = member.spec
        # A process of ours does not run before we start it; an external engine may be in any state.
        self.state = MemberState.STOPPED if member.spec.command else MemberState.UNKNOWN
        self.holds = self.state is MemberState.UNKNOWN
        self.queue: list[Request] = []  # by Request.order
        self.leases: set[Request] = set()
        self.early = False  # takes requests although it is still being verified
        self.first_swap: SwapRecord | None = None  # to hand to the next admitted request
        self.ready_since = -inf
        self.last_used = -inf
        self.served = 0
        self.num_cycles = 0
        self.num_failures = 0  # consecutive, its own
        self.num_postponed = 0  # consecutive attempts that found the device full
        self.retry_at = -inf
        self.last_error = ""
        self.last_failed_swap = 0  # SwapRecord.number
        self.missed_probes = 0
        self.memory_bytes: int | None = None
        self.awake_bytes: int | None = None
        self.residue_bytes: int | None = None
        self.times: dict[str, deque[float]] = {kind: deque(maxlen=HISTORY) for kind in GUESS_S}

    @property
    def name(self) -> str:
        return self.spec.name

    @property
    def has_room(self) -> bool:
        return self.spec.max_in_flight is None or len(self.leases) < self.spec.max_in_flight

    def move(self, new: MemberState) -> MemberState:
        """Change state along the table and return the old one."""
        check_member_move(self.name, self.state, new)
        old, self.state = self.state, new
        return old

    def enqueue(self, request: Request, policy: PoolPolicy) -> None:
        """Waiting ``ageing_s`` is worth one priority step. All requests age at one rate, so the order of two
        never changes and the key is computed once."""
        request.priority += self.spec.priority
        request.order = request.priority + request.arrived / policy.ageing_s
        insort(self.queue, request, key=lambda r: r.order)

    def strike(self, error: HotrackError, now: float, policy: PoolPolicy) -> None:
        """One more failure in a row: no new attempt before the back-off has passed. A device that others
        fill is no failure of its own, and must not bring it nearer to quarantine."""
        if isinstance(error, InsufficientMemoryError) or isinstance(error.__cause__, InsufficientMemoryError):
            self.num_postponed += 1
        else:
            self.num_failures += 1
        self.last_error = error.message
        self.retry_at = now + policy.backoff_after(self.num_failures + self.num_postponed)

    def new_process_next(self, policy: PoolPolicy) -> bool:
        """After one more failure: the process that failed so often gets one successor, then quarantine."""
        return self.num_failures + 1 >= max(1, policy.max_failures - 1)

    @property
    def remains(self) -> bool:
        """A failed process of ours that may still hold memory."""
        return self.holds and bool(self.spec.command) and self.state in FAILED_STATES

    def typical_s(self, kind: str) -> float:
        return median(self.times[kind]) if self.times[kind] else GUESS_S[kind]

    def measured_s(self, kind: str) -> float | None:
        return median(self.times[kind]) if self.times[kind] else None

    @property
    def swap_in_s(self) -> float:
        """Expected seconds until ready, for a member that is down or will be asleep by then."""
        cold = self.state in COLD or self.spec.sleep_level is None
        return self.typical_s("start" if cold else "wake")

    def expected_s(self, now: float) -> float:
        """Seconds until it could be ready, once others have left the device."""
        return max(0.0, self.retry_at - now) + (0.0 if self.state is MemberState.READY else self.swap_in_s)

    def end_leases(self) -> None:
        for lease in self.leases:
            lease.state = RequestState.ENDED
        self.leases.clear()

    def view(self) -> MemberView:
        queue = self.queue
        return MemberView(
            name=self.name,
            state=self.state,
            num_waiting=len(queue),
            oldest=min((r.arrived for r in queue), default=inf),
            deadline=min((r.deadline for r in queue), default=inf),
            waiting_priority=min((r.priority for r in queue), default=inf),
            running_priority=min((r.priority for r in self.leases), default=inf),
            request_id=queue[0].request_id if queue else "",
            by_operator=bool(queue) and all(r.by_operator for r in queue),
            num_in_flight=len(self.leases),
            served=self.served,
            ready_since=self.ready_since,
            last_used=self.last_used,
            retry_at=self.retry_at,
            pinned=self.spec.pinned,
            ttl_s=self.spec.ttl_s,
            holds=self.holds,
            stoppable=bool(self.spec.command),
            swap_s=self.swap_in_s,
            sleep_s=self.typical_s("sleep"),
            drain_s=self.spec.deadlines.drain_s,
        )

    def status(self, now: float) -> MemberStatus:
        idle = self.state is MemberState.READY and not self.leases and not self.queue
        return MemberStatus(
            name=self.name,
            aliases=self.spec.aliases,
            state=self.state,
            device_group=self.spec.device_group,
            device=self.spec.device or "host",
            endpoint=str(self.member.endpoint),
            pid=self.member.pid,
            memory_bytes=self.memory_bytes,
            awake_bytes=self.awake_bytes,
            residue_bytes=self.residue_bytes,
            num_waiting=len(self.queue),
            num_in_flight=len(self.leases),
            num_cycles=self.num_cycles,
            wake_s=self.measured_s("wake"),
            sleep_s=self.measured_s("sleep"),
            start_s=self.measured_s("start"),
            idle_s=now - self.last_used if idle else 0.0,
            ttl_s=self.spec.ttl_s,
            last_error=self.last_error,
            retry_in_s=self.retry_at - now if self.retry_at > now else None,
        )
