"""States and the moves allowed between them. Nothing infers a phase; it is stated and checked here."""

from enum import IntEnum, StrEnum


class MemberState(StrEnum):
    """Where one member (one model's server) stands, as the pool has last *observed* it."""

    STOPPED = "stopped"
    STARTING = "starting"
    VERIFYING = "verifying"
    READY = "ready"
    DRAINING = "draining"
    SUSPENDING = "suspending"
    ASLEEP = "asleep"
    WAKING = "waking"
    FAILED = "failed"
    QUARANTINED = "quarantined"
    UNKNOWN = "unknown"


_S = MemberState
MEMBER_MOVES: dict[MemberState, frozenset[MemberState]] = {
    _S.STOPPED: frozenset({_S.STARTING}),
    _S.STARTING: frozenset({_S.VERIFYING, _S.FAILED, _S.STOPPED}),
    _S.VERIFYING: frozenset({_S.READY, _S.SUSPENDING, _S.FAILED, _S.QUARANTINED, _S.STOPPED}),
    _S.READY: frozenset({_S.DRAINING, _S.FAILED, _S.STOPPED}),
    _S.DRAINING: frozenset({_S.READY, _S.SUSPENDING, _S.FAILED, _S.STOPPED}),
    _S.SUSPENDING: frozenset({_S.ASLEEP, _S.FAILED, _S.STOPPED}),
    _S.ASLEEP: frozenset({_S.WAKING, _S.FAILED, _S.STOPPED}),
    _S.WAKING: frozenset({_S.VERIFYING, _S.ASLEEP, _S.FAILED, _S.STOPPED}),
    _S.FAILED: frozenset({_S.STARTING, _S.STOPPED, _S.QUARANTINED}),
    _S.QUARANTINED: frozenset({_S.STARTING, _S.STOPPED}),
    _S.UNKNOWN: frozenset({_S.ASLEEP, _S.VERIFYING, _S.STARTING, _S.STOPPED, _S.FAILED}),
}


def check_member_move(name: str, old: MemberState, new: MemberState) -> None:
    """Assert that ``old -> new`` is a row of the table; a wrong move is a bug of ours, never a user's."""
    assert new in MEMBER_MOVES[old], f"{name}: move {old} -> {new} is not allowed"


class EngineState(StrEnum):
    """Where an engine's memory is, as its own server reports it."""

    AWAKE = "awake"
    FALLING_ASLEEP = "falling_asleep"
    ASLEEP = "asleep"
    WAKING = "waking"
    FAILED = "failed"


class SleepLevel(IntEnum):
    """vLLM's levels: 0 pauses the scheduler, 1 keeps weights on the host, 2 drops them."""

    PAUSE = 0
    KEEP_WEIGHTS = 1
    DROP_WEIGHTS = 2


class SleepMode(StrEnum):
    """What happens to requests that are running when a sleep begins (vLLM's words)."""

    ABORT = "abort"
    WAIT = "wait"
    KEEP = "keep"


class Phase(StrEnum):
    """Phase of one request inside the engine's scheduler."""

    WAITING = "waiting"
    PREFILL = "prefill"
    DECODE = "decode"
    PREEMPTED = "preempted"
    FINISHED = "finished"


class FinishReason(StrEnum):
    """Why a request ended; the first two are OpenAI's, the others are reported as errors or aborts."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"
