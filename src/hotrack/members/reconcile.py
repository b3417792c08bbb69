"""What a running engine really does, asked rather than remembered."""

from dataclasses import dataclass
from enum import Enum, auto

from hotrack.core.errors import HotrackError
from hotrack.members.member import Member


class Found(Enum):
    """ASLEEP: says so, and its bytes are gone. AWAKE: says so. HALF: neither holds. GONE: no answer."""

    GONE = auto()
    ASLEEP = auto()
    AWAKE = auto()
    HALF = auto()


@dataclass(frozen=True, slots=True)
class Observation:
    healthy: bool
    sleeping: bool | None = None
    memory_bytes: int | None = None


async def observe(member: Member) -> Observation:
    """Ask a member about itself; an unanswered question is None, never a guess."""
    if not member.alive or not await member.healthy():
        return Observation(healthy=False)
    sleeping: bool | None
    try:
        sleeping = await member.is_sleeping()
    except HotrackError:
        sleeping = None
    return Observation(True, sleeping, await member.memory_bytes())


def classify(seen: Observation, residue_limit_bytes: int | None) -> Found:
    """Pure. A sleeper that holds more than its residue limit is HALF, as is an engine that does not say."""
    if not seen.healthy:
        return Found.GONE
    if seen.sleeping is None:
        return Found.HALF
    if not seen.sleeping:
        return Found.AWAKE
    too_much = (
        seen.memory_bytes is not None
        and residue_limit_bytes is not None
        and seen.memory_bytes > residue_limit_bytes
    )
    return Found.HALF if too_much else Found.ASLEEP
