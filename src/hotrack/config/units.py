"""Byte sizes and durations as people write them."""

import re

_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]i?b?|b)?\s*", re.IGNORECASE)
_DURATION = re.compile(r"(\d+(?:\.\d+)?)(ms|s|m|h|d)")
_SECONDS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_POWER = {"k": 1, "m": 2, "g": 3, "t": 4}


def parse_size(text: str | int) -> int:
    """Bytes: ``900MiB``, ``1.5GiB`` (powers of 1024), ``2GB`` (powers of 1000), ``4096``.

    Raises:
        ValueError: not a size, or not a whole number of bytes.
    """
    match = _SIZE.fullmatch(str(text))
    if match is None:
        raise ValueError(f"{text!r} is not a size; write for example 900MiB or 1.5GiB")
    number, unit = float(match[1]), (match[2] or "b").lower()
    factor = 1 if unit == "b" else (1024 if "i" in unit else 1000) ** _POWER[unit[0]]
    return int(number * factor)


def parse_duration(text: str | float) -> float:
    """Seconds: ``10s``, ``2m``, ``1h30m``, ``500ms``; a bare number is seconds.

    Raises:
        ValueError: not a duration.
    """
    cleaned = str(text).strip().lower()
    try:
        seconds = float(cleaned)
    except ValueError:
        parts = _DURATION.findall(cleaned)
        if not parts or "".join(number + unit for number, unit in parts) != cleaned:
            raise ValueError(f"{text!r} is not a duration; write for example 10s, 2m or 1h30m") from None
        seconds = sum(float(number) * _SECONDS[unit] for number, unit in parts)
    if not 0 <= seconds < 1e9:
        raise ValueError(f"{text!r} is not a duration between 0 and 1e9 seconds")
    return seconds


def format_size(num_bytes: float) -> str:
    """``943718400`` -> ``900.0 MiB``."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(num_bytes) < 1024 or unit == "GiB":
            return f"{num_bytes:.0f} B" if unit == "B" else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1024
    raise AssertionError
