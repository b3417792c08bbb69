"""Why a request is turned away, in words with numbers. Pure."""

from collections.abc import Iterable

from hotrack.core.errors import (
    DeadlineExceededError,
    HotrackError,
    InsufficientMemoryError,
    MemberFailedError,
    ModelAsleepError,
    QueueFullError,
    WakeFailedError,
)
from hotrack.core.lifecycle import MemberState
from hotrack.plan.ledger import Verdict
from hotrack.pool.entry import Entry
from hotrack.pool.policy import PoolPolicy
from hotrack.pool.request import Request

_S = MemberState


def why_not_queue(
    entry: Entry, request: Request, *, now: float, wait_s: float, policy: PoolPolicy
) -> HotrackError | None:
    """Why ``request`` may not even wait for a member that is expected to take ``wait_s``; None when it
    may.
    """
    name = entry.name
    if entry.state is _S.QUARANTINED:
        return quarantined(entry)
    if entry.state is _S.ASLEEP and not (entry.spec.auto_wake or request.by_operator):
        return ModelAsleepError(f"{name} is asleep and is not woken by requests; wake it first")
    if len(entry.queue) >= policy.max_queue:
        return QueueFullError(
            f"{len(entry.queue)} requests already wait for {name} (limit {policy.max_queue})",
            retry_after_s=wait_s,
        )
    if now + wait_s > request.deadline:
        if entry.retry_at > now:
            kind = WakeFailedError if entry.state is _S.ASLEEP else MemberFailedError
            return kind(
                f"{name} failed and is tried again too late for this request: {entry.last_error}",
                retry_after_s=wait_s,
            )
        return DeadlineExceededError(
            f"{name} needs about {wait_s:.1f} s before it can answer, the deadline is in "
            f"{request.deadline - now:.1f} s",
            retry_after_s=wait_s,
        )
    return None


def quarantined(entry: Entry) -> MemberFailedError:
    return MemberFailedError(
        f"{entry.name} is quarantined after repeated failures and needs an operator: {entry.last_error}"
    )


def cannot_sleep(entry: Entry) -> HotrackError | None:
    """Why a member that is not awake cannot be put to sleep; None when it holds no device as it is."""
    if entry.state in (_S.ASLEEP, _S.STOPPED):
        return None
    reason = f": {entry.last_error}" if entry.last_error else ""
    return MemberFailedError(f"{entry.name} cannot be put to sleep, it is {entry.state}{reason}")


def too_late(entry: Entry, request: Request, *, now: float, wait_s: float) -> DeadlineExceededError:
    waited = f"{entry.name} was not ready after {now - request.arrived:.1f} s of waiting"
    return DeadlineExceededError(waited, retry_after_s=wait_s)


def blame(entries: Iterable[Entry]) -> str:
    """Who may hold memory that nobody can use, to end a message with."""
    return "".join(
        f"; {entry.name} is {entry.state} and may still hold memory: {entry.last_error}"
        for entry in entries
        if entry.holds and entry.state in (_S.FAILED, _S.QUARANTINED)
    )


def unfit(
    name: str, verdict: Verdict, entries: Iterable[Entry], policy: PoolPolicy
) -> InsufficientMemoryError:
    """The sum that does not work out, and who is to blame for it."""
    message = f"{name} cannot be awake: {verdict.arithmetic}{blame(entries)}"
    return InsufficientMemoryError(message, retry_after_s=policy.max_backoff_s)
