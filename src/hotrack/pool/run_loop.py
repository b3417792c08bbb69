"""The run loop: one owner of everything that changes in a device group.

Events come in as plain method calls (``on_*``), are decided at once, and leave as calls on ``Effects``. No
method awaits, so no two ever interleave; nothing here knows asyncio. Rules:

* Every request is granted, refused, cancelled or waits in a queue with a deadline; none is dropped.
* One switch at a time: its victims drain (their new requests queue), then one transition task runs.
* The path of a request for a ready member in a quiet group is a few attribute reads.
"""

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from math import inf

from hotrack.core.clock import Clock
from hotrack.core.errors import (
    DrainingError,
    HotrackError,
    InsufficientMemoryError,
    MemberFailedError,
    WakeFailedError,
)
from hotrack.core.lifecycle import MemberState
from hotrack.members.member import Member
from hotrack.obs.log import get_logger
from hotrack.plan.ledger import Verdict
from hotrack.pool.capacity import Capacity
from hotrack.pool.command import Command, switch_for
from hotrack.pool.door import blame, quarantined, too_late, unfit, why_not_queue
from hotrack.pool.effects import Effects
from hotrack.pool.entry import Entry
from hotrack.pool.events import (
    FOR_WAITERS,
    CanaryRan,
    Cause,
    FirstByte,
    MemoryMeasured,
    RequestAdmitted,
    RequestRefused,
    RequestsCut,
    StateChanged,
    SwapDone,
    SwapRecord,
)
from hotrack.pool.memory_book import MemoryBook
from hotrack.pool.policy import PoolPolicy
from hotrack.pool.request import Request, RequestState
from hotrack.pool.scheduler import DOWN_STATES, GroupView, Refuse, SwapScheduler, Switch, Wait
from hotrack.pool.status import MemberStatus
from hotrack.pool.transitions import Outcome

log = get_logger(__name__)
_S = MemberState
MAX_MISSED_PROBES = 3
CLOSING = "the pool is shutting down"
WORKING = frozenset({_S.READY, _S.DRAINING, _S.ASLEEP})


class RunLoop:
    def __init__(
        self,
        members: Sequence[Member],
        policy: PoolPolicy,
        capacity: Capacity,
        clock: Clock,
        effects: Effects,
    ) -> None:
        self._entries = {member.spec.name: Entry(member) for member in members}
        self._policy = policy
        self._memory = MemoryBook(self._entries, capacity)
        self._clock = clock
        self._effects = effects
        self._scheduler = SwapScheduler(policy)
        self._commands: deque[Command] = deque()
        self._switch: Switch | None = None  # draining, or running
        self._command: Command | None = None  # the one the switch is for
        self._record: SwapRecord | None = None
        self._running = self._closing = False
        self._switch_since = 0.0
        self._drain_until = inf
        self._cut_at = inf
        self._restore: str | None = None
        self._told: list[str] = []  # reasons of moves since the last switch began
        self._contended = False  # somebody waits or moves: no fast path
        self.num_swaps = 0

    @property
    def capacity(self) -> Capacity:
        """With all that was measured so far."""
        return self._memory.capacity

    # --- requests

    def on_request(self, request: Request) -> None:
        """Grant, refuse or queue it before returning."""
        entry = self._entries[request.member]
        if not self._contended and entry.state is _S.READY and entry.has_room:
            self._admit(entry, request)
            return
        now, wait_s = self._clock.now(), self.estimate_s(entry.name)
        error: HotrackError | None = DrainingError(CLOSING) if self._closing else None
        error = error or why_not_queue(entry, request, now=now, wait_s=wait_s, policy=self._policy)
        if error is not None:
            self._refuse(request, error)
            return
        request.state = RequestState.WAITING
        entry.enqueue(request, self._policy)
        self._settle()

    def on_served(self, request: Request) -> None:
        """The holder is done with its lease. Harmless when the lease was already cut."""
        if request.state is not RequestState.GRANTED:
            return
        request.state = RequestState.ENDED
        entry = self._entries[request.member]
        entry.leases.discard(request)
        entry.last_used = self._clock.now()
        if self._contended or entry.queue:
            self._settle()

    def on_cancel(self, request: Request) -> None:
        """The client went away while its request was entering."""
        if request.state is RequestState.GRANTED:
            self.on_served(request)
        elif request.state is RequestState.WAITING:
            request.state = RequestState.ENDED
            self._entries[request.member].queue.remove(request)
            self._settle()

    def on_first_byte(self, request: Request) -> None:
        swap = request.swap
        if swap is not None and swap.first_token_ms is None:
            now = self._clock.now()
            swap.first_token_ms = (now - self._entries[request.member].ready_since) * 1e3
            self._effects.publish(FirstByte(now, swap))

    def estimate_s(self, member: str) -> float:
        """Seconds until ``member`` can admit a request, from measured times."""
        entry, now = self._entries[member], self._clock.now()
        if entry.state is _S.READY and not self._contended:
            return 0.0
        if self._switch is not None and self._switch.target == member:
            return max(0.0, entry.expected_s(now) - (now - self._switch_since))
        awake = [e for e in self._entries.values() if e.state is _S.READY and e is not entry]
        return entry.expected_s(now) + sum(e.typical_s("sleep") for e in awake)

    # --- operator

    def on_command(self, command: Command) -> None:
        self._commands.append(command)
        self._settle()

    def on_pardon(self, name: str) -> None:
        """An operator wants a failed or quarantined member tried again, now."""
        entry = self._entries[name]
        entry.num_failures, entry.num_postponed, entry.retry_at, holds = 0, 0, -inf, entry.holds
        if entry.state is _S.QUARANTINED:
            self.moved(name, _S.STOPPED, "pardoned by the operator")
            entry.holds = holds  # a pardon frees no memory

    def on_close(self) -> None:
        """Refuse everybody who waits; the caller then ends tasks and processes."""
        self._closing = self._contended = True  # no fast path any more
        for entry in self._entries.values():
            self._refuse_waiters(entry, lambda: DrainingError(CLOSING))
            self.close_early(entry.name)
        commands, self._commands = [*self._commands], deque()
        for command in (*commands, *([self._command] if self._command else [])):
            command.done(DrainingError(CLOSING))
        self._command = None
        self._effects.set_timer(inf)

    # --- the world

    def on_timer(self) -> None:
        self._settle()

    def on_exit(self, name: str, reason: str) -> None:
        """A process ended by itself. A transition that works on it notices by itself."""
        entry = self._entries[name]
        if self._closing or entry.state not in WORKING:
            return
        self.failed(name, MemberFailedError(f"{name} ended unexpectedly: {reason}"), holds=False)
        self._settle()

    def on_probe(self, name: str, *, healthy: bool, memory_bytes: int | None) -> None:
        """Result of the periodic look. A member that misses several in a row failed, and its process is
        ended: it may be alive and hold memory."""
        entry = self._entries[name]
        entry.memory_bytes = memory_bytes if memory_bytes is not None else entry.memory_bytes
        entry.missed_probes = 0 if healthy else entry.missed_probes + 1
        if entry.missed_probes >= MAX_MISSED_PROBES and not self._closing and entry.state in WORKING:
            entry.missed_probes = 0
            self._give_up(entry, MemberFailedError(f"{name} no longer answers its health check"))

    def on_device_used(self, num_bytes: int, num_swaps: int) -> None:
        """All that is held on the device, read since swap ``num_swaps``: void if somebody moved."""
        if not self._running and num_swaps == self.num_swaps:
            self._memory.used(num_bytes)

    def on_engine_dead(self, request: Request, reason: str) -> None:
        """A member answered that its engine is gone: its process follows at once, without waiting for a
        probe."""
        entry = self._entries[request.member]
        stale = request.state is not RequestState.GRANTED  # of an earlier process
        if not (stale or self._closing) and entry.state in (_S.READY, _S.DRAINING):
            self._give_up(entry, MemberFailedError(f"{entry.name}: {reason}"))

    def _give_up(self, entry: Entry, error: MemberFailedError) -> None:
        """It failed, and its process must end: it may be alive and hold memory."""
        self.failed(entry.name, error, holds=True)
        if entry.spec.command:
            self._commands.append(Command("kill", entry.name))
        self._settle()

    def on_switch_done(self, outcome: Outcome) -> None:
        """The transition task ended."""
        switch, record = self._switch, self._record
        assert switch is not None
        assert record is not None
        self._switch = self._record = None
        self._running = False
        error = outcome.error
        if error is not None:
            record.result, record.error = error.code, error.message
            why = error.code if any(error.message in reason for reason in self._told) else error.message
            log.warning("swap %d to %s failed: %s", record.number, switch.target or "nobody", why)
        if switch.target is not None and not outcome.victim_failed:
            self._target_done(self._entries[switch.target], switch, record, error)
        self._effects.publish(SwapDone(self._clock.now(), record))
        command, self._command = self._command, None
        if command is not None:
            command.done(error)
        self._settle()

    def _target_done(
        self, entry: Entry, switch: Switch, record: SwapRecord, error: HotrackError | None
    ) -> None:
        now = self._clock.now()
        if error is None:
            if entry.last_failed_swap != record.number:
                entry.num_failures = 0
            entry.num_postponed, entry.retry_at, entry.last_error = 0, -inf, ""
            if entry.state is _S.VERIFYING:
                self.moved(entry.name, _S.READY)
                entry.ready_since = entry.last_used = now
                entry.served = len(entry.leases)
                entry.first_swap = None if entry.leases else record
            return
        if entry.state is _S.ASLEEP:  # rolled back; a failed one was struck when it failed
            entry.strike(error, now, self._policy)
        wait_s = max(0.0, entry.retry_at - now) + entry.swap_in_s
        full = isinstance(error, InsufficientMemoryError)
        message = error.message + (blame(self._entries.values()) if full else "")
        kind = InsufficientMemoryError if full else WakeFailedError
        self._refuse_waiters(entry, lambda: kind(message, retry_after_s=wait_s))
        asleep = [name for name in switch.victims if self._entries[name].state is _S.ASLEEP]
        self._restore = asleep[0] if asleep and switch.cause in FOR_WAITERS else None

    # --- Sink: a transition reports

    def state(self, name: str) -> MemberState:
        return self._entries[name].state

    def moved(self, name: str, new: MemberState, reason: str = "") -> None:
        entry = self._entries[name]
        old = entry.move(new)
        if new is _S.STARTING or new is _S.WAKING:
            entry.holds = True
            if new is _S.STARTING:
                self._memory.launched(name)
        elif new is _S.STOPPED:
            entry.holds, entry.memory_bytes = False, None
        elif new is _S.ASLEEP and old is _S.SUSPENDING:
            entry.num_cycles += 1
        if old is _S.VERIFYING:
            self.close_early(name, passed=new is _S.READY)
        self._told.append(reason)
        log.info("%s: %s -> %s%s", name, old, new, f" ({reason})" if reason else "")
        self._effects.publish(StateChanged(self._clock.now(), name, old, new, reason))

    def failed(self, name: str, error: HotrackError, *, holds: bool | None, hopeless: bool = False) -> None:
        entry = self._entries[name]
        self.close_early(name)
        entry.end_leases()  # their connections broke with the process
        entry.holds = entry.holds if holds is None else holds
        entry.memory_bytes = entry.memory_bytes if entry.holds else None
        entry.strike(error, self._clock.now(), self._policy)
        entry.last_failed_swap = self._record.number if self._record else 0
        if entry.state not in DOWN_STATES:
            self.moved(name, _S.FAILED, error.message)
        given_up = entry.num_failures >= self._policy.max_failures and entry.spec.url is None
        if entry.state is _S.FAILED and (hopeless or given_up):  # an external engine may come back any time
            reason = "it would fail again" if hopeless else f"{entry.num_failures} failures in a row"
            self.moved(name, _S.QUARANTINED, reason)

    def freed(self, name: str) -> None:
        self._entries[name].holds, self._entries[name].memory_bytes = False, None

    def remains(self) -> list[str]:
        return [entry.name for entry in self._entries.values() if entry.remains]

    def new_process_next(self, name: str) -> bool:
        return self._entries[name].new_process_next(self._policy)

    def measured(self, name: str, kind: str, num_bytes: int | None) -> None:
        if num_bytes is not None:
            self._memory.measured(name, kind, num_bytes)
            self._effects.publish(MemoryMeasured(self._clock.now(), name, kind, num_bytes))

    def seen(self, name: str, num_bytes: int | None) -> None:
        self._entries[name].memory_bytes = num_bytes

    def timed(self, name: str, kind: str, seconds: float) -> None:
        self._entries[name].times[kind].append(seconds)

    def canary(self, name: str, result: str, evidence: str = "") -> None:
        if evidence:
            log.warning("%s: canary %s: %s", name, result, evidence)
        self._effects.publish(CanaryRan(self._clock.now(), name, result, evidence))

    def fits(self, name: str) -> Verdict:
        return self._memory.fits(name)

    def lacking(self, name: str) -> int | None:
        return self._memory.lacking(name)

    def reserves(self) -> list[str]:
        return self._memory.reserves()

    def open_early(self, name: str) -> None:
        entry = self._entries[name]
        entry.early, entry.first_swap = True, self._record
        self._admit_waiters(entry)

    def close_early(self, name: str, *, passed: bool = False) -> None:
        """Whoever was admitted before the member was verified hears how that ended."""
        entry = self._entries[name]
        entry.early = False
        for lease in [lease for lease in entry.leases if lease.provisional]:
            lease.provisional = False
            self._effects.conclude(lease, passed=passed)
            if not passed:
                lease.state = RequestState.ENDED
                entry.leases.discard(lease)

    def status(self) -> list[MemberStatus]:
        now = self._clock.now()
        return [entry.status(now) for entry in self._entries.values()]

    # --- deciding

    def _settle(self) -> None:
        """Do everything that can be done now, then say when to look again."""
        if self._closing:
            return
        now = self._clock.now()
        self._expire(now)
        look_at = inf
        while True:
            for entry in self._entries.values():
                self._admit_waiters(entry)
            if self._running:
                break
            if self._switch is not None:
                look_at = self._drain(self._switch, now)
                if self._switch is not None:
                    break
                continue
            step = self._command_step() or self._scheduler.decide(self._view(), now)
            if isinstance(step, Wait) and self._restore is not None:
                step = Switch(Cause.RESTORE, self._restore)
            if isinstance(step, Wait):
                look_at = step.until
                break
            if isinstance(step, Refuse):
                self._refuse_unfit(step)
            else:
                self._begin(step, now)
        waiting = [request for entry in self._entries.values() for request in entry.queue]
        self._contended = bool(waiting or self._switch or self._commands)
        self._effects.set_timer(min([look_at, *(request.deadline for request in waiting)]))

    def _admit_waiters(self, entry: Entry) -> None:
        if not (entry.state is _S.READY or entry.early) or not entry.queue:
            return
        now = self._clock.now()  # who backs off cannot have the device yet
        others = (other for other in self._entries.values() if other is not entry)
        contended = any(other.queue and other.retry_at <= now for other in others)
        while entry.queue and entry.has_room:
            if contended and entry.served >= self._policy.max_batch_requests:
                return
            self._admit(entry, entry.queue.pop(0))

    def _admit(self, entry: Entry, request: Request) -> None:
        waited = request.state is RequestState.WAITING
        request.state, request.provisional = RequestState.GRANTED, entry.early
        entry.leases.add(request)
        entry.served += 1
        if entry.first_swap is not None:
            request.swap, entry.first_swap = entry.first_swap, None
        self._effects.grant(request, entry.member.endpoint)
        if waited:
            now = self._clock.now()
            self._effects.publish(RequestAdmitted(now, entry.name, request.request_id, now - request.arrived))

    def _begin(self, switch: Switch, now: float) -> None:
        """Victims take no new requests from here on."""
        self.num_swaps += 1
        self._switch, self._switch_since, self._restore = switch, now, None
        self._record = SwapRecord(
            self.num_swaps, now, switch.cause, switch.target, switch.victims, switch.request_id
        )
        self._cut_at, self._told = inf, []
        reason = f"{switch.cause} of {switch.target}" if switch.target else str(switch.cause)
        drain_s = 0.0
        for name in switch.victims:
            if self._entries[name].state is _S.READY:
                self.moved(name, _S.DRAINING, reason)
                drain_s = max(drain_s, self._entries[name].spec.deadlines.drain_s)
        self._drain_until = now + drain_s

    def _drain(self, switch: Switch, now: float) -> float:
        """Launch the transition when its victims are idle or cut; give up when nobody wants it any more."""
        assert self._record is not None
        victims = [self._entries[name] for name in switch.victims]
        if switch.cause in FOR_WAITERS and switch.target and not self._entries[switch.target].queue:
            for entry in victims:
                if entry.state is _S.DRAINING:
                    self.moved(entry.name, _S.READY, "nobody waits any more")
            self._switch = self._record = None
            return inf
        busy = [entry for entry in victims if entry.leases]
        if busy and now < self._drain_until:
            return self._drain_until
        if busy and self._cut_at == inf:
            self._cut(busy, now)
        if busy and now < self._cut_at:
            return self._cut_at
        for entry in busy:
            entry.end_leases()
        self._record.drain_ms = (now - self._switch_since) * 1e3
        self._running = True
        self._effects.run(switch, self._record, abort=self._cut_at != inf)
        return inf

    def _cut(self, busy: Sequence[Entry], now: float) -> None:
        for entry in busy:
            for lease in entry.leases:
                self._effects.abandon(lease)
            log.warning("%s: %d requests cut at the drain deadline", entry.name, len(entry.leases))
            self._effects.publish(RequestsCut(now, entry.name, len(entry.leases)))
        self._cut_at = now + self._policy.abort_grace_s

    def _command_step(self) -> Switch | None:
        """The switch for the next command; commands with nothing to do end here."""
        while self._commands:
            command = self._commands.popleft()
            entry = self._entries[command.name]
            down = entry.state in DOWN_STATES - {_S.STOPPED}
            if command.kind in ("unload", "kill") and entry.spec.url is not None and down:
                self.moved(entry.name, _S.STOPPED, "the operator says that it is gone")
            step = switch_for(command, entry, self._view(), self._entries.values(), self._policy)
            if isinstance(step, Switch):
                self._command = command
                return step
            command.done(step)
        return None

    def _view(self) -> GroupView:
        return GroupView([entry.view() for entry in self._entries.values()], self.capacity)

    # --- saying no

    def _expire(self, now: float) -> None:
        for entry in self._entries.values():
            if entry.state is _S.QUARANTINED:
                self._refuse_waiters(entry, partial(quarantined, entry))
            late = [request for request in entry.queue if request.deadline <= now]
            for request in late:
                entry.queue.remove(request)
                wait_s = self.estimate_s(entry.name)
                self._refuse(request, too_late(entry, request, now=now, wait_s=wait_s))

    def _refuse_unfit(self, step: Refuse) -> None:
        why = partial(unfit, step.target, step.verdict, self._entries.values(), self._policy)
        self._refuse_waiters(self._entries[step.target], why)

    def _refuse_waiters(self, entry: Entry, error: Callable[[], HotrackError]) -> None:
        queue, entry.queue = entry.queue, []
        for request in queue:
            self._refuse(request, error())

    def _refuse(self, request: Request, error: HotrackError) -> None:
        request.state = RequestState.ENDED
        self._effects.refuse(request, error)
        self._effects.publish(
            RequestRefused(self._clock.now(), request.member, request.request_id, error.code)
        )
