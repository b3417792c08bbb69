"""A YAML file as plain values plus the line each of them came from.

The file may be hostile: its size, nesting and the number of values after expanding aliases are bounded, only
plain YAML types are built, and a key written twice is an error instead of a silent overwrite.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import yaml

from hotrack.core.errors import ConfigError

MAX_FILE_BYTES = 256 * 1024
MAX_NODES = 20_000
MAX_DEPTH = 40

Place = tuple[str | int, ...]
_TAG = "tag:yaml.org,2002:"
_SCALARS = {_TAG + name for name in ("null", "bool", "int", "float", "str")}

# libyaml's scanner is linear and bounds nesting itself; the one in Python is quadratic in it.
_Loader = yaml.CSafeLoader if yaml.__with_libyaml__ else yaml.SafeLoader
_COLLECTIONS = {_TAG + "map", _TAG + "seq"}


@dataclass(slots=True)
class Document:
    """``lines`` maps the place of a value (keys and indices from the top) to its 1-based line. ``not_text``:
    places whose key YAML reads as a number, a truth value or nothing; here it is the text as written."""

    name: str
    value: Any = None
    lines: dict[Place, int] = field(default_factory=dict)
    not_text: set[Place] = field(default_factory=set)

    def fail(self, place: Place, message: str) -> NoReturn:
        """Raise ConfigError for the value at ``place``."""
        while place not in self.lines and place:
            place = place[:-1]
        line = self.lines.get(place, 1)
        where = dotted(place)
        raise ConfigError(f"{self.name}:{line}: {where + ': ' if where else ''}{message}")


def dotted(place: Place) -> str:
    return ".".join(str(part) for part in place)


def read_document(path: Path) -> Document:
    """Parse the YAML file at ``path``.

    Raises:
        ConfigError: missing, unreadable, too big, not UTF-8, not YAML, or not plain.
    """
    try:
        with path.open("rb") as file:
            raw = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror or error}") from error
    if len(raw) > MAX_FILE_BYTES:
        raise ConfigError(f"{path} is larger than {MAX_FILE_BYTES} bytes; is it a pool file?")
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not UTF-8: {error.reason} at byte {error.start}") from error
    return parse_document(text, str(path))


def parse_document(text: str, name: str) -> Document:
    document = Document(name)
    try:
        root = yaml.compose(text, Loader=_Loader)
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        raise ConfigError(f"{name}:{line}: not valid YAML: {error.problem or error.context}") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"{name}: not valid YAML: {error}") from error
    except RecursionError:
        raise ConfigError(f"{name}: nested too deeply") from None
    document.value = None if root is None else _Builder(document).build(root, (), 0)
    return document


class _Builder:
    """Builds plain values from YAML's node graph, counting as it goes."""

    def __init__(self, document: Document) -> None:
        self._document = document
        self._constructor = yaml.constructor.SafeConstructor()
        self._num_nodes = 0

    def build(self, node: yaml.Node, place: Place, depth: int) -> Any:
        document = self._document
        document.lines[place] = node.start_mark.line + 1
        self._num_nodes += 1
        if self._num_nodes > MAX_NODES:
            document.fail(place, f"more than {MAX_NODES} values after expanding aliases")
        if depth > MAX_DEPTH:
            document.fail(place, f"nested more than {MAX_DEPTH} levels deep")
        if not isinstance(node, yaml.ScalarNode) and node.tag not in _COLLECTIONS:
            document.fail(place, f"the tag {node.tag!r} is not allowed")
        if isinstance(node, yaml.MappingNode):
            return self._mapping(node, place, depth)
        if isinstance(node, yaml.SequenceNode):
            return [self.build(item, (*place, index), depth + 1) for index, item in enumerate(node.value)]
        return self._scalar(node, place)

    def _scalar(self, node: yaml.Node, place: Place) -> Any:
        if node.tag == _TAG + "timestamp":
            return node.value
        if node.tag not in _SCALARS:
            self._document.fail(place, f"the tag {node.tag!r} is not allowed")
        try:
            return self._constructor.construct_object(node)
        except (ValueError, yaml.YAMLError) as error:
            self._document.fail(place, f"not a valid value: {error}")

    def _mapping(self, node: yaml.MappingNode, place: Place, depth: int) -> dict[str, Any]:
        own: dict[str, Any] = {}
        merged: dict[str, Any] = {}
        for key_node, value_node in node.value:
            if not isinstance(key_node, yaml.ScalarNode):
                self._document.fail(place, "a key must be a plain word")
            if key_node.tag == _TAG + "merge":
                merged = {**self._merge(value_node, place, depth), **merged}
                continue
            key: str = key_node.value
            if key in own:
                line = key_node.start_mark.line + 1
                self._document.lines[(*place, key)] = line
                self._document.fail((*place, key), "written twice; each name may be used once")
            if key_node.tag != _TAG + "str":
                self._document.not_text.add((*place, key))
            own[key] = self.build(value_node, (*place, key), depth + 1)
            self._document.lines[(*place, key)] = key_node.start_mark.line + 1
        return {**merged, **own}

    def _merge(self, node: yaml.Node, place: Place, depth: int) -> dict[str, Any]:
        sources = node.value if isinstance(node, yaml.SequenceNode) else [node]
        result: dict[str, Any] = {}
        for source in reversed(sources):
            value = self.build(source, place, depth + 1)
            if not isinstance(value, dict):
                self._document.fail(place, "'<<' needs a mapping")
            result.update(value)
        return result
