"""Pool: the public face. One run loop per device group owns that group's state; this file routes to it."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TypeVar

from hotrack.core.clock import Clock, MonotonicClock
from hotrack.core.errors import ConfigError, HotrackError, ModelNotFoundError
from hotrack.core.lifecycle import MemberState
from hotrack.members.gpu import Gpu
from hotrack.members.member import Member, MemberFactory
from hotrack.members.process import describe_exit
from hotrack.members.spec import MemberSpec, check_members
from hotrack.obs.log import get_logger
from hotrack.plan.ledger import DeviceBudget, Footprint, GpuLedger, Term, assumed, stated
from hotrack.pool.capacity import ledger_capacity
from hotrack.pool.checked import CheckedMember
from hotrack.pool.command import Command
from hotrack.pool.effects import AsyncEffects
from hotrack.pool.events import EventLog, SwapRecord
from hotrack.pool.lease import Lease
from hotrack.pool.metrics import PoolMetrics
from hotrack.pool.policy import PoolPolicy
from hotrack.pool.run_loop import RunLoop
from hotrack.pool.scheduler import Switch
from hotrack.pool.status import MemberStatus
from hotrack.pool.transitions import Transitions

log = get_logger(__name__)
T = TypeVar("T")
WATCHED = frozenset({MemberState.READY, MemberState.ASLEEP})


class Pool:
    """Members that take turns. Use from one event loop; ``start`` it, ``close`` it.

    ``budgets``: per device group; a group without one keeps one member awake at a time. ``gpus``: of groups
    whose budget is a whole GPU; what others hold on it is read from time to time. ``connect`` makes the
    object that drives a member.

    Raises:
        ConfigError: two members with one name, or a member that can never be awake within its budget.
    """

    def __init__(
        self,
        members: Sequence[MemberSpec],
        policy: PoolPolicy | None = None,
        *,
        budgets: Mapping[str, DeviceBudget] | None = None,
        gpus: Mapping[str, Gpu] | None = None,
        clock: Clock | None = None,
        connect: Callable[[MemberSpec], Member] | None = None,
        log_dir: Path | None = None,
    ) -> None:
        self._policy = policy or PoolPolicy()
        self._clock = clock or MonotonicClock()
        self._owner_of = check_members(tuple(members))
        self._specs = {spec.name: spec for spec in members}
        connect = connect or MemberFactory(log_dir)
        self._members = {spec.name: connect(spec) for spec in members}
        self.events = EventLog()
        self.metrics = PoolMetrics()
        self.events.listen(self.metrics.observe)
        self._groups: dict[str, _Group] = {}
        self._gpus = dict(gpus or {})
        self._unread: set[str] = set()  # whose memory could not be read when last looked at
        budgets = budgets or {}
        names = list(dict.fromkeys(spec.device_group for spec in members))
        if unknown := set(budgets) - set(names):
            raise ConfigError(f"a budget names device group {min(unknown)!r}, but no member is in it")
        for group in names:
            specs = [spec for spec in members if spec.device_group == group]
            self._groups[group] = _Group(self, specs, budgets.get(group))
        self._loop_of = {spec.name: self._groups[spec.device_group].loop for spec in members}
        self._watcher: asyncio.Task[None] | None = None
        self._closed = False

    async def start(self, *, preload: str | None = None) -> None:
        """Find out what runs, then start, verify and put to sleep each member in turn; finally wake
        ``preload``.

        Requests may be leased meanwhile; they queue. A member that fails to start does not fail the pool: it
        shows in
        ``status`` and is tried again.
        """
        self._watcher = asyncio.get_running_loop().create_task(self._watch())
        found_first = sorted(self._specs.values(), key=lambda spec: spec.url is None)
        boots = [self._boot(spec) for spec in found_first if self._wants_boot(spec)]
        await asyncio.gather(*boots)
        if preload is not None and not self._closed:
            await self.wake(preload)

    def check_measured(self) -> None:
        """Raises ConfigError when, by what was measured so far, a member can never be awake: not even after
        everybody else whose process is ours has ended."""
        for spec in self._specs.values():
            others = {
                other.name
                for other in self._specs.values()
                if other.device_group == spec.device_group and other is not spec and other.command
            }
            verdict = self._loop_of[spec.name].capacity.fits((spec.name,), absent=others)
            if not verdict.fits:
                raise ConfigError(
                    f"{spec.name} can never be awake within its budget: {verdict.arithmetic}; raise "
                    "pool.memory.budget, or make the model smaller (kv_cache_memory, max_model_len, dtype)"
                )

    def lease(
        self, model: str, *, priority: int = 0, deadline_s: float | None = None, request_id: str = ""
    ) -> Lease:
        """A place at ``model`` (name or alias); see ``Lease``. ``priority``: lower runs first.
        ``deadline_s``: seconds from now within which it must be admitted.

        Raises:
            ModelNotFoundError: no member has that name.
        """
        name = self.resolve(model)
        now = self._clock.now()
        wait_s = self._policy.max_queue_wait_s if deadline_s is None else deadline_s
        return Lease(
            self._loop_of[name],
            name,
            request_id=request_id,
            priority=priority,
            arrived=now,
            deadline=now + wait_s,
        )

    def resolve(self, model: str) -> str:
        """Member name of a name or alias."""
        try:
            return self._owner_of[model]
        except KeyError:
            known = ", ".join(sorted(self._specs))
            raise ModelNotFoundError(
                f"there is no model {model!r}; this pool has {known}", param="model"
            ) from None

    def spec(self, name: str) -> MemberSpec:
        return self._specs[self.resolve(name)]

    def names(self) -> list[str]:
        return list(self._specs)

    def logs(self, name: str) -> list[str]:
        """Last lines that the member's process wrote."""
        return self._members[self.resolve(name)].logs()

    def status(self) -> list[MemberStatus]:
        by_name = {row.name: row for group in self._groups.values() for row in group.loop.status()}
        return [by_name[name] for name in self._specs]

    def render_metrics(self) -> bytes:
        """Prometheus text."""
        capacities = {name: group.loop.capacity for name, group in self._groups.items()}
        return self.metrics.render(self.status(), capacities)

    async def sleep(self, name: str) -> None:
        """Drain the member and put it to sleep; nothing to do when it is not awake. Raises what went
        wrong.
        """
        await self._command("sleep", self.resolve(name))

    async def unload(self, name: str) -> None:
        """Drain the member and end its process. For a failed external engine: the operator's word that it is
        gone and holds no memory; a healthy one is refused."""
        await self._command("unload", self.resolve(name))

    async def wake(self, name: str) -> None:
        """Make the member ready, in its turn like a request; also pardons a quarantined one."""
        name = self.resolve(name)
        self._loop_of[name].on_pardon(name)
        lease = self.lease(name, request_id="wake")
        lease.by_operator = True
        async with lease:
            pass

    async def close(self) -> None:
        """Refuse waiters, stop transitions, end every process that the pool started. Idempotent."""
        if self._closed:
            return
        self._closed = True
        if self._watcher is not None:
            self._watcher.cancel()
            await asyncio.gather(self._watcher, return_exceptions=True)
        for group in self._groups.values():
            group.loop.on_close()
            await group.effects.close()
        await asyncio.gather(*(self._end(member) for member in self._members.values()))

    def _wants_boot(self, spec: MemberSpec) -> bool:
        return spec.url is not None or (self._policy.boot and spec.sleep_level is not None)

    async def _boot(self, spec: MemberSpec) -> None:
        try:
            await self._command("boot", spec.name)
        except HotrackError as error:
            told = any(error.message == row.last_error for row in self.status() if row.name == spec.name)
            log.error("%s did not start: %s", spec.name, error.code if told else error.message)

    def _command(self, kind: str, name: str) -> Awaitable[None]:
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def done(error: HotrackError | None) -> None:
            if future.done():  # the caller went away
                return
            if error is None:
                future.set_result(None)
            else:
                future.set_exception(error)

        self._loop_of[name].on_command(Command(kind, name, done))
        return future

    async def _watch(self) -> None:
        """Look at every settled member now and then: is it there, what does it hold?"""
        while True:
            await self._clock.sleep(self._policy.probe_interval_s)
            num_swaps = {name: group.loop.num_swaps for name, group in self._groups.items()}
            for name, member in self._members.items():
                loop = self._loop_of[name]
                if loop.state(name) not in WATCHED:
                    continue
                healthy = await member.healthy()
                memory_bytes = await self._read(name, member.memory_bytes())
                if loop.state(name) in WATCHED:
                    loop.on_probe(name, healthy=healthy, memory_bytes=memory_bytes)
            for name, gpu in self._gpus.items():
                memory = await self._read(f"device of {name}", asyncio.to_thread(gpu.memory))
                if memory is not None:
                    self._groups[name].loop.on_device_used(memory.used, num_swaps[name])

    async def _read(self, what: str, reading: Awaitable[T]) -> T | None:
        """None when it cannot be read, which is said once: a lost GPU must not end the watch over everybody
        else."""
        try:
            value = await reading
        except HotrackError as error:
            if what not in self._unread:
                log.warning("%s: its memory cannot be read: %s", what, error.message)
            self._unread.add(what)
            return None
        self._unread.discard(what)
        return value

    async def _end(self, member: Member) -> None:
        if member.spec.command:
            await member.stop()
        await member.close()


class _Group:
    """A run loop with its effects and transitions."""

    def __init__(self, pool: Pool, specs: Sequence[MemberSpec], budget: DeviceBudget | None) -> None:
        ledger = make_ledger(specs, budget) if budget is not None else None
        if ledger is not None:
            for warning in ledger.check_each_alone():
                log.info("plan: %s", warning)
        members = {spec.name: pool._members[spec.name] for spec in specs}
        self.effects = AsyncEffects(pool._clock, pool.events)
        self.loop = RunLoop(
            list(members.values()), pool._policy, ledger_capacity(ledger), pool._clock, self.effects
        )
        self.effects.on_timer = self.loop.on_timer
        self.effects.start_switch = self._start_switch
        checked = {name: CheckedMember(m, pool._clock, pool._policy.poll_s) for name, m in members.items()}
        self._transitions = Transitions(checked, self.loop, pool._clock)
        for name, member in members.items():
            member.watch(partial(self._exited, name))

    def _exited(self, name: str, code: int) -> None:
        self.loop.on_exit(name, describe_exit(code))

    def _start_switch(self, switch: Switch, record: SwapRecord, abort: bool) -> "asyncio.Task[None]":
        return asyncio.get_running_loop().create_task(self._switch(switch, record, abort))

    async def _switch(self, switch: Switch, record: SwapRecord, abort: bool) -> None:
        outcome = await self._transitions.run(switch, record, abort=abort)
        self.loop.on_switch_done(outcome)


def make_ledger(specs: Sequence[MemberSpec], budget: DeviceBudget) -> GpuLedger:
    """What is known of each member before it is measured. Of a GPU an unknown member is taken to need half:
    engines size themselves by what they find free, so who holds much must leave before it starts."""

    def awake(spec: MemberSpec) -> Term:
        unknown = spec.awake_bytes is None and spec.device is not None
        return assumed(budget.total_bytes // 2) if unknown else stated(spec.awake_bytes)

    return GpuLedger.of(
        budget,
        [Footprint(spec.name, pool=awake(spec), residue=stated(spec.residue_bytes)) for spec in specs],
    )
