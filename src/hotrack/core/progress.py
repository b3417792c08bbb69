"""How long work reports how far it is."""

from collections.abc import Callable

Progress = Callable[[int, int], None]
"""``progress(done, total)`` in bytes unless said otherwise; from any thread, one call at a time."""
