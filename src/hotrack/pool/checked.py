"""A member whose word is checked: each operation returns when it is *measured* to have happened. No states
here.
"""

import asyncio
from collections.abc import Awaitable
from typing import TypeVar

from hotrack.core.clock import Clock
from hotrack.core.errors import (
    HotrackError,
    InsufficientMemoryError,
    MemberFailedError,
    SleepError,
    WakeError,
)
from hotrack.core.lifecycle import SleepMode
from hotrack.members.canary import CanaryAnswer, mismatch
from hotrack.members.member import Member
from hotrack.members.reconcile import Found, classify, observe
from hotrack.plan.ledger import MIB, format_bytes

T = TypeVar("T")
FLAT_S = 1.0  # a sleeper that gave back a part and then nothing for this long will not give back the rest
FLAT_BYTES = MIB
FIRST_POLL_S = 0.001  # a sleep may take 10 ms, and reading a GPU's memory costs 0.05 ms
POLL_SHARE = 0.1  # later readings come after this share of the time waited so far


class CanaryMismatchError(WakeError):
    """The member is up but its answers changed."""

    code = "canary_mismatch"


class NoAnswerError(MemberFailedError):
    """It did not answer within the deadline: who knows what its process does."""


class CheckedMember:
    """One member with what was learnt about it: its first residue, and its answers when it was new.

    Every operation has a deadline of the pool's clock and raises ``HotrackError``; polling, never a fixed
    wait.
    """

    def __init__(self, member: Member, clock: Clock, poll_s: float) -> None:
        self.member = member
        self.spec = member.spec
        self._clock = clock
        self._poll_s = poll_s
        self._baseline: tuple[CanaryAnswer, ...] | None = None
        self._asleep_bytes: int | None = None
        self._gave_bytes: int | None = None  # in its last sleep
        self._residue_bytes: int | None = None  # after its first whole sleep; on a GPU after its last
        self._promised_bytes = 0  # what it says that its last sleep gave back
        self._back_by: float | None = None  # of a streamed wake whose memory was not yet seen back

    @property
    def asleep_bytes(self) -> int | None:
        """Bytes held when it was last measured asleep."""
        return self._asleep_bytes

    @property
    def residue_bytes(self) -> int | None:
        """What it keeps when it gives back all it can; None before its first sleep."""
        return self._residue_bytes

    @property
    def can_stream(self) -> bool:
        """Its next wake may be streamed: only a canary with a record proves that it landed."""
        streams = self.spec.streamed_wake and self.spec.sleep_level == 1
        return streams and bool(self.spec.canary.prompts) and self._baseline is not None

    @property
    def external(self) -> bool:
        return self.spec.url is not None

    async def measure(self) -> int | None:
        """Bytes held now; None when they cannot be known."""
        return await self._within(self.spec.deadlines.probe_s, self.member.memory_bytes(), "memory probe")

    async def start(self) -> None:
        """Launch and wait until healthy; an external engine is there already, and is woken.

        Raises:
            MemberFailedError: it ended or was not healthy in time; the message has its last output.
        """
        self._residue_bytes = None  # the last process's, if there was one
        try:
            await self._within(self.spec.deadlines.start_s, self._until_healthy(), "start")
        except HotrackError as error:
            raise MemberFailedError(f"{error.message}{last_words(self.member.logs())}") from error

    async def sleep(self, mode: SleepMode, before: int | None, nbytes: int | None = None) -> int | None:
        """Bytes held asleep, once they are down to the residue. ``before``: bytes held until then.
        ``nbytes``: only about so many need to go.

        Raises:
            SleepError: asked twice, the second time dropping every request, it did not give its memory back.
        """
        self._promised_bytes = 0
        try:
            held = await self._sleep_once(mode, before, nbytes)
        except HotrackError as first:
            if not self.member.alive:
                raise SleepError(f"{self.spec.name} died falling asleep: {first.message}") from first
            try:
                nbytes = None
                held = await self._sleep_once(SleepMode.ABORT, before)
            except HotrackError as second:
                kept = f"{self.spec.name} did not give its memory back: {second.message}"
                raise SleepError(kept) from second
        self._asleep_bytes = held
        self._gave_bytes = None if before is None or held is None else before - held
        if nbytes is None and (self._residue_bytes is None or self.spec.device is not None):
            self._residue_bytes = held
        return held

    async def wake(self, *, streamed: bool = False) -> None:
        """Until the engine says that it is awake and its swappable bytes are back. ``streamed``: until it
        takes requests; ``verify`` then sees to the rest."""
        deadline = self._clock.now() + self.spec.deadlines.wake_s
        wake_up = self.member.wake_up(streamed=True) if streamed else self.member.wake_up()
        await self._within(self.spec.deadlines.wake_s, wake_up, "wake_up")
        back_by = min(deadline, self._clock.now() + self.spec.deadlines.release_s)
        self._back_by = back_by if streamed else None
        if not streamed:
            await self._until_back(back_by)

    async def put_back(self) -> bool:
        """After a failed wake: True when it is measured asleep again, if need be after one more sleep."""
        try:
            if await self.found() is Found.ASLEEP:
                return True
            if not self.member.alive:
                return False
            self._asleep_bytes = await self._sleep_once(SleepMode.ABORT, None)
        except HotrackError:
            return False
        return True

    async def found(self) -> Found:
        """What the engine says and holds now."""
        seen = await observe(self.member)
        found = classify(seen, self._residue_limit(None))
        if found is Found.ASLEEP:
            self._asleep_bytes = seen.memory_bytes
        return found

    async def verify(self, *, compare: bool) -> tuple[str, int | None]:
        """('recorded' | 'identical' | '' without a canary, bytes held). ``compare``: answers must be those
        of the record, if there is one; else they become the record.

        Raises:
            CanaryMismatchError, InsufficientMemoryError, MemberFailedError: not fit for traffic.
        """
        back_by, self._back_by = self._back_by, None
        back = asyncio.ensure_future(self._until_back(back_by)) if back_by is not None else None
        try:
            result = await self._canary(compare=compare)
            if back is not None:
                await back
        finally:
            if back is not None:
                back.cancel()
        held, limit = await self.measure(), self.spec.awake_bytes
        if held is not None and limit is not None and held > limit + self.spec.tolerance_bytes:
            raise InsufficientMemoryError(
                f"{self.spec.name} holds {format_bytes(held)} awake, its configuration allows "
                f"{format_bytes(limit)} plus {format_bytes(self.spec.tolerance_bytes)} tolerance: write "
                f"`awake: {-(-held // MIB)}MiB` under its `memory`, or make it smaller"
            )
        return result, held

    async def stop(self) -> None:
        """End its process. Raises when that cannot be done."""
        await self._within(self.spec.deadlines.stop_s * 2, self.member.stop(), "stop")
        self._asleep_bytes = None

    async def _until_healthy(self) -> None:
        await self.member.launch()
        while not await self.member.healthy():
            if not self.member.alive:
                raise MemberFailedError(f"{self.spec.name} ended before it was healthy")
            await self._clock.sleep(self._poll_s)
        if self.external and await self.member.is_sleeping():
            await self.member.wake_up()

    async def _sleep_once(self, mode: SleepMode, before: int | None, nbytes: int | None = None) -> int | None:
        sleep = self.member.sleep(mode) if nbytes is None else self.member.sleep(mode, nbytes)
        freed = await self._within(self.spec.deadlines.sleep_s, sleep, "sleep")
        limit, began = self._residue_limit(before, nbytes), self._clock.now()
        self._promised_bytes = max(self._promised_bytes, freed or 0)
        if self._promised_bytes and before is not None and nbytes is None and self.spec.residue_bytes is None:
            # A CUDA context grows with the kernels it has loaded. What was promised must be gone; what is
            # left beyond an earlier residue is the ledger's business.
            limit = max(limit or 0, before - self._promised_bytes + self.spec.tolerance_bytes)
        low, low_at = before, began
        while True:
            (sleeping, held), now = await self._look(), self._clock.now()
            gone = held is None or limit is None or held <= limit
            if sleeping and gone:
                return held
            if held is not None and (low is None or held < low - FLAT_BYTES):
                low, low_at = held, now
            # Nothing given back at all may still be on its way; half of it and no more is all there is.
            partly = (
                before is not None
                and limit is not None
                and low is not None
                and before - low >= (before - limit) / 2
            )
            flat = sleeping and partly and now - low_at >= FLAT_S
            if flat or now - began >= self.spec.deadlines.release_s:
                holds = f"it holds {format_bytes(held or 0)}, expected at most {format_bytes(limit or 0)}"
                problem = holds if sleeping else "it still says that it is awake"
                raise SleepError(f"{now - began:.1f} s after /sleep {problem}")
            await self._pause(now - began)

    async def _until_back(self, until: float) -> None:
        low, began = 0, self._clock.now()
        if self.spec.swap_bytes is not None and self._asleep_bytes is not None:
            comes = min(self.spec.swap_bytes, self._gave_bytes or self.spec.swap_bytes)
            low = self._asleep_bytes + comes - self.spec.tolerance_bytes
        while True:
            sleeping, held = await self._look()
            if not sleeping and (held is None or held >= low):
                return
            if self._clock.now() >= until:
                holds = f"it holds {format_bytes(held or 0)}, expected at least {format_bytes(low)}"
                raise WakeError("it still says that it sleeps" if sleeping else holds)
            await self._pause(self._clock.now() - began)

    async def _look(self) -> tuple[bool, int | None]:
        """What it says, and what it holds; asked together."""
        sleeping, held = await asyncio.gather(self._is_sleeping(), self.measure())
        return sleeping, held

    async def _pause(self, waited_s: float) -> None:
        """Before the next look: what takes long is looked at less often."""
        await self._clock.sleep(min(self._poll_s, max(FIRST_POLL_S, POLL_SHARE * waited_s)))

    def _residue_limit(self, before: int | None, nbytes: int | None = None) -> int | None:
        """Most bytes a sleeper may hold: after a partial sleep what it did not have to give; as declared,
        else as after its first sleep, else what is left without its swappable bytes; None when nothing is
        known."""
        spec = self.spec
        if nbytes is not None:
            return None if before is None else max(0, before - nbytes) + spec.tolerance_bytes
        if spec.residue_bytes is not None:
            return spec.residue_bytes + spec.tolerance_bytes
        if self._residue_bytes is not None:
            return self._residue_bytes + spec.tolerance_bytes
        if spec.swap_bytes is not None and before is not None:
            return max(0, before - spec.swap_bytes) + spec.tolerance_bytes
        return None

    async def _canary(self, *, compare: bool) -> str:
        canary, answers = self.spec.canary, []
        for prompt in canary.prompts:
            ask = self.member.ask(prompt, canary.max_tokens)
            answers.append(await self._within(self.spec.deadlines.canary_s, ask, "canary"))
        if not answers:
            return ""
        if self._baseline is None or not compare:
            self._baseline = tuple(answers)
            return "recorded"
        evidence = mismatch(self._baseline, answers, logprob_tolerance=canary.logprob_tolerance)
        if evidence:
            raise CanaryMismatchError(f"{self.spec.name} answers differently since it woke; {evidence}")
        return "identical"

    async def _is_sleeping(self) -> bool:
        return await self._within(self.spec.deadlines.probe_s, self.member.is_sleeping(), "is_sleeping")

    async def _within(self, seconds: float, work: Awaitable[T], what: str) -> T:
        """The result of ``work``, or NoAnswerError after ``seconds`` of the pool's clock."""
        task = asyncio.ensure_future(work)
        alarm = asyncio.ensure_future(self._clock.sleep(seconds))
        try:
            await asyncio.wait((task, alarm), return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                return task.result()
            raise NoAnswerError(f"{self.spec.name}: {what} gave no answer within {seconds:g} s")
        except MemberFailedError as error:
            if isinstance(error.__cause__, TimeoutError):  # its client had a deadline too, and was faster
                raise NoAnswerError(error.message) from error
            raise
        finally:
            task.cancel()
            alarm.cancel()


def last_words(lines: list[str], count: int = 3) -> str:
    """The end of a log, for an error message."""
    tail = [line.strip() for line in lines if line.strip()][-count:]
    return f"; its last output: {' | '.join(tail)}" if tail else ""
