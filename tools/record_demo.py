"""Runs a command in a terminal and draws what the terminal shows in the end: docs/images/demo.svg.

    python tools/record_demo.py                        runs `make demo`
    python tools/record_demo.py --command "hotrack ps" --output ps.svg

Needs tmux. Fails when the command does, so a picture is always of a run that held.
"""

import argparse
import io
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from rich.console import Console
from rich.text import Text

ROOT = Path(__file__).resolve().parent.parent
COLUMNS = 80


def tmux(*args: str) -> str:
    return subprocess.run(["tmux", *args], check=True, capture_output=True, text=True).stdout


def screen_of(command: str) -> tuple[str, int]:
    """What an 80-column terminal shows after ``command``, with colours, and the exit code."""
    with tempfile.TemporaryDirectory() as folder:
        code, name = Path(folder, "code"), f"record-{Path(folder).name}"
        shell = f"cd {ROOT} && {command}; echo $? > {code}; tmux wait-for -S {name}; sleep 60"
        tmux("new-session", "-d", "-s", name, "-x", str(COLUMNS), "-y", "60", shell)
        try:
            tmux("wait-for", name)
            return tmux("capture-pane", "-t", name, "-pe"), int(code.read_text())
        finally:
            tmux("kill-session", "-t", name)


def draw(screen: str, title: str, path: Path) -> None:
    console = Console(
        record=True, width=COLUMNS, file=io.StringIO(), force_terminal=True, color_system="truecolor"
    )
    for line in screen.rstrip().splitlines():
        text = Text.from_ansi(line)
        text.rstrip()
        console.print(text, soft_wrap=True, highlight=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    svg = console.export_svg(title=title)
    path.write_text(re.sub(r"@font-face \{.*?\}\s*", "", svg, flags=re.DOTALL))  # fonts from the network


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--command", default="make demo")
    parser.add_argument("--output", type=Path, default=ROOT / "docs" / "images" / "demo.svg")
    options = parser.parse_args()
    screen, code = screen_of(options.command)
    if code != 0:
        print(f"{options.command} ended with {code}:\n{screen.rstrip()}", file=sys.stderr)
        return 1
    draw(screen, options.command, options.output)
    return 0


if __name__ == "__main__":
    sys.exit(main())
