"""A wish from outside: an operator's, or the pool's own."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from hotrack.core.errors import HotrackError, MemberFailedError
from hotrack.core.lifecycle import MemberState
from hotrack.pool.door import cannot_sleep, unfit
from hotrack.pool.entry import Entry
from hotrack.pool.events import Cause
from hotrack.pool.policy import PoolPolicy
from hotrack.pool.scheduler import GroupView, Room, SwapScheduler, Switch

_S = MemberState


def _nobody_waits(error: HotrackError | None) -> None:
    del error


@dataclass(slots=True)
class Command:
    """``kind``: 'boot', 'sleep', 'unload' or 'kill'. ``done`` is called once, with what went wrong."""

    kind: str
    name: str
    done: Callable[[HotrackError | None], None] = _nobody_waits


def switch_for(
    command: Command, entry: Entry, view: GroupView, entries: Iterable[Entry], policy: PoolPolicy
) -> Switch | HotrackError | None:
    """What fulfils the command; None when it is so already. Pure."""
    if command.kind == "boot":
        return _boot(entry, view, entries, policy)
    if command.kind == "sleep":
        ready = entry.state is _S.READY
        return Switch(Cause.OPERATOR, victims=(entry.name,)) if ready else cannot_sleep(entry)
    assert command.kind in ("unload", "kill"), command.kind
    if entry.state is _S.STOPPED:
        return None
    if entry.spec.url is not None:
        return MemberFailedError(
            f"{entry.name} runs outside hotrack at {entry.spec.url}; stop it where it was started"
        )
    cause = Cause.OPERATOR if command.kind == "unload" else Cause.PROBE
    return Switch(cause, victims=(entry.name,), stop=True)


def _boot(
    entry: Entry, view: GroupView, entries: Iterable[Entry], policy: PoolPolicy
) -> Switch | HotrackError | None:
    """Find out what runs, or start it."""
    if entry.state not in (_S.STOPPED, _S.UNKNOWN):
        return None
    found, scheduler = entry.state is _S.UNKNOWN, SwapScheduler(policy)
    room = Room(()) if found else scheduler.room(view, entry.name)
    if room is None:
        return unfit(entry.name, scheduler.verdict_alone(view, entry.name), entries, policy)
    alone = not any(member.state is _S.READY for member in view.members)
    then_sleep = not (found and alone)
    return Switch(Cause.BOOT, entry.name, room.victims, then_sleep=then_sleep, cold=room.cold)
