"""Tables, JSON and plots of measurements, always with the machine and the command that made them."""

import json
import platform
import shutil
import subprocess
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import psutil
from rich.table import Table

from hotrack._version import __version__
from hotrack.bench.sweep import CellResult, Spread


def provenance(argv: Sequence[str]) -> dict[str, Any]:
    """Machine, command, commit and time of a measurement."""
    return {
        "command": " ".join(["hotrack", *argv[1:]]),
        "commit": _commit(),
        "hotrack": __version__,
        "python": platform.python_version(),
        "machine": {
            "cpu": _cpu_name(),
            "cores": psutil.cpu_count(),
            "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        },
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def _commit() -> str | None:
    git = shutil.which("git")
    if git is None:
        return None
    here = Path(__file__).parent
    done = subprocess.run(
        [git, "rev-parse", "--short=12", "HEAD"], cwd=here, capture_output=True, text=True, check=False
    )
    return done.stdout.strip() or None


def _cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor()


def _cell(spread: Spread, digits: int = 0) -> str:
    return f"{spread.median:.{digits}f} ({spread.low:.{digits}f}-{spread.high:.{digits}f})"


def sweep_table(title: str, results: Sequence[CellResult]) -> Table:
    table = Table(title=title, caption="median (lowest-highest)")
    for name in (
        "streams",
        "input",
        "output",
        "TTFT ms",
        "tok/s per stream",
        "tok/s total",
        "ITL p99 ms",
        "E2E s",
    ):
        table.add_column(name, justify="right")
    for r in results:
        table.add_row(
            str(r.cell.concurrency),
            f"{r.prompt_tokens:.0f}",
            str(r.cell.output_len),
            _cell(r.ttft_ms),
            _cell(r.stream_tokens_per_s, 1),
            _cell(r.total_tokens_per_s, 1),
            f"{r.itl_p99_ms:.1f}",
            _cell(r.e2e_s, 2),
        )
    return table


def write_json(path: Path, payload: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(payload, indent=1) + "\n")
