"""`hotrack ps`: who is awake, what it holds, what waits."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hotrack.cli.http import IS_IT_THERE, Api, ServerError
from hotrack.cli.options import DEFAULT_URL, Json, Key, Url, print_json
from hotrack.config import env
from hotrack.config.units import format_size

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

COLORS = {"ready": "green", "asleep": "blue", "failed": "red", "quarantined": "red"}
Column = tuple[str, bool, Callable[[dict[str, Any]], str]]  # title, to the right, text of one row


def ps(
    url: Url = DEFAULT_URL,
    api_key: Key = None,
    swaps: Annotated[bool, typer.Option("--swaps", help="Also list the last swaps.")] = False,
    json_output: Json = False,
) -> None:
    """Members of a running pool: state, memory, queue, measured wake times."""
    api = Api(url, api_key or env.api_key(), timeout_s=10.0)
    members = _of_pool(api, "/api/pool/members", "members")
    history = _of_pool(api, "/api/pool/swaps", "swaps")["swaps"][-20:] if swaps else []
    if json_output:
        print_json({**members, "swaps": history} if swaps else members)
        return
    from rich.console import Console

    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=1000)  # whoever reads a pipe wants whole lines
    show(console, members["members"], history if swaps else None)


def show(console: "Console", members: list[dict[str, Any]], swaps: list[dict[str, Any]] | None) -> None:
    """Tables as wide as they need, without their least important columns where the console is narrower."""
    on_gpus = any(row["device"] != "host" for row in members)
    columns = tuple(column for column in MEMBER_COLUMNS if on_gpus or column[0] != "device")
    spare = ("pid", "slept", "device", "awake", "asleep")
    console.print(fitting(console, columns, members, drop=spare))
    for row in members:
        if row["last_error"]:
            console.print(f"{row['name']}: {row['last_error']}", markup=False)
    if swaps is not None:
        console.print()
        drop = ("drain", "start", "verify", "first token", "sleep", "wake")
        console.print(fitting(console, SWAP_COLUMNS, swaps, drop=drop))


def fitting(
    console: "Console", columns: tuple[Column, ...], rows: list[dict[str, Any]], *, drop: tuple[str, ...]
) -> "Table":
    """``columns`` without as few of ``drop``, in that order, as fit the console's width."""
    from rich.measure import Measurement

    table = _table(columns, rows)
    for title in drop:
        if Measurement.get(console, console.options, table).maximum < console.width:
            break
        columns = tuple(column for column in columns if column[0] != title)
        table = _table(columns, rows)
    return table


def _table(columns: tuple[Column, ...], rows: list[dict[str, Any]]) -> "Table":
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False)
    for title, right, _ in columns:
        table.add_column(title, justify="right" if right else "left", no_wrap=True, overflow="ellipsis")
    for row in rows:
        color = COLORS.get(row.get("state", ""), "yellow")
        texts = ((title, text(row)) for title, _, text in columns)
        table.add_row(*(Text(text, style=color if title == "state" else "") for title, text in texts))
    return table


def _of_pool(api: Api, path: str, key: str) -> dict[str, Any]:
    """The pool's answer; a server that is none is told apart."""
    try:
        answer = api.get(path)
    except ServerError as error:
        if error.code != "not_found":
            raise
        answer = None
    if not isinstance(answer, dict) or not isinstance(answer.get(key), list):
        raise ServerError(f"what answers at {api.url} is not a pool; {IS_IT_THERE}", status_code=404)
    return answer


def milliseconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.0f}" if value >= 10 else f"{value:.1f}"


def _size(key: str) -> Callable[[dict[str, Any]], str]:
    return lambda row: "-" if row[key] is None else format_size(row[key])


def _milliseconds(key: str) -> Callable[[dict[str, Any]], str]:
    return lambda row: milliseconds(row[key])


MEMBER_COLUMNS: tuple[Column, ...] = (
    ("member", False, lambda row: row["name"]),
    ("state", False, lambda row: row["state"]),
    ("device", False, lambda row: row["device"]),
    ("memory", True, _size("memory_bytes")),
    ("awake", True, _size("awake_bytes")),
    ("asleep", True, _size("residue_bytes")),
    ("wait", True, lambda row: str(row["num_waiting"])),
    ("run", True, lambda row: str(row["num_in_flight"])),
    ("wake", True, lambda row: "-" if row["wake_s"] is None else f"{row['wake_s'] * 1e3:.0f} ms"),
    ("slept", True, lambda row: str(row["num_cycles"])),
    ("pid", True, lambda row: str(row["pid"] or "-")),
)
SWAP_COLUMNS: tuple[Column, ...] = (
    ("#", True, lambda row: str(row["number"])),
    ("from", False, lambda row: ", ".join(row["from"]) or "-"),
    ("to", False, lambda row: row["to"] or "-"),
    ("cause", False, lambda row: row["cause"]),
    *(
        (title, True, _milliseconds(f"{key}_ms"))
        for title, key in (
            ("drain", "drain"),
            ("sleep", "sleep"),
            ("start", "start"),
            ("wake", "wake"),
            ("verify", "verify"),
            ("first token", "first_token"),
        )
    ),
    ("result", False, lambda row: row["result"]),
)
