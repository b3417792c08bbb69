"""`hotrack demo`: two real models take turns on a budget that holds only one of them."""

import shutil
import tempfile
import threading
import time
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hotrack.cli.options import Json, print_json
from hotrack.core.rounding import rounded

if TYPE_CHECKING:
    from rich.console import Console

    from hotrack.cli.demo_script import DemoModel, Outcome, Reference
    from hotrack.cli.http import Api

MAX_MODEL_LEN = 1024
QUESTIONS = {
    "smollm2": ("What is the capital of France?", "Name three colors of the rainbow."),
    "tiny-moe": ("add 123 456", "sort 7 3 9 1"),
}
KV_CACHE = {"smollm2": "64MiB", "tiny-moe": "256MiB"}


def demo(
    first: Annotated[str, typer.Argument(help="Model A: demo name, repo id or path.")] = "smollm2",
    second: Annotated[str, typer.Argument(help="Model B.")] = "tiny-moe",
    keep: Annotated[bool, typer.Option("--keep", help="Leave the server up and print curl lines.")] = False,
    plain: Annotated[bool, typer.Option("--plain", help="No colors, no spinner.")] = False,
    json_output: Json = False,
) -> None:
    """Two real models answer in turn through one gateway; every swap is measured and checked."""
    from rich.console import Console

    console = Console(
        stderr=json_output, no_color=plain, force_terminal=False if plain else None, highlight=False
    )
    folder = Path(tempfile.mkdtemp(prefix="hotrack-demo-"))
    ok = False
    try:
        ok = _Demo(console, folder, keep, json_output).play(_fetch(first), _fetch(second))
    finally:
        if ok or not any(folder.iterdir()):
            shutil.rmtree(folder, ignore_errors=True)
        else:
            console.print(f"logs are in {folder}")
    raise typer.Exit(0 if ok else 1)


def _fetch(model: str) -> "DemoModel":
    from hotrack.cli.demo_script import DemoModel
    from hotrack.cli.pull_cmd import fetch
    from hotrack.hub.resolve import resolve

    found = fetch(model, lambda progress: resolve(model, progress=progress))
    name = found.name.rpartition("/")[2]
    questions = QUESTIONS.get(name, ("What is the capital of France?", "Count from one to ten."))
    return DemoModel(name, str(found.path), questions, KV_CACHE.get(name, "64MiB"))


class _Demo:
    def __init__(self, console: "Console", folder: Path, keep: bool, json_output: bool) -> None:
        self._console = console
        self._folder = folder
        self._keep = keep
        self._json_output = json_output

    def play(self, *models: "DemoModel") -> bool:
        """True when every check held."""
        from hotrack.cli import demo_script as script

        say, start = self._console.print, time.monotonic()
        names = [model.name for model in models]
        say(f"[bold]hotrack demo[/]: {names[0]} and {names[1]} share a budget that holds one of them awake\n")
        references = self._references(models)
        budget = script.choose_budget(references)
        say(f"\nbudget for both: [bold]{budget / script.MIB:.0f} MiB[/]")
        pool_file = self._write_pool_file(script.pool_file(models, references, MAX_MODEL_LEN, budget))
        outcome = script.Outcome(budget, references, [], [])
        with ExitStack() as stack:
            api = self._start(pool_file, stack)
            self._ask(api, outcome, models)
            outcome.swaps = _finished_swaps(api)
            script.check(outcome)
            self._report(outcome, time.monotonic() - start)
            if self._keep:
                self._stay(api, names)
        return outcome.ok

    def _start(self, pool_file: Path, stack: ExitStack) -> "Api":
        from hotrack.cli.demo_processes import gateway

        with self._console.status("starting the gateway") as status:

            def progress(api: "Api") -> None:
                rows = api.get("/api/pool/members")["members"]
                status.update("starting: " + ", ".join(f"{row['name']} {row['state']}" for row in rows))

            return stack.enter_context(gateway(pool_file, self._folder, progress))

    def _references(self, models: tuple["DemoModel", ...]) -> dict[str, "Reference"]:
        """What each engine alone answers, before it ever slept; and what it holds."""
        from concurrent.futures import ThreadPoolExecutor

        from hotrack.cli.demo_processes import reference
        from hotrack.cli.demo_script import MIB

        names = " and ".join(model.name for model in models)
        cancelled = threading.Event()
        with (
            self._console.status(f"{names} answer alone, before they ever sleep"),
            ThreadPoolExecutor() as pool,
        ):
            jobs = [pool.submit(reference, model, MAX_MODEL_LEN, self._folder, cancelled) for model in models]
            try:
                found = [job.result() for job in jobs]
            except BaseException:  # Ctrl-C, or one failed: the other need not go on
                cancelled.set()
                raise
        for model, facts in zip(models, found, strict=True):
            sizes = (facts.resident_bytes, facts.awake_bytes, facts.asleep_bytes)
            resident, awake, asleep = (f"{size / MIB:.0f} MiB" for size in sizes)
            self._console.print(
                f"{model.name} alone: {resident} resident awake, at most {awake}; {asleep} asleep"
            )
        return {model.name: facts for model, facts in zip(models, found, strict=True)}

    def _write_pool_file(self, content: dict[str, Any]) -> Path:
        import yaml

        path = self._folder / "pool.yaml"
        path.write_text(yaml.safe_dump(content, sort_keys=False))
        return path

    def _ask(self, api: "Api", outcome: "Outcome", models: tuple["DemoModel", ...]) -> None:
        from hotrack.cli.demo_script import ask

        for number, (turn, model) in enumerate((turn, model) for turn in range(2) for model in models):
            stream = number != 1  # one in one piece, the others as they are generated
            kind = "" if stream else " (not streaming)"
            self._console.print(f"\n[bold]{model.name}[/]{kind} <- {model.questions[turn]}")
            answer = ask(api, model.name, model.questions[turn], stream=stream, echo=self._echo)
            outcome.answers.append(answer)
            self._console.print()

    def _echo(self, piece: str) -> None:
        shown = "".join(c if c.isprintable() or c == "\n" else "." for c in piece)
        self._console.print(shown, end="", markup=False)
        self._console.file.flush()

    def _report(self, outcome: "Outcome", seconds: float) -> None:
        if self._json_output:
            print_json(rounded({"ok": outcome.ok, "seconds": seconds, **asdict(outcome)}))
            return
        self._console.print()
        self._console.print(_table(outcome))
        for name, held in outcome.checks.items():
            verdict = "[green]yes[/]" if held else "[red]NO[/]"
            self._console.print(f"{name}: {verdict}")
        self._console.print(f"{seconds:.0f} s in all")

    def _stay(self, api: "Api", names: list[str]) -> None:
        self._console.print(f"\nThe server is up at {api.url}. Ctrl-C ends it. Try:\n")
        body = (
            '{"model": "%s", "messages": [{"role": "user", "content": "What is the capital of France?"}], '
            '"temperature": 0, "max_tokens": 32}'
        )
        for name, remark in ((names[1], "awake now"), (names[0], "asleep: this one triggers a swap")):
            self._console.print(f"# {name} is {remark}", style="dim")
            line = (
                f"curl {api.url}/v1/chat/completions -H 'content-type: application/json' -d '{body % name}'"
            )
            self._console.print(line, markup=False, soft_wrap=True)
        for path, remark in (("/v1/models", "who is awake"), ("/api/pool/swaps", "what each swap cost")):
            self._console.print(f"curl {api.url}{path}  # {remark}", markup=False, soft_wrap=True)
        try:
            while True:
                time.sleep(3600)
        except KeyboardInterrupt:
            self._console.print("stopping")


def _finished_swaps(api: "Api") -> list[dict[str, Any]]:
    """Swaps that requests caused. The last one's first-token time is noted just after its answer."""
    swaps: list[dict[str, Any]] = api.get("/api/pool/swaps")["swaps"]
    return [swap for swap in swaps if swap["cause"] != "boot"]


def _table(outcome: "Outcome") -> Any:
    from rich.table import Table

    from hotrack.cli.demo_script import identical
    from hotrack.cli.ps_cmd import milliseconds

    table = Table(
        box=None,  # it has to fit 80 columns
        pad_edge=False,
        padding=(0, 1, 0, 0),
        title="swaps: milliseconds, and resident MiB before->after",
        title_justify="left",
    )
    phases = ("drain", "sleep", "wake", "verify", "first_token")
    for name in ("#", "from -> to", "drain", "sleep", "wake", "verify", "token", "slept", "woken", "same"):
        wide = name in ("from -> to", "slept", "woken")
        table.add_column(name, justify="left" if wide else "right", no_wrap=True)
    for number, (swap, answer) in enumerate(zip(outcome.swaps, outcome.answers, strict=False), 1):
        table.add_row(
            str(number),
            f"{', '.join(swap['from']) or 'nobody'} -> {swap['to']}",
            *(milliseconds(swap[f"{phase}_ms"]) for phase in phases),
            _change(swap, "victim"),
            _change(swap, "target"),
            "yes" if identical(outcome, answer) else "NO",
        )
    table.caption = (
        "token: from ready to the first byte; of swap 2, which does not stream, to the whole answer\n"
        "same: the tokens are those of an engine that never slept"
    )
    table.caption_justify = "left"
    return table


def _change(swap: dict[str, Any], who: str) -> str:
    from hotrack.cli.demo_script import MIB

    before, after = swap[f"{who}_bytes_before"], swap[f"{who}_bytes_after"]
    return "-" if before is None or after is None else f"{before / MIB:.0f}->{after / MIB:.0f}"
