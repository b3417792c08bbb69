"""A pool of fake members on virtual time, and clients that behave like the gateway."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from fakes.clock import VirtualClock
from fakes.fake_member import GIB, FakeMember, World
from hotrack.core.errors import HotrackError
from hotrack.core.lifecycle import MemberState
from hotrack.members.spec import Deadlines, MemberSpec
from hotrack.plan.ledger import DeviceBudget
from hotrack.pool.policy import PoolPolicy
from hotrack.pool.pool import Pool


def spec(name: str, **changes: Any) -> MemberSpec:
    values: dict[str, Any] = {
        "command": ("fake", name),
        "awake_bytes": 60 * GIB,
        "residue_bytes": 1 * GIB,
        "swap_bytes": 59 * GIB,
        "deadlines": Deadlines(drain_s=5.0, release_s=5.0, wake_s=10.0, sleep_s=10.0),
    }
    return MemberSpec(name=name, **{**values, **changes})


@dataclass
class Answer:
    """How one request ended: ``code`` is 'ok', 'drain_timeout', 'dropped' or an error code."""

    model: str
    code: str
    arrived: float
    admitted: float | None
    ended: float
    error: HotrackError | None = None


@dataclass
class Rig:
    """``async with Rig(...) as rig``: a booted pool, members asleep, one device of 96 GiB."""

    names: Sequence[str] = ("a", "b")
    policy: PoolPolicy = field(default_factory=lambda: PoolPolicy(min_residency_s=0.0))
    specs: Sequence[MemberSpec] | None = None
    boot: bool = True
    total_bytes: int | None = 96 * GIB
    world: World = field(default_factory=World)
    answers: list[Answer] = field(default_factory=list)

    async def __aenter__(self) -> "Rig":
        self.clock = VirtualClock()
        self.pool = self.new_pool()
        if self.boot:
            await self.pool.start()
        self.booted_swaps = len(self.pool.events.swaps())
        self.world.calls.clear()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.pool.close()

    def new_pool(self) -> Pool:
        specs = list(self.specs or [spec(name) for name in self.names])
        for one in specs:
            if one.name not in self.world.members:
                FakeMember(one, self.world)
        self.world.capacity_bytes = self.total_bytes or 96 * GIB
        budgets = {"default": DeviceBudget(self.total_bytes)} if self.total_bytes else None
        policy = replace(self.policy, boot=self.boot)
        return Pool(specs, policy, budgets=budgets, clock=self.clock, connect=self.world.connect)

    def __getitem__(self, name: str) -> FakeMember:
        return self.world.members[name]

    def state(self, name: str) -> MemberState:
        return next(row.state for row in self.pool.status() if row.name == name)

    def swaps(self) -> list[Any]:
        """Swaps since boot."""
        return self.pool.events.swaps()[self.booted_swaps :]

    async def request(self, model: str, seconds: float = 0.1, **lease: Any) -> Answer:
        arrived = self.clock.now()
        admitted: float | None = None
        error: HotrackError | None = None
        try:
            passed = False
            while not passed:
                async with self.pool.lease(model, **lease) as held:
                    admitted = self.clock.now()
                    if not held.provisional:
                        held.first_byte()
                    serving = asyncio.ensure_future(self[held.member].serve(seconds, held.abandoned))
                    verdict = asyncio.ensure_future(held.verified())
                    try:
                        await asyncio.wait((serving, verdict), return_when=asyncio.FIRST_COMPLETED)
                        if passed := await verdict:
                            held.first_byte()
                            end = await serving
                    finally:
                        serving.cancel()
                        verdict.cancel()
                        await asyncio.wait((serving,))
                    if passed:
                        code = {"done": "ok", "cut": "drain_timeout"}.get(end, end)
        except HotrackError as refused:
            code, error = refused.code, refused
        answer = Answer(model, code, arrived, admitted, self.clock.now(), error)
        self.answers.append(answer)
        return answer

    def spawn(self, model: str, seconds: float = 0.1, **lease: Any) -> "asyncio.Task[Answer]":
        return asyncio.get_running_loop().create_task(self.request(model, seconds, **lease))

    async def all(self, *models: str, seconds: float = 0.1) -> list[Answer]:
        """Requests that arrive at one instant, in this order."""
        return list(await asyncio.gather(*[self.spawn(model, seconds) for model in models]))
