"""One request as the run loop sees it: no sockets, no asyncio."""

from enum import Enum, auto
from math import inf

from hotrack.pool.events import SwapRecord


class RequestState(Enum):
    NEW = auto()
    WAITING = auto()
    GRANTED = auto()
    ENDED = auto()  # released, refused, cancelled or cut; exactly once


class Request:
    """``deadline``: pool-clock second by which it must be admitted. ``priority``: lower runs first."""

    __slots__ = (
        "arrived",
        "by_operator",
        "deadline",
        "member",
        "order",
        "priority",
        "provisional",
        "request_id",
        "state",
        "swap",
    )

    def __init__(
        self,
        member: str,
        *,
        request_id: str = "",
        priority: int = 0,
        arrived: float = 0.0,
        deadline: float = inf,
    ) -> None:
        self.member = member
        self.request_id = request_id
        self.priority = priority
        self.arrived = arrived
        self.deadline = deadline
        self.by_operator = False  # may wake a member that requests may not
        self.provisional = False  # granted before its member was verified: its answer must wait for that
        self.order = 0.0  # place in its member's queue, set on arrival
        self.state = RequestState.NEW
        self.swap: SwapRecord | None = None  # the swap it was the first to be admitted after
