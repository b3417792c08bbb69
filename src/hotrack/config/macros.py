"""llama-swap's macros: ``${name}``, ``${env.NAME}``, ``${MODEL_ID}``, ``${PORT}`` in any value."""

import re
from collections.abc import Callable, Mapping
from typing import Any

from hotrack.config import env
from hotrack.config.document import Document, Place

MACRO = re.compile(r"\$\{([A-Za-z0-9_.-]{1,67})\}")
_NAME = re.compile(r"[A-Za-z0-9_-]{1,63}")
RESERVED = frozenset({"PORT", "MODEL_ID", "PID", "SOCKET"})
# Filled in when the process is started or stopped, not when the file is read.
LATE = frozenset({"PORT", "PID", "SOCKET"})
MAX_TEXT = 64 * 1024

Scalar = str | int | float | bool


def define(document: Document, place: Place, raw: Any, outer: Mapping[str, Scalar]) -> dict[str, Scalar]:
    """``outer`` plus the macros of one ``macros:`` block; a macro may use those written before it."""
    if raw is None:
        return dict(outer)
    if not isinstance(raw, dict):
        document.fail(place, "must be a mapping of names to values")
    macros = dict(outer)
    for name, value in raw.items():
        here = (*place, name)
        if not _NAME.fullmatch(name) or name in RESERVED:
            document.fail(
                here, f"not a macro name (letters, digits, _ and -; not {', '.join(sorted(RESERVED))})"
            )
        if not isinstance(value, Scalar):
            document.fail(here, "a macro must be a string, a number or true/false")
        macros[name] = expand(document, here, value, macros)
    return macros


def expand(document: Document, place: Place, value: Any, macros: Mapping[str, Scalar]) -> Any:
    """``value`` with its macros replaced, through lists and mappings (keys too).

    A string that is exactly one macro takes the macro's type, so ``"${temp}"`` may become 0.7.
    """
    if isinstance(value, dict):
        return {
            _text(document, (*place, key), key, macros): expand(document, (*place, key), item, macros)
            for key, item in value.items()
        }
    if isinstance(value, list):
        return [expand(document, (*place, index), item, macros) for index, item in enumerate(value)]
    if not isinstance(value, str):
        return value
    whole = MACRO.fullmatch(value)
    if whole is not None:
        return _lookup(document, place, macros)(whole)
    return _text(document, place, value, macros)


def _text(document: Document, place: Place, value: str, macros: Mapping[str, Scalar]) -> str:
    find = _lookup(document, place, macros)
    result = MACRO.sub(lambda match: str(find(match)), value)
    if len(result) > MAX_TEXT:
        document.fail(place, f"longer than {MAX_TEXT} characters after expanding macros")
    return result


def _lookup(
    document: Document, place: Place, macros: Mapping[str, Scalar]
) -> Callable[[re.Match[str]], Scalar]:
    def find(match: re.Match[str]) -> Scalar:
        name = match[1]
        if name.startswith("env."):
            found = env.expand(name[4:])
            if found is None:
                document.fail(place, f"environment variable {name[4:]} is not set")
            return found
        if name in macros:
            return macros[name]
        if name not in LATE:
            document.fail(place, f"unknown macro ${{{name}}}")
        return match[0]

    return find
