"""`hotrack serve pool.yaml`: several models behind one address."""

import json
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hotrack.cli.config_cmd import PoolFile, check_model_names, plan_warnings

if TYPE_CHECKING:
    from hotrack.config.pool import PoolConfig
    from hotrack.core.progress import Progress
    from hotrack.hub.model import ResolvedModel


def serve(
    path: PoolFile,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 takes a free port.")] = 8000,
    api_key: Annotated[
        str | None, typer.Option(help="Clients must send it; added to apiKeys. Default: HOTRACK_API_KEY.")
    ] = None,
    admin_key: Annotated[str | None, typer.Option(help="For sleep, wake, unload, logs.")] = None,
    access_log: Annotated[bool, typer.Option("--access-log", help="One line per request.")] = False,
    log_dir: Annotated[Path | None, typer.Option(help="One log file per member here.")] = None,
    json_output: Annotated[
        bool,
        typer.Option(
            "--json", help="Also say on stdout, in JSON lines, where it listens and when it is ready."
        ),
    ] = False,
) -> None:
    """Serve the models of a pool file; they take turns on the devices they share."""
    from hotrack.config import env
    from hotrack.config.pool_file import load_pool_file
    from hotrack.gateway.auth import Keys
    from hotrack.gateway.serve import listen
    from hotrack.gateway.serve import serve as run
    from hotrack.obs.log import setup_logging

    config = load_pool_file(path)
    check_model_names(config, path)
    setup_logging("gateway", config.log_level)
    for warning in config.warnings:
        _say(f"warning: {warning}")
    extra = (api_key or env.api_key(),)
    keys = Keys(
        api=(*config.api_keys, *filter(None, extra)),
        admin=(*config.pool.admin_keys, *((admin_key,) if admin_key else ())),
    )
    keys.check_bind(host)
    if log_dir is not None:
        log_dir.mkdir(parents=True, exist_ok=True)
    listener = listen(host, port)
    config = _fetch_models(config)
    for warning in plan_warnings(config):
        _say(f"warning: {warning}")
    bound = listener.getsockname()[1]
    url = f"http://{f'[{host}]' if ':' in host else host}:{bound}"

    def announce(event: str, text: str) -> None:
        _say(text)
        if json_output:
            print(json.dumps({"event": event, "url": url, "models": list(config.models)}), flush=True)

    announce("listening", f"listening on {url} ({len(config.models)} models: {', '.join(config.models)})")
    run(
        config,
        listener,
        keys,
        access_log=access_log,
        log_dir=log_dir,
        on_ready=lambda: announce("ready", "ready"),
    )


def _fetch_models(config: "PoolConfig") -> "PoolConfig":
    """Have every model's files here before the first member starts, so that no start deadline pays for a
    download. Each model is then named by its path."""
    from hotrack.cli.pull_cmd import fetch

    models = dict(config.models)
    for name, model in models.items():
        if model.model is not None:
            found = fetch(model.model, partial(_resolve, model.model))
            models[name] = replace(model, model=str(found.path))
    return replace(config, models=models)


def _resolve(model: str, progress: "Progress") -> "ResolvedModel":
    from hotrack.hub.resolve import resolve

    return resolve(model, progress=progress)


def _say(text: str) -> None:
    print(f"hotrack: {text}", file=sys.stderr, flush=True)
