"""Reading a pool file: YAML, then macros, then the closed schema, then the checks that span several keys."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from hotrack.config.document import Document, parse_document, read_document
from hotrack.config.macros import define, expand
from hotrack.config.pool import ModelConfig, PoolConfig
from hotrack.config.schema import Reading, block_schema


def load_pool_file(path: Path) -> PoolConfig:
    """The configuration in ``path``.

    Raises:
        ConfigError: the file is missing or wrong; the message has the line, the key and a remedy.
    """
    return _load(read_document(path))


def load_pool_text(text: str, name: str = "pool.yaml") -> PoolConfig:
    """The same from a string."""
    return _load(parse_document(text, name))


def pool_json_schema() -> dict[str, Any]:
    """JSON schema of a pool file, for editors."""
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "hotrack pool file",
        **block_schema(PoolConfig),
    }


def _load(document: Document) -> PoolConfig:
    raw = document.value
    if not isinstance(raw, dict):
        document.fail((), "a pool file is a mapping with at least 'models:'")
    reading = Reading(document, [])
    expanded = _expanded(document, raw)
    for name in expanded["models"]:
        _check_name(document, name)
    config = reading.block(PoolConfig, (), expanded)
    if not config.models:
        document.fail(("models",), "at least one model is needed")
    for name, model in config.models.items():
        _check_model(document, name, model)
    _check_names(document, config)
    for key, keys in (("apiKeys", config.api_keys), ("pool.admin_keys", config.pool.admin_keys)):
        if not all(keys):
            document.fail(tuple(key.split(".")), "a key must not be empty")
    _check_preload(document, config, reading)
    return replace(config, warnings=tuple(reading.warnings))


def _expanded(document: Document, raw: dict[str, Any]) -> dict[str, Any]:
    """``raw`` with macros replaced; each model sees the global macros, its own, and MODEL_ID."""
    macros = define(document, ("macros",), raw.get("macros"), {})
    rest = {key: value for key, value in raw.items() if key not in ("macros", "models")}
    result = expand(document, (), rest, macros)
    models = raw.get("models")
    if not isinstance(models, dict):
        document.fail(("models",), "must be a mapping of model ids to models")
    result["models"] = {
        name: _expanded_model(document, name, model, macros) for name, model in models.items()
    }
    return dict(result)


def _expanded_model(document: Document, name: str, model: Any, macros: dict[str, Any]) -> Any:
    place = ("models", name)
    if not isinstance(model, dict):
        return model
    scope = define(document, (*place, "macros"), model.get("macros"), {**macros, "MODEL_ID": name})
    rest = {key: value for key, value in model.items() if key != "macros"}
    for key in ("cmd", "cmdStop"):
        if isinstance(rest.get(key), str):
            rest[key] = _without_comments(rest[key])
    return expand(document, place, rest, scope)


def _without_comments(command: str) -> str:
    """Lines of a command may be comments; they go before macros could turn one line into several."""
    return "\n".join(line for line in command.splitlines() if not line.lstrip().startswith("#")).strip()


def _check_name(document: Document, name: str) -> None:
    place = ("models", name)
    if place in document.not_text:
        document.fail(
            place,
            f"YAML does not read this model id as text but as a number, true, false or nothing; "
            f'write it in quotes: "{name}"',
        )
    if not name or len(name) > 256 or not name.isprintable():
        document.fail(place, "a model id must be 1 to 256 printable characters")


def _check_model(document: Document, name: str, model: ModelConfig) -> None:
    place = ("models", name)
    if model.model is not None and (model.cmd is not None or model.proxy is not None):
        document.fail((*place, "model"), "give either 'model' (hotrack runs it) or 'cmd'/'proxy', not both")
    if model.model is None and model.cmd is None and model.proxy is None:
        document.fail(
            place, "needs 'model' (hotrack runs it), 'cmd' (a server to start) or 'proxy' (one that runs)"
        )
    if model.proxy is not None and not model.proxy.startswith(("http://", "https://")):
        document.fail((*place, "proxy"), f"must be an http URL, got {model.proxy!r}")
    for index, entry in enumerate(model.env):
        if "=" not in entry:
            document.fail((*place, "env", index), f"must be NAME=value, got {entry!r}")


def _check_names(document: Document, config: PoolConfig) -> None:
    owner = dict.fromkeys(config.models)
    names: dict[str, str] = {name: name for name in owner}
    for name, model in config.models.items():
        variants = [key for key in model.filters.set_params_by_id if key != name]
        for alias in (*model.aliases, *variants):
            other = names.setdefault(alias, name)
            if alias in config.models or (other != name):
                document.fail(
                    ("models", name, "aliases"),
                    f"the name {alias!r} already belongs to model {other!r}; names must be unique",
                )


def _check_preload(document: Document, config: PoolConfig, reading: Reading) -> None:
    known = {alias for model in config.models.values() for alias in model.aliases} | set(config.models)
    if len(config.hooks.on_startup.preload) > 1:
        reading.warnings.append("hooks.on_startup.preload: only the first model is woken at start")
    for index, name in enumerate(config.hooks.on_startup.preload):
        if name in config.selectors:
            reading.warnings.append(f"hooks.on_startup.preload: {name!r} is a selector and is not preloaded")
        elif name not in known:
            document.fail(
                ("hooks", "on_startup", "preload", index),
                f"unknown model {name!r}; known: {', '.join(config.models)}",
            )
