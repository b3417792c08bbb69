"""`hotrack ps`: who is awake, what it holds, what waits."""

from typing import Annotated, Any

import typer

from hotrack.cli.http import Api
from hotrack.cli.options import DEFAULT_URL, Json, Key, Url, print_json
from hotrack.config import env
from hotrack.config.units import format_size

COLORS = {"ready": "green", "asleep": "blue", "failed": "red", "quarantined": "red"}


def ps(
    url: Url = DEFAULT_URL,
    api_key: Key = None,
    swaps: Annotated[bool, typer.Option("--swaps", help="Also list the last swaps.")] = False,
    json_output: Json = False,
) -> None:
    """Members of a running pool: state, memory, queue, measured wake times."""
    api = Api(url, api_key or env.api_key(), timeout_s=10.0)
    members = api.get("/api/pool/members")
    history = api.get("/api/pool/swaps")["swaps"][-20:] if swaps else []
    if json_output:
        print_json({**members, "swaps": history} if swaps else members)
        return
    from rich.console import Console

    console = Console()
    console.print(members_table(members["members"]))
    if swaps:
        console.print(swaps_table(history))


def members_table(rows: list[dict[str, Any]]) -> Any:
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for name in (
        "member",
        "state",
        "memory",
        "awake",
        "asleep",
        "waiting",
        "running",
        "wake",
        "swaps",
        "pid",
        "note",
    ):
        table.add_column(name, justify="left" if name in ("member", "state", "note") else "right")
    for row in rows:
        color = COLORS.get(row["state"], "yellow")
        table.add_row(
            row["name"],
            f"[{color}]{row['state']}[/]",
            *(_size(row[key]) for key in ("memory_bytes", "awake_bytes", "residue_bytes")),
            str(row["num_waiting"]),
            str(row["num_in_flight"]),
            "-" if row["wake_s"] is None else f"{row['wake_s'] * 1e3:.0f} ms",
            str(row["num_cycles"]),
            str(row["pid"] or "-"),
            row["last_error"],
        )
    return table


def swaps_table(rows: list[dict[str, Any]]) -> Any:
    from rich.table import Table

    table = Table(box=None, pad_edge=False, title="swaps", title_justify="left")
    for name in (
        "#",
        "from",
        "to",
        "cause",
        "drain",
        "sleep",
        "start",
        "wake",
        "verify",
        "first token",
        "result",
    ):
        table.add_column(name, justify="left" if name in ("from", "to", "cause", "result") else "right")
    for row in rows:
        table.add_row(
            str(row["number"]),
            ", ".join(row["from"]) or "-",
            row["to"] or "-",
            row["cause"],
            *(
                milliseconds(row[f"{phase}_ms"])
                for phase in ("drain", "sleep", "start", "wake", "verify", "first_token")
            ),
            row["result"],
        )
    return table


def milliseconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.0f}" if value >= 10 else f"{value:.1f}"


def _size(value: int | None) -> str:
    return "-" if value is None else format_size(value)
