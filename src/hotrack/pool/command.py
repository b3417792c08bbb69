"""A wish from outside: an operator's, or the pool's own."""

from collections.abc import Callable
from dataclasses import dataclass

from hotrack.core.errors import HotrackError


def _nobody_waits(error: HotrackError | None) -> None:
    del error


@dataclass(slots=True)
class Command:
    """``kind``: 'boot', 'sleep', 'unload' or 'kill'. ``done`` is called once, with what went wrong."""

    kind: str
    name: str
    done: Callable[[HotrackError | None], None] = _nobody_waits
