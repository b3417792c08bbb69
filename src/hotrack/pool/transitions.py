"""Putting members to sleep and waking them, believing only what was measured. One runs at a time per device
group.
"""

import asyncio
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

from hotrack.core.clock import Clock
from hotrack.core.errors import (
    HotrackError,
    InsufficientMemoryError,
    MemberFailedError,
    SleepError,
    WakeError,
)
from hotrack.core.lifecycle import MemberState, SleepMode
from hotrack.members.canary import CanaryAnswer, mismatch
from hotrack.members.member import Member
from hotrack.members.reconcile import Found, classify, observe
from hotrack.obs.log import get_logger
from hotrack.plan.ledger import Verdict, format_bytes
from hotrack.pool.events import SwapRecord
from hotrack.pool.scheduler import Switch

T = TypeVar("T")
_S = MemberState
HALF_WAY = frozenset({_S.DRAINING, _S.SUSPENDING, _S.WAKING, _S.STARTING, _S.VERIFYING})
log = get_logger(__name__)


class Sink(Protocol):
    """Where a transition reports; the owner of the state decides what to make of it."""

    def state(self, name: str) -> MemberState: ...

    def moved(self, name: str, new: MemberState, reason: str = "") -> None: ...

    def failed(self, name: str, error: HotrackError, *, holds: bool, hopeless: bool = False) -> None:
        """``holds``: it may still hold memory, because its process could not be ended. ``hopeless``: no
        automatic remedy is left."""
        ...

    def measured(self, name: str, kind: str, num_bytes: int | None) -> None: ...

    def timed(self, name: str, kind: str, seconds: float) -> None: ...

    def canary(self, name: str, result: str, evidence: str = "") -> None: ...

    def fits(self, name: str) -> Verdict:
        """Does the member fit, by what was measured so far?"""
        ...


class CanaryMismatchError(WakeError):
    """The member is up but its answers changed."""

    code = "canary_mismatch"


@dataclass(slots=True)
class Outcome:
    """``error`` None: everything asked for happened. ``victim_failed``: the target was not touched."""

    error: HotrackError | None = None
    victim_failed: bool = False


@dataclass(slots=True)
class Memory:
    """What this group has learnt about one member's bytes and answers."""

    baseline: tuple[CanaryAnswer, ...] | None = None
    asleep_bytes: int | None = None
    first_residue_bytes: int | None = None


@dataclass(slots=True)
class Transitions:
    members: dict[str, Member]
    sink: Sink
    clock: Clock
    poll_s: float
    known: dict[str, Memory] = field(default_factory=dict)

    async def run(self, switch: Switch, record: SwapRecord, *, abort: bool) -> Outcome:
        """Never raises (cancellation excepted): failures are reported to the sink and returned. A bug of
        ours fails the members it left half way, so that the group goes on."""
        try:
            return await self._run(switch, record, abort=abort)
        except Exception as error:
            log.exception("transition %d", record.number)
            failure = MemberFailedError(f"internal error in a transition: {error!r}")
            for name in (*switch.victims, *([switch.target] if switch.target else [])):
                if self.sink.state(name) in HALF_WAY:
                    await self._fail(name, failure)
            return Outcome(failure)

    async def _run(self, switch: Switch, record: SwapRecord, *, abort: bool) -> Outcome:
        mode = SleepMode.ABORT if abort else SleepMode.WAIT
        for victim in switch.victims:
            try:
                if switch.stop:
                    await self._unload(victim)
                elif self.sink.state(victim) is _S.DRAINING:  # it may have died meanwhile
                    await self._suspend(victim, mode, record, as_victim=True)
            except HotrackError as error:
                return Outcome(error, victim_failed=True)
        if switch.target is None:
            return Outcome()
        try:
            await self._activate(switch.target, record)
            if switch.then_sleep and self.sink.state(switch.target) is _S.VERIFYING:
                await self._suspend(switch.target, SleepMode.WAIT, record, as_victim=False)
        except HotrackError as error:
            return Outcome(error)
        return Outcome()

    # --- giving memory back

    async def _suspend(self, name: str, mode: SleepMode, record: SwapRecord, *, as_victim: bool) -> None:
        """DRAINING or VERIFYING -> SUSPENDING -> ASLEEP, once the bytes are measured gone.

        Raises:
            SleepError: it kept its memory, or did not answer; it is FAILED and, when it is ours, stopped.
        """
        member = self.members[name]
        began = self.clock.now()
        self.sink.moved(name, _S.SUSPENDING)
        before = await self._measure(member)
        if member.spec.sleep_level is None:
            await self._stop(name)
            self.sink.moved(name, _S.STOPPED)
            after: int | None = 0
        else:
            after = await self._sleep_until_gone(member, mode, before)
            self.sink.moved(name, _S.ASLEEP)
            self._known(name).asleep_bytes = after
            if self._known(name).first_residue_bytes is None:
                self._known(name).first_residue_bytes = after
            self.sink.measured(name, "residue", after)
        seconds = self.clock.now() - began
        self.sink.timed(name, "sleep", seconds)
        record.sleep_ms += seconds * 1e3
        if as_victim:
            record.victim_bytes_before, record.victim_bytes_after = before, after

    async def _sleep_until_gone(self, member: Member, mode: SleepMode, before: int | None) -> int | None:
        """Ask; if that is not enough ask once more, dropping every request; then give up on it."""
        error: HotrackError
        try:
            return await self._sleep_once(member, mode, before)
        except HotrackError as first:
            error = first
        if member.alive:
            try:
                return await self._sleep_once(member, SleepMode.ABORT, before)
            except HotrackError as second:
                error = second
        failure = SleepError(f"{member.spec.name} did not give its memory back: {error.message}")
        await self._fail(member.spec.name, failure)
        raise failure from error

    async def _sleep_once(self, member: Member, mode: SleepMode, before: int | None) -> int | None:
        deadlines = member.spec.deadlines
        await self._within(deadlines.sleep_s, member.sleep(mode), f"{member.spec.name}: sleep")
        limit = self._residue_limit(member, before)
        until = self.clock.now() + deadlines.release_s
        while True:
            sleeping = await self._within(
                deadlines.probe_s, member.is_sleeping(), f"{member.spec.name}: is_sleeping"
            )
            held = await self._measure(member)
            if sleeping and (held is None or limit is None or held <= limit):
                return held
            if self.clock.now() >= until:
                raise SleepError(self._still_held(sleeping, held, limit, deadlines.release_s))
            await self.clock.sleep(self.poll_s)

    @staticmethod
    def _still_held(sleeping: bool, held: int | None, limit: int | None, release_s: float) -> str:
        if not sleeping:
            return f"{release_s:g} s after /sleep it still says that it is awake"
        assert held is not None
        assert limit is not None
        holds = f"it holds {format_bytes(held)}, expected at most {format_bytes(limit)}"
        return f"{release_s:g} s after /sleep {holds}"

    def _residue_limit(self, member: Member, before: int | None) -> int | None:
        """Most bytes a sleeper may hold: as declared, else as after its first sleep, else what is left
        without its swappable bytes; None when nothing is known."""
        spec, known = member.spec, self._known(member.spec.name)
        if spec.residue_bytes is not None:
            return spec.residue_bytes + spec.tolerance_bytes
        if known.first_residue_bytes is not None:
            return known.first_residue_bytes + spec.tolerance_bytes
        if spec.swap_bytes is not None and before is not None:
            return max(0, before - spec.swap_bytes) + spec.tolerance_bytes
        return None

    # --- taking memory

    async def _activate(self, name: str, record: SwapRecord) -> None:
        """Bring the target to VERIFYING with its canary passed; the owner then makes it READY.

        Raises:
            WakeError, MemberFailedError, InsufficientMemoryError: its state says where it is now (ASLEEP
            after a
                rolled back wake, FAILED, QUARANTINED).
        """
        member, began = self.members[name], self.clock.now()
        state = self.sink.state(name)
        verdict = self.sink.fits(name)
        if not verdict.fits and state is not _S.UNKNOWN:  # what it holds, it holds already
            raise InsufficientMemoryError(f"{name} does not fit now: {verdict.arithmetic}")
        record.target_bytes_before = await self._measure(member)
        if state is _S.UNKNOWN:
            await self._reconcile(name, record)
        elif state is _S.ASLEEP:
            await self._wake_verified(name, record)
            self.sink.timed(name, "wake", self.clock.now() - began)
        else:
            await self._start(name, record)
            # A new process is the new truth; an engine we did not restart is not.
            await self._verify_or_fail(name, record, compare=member.spec.url is not None)
            self.sink.timed(name, "start", self.clock.now() - began)
        record.target_bytes_after = await self._measure(member)

    async def _reconcile(self, name: str, record: SwapRecord) -> None:
        """UNKNOWN -> ASLEEP, or VERIFYING with a passed canary; nothing the engine says is taken on trust."""
        member = self.members[name]
        seen = await observe(member)
        found = classify(seen, self._residue_limit(member, None))
        if found is Found.GONE:
            error = MemberFailedError(f"{name} does not answer at {member.endpoint}")
            self.sink.failed(name, error, holds=False)
            raise error
        if found is Found.ASLEEP:
            self._known(name).asleep_bytes = seen.memory_bytes
            self.sink.moved(name, _S.ASLEEP, "found asleep")
            return
        self.sink.moved(name, _S.VERIFYING, f"found {found.name.lower()}")
        if found is Found.AWAKE:
            try:
                await self._verify(name, record, compare=False)
            except HotrackError as error:
                self.sink.canary(name, "mismatch", error.message)
            else:
                return
        await self._suspend(name, SleepMode.ABORT, record, as_victim=False)

    async def _wake_verified(self, name: str, record: SwapRecord) -> None:
        """Wake and verify; on wrong answers sleep and wake once more, then restart, then quarantine."""
        member = self.members[name]
        for _ in range(2):
            await self._wake(name, record)
            try:
                await self._verify(name, record, compare=True)
            except HotrackError as error:
                self.sink.canary(name, "mismatch", error.message)
                if not member.alive:
                    break
                await self._suspend(name, SleepMode.ABORT, record, as_victim=False)
            else:
                return
        await self._restart(name, record)

    async def _restart(self, name: str, record: SwapRecord) -> None:
        """Last automatic remedy: a new process must give the old answers."""
        error = WakeError(f"{name} woke wrong twice or died on its first answer; restarting it")
        await self._fail(name, error)
        if self.sink.state(name) is not _S.FAILED or self.members[name].spec.url is not None:
            raise error
        await self._start(name, record)
        try:
            await self._verify(name, record, compare=True)
        except HotrackError as wrong:
            self.sink.canary(name, "mismatch", wrong.message)
            final = WakeError(f"{name} still answers wrong after a restart, so it is quarantined: {wrong}")
            await self._fail(name, final, hopeless=True)
            raise final from wrong

    async def _wake(self, name: str, record: SwapRecord) -> None:
        """ASLEEP -> WAKING, until the engine says so and its bytes are back; else back to ASLEEP or
        FAILED.
        """
        member = self.members[name]
        deadlines = member.spec.deadlines
        began = self.clock.now()
        self.sink.moved(name, _S.WAKING)
        try:
            await self._within(deadlines.wake_s, member.wake_up(), f"{name}: wake_up")
            await self._until_back(member, began + deadlines.wake_s)
        except HotrackError as error:
            await self._roll_back(name, error)
            raise WakeError(f"{name} did not wake: {error.message}") from error
        finally:
            record.wake_ms += (self.clock.now() - began) * 1e3

    async def _until_back(self, member: Member, until: float) -> None:
        spec = member.spec
        asleep = self._known(spec.name).asleep_bytes
        low = 0
        if spec.swap_bytes is not None and asleep is not None:
            low = asleep + spec.swap_bytes - spec.tolerance_bytes
        until = min(until, self.clock.now() + spec.deadlines.release_s)
        while True:
            sleeping = await self._within(
                spec.deadlines.probe_s, member.is_sleeping(), f"{spec.name}: is_sleeping"
            )
            held = await self._measure(member)
            if not sleeping and (held is None or held >= low):
                return
            if self.clock.now() >= until:
                raise WakeError(
                    "it still says that it sleeps"
                    if sleeping
                    else f"it holds {format_bytes(held or 0)}, expected at least {format_bytes(low)}"
                )
            await self.clock.sleep(self.poll_s)

    async def _roll_back(self, name: str, cause: HotrackError) -> None:
        """After a failed wake: verified ASLEEP again, else FAILED."""
        member = self.members[name]
        limit = self._residue_limit(member, None)
        found = classify(await observe(member), limit)
        if found is not Found.ASLEEP and member.alive:
            try:
                await self._sleep_once(member, SleepMode.ABORT, None)
                found = Found.ASLEEP
            except HotrackError:
                found = Found.HALF
        if found is Found.ASLEEP:
            self.sink.moved(name, _S.ASLEEP, f"wake rolled back: {cause.message}")
        else:
            await self._fail(name, cause)

    async def _start(self, name: str, record: SwapRecord) -> None:
        """STARTING until healthy.

        Raises:
            MemberFailedError: it ended or was not healthy in time; it is FAILED and stopped.
        """
        member = self.members[name]
        began = self.clock.now()
        self.sink.moved(name, _S.STARTING)
        try:
            await self._within(member.spec.deadlines.start_s, self._until_healthy(member), f"{name}: start")
        except HotrackError as error:
            failure = MemberFailedError(f"{error.message}{last_words(member.logs())}")
            await self._fail(name, failure)
            raise failure from error
        finally:
            record.start_ms += (self.clock.now() - began) * 1e3
        self.sink.moved(name, _S.VERIFYING)

    async def _until_healthy(self, member: Member) -> None:
        await member.launch()
        while not await member.healthy():
            if not member.alive:
                raise MemberFailedError(f"{member.spec.name} ended before it was healthy")
            await self.clock.sleep(self.poll_s)
        if member.spec.url is not None and await member.is_sleeping():
            await member.wake_up()

    # --- verification

    async def _verify_or_fail(self, name: str, record: SwapRecord, *, compare: bool) -> None:
        try:
            await self._verify(name, record, compare=compare)
        except HotrackError as error:
            await self._fail(name, error)
            raise

    async def _verify(self, name: str, record: SwapRecord, *, compare: bool) -> None:
        """Memory within its bound and the canary's answers as recorded; without a record, record them.

        Raises:
            CanaryMismatchError, InsufficientMemoryError, MemberFailedError: not fit for traffic. State stays
            VERIFYING.
        """
        member = self.members[name]
        if self.sink.state(name) is not _S.VERIFYING:
            self.sink.moved(name, _S.VERIFYING)
        began = self.clock.now()
        try:
            await self._run_canary(member, record, compare=compare)
            held = await self._measure(member)
        finally:
            record.verify_ms += (self.clock.now() - began) * 1e3
        limit = member.spec.awake_bytes
        if held is not None and limit is not None and held > limit + member.spec.tolerance_bytes:
            raise InsufficientMemoryError(
                f"{name} holds {format_bytes(held)} awake, its configuration allows {format_bytes(limit)} "
                f"plus {format_bytes(member.spec.tolerance_bytes)} tolerance"
            )
        self.sink.measured(name, "awake", held)

    async def _run_canary(self, member: Member, record: SwapRecord, *, compare: bool) -> None:
        canary, known = member.spec.canary, self._known(member.spec.name)
        answers = []
        for prompt in canary.prompts:
            ask = member.ask(prompt, canary.max_tokens)
            answer = await self._within(member.spec.deadlines.canary_s, ask, f"{member.spec.name}: canary")
            answers.append(answer)
        if not answers:
            return
        if known.baseline is None or not compare:
            known.baseline = tuple(answers)
            record.canary = "recorded"
        else:
            evidence = mismatch(known.baseline, answers, logprob_tolerance=canary.logprob_tolerance)
            record.canary = "mismatch" if evidence else "identical"
            if evidence:
                raise CanaryMismatchError(f"{member.spec.name} answers differently since it woke; {evidence}")
        self.sink.canary(member.spec.name, record.canary)

    # --- ending processes

    async def _unload(self, name: str) -> None:
        await self._stop(name)
        self.sink.moved(name, _S.STOPPED)

    async def _stop(self, name: str) -> None:
        member = self.members[name]
        await self._within(member.spec.deadlines.stop_s * 2, member.stop(), f"{name}: stop")
        self._known(name).asleep_bytes = None

    async def _stop_quietly(self, name: str) -> bool:
        try:
            await self._stop(name)
        except HotrackError:
            return False
        return True

    async def _fail(self, name: str, error: HotrackError, *, hopeless: bool = False) -> None:
        """FAILED, and its process ended: the ledger counts what is measured, not what was promised."""
        stopped = await self._stop_quietly(name)
        self.sink.failed(name, error, holds=not stopped, hopeless=hopeless)

    # --- small things

    def _known(self, name: str) -> Memory:
        return self.known.setdefault(name, Memory())

    async def _measure(self, member: Member) -> int | None:
        what = f"{member.spec.name}: memory probe"
        return await self._within(member.spec.deadlines.probe_s, member.memory_bytes(), what)

    async def _within(self, seconds: float, work: Awaitable[T], what: str) -> T:
        """The result of ``work``, or MemberFailedError after ``seconds`` of the pool's clock."""
        task = asyncio.ensure_future(work)
        alarm = asyncio.ensure_future(self.clock.sleep(seconds))
        try:
            await asyncio.wait((task, alarm), return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                return task.result()
            raise MemberFailedError(f"{what} gave no answer within {seconds:g} s")
        finally:
            task.cancel()
            alarm.cancel()


def last_words(lines: Sequence[str], count: int = 3) -> str:
    """The end of a log, for an error message."""
    tail = [line.strip() for line in lines if line.strip()][-count:]
    return f"; its last output: {' | '.join(tail)}" if tail else ""
