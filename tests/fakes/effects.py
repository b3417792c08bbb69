"""Effects that only write down what the run loop wanted; a test plays the world."""

from math import inf

from hotrack.core.errors import HotrackError
from hotrack.members.endpoint import Endpoint
from hotrack.pool.events import Event, SwapRecord
from hotrack.pool.request import Request
from hotrack.pool.scheduler import Switch


class ManualClock:
    def __init__(self) -> None:
        self.time = 100.0

    def now(self) -> float:
        return self.time

    async def sleep(self, seconds: float) -> None:
        raise AssertionError("the run loop never sleeps")


class FakeEffects:
    def __init__(self) -> None:
        self.calls: list[tuple[str, str]] = []
        self.timer = inf
        self.switch: Switch | None = None
        self.record: SwapRecord | None = None
        self.aborted = False
        self.events: list[Event] = []

    def grant(self, request: Request, endpoint: Endpoint) -> None:
        self.calls.append(("grant", request.request_id))

    def refuse(self, request: Request, error: HotrackError) -> None:
        self.calls.append((error.code, request.request_id))

    def conclude(self, request: Request, *, passed: bool) -> None:
        self.calls.append(("confirm" if passed else "revoke", request.request_id))

    def abandon(self, request: Request) -> None:
        self.calls.append(("abandon", request.request_id))

    def run(self, switch: Switch, record: SwapRecord, *, abort: bool) -> None:
        assert self.switch is None, "a second transition while one runs"
        self.switch, self.record, self.aborted = switch, record, abort
        self.calls.append(("run", f"{'+'.join(switch.victims)}>{switch.target or ''}"))

    def set_timer(self, when: float) -> None:
        self.timer = when

    def publish(self, event: Event) -> None:
        self.events.append(event)
