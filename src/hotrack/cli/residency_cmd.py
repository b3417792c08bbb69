"""`hotrack sleep MEMBER` and `hotrack wake MEMBER`."""

import time
from typing import Annotated
from urllib.parse import quote

import typer

from hotrack.cli.http import Api
from hotrack.cli.options import DEFAULT_URL, AdminKey, Json, Url, print_json
from hotrack.config import env
from hotrack.core.rounding import rounded

Member = Annotated[str, typer.Argument(help="Model id or alias.")]


def sleep(
    member: Member, url: Url = DEFAULT_URL, admin_key: AdminKey = None, json_output: Json = False
) -> None:
    """Drain a member and give its memory back."""
    _post("sleep", "asleep", member, url, admin_key, json_output)


def wake(
    member: Member, url: Url = DEFAULT_URL, admin_key: AdminKey = None, json_output: Json = False
) -> None:
    """Make a member ready; whoever holds the device is put to sleep first."""
    _post("wake_up", "awake", member, url, admin_key, json_output)


def _post(endpoint: str, outcome: str, member: str, url: str, key: str | None, json_output: bool) -> None:
    api = Api(url, key or env.api_key())
    start = time.monotonic()
    answer = api.post(f"/{endpoint}?model={quote(member, safe='')}")
    seconds = rounded(time.monotonic() - start)
    if json_output:
        print_json({**answer, "member": member, "seconds": seconds})
    else:
        reached = "stopped" if answer.get("status") == "stopped" else outcome
        print(f"{member} is {reached} ({seconds:.2f} s)")
