"""Numbers as people read them."""

from typing import Any


def rounded(value: Any, digits: int = 3) -> Any:
    """``value`` with every float in it rounded, through dicts and lists: milliseconds to the microsecond,
    seconds to the millisecond."""
    if isinstance(value, float):
        return round(value, digits)
    if isinstance(value, dict):
        return {key: rounded(item, digits) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [rounded(item, digits) for item in value]
    return value
