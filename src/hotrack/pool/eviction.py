"""Who gives memory back for a target. Pure: it is asked speculatively, so it neither logs nor acts."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Holder:
    """An awake member. ``idle``: nothing running or waiting. ``last_used`` in pool-clock seconds."""

    name: str
    idle: bool
    last_used: float
    pinned: bool = False


def choose_victims(
    holders: Sequence[Holder], fits_without: Callable[[frozenset[str]], bool]
) -> tuple[str, ...] | None:
    """A minimal set of holders whose sleep lets the target in, or None when no set does.

    ``fits_without(victims)`` says whether the target fits once those are asleep. Idle holders go before busy
    ones, least recently used first; pinned ones never go. Minimal: no member of the set can be spared.
    """
    order = sorted((h for h in holders if not h.pinned), key=lambda h: (not h.idle, h.last_used, h.name))
    victims: list[str] = []
    for holder in order:
        if fits_without(frozenset(victims)):
            break
        victims.append(holder.name)
    if not fits_without(frozenset(victims)):
        return None
    for name in reversed(victims.copy()):  # a large late victim can make early ones needless
        if fits_without(frozenset(victims) - {name}):
            victims.remove(name)
    return tuple(victims)
