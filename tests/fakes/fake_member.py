"""A member that lives in this process: speaks ``members.member.Member``, keeps a byte ledger, and lies on
request.
"""

import asyncio
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field

from hotrack.core.errors import MemberFailedError
from hotrack.core.lifecycle import SleepMode
from hotrack.members.canary import CanaryAnswer
from hotrack.members.endpoint import Endpoint
from hotrack.members.spec import MIB, MemberSpec

GIB = 1024 * MIB


@dataclass
class World:
    """What all fakes of a test share. ``violations`` collects what must never happen."""

    capacity_bytes: int = 1 << 60
    held: dict[str, int] = field(default_factory=dict)
    calls: list[tuple[float, str, str]] = field(default_factory=list)  # time, member, operation
    violations: list[str] = field(default_factory=list)
    members: dict[str, "FakeMember"] = field(default_factory=dict)

    def connect(self, spec: MemberSpec) -> "FakeMember":
        """For ``Pool(connect=...)``; a member made by hand under that name is reused."""
        return self.members.get(spec.name) or FakeMember(spec, self)

    def note(self, member: str, operation: str) -> None:
        self.calls.append((asyncio.get_running_loop().time(), member, operation))

    def hold(self, member: str, num_bytes: int) -> None:
        self.held[member] = num_bytes
        if sum(self.held.values()) > self.capacity_bytes:
            self.violations.append(f"out of memory: {self.held} of {self.capacity_bytes}")

    def count(self, operation: str, member: str | None = None) -> int:
        return sum(op == operation and member in (None, name) for _, name, op in self.calls)

    def operations(self, *kinds: str) -> list[tuple[str, str]]:
        return [(name, op) for _, name, op in self.calls if op in kinds]


class FakeMember:
    """``faults[operation]`` is a list of actions, one taken per call (the last one stays when ``sticky``).

    Actions: 'error' (500, nothing done), 'error_after' (done, then 500), 'hang', 'timeout' (its client
    gives up first), 'die', 'lie' (200, nothing
    done), 'lag' (200; bytes move ``lag_s`` later), 'wrong' (ask: repeated '!'). A streamed wake answers at
    once and lands ``wake_s`` later; 'land': 'error' makes what arrives wrong, so that it is asleep again.
    """

    def __init__(
        self,
        spec: MemberSpec,
        world: World,
        *,
        start_s: float = 5.0,
        sleep_s: float = 0.2,
        wake_s: float = 0.5,
        ask_s: float = 0.05,
        awake_bytes: int = 60 * GIB,
        residue_bytes: int = 1 * GIB,
        running: bool = False,
        sleeping: bool = False,
    ) -> None:
        self.spec, self.world = spec, world
        self.start_s, self.sleep_s, self.wake_s, self.ask_s = start_s, sleep_s, wake_s, ask_s
        self.awake_bytes, self.residue_bytes = awake_bytes, residue_bytes
        self.running, self.sleeping = running, sleeping
        self.lag_s = 3.0
        self.faults: dict[str, list[str]] = defaultdict(list)
        self.sticky = False
        self.corrupt = False
        self.served = 0
        self._landed: asyncio.Task[None] | None = None
        self._keeps = 0
        self._fell_back = False  # asleep because what a streamed wake brought was wrong
        self._streams: set[asyncio.Event] = set()
        self._healthy_at = 0.0
        self._on_exit: Callable[[int], None] | None = None
        self._launches = 0
        world.members[spec.name] = self
        if running:
            world.held[spec.name] = residue_bytes if sleeping else awake_bytes

    # --- Member

    @property
    def endpoint(self) -> Endpoint:
        return Endpoint(f"http://{self.spec.name}")

    @property
    def pid(self) -> int | None:
        return 1000 + self._launches if self.alive and self.spec.command else None

    @property
    def alive(self) -> bool:
        return self.running or self.spec.url is not None

    def watch(self, on_exit: Callable[[int], None]) -> None:
        self._on_exit = on_exit

    async def launch(self) -> None:
        if self.spec.url is not None:
            return
        assert not self.running, "launched twice"
        self.world.note(self.spec.name, "launch")
        self._launches += 1
        self.running, self.sleeping, self.corrupt = True, False, False
        self._healthy_at = asyncio.get_running_loop().time() + self.start_s
        self.world.hold(self.spec.name, self.awake_bytes)
        await self._fault("launch")

    async def stop(self) -> None:
        self.world.note(self.spec.name, "stop")
        if self.spec.url is not None:
            raise MemberFailedError("not ours to stop")
        await self._fault("stop")
        self._gone()

    async def healthy(self) -> bool:
        return self.running and asyncio.get_running_loop().time() >= self._healthy_at

    async def is_sleeping(self) -> bool:
        self._reachable()
        return self.sleeping

    async def sleep(self, mode: SleepMode, nbytes: int | None = None) -> int | None:
        self._reachable()
        what = f"sleep:{mode}" if nbytes is None else f"sleep:{mode}:{nbytes / GIB:.2f}"
        self.world.note(self.spec.name, what)
        self._keeps = 0 if nbytes is None else max(0, self.world.held[self.spec.name] - nbytes)
        if self._streams and mode is not SleepMode.ABORT:
            self.world.violations.append(f"{self.spec.name} slept over {len(self._streams)} running requests")
        for stream in self._streams:
            stream.set()
        await asyncio.sleep(self.sleep_s)
        fault = await self._fault("sleep")
        gives = self.world.held[self.spec.name] - max(self.residue_bytes, self._keeps)
        promise = gives if self.spec.device and not self.sleeping else None
        if fault == "lie":
            self.sleeping = True
            return promise
        self.sleeping = True
        if fault == "lag":
            asyncio.get_running_loop().call_later(self.lag_s, self._release)
        else:
            self._release()
        if fault == "error_after":
            raise MemberFailedError("sleep answered 500: assertion")
        return promise

    async def wake_up(self, *, streamed: bool = False) -> None:
        self._reachable()
        self.world.note(self.spec.name, "wake:streamed" if streamed else "wake")
        if not streamed:
            await asyncio.sleep(self.wake_s)
        fault = await self._fault("wake")
        self.sleeping = False
        if fault == "lie":
            self.corrupt = True
            return
        self.world.hold(self.spec.name, self.awake_bytes)
        self.corrupt = fault == "wrong"
        self._fell_back = False
        if streamed:
            self._landed = asyncio.create_task(self._land())

    async def _land(self) -> None:
        process = self._launches
        await asyncio.sleep(self.wake_s)
        if not self.running or process != self._launches:
            return
        try:
            await self._fault("land")
        except MemberFailedError:
            if self.running:
                self.sleeping, self._keeps, self._fell_back = True, 0, True
                self._release()
            for stream in self._streams:
                stream.set()

    async def ask(self, prompt: str, max_tokens: int) -> CanaryAnswer:
        if not self._fell_back:
            self._usable("canary")
        if self._landed is not None:
            await self._landed
        self._reachable()
        if self.sleeping:
            raise MemberFailedError(f"{self.spec.name}: checksum mismatch")
        await asyncio.sleep(self.ask_s)
        fault = await self._fault("ask")
        text = "!!!!" if self.corrupt or fault == "wrong" else f"{self.spec.name} answers"
        return CanaryAnswer(text, (text,), -0.5)

    async def memory_bytes(self) -> int | None:
        return self.world.held.get(self.spec.name) if self.running else None

    def logs(self) -> list[str]:
        return ["loading", "ready"]

    async def close(self) -> None:
        pass

    # --- what a gateway would do, and what fate does

    async def serve(self, seconds: float, cut: asyncio.Event | None = None) -> str:
        """One request: 'done', 'cut' (the lease was abandoned) or 'dropped' (by the engine)."""
        if self._fell_back and self.sleeping:
            return "dropped"  # the engine refuses it
        self._usable("request")
        self.served += 1
        dropped = asyncio.Event()
        self._streams.add(dropped)
        try:
            waits = {"dropped": dropped.wait(), "cut": (cut or asyncio.Event()).wait()}
            tasks = {asyncio.ensure_future(wait): why for why, wait in waits.items()}
            done, pending = await asyncio.wait(tasks, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
            for task in pending:
                task.cancel()
            return min((tasks[task] for task in done), default="done")
        finally:
            self._streams.discard(dropped)

    def die(self) -> None:
        """The process ends by itself."""
        self._gone()
        if self._on_exit is not None:
            self._on_exit(-9)

    def _gone(self) -> None:
        self.running = False
        self.world.held.pop(self.spec.name, None)
        for stream in self._streams:
            stream.set()

    def _release(self) -> None:
        if self.running and self.sleeping:
            self.world.hold(self.spec.name, max(self.residue_bytes, self._keeps))

    def _reachable(self) -> None:
        if not self.running:
            raise MemberFailedError(f"{self.spec.name}: connection refused")

    def _usable(self, what: str) -> None:
        self._reachable()
        if self.sleeping:
            self.world.violations.append(f"{what} sent to sleeping {self.spec.name}")

    async def _fault(self, operation: str) -> str:
        faults = self.faults[operation]
        if not faults:
            return ""
        fault = faults[0] if self.sticky and len(faults) == 1 else faults.pop(0)
        if fault == "error":
            raise MemberFailedError(f"{self.spec.name}: {operation} answered 500: out of memory")
        if fault == "timeout":
            raise MemberFailedError(f"{self.spec.name}: {operation} gave no answer") from TimeoutError()
        if fault == "hang":
            await asyncio.Event().wait()
        if fault == "die":
            self.die()
            raise MemberFailedError(f"{self.spec.name}: connection reset")
        return fault
