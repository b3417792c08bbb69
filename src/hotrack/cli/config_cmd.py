"""`hotrack validate FILE` and `hotrack config schema`."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hotrack.cli.options import Json, print_json

if TYPE_CHECKING:
    from hotrack.config.pool import PoolConfig

app = typer.Typer(no_args_is_help=True, help="About the pool file.")
PoolFile = Annotated[Path, typer.Argument(help="Pool file (YAML).")]


@app.callback()
def _group() -> None:
    """Keeps `schema` a subcommand while it is the only one."""


@app.command()
def schema() -> None:
    """Print the JSON schema of a pool file, for editors."""
    from hotrack.config.pool_file import pool_json_schema

    print_json(pool_json_schema())


def validate(path: PoolFile, json_output: Json = False) -> None:
    """Check a pool file without starting anything."""
    from hotrack.config.pool_file import load_pool_file
    from hotrack.gateway.build import member_specs, pool_policy

    config = load_pool_file(path)
    check_model_names(config, path)
    specs = member_specs(config)
    pool_policy(config)
    warnings = [*config.warnings, *plan_warnings(config)]
    if json_output:
        print_json({"ok": True, "models": [spec.name for spec in specs], "warnings": warnings})
        return
    for warning in warnings:
        print(f"warning: {warning}")
    print(f"{path}: {len(specs)} models, no errors")


def check_model_names(config: "PoolConfig", path: Path) -> None:
    """Raises ConfigError when a ``model:`` can be no model: no such file, and neither a demo name nor shaped
    like a repository. Fetches nothing."""
    from hotrack.core.errors import CheckpointError, ConfigError
    from hotrack.hub.resolve import check_name

    for name, model in config.models.items():
        if model.model is not None:
            try:
                check_name(model.model)
            except CheckpointError as error:
                raise ConfigError(f"{path}: models.{name}.model: {error.message}") from None


def plan_warnings(config: "PoolConfig") -> tuple[str, ...]:
    """Check the memory budget against what model files on this machine tell; fetches nothing.

    Raises:
        ConfigError: a member cannot be awake even alone.
    """
    from hotrack.gateway.build import check_budget

    return check_budget(config, known_weights(config))


def known_weights(config: "PoolConfig") -> dict[str, int]:
    """Bytes of the weights of those members whose model files are here; fetches nothing."""
    from hotrack.core.errors import CheckpointError
    from hotrack.modelspec.bytes import weight_bytes
    from hotrack.modelspec.load import load_spec

    known: dict[str, int] = {}
    for name, model in config.models.items():
        if model.model is None:
            continue
        try:
            path = _local_path(model.model)
            if path is not None:
                dtype = model.engine.dtype if model.engine.dtype not in (None, "auto") else None
                known[name] = weight_bytes(load_spec(path), dtype)
        except CheckpointError:
            continue  # said by the member itself when it starts
    return known


def _local_path(model: str) -> Path | None:
    """Files of ``model`` when they are here already."""
    from hotrack.hub.demo import find_demo
    from hotrack.hub.resolve import resolve

    demo = find_demo(model)
    if Path(model).expanduser().exists() or (demo is not None and demo.resolved() is not None):
        return resolve(model).path
    return None
