"""The moves of one switch: victims fall asleep, the target wakes, and what is done when either goes wrong.

One switch runs at a time per device group. States change only through the ``Sink``, which owns them.
"""

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol

from hotrack.core.clock import Clock
from hotrack.core.errors import HotrackError, InsufficientMemoryError, MemberFailedError, WakeError
from hotrack.core.lifecycle import MemberState, SleepMode
from hotrack.members.reconcile import Found
from hotrack.obs.log import get_logger
from hotrack.plan.ledger import MIB, Verdict
from hotrack.pool.checked import CanaryMismatchError, CheckedMember, NoAnswerError
from hotrack.pool.events import Cause, SwapRecord
from hotrack.pool.scheduler import Switch

log = get_logger(__name__)
_S = MemberState
PARTIAL_MARGIN = 64 * MIB  # beyond what is lacking, when only that leaves
HALF_WAY = frozenset({_S.DRAINING, _S.SUSPENDING, _S.WAKING, _S.STARTING, _S.VERIFYING})


class Sink(Protocol):
    """Where a transition reports; the owner of the state decides what to make of it."""

    def state(self, name: str) -> MemberState: ...

    def moved(self, name: str, new: MemberState, reason: str = "") -> None: ...

    def failed(self, name: str, error: HotrackError, *, holds: bool | None, hopeless: bool = False) -> None:
        """``holds``: it may still hold memory, because its process could not be ended (None: as before).
        ``hopeless``: no automatic remedy is left."""
        ...

    def freed(self, name: str) -> None:
        """A failed member's process has ended, and all it held went with it."""
        ...

    def remains(self) -> list[str]:
        """Failed members of ours whose processes may still hold memory."""
        ...

    def new_process_next(self, name: str) -> bool:
        """After one more failure to wake, is another try of the same process a waste?"""
        ...

    def measured(self, name: str, kind: str, num_bytes: int | None) -> None:
        """``kind``: 'awake'; asleep 'residue', or 'partial' when it need not give back all it could."""
        ...

    def seen(self, name: str, num_bytes: int | None) -> None:
        """What it holds now, on its way somewhere else."""
        ...

    def timed(self, name: str, kind: str, seconds: float) -> None:
        """``kind``: 'sleep', or 'wake' and 'start' until verified."""
        ...

    def canary(self, name: str, result: str, evidence: str = "") -> None: ...

    def fits(self, name: str) -> Verdict:
        """Does the member fit, by what was measured so far, if all others sleep as deep as they can?"""
        ...

    def lacking(self, name: str) -> int | None:
        """Bytes that must still go so that the member fits, by what all others hold now (0 or less: none);
        None when that is not known: then everything must go that can."""
        ...

    def reserves(self) -> list[str]:
        """Sleepers that hold more than their residue, the largest first."""
        ...

    def open_early(self, name: str) -> None:
        """A member in VERIFYING takes its waiting requests; their answers are held back until it is READY."""
        ...

    def close_early(self, name: str) -> None:
        """It did not pass: their answers are thrown away, and they are sent again later."""
        ...


@dataclass(frozen=True, slots=True)
class Outcome:
    """``error`` None: everything asked for happened. ``victim_failed``: the target was not touched."""

    error: HotrackError | None = None
    victim_failed: bool = False


@dataclass(frozen=True, slots=True)
class Transitions:
    members: Mapping[str, CheckedMember]
    sink: Sink
    clock: Clock

    async def run(self, switch: Switch, record: SwapRecord, *, abort: bool) -> Outcome:
        """Never raises (cancellation excepted): failures are reported to the sink and returned. A bug of
        ours fails the members it left half way, so that the group goes on."""
        try:
            return await self._run(switch, record, SleepMode.ABORT if abort else SleepMode.WAIT)
        except Exception as error:
            log.exception("transition %d", record.number)
            failure = MemberFailedError(f"internal error in a transition: {error!r}")
            for name in (*switch.victims, *([switch.target] if switch.target else [])):
                if self.sink.state(name) in HALF_WAY:
                    await self._fail(name, failure)
            return Outcome(failure)

    async def _run(self, switch: Switch, record: SwapRecord, mode: SleepMode) -> Outcome:
        try:
            for victim in switch.victims:
                await self._leave(victim, switch, record, mode)
            await self._bury_all()
            await self._end_heavy_sleepers(switch)
            await self._deepen(switch.target)
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

    async def _leave(self, victim: str, switch: Switch, record: SwapRecord, mode: SleepMode) -> None:
        """One victim gives its memory back, in the way that the switch wants."""
        state = self.sink.state(victim)
        if switch.stop and switch.cause is Cause.PROBE:
            await self._bury(victim)
        elif switch.stop:
            await self._unload(victim)
        elif state in (_S.FAILED, _S.QUARANTINED):
            return  # since the switch began: it stays so, and what it holds is buried with the others
        elif victim in switch.cold:
            await self._unload(victim, f"even asleep it would leave no room for {switch.target}")
        elif state is _S.DRAINING:
            await self._suspend(victim, mode, record, as_victim=True, room_for=switch.target)

    async def _bury_all(self) -> None:
        """Who waits must not pay for a member that failed: what its process still holds goes now. One that
        cannot be ended is in the sum, and named there."""
        for name in self.sink.remains():
            with suppress(HotrackError):
                await self._bury(name)

    async def _bury(self, name: str) -> None:
        """End the process of a failed member, which stays failed or quarantined."""
        try:
            await self.members[name].stop()
        except HotrackError as error:
            self.sink.failed(name, error, holds=True)
            raise
        self.sink.freed(name)

    async def _end_heavy_sleepers(self, switch: Switch) -> None:
        """Victims that kept more than the sum allows end as processes: the target gets its turn, and they
        start cold at their next one."""
        if switch.target is None or self.sink.state(switch.target) is _S.UNKNOWN:
            return
        for victim in switch.victims:
            if self.sink.fits(switch.target).fits:
                return
            if self.sink.state(victim) is _S.ASLEEP and not self.members[victim].external:
                await self._unload(victim, f"asleep it leaves no room for {switch.target}")

    async def _deepen(self, target: str | None) -> None:
        """Sleepers that gave back only a part give back more, where the target needs it.

        Raises:
            SleepError: one did not; it is FAILED and, when it is ours, stopped.
        """
        if target is None:
            return
        for name in self.sink.reserves():
            lacking = self.sink.lacking(target)
            if name == target or (lacking is not None and lacking <= 0):
                continue
            member = self.members[name]
            before = await member.measure()
            nbytes = self._share(name, target, before)
            try:
                held = await member.sleep(SleepMode.ABORT, before, nbytes)
            except HotrackError as error:
                await self._fail(name, error)
                raise
            self.sink.measured(name, "residue" if nbytes is None else "partial", held)

    def _share(self, name: str, target: str | None, held: int | None) -> int | None:
        """How much of what it holds has to go for the target; None: all of it."""
        member = self.members[name]
        if target is None or not member.spec.partial_sleep or member.spec.sleep_level != 1:
            return None
        if held is None or member.residue_bytes is None:  # not before a whole sleep was measured
            return None
        self.sink.seen(name, held)
        lacking = self.sink.lacking(target)
        if lacking is None:
            return None
        share = max(0, lacking) + PARTIAL_MARGIN
        return share if share < held - member.residue_bytes else None

    async def _unload(self, name: str, reason: str = "") -> None:
        try:
            await self.members[name].stop()
        except HotrackError as error:
            self.sink.failed(name, error, holds=True)
            raise
        self.sink.moved(name, _S.STOPPED, reason)

    async def _suspend(
        self,
        name: str,
        mode: SleepMode,
        record: SwapRecord,
        *,
        as_victim: bool,
        room_for: str | None = None,
    ) -> None:
        """DRAINING or VERIFYING -> SUSPENDING -> ASLEEP (STOPPED when it cannot sleep), once the bytes are
        gone. ``room_for``: only as many as that member lacks, where the engine can do that.

        Raises:
            SleepError: it kept its memory, or did not answer; it is FAILED and, when it is ours, stopped.
        """
        member, began = self.members[name], self.clock.now()
        self.sink.moved(name, _S.SUSPENDING)
        try:
            before = await member.measure()
            if member.spec.sleep_level is None:
                await member.stop()
                after: int | None = 0
                self.sink.moved(name, _S.STOPPED)
            else:
                nbytes = self._share(name, room_for, before)
                after = await member.sleep(mode, before, nbytes)
                self.sink.moved(name, _S.ASLEEP)
                self.sink.measured(name, "residue" if nbytes is None else "partial", after)
        except HotrackError as error:
            await self._fail(name, error)
            raise
        finally:
            record.sleep_ms += (self.clock.now() - began) * 1e3
        self.sink.timed(name, "sleep", self.clock.now() - began)
        if as_victim:
            record.victim_bytes_before, record.victim_bytes_after = before, after

    async def _activate(self, name: str, record: SwapRecord) -> None:
        """Bring the target to VERIFYING with its canary passed; the owner then makes it READY.

        Raises:
            WakeError, MemberFailedError, InsufficientMemoryError: its state says where it is now (ASLEEP
            after a
                rolled back wake, FAILED, QUARANTINED).
        """
        member, state, began = self.members[name], self.sink.state(name), self.clock.now()
        verdict = self.sink.fits(name)
        if not verdict.fits and state is not _S.UNKNOWN:  # what it holds, it holds already
            raise InsufficientMemoryError(f"{name} does not fit now: {verdict.arithmetic}")
        record.target_bytes_before = await member.measure()
        if state is _S.UNKNOWN:
            await self._reconcile(name, record)
            record.target_bytes_after = await member.measure()
        elif state is _S.ASLEEP:
            await self._wake_verified(name, record)
            self.sink.timed(name, "wake", self.clock.now() - began)
        else:
            await self._start(name, record)
            try:
                # A new process is the new truth; an engine that we did not restart is not.
                await self._verify(name, record, compare=member.external)
            except HotrackError as error:
                too_large = isinstance(error, InsufficientMemoryError) and not member.external
                await self._fail(name, error, hopeless=too_large)  # the next start would be no smaller
                raise
            self.sink.timed(name, "start", self.clock.now() - began)

    async def _reconcile(self, name: str, record: SwapRecord) -> None:
        """UNKNOWN -> ASLEEP, or VERIFYING with a passed canary; nothing the engine says is taken on trust."""
        member = self.members[name]
        found = await member.found()
        if found is Found.GONE:
            error = MemberFailedError(f"{name} does not answer at {member.member.endpoint}")
            self.sink.failed(name, error, holds=False)
            raise error
        if found is Found.ASLEEP:
            self.sink.moved(name, _S.ASLEEP, "found asleep")
            return
        self.sink.moved(name, _S.VERIFYING, f"found {found.name.lower()}")
        if found is Found.AWAKE and await self._passes(name, record, compare=False):
            return
        await self._suspend(name, SleepMode.ABORT, record, as_victim=False)

    async def _wake_verified(self, name: str, record: SwapRecord) -> None:
        """Wake and verify; on wrong answers sleep and wake once more, then restart, then quarantine.

        Where the engine can, the first wake is streamed: canary and waiting requests are computed while
        weights still arrive, and share the first step. Answers in such company may differ in a last digit; so
        a canary that fails there is asked once more alone.
        """
        member = self.members[name]
        for streamed in (member.can_stream, False):
            await self._wake(name, record, streamed=streamed)
            if await self._passes(name, record, compare=True):
                return
            if streamed:
                self.sink.close_early(name)
                if record.canary == "mismatch" and await self._passes(name, record, compare=True):
                    return
            if not member.member.alive:
                break
            await self._suspend(name, SleepMode.ABORT, record, as_victim=False)
        await self._restart(name, record)

    async def _restart(self, name: str, record: SwapRecord) -> None:
        """Last automatic remedy: a new process must give the old answers."""
        error = WakeError(f"{name} woke wrong twice or died on its first answer")
        await self._fail(name, error)
        if self.sink.state(name) is not _S.FAILED or self.members[name].external:
            raise error
        await self._start(name, record)
        try:
            await self._verify(name, record, compare=True)
        except HotrackError as wrong:
            final = WakeError(f"{name} is still wrong after a restart, so it is quarantined: {wrong.message}")
            await self._fail(name, final, hopeless=True)
            raise final from wrong

    async def _wake(self, name: str, record: SwapRecord, *, streamed: bool) -> None:
        """ASLEEP -> WAKING -> VERIFYING, and measured back (``streamed``: open to requests, and measured with
        the canary); on failure ASLEEP again, measured too, else FAILED."""
        member, began = self.members[name], self.clock.now()
        self.sink.moved(name, _S.WAKING)
        record.streamed = streamed
        try:
            await member.wake(streamed=streamed)
        except HotrackError as error:
            failure = WakeError(f"{name} did not wake: {error.message}")
            if self._worth_keeping(name, error) and await member.put_back():
                self.sink.moved(name, _S.ASLEEP, f"rolled back: {failure.message}")
                self.sink.seen(name, member.asleep_bytes)
            else:
                await self._fail(name, failure)
            raise failure from error
        finally:
            record.wake_ms += (self.clock.now() - began) * 1e3
        self.sink.moved(name, _S.VERIFYING)
        if streamed:
            self.sink.open_early(name)

    def _worth_keeping(self, name: str, error: HotrackError) -> bool:
        """May this process be woken again? Not one that gave no answer, whatever it says of its sleep, or
        failed before; that the device is full is not its fault."""
        if self.members[name].external or isinstance(error, InsufficientMemoryError):
            return True
        return not (isinstance(error, NoAnswerError) or self.sink.new_process_next(name))

    async def _start(self, name: str, record: SwapRecord) -> None:
        """STARTING -> VERIFYING once healthy; on failure FAILED, and raises MemberFailedError."""
        member, began = self.members[name], self.clock.now()
        if member.external and not await member.member.healthy():
            gone = MemberFailedError(f"{name} does not answer at {member.member.endpoint}")
            self.sink.failed(name, gone, holds=None)
            raise gone
        self.sink.moved(name, _S.STARTING)
        try:
            await member.start()
        except HotrackError as error:
            await self._fail(name, error)
            raise
        finally:
            record.start_ms += (self.clock.now() - began) * 1e3
        self.sink.moved(name, _S.VERIFYING)

    async def _passes(self, name: str, record: SwapRecord, *, compare: bool) -> bool:
        try:
            await self._verify(name, record, compare=compare)
        except HotrackError:
            return False
        return True

    async def _verify(self, name: str, record: SwapRecord, *, compare: bool) -> None:
        """Memory within its bound and the canary as recorded. State stays VERIFYING, also on failure."""
        began = self.clock.now()
        try:
            record.canary, held = await self.members[name].verify(compare=compare)
        except HotrackError as error:
            record.canary = "mismatch" if isinstance(error, CanaryMismatchError) else "error"
            if not isinstance(error, InsufficientMemoryError):  # it answered well, and is too large
                self.sink.canary(name, record.canary, error.message)
            raise
        finally:
            record.verify_ms += (self.clock.now() - began) * 1e3
        if record.canary:
            self.sink.canary(name, record.canary)
        self.sink.measured(name, "awake", held)
        record.target_bytes_after = held

    async def _fail(self, name: str, error: HotrackError, *, hopeless: bool = False) -> None:
        """FAILED, and its process ended: the ledger counts what is measured, not what was promised."""
        try:
            await self.members[name].stop()
        except HotrackError:
            holds = True
        else:
            holds = False
        self.sink.failed(name, error, holds=holds, hopeless=hopeless)
