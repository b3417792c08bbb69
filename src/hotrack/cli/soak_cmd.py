"""`hotrack soak FILE`: a pool under mixed load while its processes are killed."""

import asyncio
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hotrack.cli.config_cmd import PoolFile
from hotrack.cli.options import Json, print_json

if TYPE_CHECKING:
    from hotrack.bench.soak import SoakReport

QUESTIONS = ("add 12 30", "add 7 5", "sort 9 1 7 3", "add 40 2")
STOP_S = 30.0


def soak(
    path: PoolFile,
    seconds: Annotated[float, typer.Option("--seconds", min=1, help="How long clients ask.")] = 60.0,
    clients: Annotated[int, typer.Option("--clients", min=1, help="Requests at a time.")] = 32,
    kill_every: Annotated[
        float, typer.Option("--kill-every", min=0, help="Seconds between two kills of a process; 0: none.")
    ] = 10.0,
    restarts: Annotated[int, typer.Option("--restarts", min=0, help="Of the gateway, evenly spread.")] = 0,
    prompt: Annotated[
        list[str] | None, typer.Option("--prompt", help="Asked of every model; give some with sure answers.")
    ] = None,
    seed: Annotated[int, typer.Option("--seed", help="Of what is asked and killed when.")] = 0,
    out: Annotated[Path | None, typer.Option("--out", help="Also write the report as JSON here.")] = None,
    json_output: Json = False,
) -> None:
    """Ask a pool's models from many clients, kill its processes, check what must hold whatever happens."""
    from hotrack.bench.report import provenance
    from hotrack.bench.soak import Soak, SoakOptions
    from hotrack.config.pool_file import load_pool_file
    from hotrack.gateway.build import member_specs, pool_policy

    config = load_pool_file(path)
    specs, policy = member_specs(config), pool_policy(config)
    drain_s = max(spec.deadlines.drain_s for spec in specs)
    options = SoakOptions(
        models=[spec.name for spec in specs],
        prompts=prompt or QUESTIONS,
        seconds=seconds,
        clients=clients,
        kill_every_s=kill_every,
        # A turn that is due waits for the running one's drain; everybody before it may have one.
        limit_s=len(specs) * (policy.max_wait_s + drain_s),
        seed=seed,
    )
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="hotrack-soak-")))
        server = stack.enter_context(Server(path, folder, seed))
        run = Soak(server.url, options, kill=server.kill, down=lambda: server.down)
        restarter = threading.Thread(target=server.restart_at, args=(seconds, restarts), daemon=True)
        restarter.start()
        report = asyncio.run(run.run(_progress))
        report.restarts = server.restarts
        report.left_processes = server.stop()
    facts = _facts(report, options.limit_s) | {"options": vars_of(options)} | provenance(sys.argv)
    if out is not None:
        import json

        out.write_text(json.dumps(facts, indent=1) + "\n")
    print_json(facts) if json_output else _show(facts)
    if not all(facts["invariants"].values()):
        raise typer.Exit(1)


class Server:
    """`hotrack serve` on one port, which may be restarted; everything below it may be killed."""

    def __init__(self, path: Path, folder: Path, seed: int) -> None:
        from hotrack.members.process import free_port

        self.down = True
        self.restarts = 0
        self._command = [sys.executable, "-m", "hotrack", "serve", str(path), "--port", str(free_port())]
        self.url = f"http://127.0.0.1:{self._command[-1]}"
        self._log = folder / "gateway.log"
        self._random = random.Random(seed)
        self._seen: dict[int, Any] = {}
        self._over = threading.Event()

    def __enter__(self) -> "Server":
        self._start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _start(self) -> None:
        from hotrack.bench.client import BenchError
        from hotrack.cli.http import Api, ServerError
        from hotrack.core.child import bound_to_parent

        with self._log.open("ab") as output:
            self._process = subprocess.Popen(
                self._command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT,
                start_new_session=True, preexec_fn=bound_to_parent(),
            )  # fmt: skip
        deadline = time.monotonic() + 180
        while True:
            try:
                Api(self.url, timeout_s=10).get("/ready")
                self.down = False
                return
            except ServerError:
                if self._process.poll() is not None or time.monotonic() > deadline:
                    tail = self._log.read_text(errors="replace")[-2000:]
                    raise BenchError(f"the pool did not start; its last words:\n{tail}") from None
                time.sleep(0.1)

    def kill(self) -> bool:
        """SIGKILL for one process below the gateway."""
        import psutil

        try:
            below = psutil.Process(self._process.pid).children(recursive=True)
            self._seen |= {process.pid: process for process in below}
            self._random.choice(below).kill()
        except (psutil.Error, IndexError):
            return False
        return True

    def restart_at(self, seconds: float, times: int) -> None:
        for _ in range(times):
            time.sleep(seconds / (times + 1))
            self.down = True
            self._end()
            self._start()
            self.restarts += 1
        self._over.wait()  # the kernel ends a child with the thread that started it

    def stop(self) -> int:
        """How many of its processes are still there afterwards."""
        import psutil

        if self._process.poll() is None:
            below = psutil.Process(self._process.pid).children(recursive=True)
            self._seen |= {process.pid: process for process in below}
            self._end()
        self._over.set()
        _, alive = psutil.wait_procs(list(self._seen.values()), timeout=5)
        return len(alive)

    def _end(self) -> None:
        self._process.send_signal(signal.SIGTERM)
        try:
            self._process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def vars_of(options: Any) -> dict[str, Any]:
    from dataclasses import asdict

    return asdict(options)


def _progress(share: float, requests: int, swaps: int) -> None:
    print(f"\r{share:4.0%}  {requests} requests, {swaps} swaps ", end="", file=sys.stderr, flush=True)


def _facts(report: "SoakReport", limit_s: float) -> dict[str, Any]:
    return {
        "invariants": report.invariants(limit_s),
        "requests": report.endings.total(),
        "endings": dict(report.endings.most_common()),
        "swaps": report.swaps,
        "kills": report.kills,
        "restarts": report.restarts,
        "first_byte_p99_s": round(report.p99_s(), 3),
        "residue_growth_bytes": report.growth_bytes(),
        "left_processes": report.left_processes,
        "evidence": report.evidence,
    }


def _show(facts: dict[str, Any]) -> None:
    from rich.console import Console

    console = Console()
    print(file=sys.stderr)
    endings = ", ".join(f"{ending} {count}" for ending, count in facts["endings"].items())
    console.print(
        f"{facts['requests']} requests, {facts['swaps']} swaps, {facts['kills']} kills, "
        f"{facts['restarts']} restarts of the gateway"
    )
    console.print(f"endings: {endings}", markup=False)
    console.print(f"99 % of first bytes within {facts['first_byte_p99_s']:.2f} s")
    for name, held in facts["invariants"].items():
        console.print(f"{name}: {'[green]yes[/]' if held else '[red]NO[/]'}")
    for line in facts["evidence"]:
        console.print(line, markup=False)
