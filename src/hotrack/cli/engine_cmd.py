"""`hotrack engine MODEL`: one model's OpenAI server."""

import os
import sys
from typing import Any

import typer

SETTINGS: dict[str, Any] = {
    # Every flag belongs to the server, `--help` included.
    "context_settings": {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []},
    "add_help_option": False,
}


def engine(context: typer.Context) -> None:
    """Serve one model with OpenAI's API and vLLM's flags; `hotrack engine --help` lists them."""
    sys.stdout.flush()
    os.execv(sys.executable, [sys.executable, "-m", "hotrack.server", *context.args])
