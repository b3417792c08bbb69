"""Checked access to hostile data (config.json, GGUF metadata): right type and range, or an error."""

import json
from collections.abc import Mapping
from pathlib import Path

from hotrack.core.errors import CheckpointError

MAX_JSON_BYTES = 256 << 20  # tokenizer.json of a 250k vocabulary is about 30 MB


def read_json_object(path: Path) -> dict[str, object]:
    """The JSON object in ``path``; CheckpointError when the file is missing, too large or not an object."""
    try:
        size = path.stat().st_size
        if size > MAX_JSON_BYTES:
            raise CheckpointError(
                f"{path} has {size} bytes; a model's JSON file has at most {MAX_JSON_BYTES}"
            )
        return parse_json_object(path.read_bytes(), str(path))
    except OSError as e:
        raise CheckpointError(f"cannot read {path}: {e.strerror or e}") from e


def parse_json_object(data: bytes, where: str) -> dict[str, object]:
    """``data`` as a JSON object; CheckpointError for anything else, and for repeated keys."""
    try:
        value = json.loads(data, object_pairs_hook=_unique)
    except RecursionError as e:
        raise CheckpointError(f"{where} is nested too deeply to be a model's file") from e
    except ValueError as e:  # bad JSON, bad UTF-8, integers of thousands of digits
        raise CheckpointError(f"{where} is not valid JSON: {shorten(e)}") from e
    if not isinstance(value, dict):
        raise CheckpointError(f"{where} must hold a JSON object, found {type(value).__name__}")
    return value


def _unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
    """Two readers of one file may disagree on which of two equal keys counts, so neither does."""
    result = dict(pairs)
    if len(result) != len(pairs):
        keys = [k for k, _ in pairs]
        raise ValueError(f"key {shorten(next(k for k in keys if keys.count(k) > 1))!r} appears twice")
    return result


def shorten(value: object, limit: int = 80) -> str:
    """``str(value)`` cut to ``limit`` characters, for messages about data we do not trust."""
    try:
        text = str(value)
    except ValueError:  # an int beyond sys.get_int_max_str_digits()
        return "a number of thousands of digits"
    return text if len(text) <= limit else text[: limit - 3] + "..."


class Fields:
    """Typed look-ups in one mapping. Several names are spellings of one field: the first present wins.

    A missing field without a default, or a value of the wrong type or out of range, is a CheckpointError that
    names the file, the field, what was found and what is accepted. JSON null counts as missing.
    """

    def __init__(self, values: Mapping[str, object], where: str) -> None:
        self.values = values
        self.where = where

    def get(self, *names: str) -> object:
        return next((v for n in names if (v := self.values.get(n)) is not None), None)

    def fail(self, name: str, expected: str, found: object) -> CheckpointError:
        shown = shorten(repr(found) if not isinstance(found, int) else found)
        return CheckpointError(f"{self.where}: {name} must be {expected}, found {shown}", param=name)

    def _need(self, names: tuple[str, ...], expected: str) -> object:
        value = self.get(*names)
        if value is None:
            spellings = " or ".join(repr(n) for n in names)
            raise CheckpointError(
                f"{self.where}: {spellings} is missing; {expected} is needed", param=names[0]
            )
        return value

    def integer(self, *names: str, high: int, low: int = 1, default: int | None = None) -> int:
        expected = f"an integer between {low} and {high}"
        value = self.get(*names) if default is not None else self._need(names, expected)
        if value is None and default is not None:
            return default
        if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
            raise self.fail(names[0], expected, value)
        return value

    def number(self, *names: str, low: float, high: float, default: float | None = None) -> float:
        expected = f"a number between {low:g} and {high:g}"
        value = self.get(*names) if default is not None else self._need(names, expected)
        if value is None and default is not None:
            return default
        if not isinstance(value, int | float) or isinstance(value, bool) or not low <= value <= high:
            raise self.fail(names[0], expected, value)  # NaN compares false, so it lands here
        return float(value)

    def flag(self, *names: str, default: bool) -> bool:
        value = self.get(*names)
        if value is not None and not isinstance(value, bool):
            raise self.fail(names[0], "true or false", value)
        return default if value is None else value

    def text(self, *names: str, default: str | None = None) -> str:
        value = self.get(*names) if default is not None else self._need(names, "a string")
        if value is None and default is not None:
            return default
        if not isinstance(value, str):
            raise self.fail(names[0], "a string", value)
        return value

    def integers(self, *names: str, high: int, max_len: int) -> tuple[int, ...]:
        """A list of integers in [0, high]; one integer is a list of one, a missing field an empty list."""
        value = self.get(*names)
        items = [] if value is None else value if isinstance(value, list) else [value]
        good = len(items) <= max_len and all(
            isinstance(v, int) and not isinstance(v, bool) and 0 <= v <= high for v in items
        )
        if not good:
            raise self.fail(names[0], f"at most {max_len} integers between 0 and {high}", value)
        return tuple(items)

    def section(self, *names: str) -> "Fields":
        """A nested object; an empty one when the field is missing."""
        value = self.get(*names)
        if value is not None and not isinstance(value, dict):
            raise self.fail(names[0], "an object", value)
        return Fields(value or {}, f"{self.where}: {names[0]}")
