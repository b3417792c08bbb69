"""`hotrack`: the command line. A command lives in a file of its own and is one line here."""

import sys
from typing import Annotated

import typer

from hotrack._version import __version__
from hotrack.cli import (
    bench_cmd,
    chat_cmd,
    config_cmd,
    demo_cmd,
    doctor_cmd,
    engine_cmd,
    plan_cmd,
    ps_cmd,
    pull_cmd,
    residency_cmd,
    serve_cmd,
    soak_cmd,
)
from hotrack.core.errors import HotrackError

app = typer.Typer(
    name="hotrack",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Serve Mixture-of-Experts models on the hardware you have: models take turns on one set of devices.",
)
app.command("serve")(serve_cmd.serve)
app.command("engine", **engine_cmd.SETTINGS)(engine_cmd.engine)
app.command("demo")(demo_cmd.demo)
app.command("doctor")(doctor_cmd.doctor)
app.command("pull")(pull_cmd.pull)
app.command("chat")(chat_cmd.chat)
app.command("ps")(ps_cmd.ps)
app.command("sleep")(residency_cmd.sleep)
app.command("wake")(residency_cmd.wake)
app.command("soak")(soak_cmd.soak)
app.command("plan")(plan_cmd.plan)
app.command("validate")(config_cmd.validate)
app.add_typer(config_cmd.app, name="config")
app.add_typer(bench_cmd.app, name="bench")

EXIT_FAILURE = 1
EXIT_INTERRUPTED = 130


def _version(asked: bool) -> None:
    if asked:
        print(f"hotrack {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    del version


def main() -> None:
    """Entry point. Errors we raise on purpose are one line on stderr and an exit code, never a traceback."""
    try:
        app()
    except HotrackError as error:
        print(f"hotrack: {error.message}", file=sys.stderr)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        sys.exit(EXIT_INTERRUPTED)
    except BrokenPipeError:  # `hotrack ps | head`
        sys.stderr.close()
        sys.exit(EXIT_FAILURE)
