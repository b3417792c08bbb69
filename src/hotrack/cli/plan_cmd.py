"""`hotrack plan FILE`: which models fit awake beside which sleepers, and how large each may be."""

from typing import TYPE_CHECKING, Annotated, Any

import typer

from hotrack.cli.config_cmd import PoolFile, check_model_names, known_weights
from hotrack.cli.options import Json, print_json
from hotrack.config.units import format_size

if TYPE_CHECKING:
    from hotrack.plan.ledger import GpuLedger

Facts = dict[str, Any]


def plan(
    path: PoolFile,
    budget: Annotated[
        str | None,
        typer.Option("--budget", metavar="SIZE", help="What a device has, as 95GiB; default: the file's."),
    ] = None,
    json_output: Json = False,
) -> None:
    """What every model needs awake beside sleepers, from the pool file and the model files that are here."""
    from hotrack.config.pool_file import load_pool_file
    from hotrack.core.errors import ConfigError
    from hotrack.gateway.build import ledgers
    from hotrack.gateway.devices import budgets_of, stated_budgets

    config = load_pool_file(path)
    check_model_names(config, path)
    budgets = stated_budgets(config) if budget is None else budgets_of(config, _size(budget))
    if not budgets:
        raise ConfigError(
            f"{path} states no pool.memory.budget, so one model of a device is awake at a time; "
            "--budget SIZE plans with one"
        )
    groups = [describe(usual) for _, usual in ledgers(config, known_weights(config), budgets)]
    if json_output:
        print_json({"groups": groups})
    else:
        for group in groups:
            _show(group)
    if not all(member["fits"] for group in groups for member in group["members"]):
        raise typer.Exit(1)


def describe(ledger: "GpuLedger") -> Facts:
    """Per member: its terms, the sum when it alone is awake and all others sleep, and the largest pool
    (weights and KV cache) that it could have beside 0, 1, ... of the largest sleepers."""
    members = []
    for name, footprint in ledger.footprints.items():
        others = sorted(
            (other for other in ledger.footprints if other != name),
            key=lambda other: -ledger.footprints[other].residue.num_bytes,
        )
        verdict = ledger.fits((name,))
        members.append(
            {
                "name": name,
                "pool": _term(footprint.pool),
                "nonpool": _term(footprint.nonpool),
                "residue": _term(footprint.residue),
                "fits": verdict.fits,
                "spare_bytes": verdict.spare_bytes,
                "arithmetic": verdict.arithmetic,
                "largest_pool_bytes": [
                    ledger.max_pool_bytes(name, absent=others[sleepers:])
                    for sleepers in range(len(others) + 1)
                ],
            }
        )
    warnings = dict.fromkeys(w for name in ledger.footprints for w in ledger.fits((name,)).warnings)
    return {"device": ledger.budget.device, **ledger.shares(), "members": members, "warnings": list(warnings)}


def _term(term: Any) -> Facts:
    return {"bytes": term.num_bytes, "provenance": str(term.provenance)}


def _size(text: str) -> int:
    from hotrack.config.units import parse_size
    from hotrack.core.errors import ConfigError

    try:
        return parse_size(text)
    except ValueError as error:
        raise ConfigError(f"--budget {text}: {error}") from None


def _show(group: Facts) -> None:
    from rich.console import Console
    from rich.table import Table

    total = group["total"]
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), title_justify="left")
    table.title = (
        f"{group['device']}: {format_size(total)}, of which {format_size(group['margin'])} margin"
        + (f" and {format_size(group['foreign'])} others'" if group["foreign"] else "")
    )
    for name in ("awake", "asleep", "spare when awake", "largest pool beside 0, 1, ... sleepers"):
        if not table.columns:
            table.add_column("model", no_wrap=True)
        table.add_column(name, justify="left" if name.startswith("largest") else "right")
    for member in group["members"]:
        awake = member["pool"]["bytes"] + member["nonpool"]["bytes"]
        guessed = {member["pool"]["provenance"], member["nonpool"]["provenance"]} & {"assumed"}
        spare = member["spare_bytes"]
        table.add_row(
            member["name"],
            format_size(awake) + ("?" if guessed else ""),
            format_size(member["residue"]["bytes"])
            + ("?" if member["residue"]["provenance"] == "assumed" else ""),
            format_size(spare) if spare >= 0 else f"[red]{format_size(-spare)} short[/]",
            ", ".join(
                f"{format_size(largest)} ({largest / total:.2f})" if largest > 0 else "none"
                for largest in member["largest_pool_bytes"]
            ),
        )
    console = Console()
    console.print(table)
    if group["warnings"]:
        console.print("?: assumed, not stated or measured", style="dim")
    for member in group["members"]:
        if not member["fits"]:
            console.print(f"{member['name']} does not fit: {member['arithmetic']}", markup=False)
