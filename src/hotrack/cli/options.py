"""Options that several commands share."""

from typing import Annotated, Any

import typer

from hotrack.cli.http import DEFAULT_URL

Url = Annotated[str, typer.Option("--url", help="Address of a running gateway or engine.")]
Key = Annotated[str | None, typer.Option("--api-key", help="Default: HOTRACK_API_KEY.")]
AdminKey = Annotated[
    str | None, typer.Option("--admin-key", help="Key for operating the pool; default: HOTRACK_API_KEY.")
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")]

__all__ = ["DEFAULT_URL", "AdminKey", "Json", "Key", "Url", "print_json"]


def print_json(payload: Any) -> None:
    import msgspec

    print(msgspec.json.format(msgspec.json.encode(payload), indent=1).decode(), flush=True)
