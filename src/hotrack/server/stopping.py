"""Stop strings on a text stream: never let a part of one out, never hold back more than could still become
one."""

from collections.abc import Sequence

from hotrack.core.errors import RequestError

# Checking costs at most one comparison per character of all stop strings and token.
MAX_STOP_CHARS = 4096


class StopMatcher:
    """Feed text; what comes back may be shown.

    The earliest match in the text wins, then the first in the list. ``matched`` names it; nothing comes
    after.

    Raises:
        RequestError: the stop strings together are longer than ``MAX_STOP_CHARS``.
    """

    __slots__ = ("_held", "_include", "_stops", "matched")

    def __init__(self, stops: Sequence[str], *, include: bool = False) -> None:
        if (total := sum(map(len, stops))) > MAX_STOP_CHARS:
            raise RequestError(
                f"the stop strings have {total} characters together; at most {MAX_STOP_CHARS} are allowed",
                param="stop",
            )
        self._stops = tuple(stops)
        self._include = include
        self._held = ""
        self.matched: str | None = None

    def push(self, text: str, *, armed: bool = True) -> str:
        """Text that is now certain not to be part of a stop string. Unarmed (``min_tokens``): nothing in it
        can match."""
        if self.matched is not None:
            return ""
        if not self._stops:
            return text
        if not armed:
            released, self._held = self._held + text, ""
            return released
        buffer = self._held + text
        hits = [(at, i) for i, stop in enumerate(self._stops) if (at := buffer.find(stop)) >= 0]
        if hits:
            at, which = min(hits)
            self.matched = self._stops[which]
            self._held = ""
            return buffer[: at + len(self.matched)] if self._include else buffer[:at]
        keep = max(_overlap(buffer, stop) for stop in self._stops)
        self._held = buffer[len(buffer) - keep :]
        return buffer[: len(buffer) - keep]

    def finish(self) -> str:
        """What was held back, once no more text comes."""
        held, self._held = self._held, ""
        return held


def _overlap(buffer: str, stop: str) -> int:
    """Length of the longest end of ``buffer`` that begins ``stop`` (and is not all of it)."""
    first = stop[0]
    at = buffer.find(first, max(0, len(buffer) - len(stop) + 1))
    while at >= 0:
        if stop.startswith(buffer[at:]):
            return len(buffer) - at
        at = buffer.find(first, at + 1)
    return 0
