"""Closed schemas: a frozen dataclass says which keys a block has; this file reads, refuses and publishes it.

A field made with ``option(kind, default)`` is one key. ``kind`` parses and checks the value and describes
itself as JSON schema. An unknown key is an error that names the nearest known one.
"""

import dataclasses
import difflib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from hotrack.config.document import Document, Place, dotted
from hotrack.config.units import parse_duration, parse_size

T = TypeVar("T")


class Kind(Protocol):
    def parse(self, context: "Reading", place: Place, value: Any) -> Any: ...

    def json_schema(self) -> dict[str, Any]: ...


@dataclass(slots=True)
class Reading:
    """One pass over a document; ``warnings`` collects what is accepted but differs."""

    document: Document
    warnings: list[str]

    def block(self, cls: type[T], place: Place, value: Any) -> T:
        """An instance of the option dataclass ``cls`` from a mapping.

        Raises:
            ConfigError: not a mapping, unknown key, bad value, or the class's own checks.
        """
        options = options_of(cls)
        if value is None:
            value = {}
        if not isinstance(value, dict):
            self.document.fail(place, f"must be a mapping, got {_shown(value)}")
        arguments: dict[str, Any] = {}
        for key, item in value.items():
            here = (*place, key)
            if key not in options:
                self.document.fail(here, f"unknown key{_suggest(key, options)}")
            field = options[key]
            if note := field.metadata["differs"]:
                self.warnings.append(f"{dotted(here)}: {note}")
            if item is not None:
                arguments[field.name] = field.metadata["kind"].parse(self, here, item)
        missing = [key for key, field in options.items() if _required(field) and field.name not in arguments]
        if missing:
            self.document.fail(place, f"{missing[0]!r} is required")
        return cls(**arguments)


def option(
    kind: Kind, default: Any = dataclasses.MISSING, *, key: str = "", doc: str = "", differs: str = ""
) -> Any:
    """One key. ``default``: a value, or the class of a block that may be left out. ``key``: its name in the
    file, when not the field's. ``differs``: a warning for files that use it, saying what hotrack does."""
    metadata = {"kind": kind, "key": key, "doc": doc, "differs": differs}
    if isinstance(default, dict):
        return dataclasses.field(default_factory=dict, metadata=metadata)
    if isinstance(default, type):
        return dataclasses.field(default_factory=default, metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def options_of(cls: type) -> dict[str, "dataclasses.Field[Any]"]:
    return {
        field.metadata["key"] or field.name: field
        for field in dataclasses.fields(cls)
        if "kind" in field.metadata
    }


def _required(field: "dataclasses.Field[Any]") -> bool:
    return field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING


def _suggest(key: str, options: Mapping[str, Any]) -> str:
    near = difflib.get_close_matches(key, options, n=1, cutoff=0.6)
    return f"; did you mean {near[0]!r}?" if near else f"; known keys: {', '.join(sorted(options))}"


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


@dataclass(frozen=True, slots=True)
class Text:
    """Any string, or one of ``choices``, or one that matches the pattern ``also``."""

    choices: tuple[str, ...] = ()
    also: str = ""

    def parse(self, context: Reading, place: Place, value: Any) -> str:
        if isinstance(value, dict | list | bool):
            context.document.fail(place, f"must be a string, got {_shown(value)}")
        text = str(value)
        known = not self.choices or text in self.choices
        if not known and not (self.also and re.fullmatch(self.also, text)):
            context.document.fail(
                place, f"must be one of {', '.join(map(repr, self.choices))}; got {_shown(text)}"
            )
        return text

    def json_schema(self) -> dict[str, Any]:
        if not self.choices:
            return {"type": "string"}
        listed = {"type": "string", "enum": list(self.choices)}
        return {"anyOf": [listed, {"type": "string", "pattern": f"^{self.also}$"}]} if self.also else listed


@dataclass(frozen=True, slots=True)
class Number:
    """An integer (``whole``) or any number within bounds."""

    low: float | None = None
    high: float | None = None
    whole: bool = True

    def parse(self, context: Reading, place: Place, value: Any) -> float:
        kinds = (int,) if self.whole else (int, float)
        if isinstance(value, bool) or not isinstance(value, kinds):
            context.document.fail(
                place, f"must be {'an integer' if self.whole else 'a number'}, got {_shown(value)}"
            )
        inside = (self.low is None or value >= self.low) and (self.high is None or value <= self.high)
        if not inside:
            context.document.fail(place, f"must be {self._range()}, got {value}")
        return value if self.whole else float(value)

    def _range(self) -> str:
        if self.high is None:
            return f"at least {self.low:g}"
        return f"at most {self.high:g}" if self.low is None else f"between {self.low:g} and {self.high:g}"

    def json_schema(self) -> dict[str, Any]:
        schema: dict[str, Any] = {"type": "integer" if self.whole else "number"}
        if self.low is not None:
            schema["minimum"] = self.low
        if self.high is not None:
            schema["maximum"] = self.high
        return schema


@dataclass(frozen=True, slots=True)
class Flag:
    def parse(self, context: Reading, place: Place, value: Any) -> bool:
        if not isinstance(value, bool):
            context.document.fail(place, f"must be true or false, got {_shown(value)}")
        return value

    def json_schema(self) -> dict[str, Any]:
        return {"type": "boolean"}


@dataclass(frozen=True, slots=True)
class Size:
    """Bytes."""

    def parse(self, context: Reading, place: Place, value: Any) -> int:
        return int(_converted(parse_size, context, place, value))

    def json_schema(self) -> dict[str, Any]:
        return {"type": ["string", "integer"], "examples": ["900MiB", "1.5GiB"]}


@dataclass(frozen=True, slots=True)
class Duration:
    """Seconds."""

    def parse(self, context: Reading, place: Place, value: Any) -> float:
        return _converted(parse_duration, context, place, value)

    def json_schema(self) -> dict[str, Any]:
        return {"type": ["string", "number"], "examples": ["10s", "2m"]}


def _converted(convert: Any, context: Reading, place: Place, value: Any) -> float:
    if isinstance(value, dict | list | bool):
        context.document.fail(place, f"must be a string or a number, got {_shown(value)}")
    try:
        result: float = convert(value)
    except ValueError as error:
        context.document.fail(place, str(error))
    return result


@dataclass(frozen=True, slots=True)
class Anything:
    def parse(self, context: Reading, place: Place, value: Any) -> Any:  # noqa: ARG002 - a Kind by shape
        return value

    def json_schema(self) -> dict[str, Any]:
        return {}


@dataclass(frozen=True, slots=True)
class ListOf:
    item: Kind

    def parse(self, context: Reading, place: Place, value: Any) -> tuple[Any, ...]:
        if not isinstance(value, list):
            context.document.fail(place, f"must be a list, got {_shown(value)}")
        return tuple(self.item.parse(context, (*place, index), item) for index, item in enumerate(value))

    def json_schema(self) -> dict[str, Any]:
        return {"type": "array", "items": self.item.json_schema()}


@dataclass(frozen=True, slots=True)
class MapOf:
    item: Kind

    def parse(self, context: Reading, place: Place, value: Any) -> dict[str, Any]:
        if not isinstance(value, dict):
            context.document.fail(place, f"must be a mapping, got {_shown(value)}")
        return {key: self.item.parse(context, (*place, key), item) for key, item in value.items()}

    def json_schema(self) -> dict[str, Any]:
        return {"type": "object", "additionalProperties": self.item.json_schema()}


@dataclass(frozen=True, slots=True)
class Block:
    cls: type

    def parse(self, context: Reading, place: Place, value: Any) -> Any:
        return context.block(self.cls, place, value)

    def json_schema(self) -> dict[str, Any]:
        return block_schema(self.cls)


def block_schema(cls: type) -> dict[str, Any]:
    """JSON schema of one block, closed like the reader."""
    properties: dict[str, Any] = {}
    for key, field in options_of(cls).items():
        schema = field.metadata["kind"].json_schema()
        doc = " ".join(filter(None, (field.metadata["doc"], field.metadata["differs"])))
        properties[key] = {**schema, "description": doc} if doc else schema
    required = [key for key, field in options_of(cls).items() if _required(field)]
    schema = {"type": "object", "additionalProperties": False, "properties": properties}
    return {**schema, "required": required} if required else schema
