"""The command line of ``python -m hotrack.server``, in vLLM's spellings."""

import argparse
import difflib
from collections.abc import Sequence
from typing import NoReturn

from hotrack._version import __version__
from hotrack.config import env
from hotrack.config.engine import DEVICES, DTYPES, HOST_COPIES, LOAD_FORMATS, EngineConfig
from hotrack.config.server import ServerConfig
from hotrack.config.units import parse_size
from hotrack.core.errors import ConfigError

# vLLM's flags that have no meaning here; naming them saves a search.
_NOT_NEEDED = {
    "--trust-remote-code": "model code from checkpoints is never run",
    "--swap-space": "sleeping keeps weights on the host by itself",
    "--disable-log-requests": "requests are not logged",
    "--enable-chunked-prefill": "prefill is always chunked",
}


class _Parser(argparse.ArgumentParser):
    """Raises ConfigError instead of leaving the process."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(message)


def parse_flags(argv: Sequence[str]) -> tuple[EngineConfig, ServerConfig]:
    """Options of engine and server from the command line; unset ones keep the defaults stated in ``config``.

    Raises:
        ConfigError: an unknown flag (with the nearest known one), a malformed value or a bad combination.
    """
    parser = _build_parser()
    known, extra = parser.parse_known_args([_dashes(arg) for arg in argv])
    if extra:
        raise _unknown(parser, extra[0])
    if known.model is None:
        raise ConfigError(
            "no MODEL given; name a folder, a GGUF file, a Hugging Face repo id or a demo model"
        )
    values = {name: value for name, value in vars(known).items() if value is not None}
    names = tuple(values.pop("served_model_name", ()))
    server = {name: values.pop(name) for name in _SERVER_FIELDS & values.keys()}
    if "uds" not in server:  # a gateway's own key must not lock its members; the socket's mode guards it
        server.setdefault("api_key", env.api_key())
    engine = EngineConfig(**values, served_model_name=names[0] if names else None)
    return engine, ServerConfig(**server, served_model_names=names)


_SERVER_FIELDS = {
    "api_key",
    "chat_template",
    "drain_timeout_s",
    "generation_config",
    "host",
    "log_level",
    "max_body_bytes",
    "max_concurrent_requests",
    "port",
    "template_timeout_s",
    "uds",
}


def _build_parser() -> _Parser:
    parser = _Parser(
        prog="hotrack engine",
        description="Serve one model over HTTP (OpenAI API, vLLM's sleep endpoints).",
        allow_abbrev=False,
        argument_default=None,
    )
    parser.add_argument(
        "model", nargs="?", metavar="MODEL", help="folder, GGUF file, Hugging Face repo id or demo name"
    )
    parser.add_argument("--version", action="version", version=f"hotrack {__version__}")
    _add_server_flags(parser.add_argument_group("server"))
    _add_engine_flags(parser.add_argument_group("engine"))
    return parser


def _add_server_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--host", help="address to listen on (default 127.0.0.1)")
    group.add_argument("--port", type=int, help="port to listen on; 0 takes a free one (default 8000)")
    group.add_argument("--uds", metavar="PATH", help="listen on a Unix socket instead")
    group.add_argument(
        "--api-key", metavar="KEY", help="key clients must send (default: HOTRACK_API_KEY, without --uds)"
    )
    group.add_argument(
        "--served-model-name", nargs="+", metavar="NAME", help="names clients use; the first is shown"
    )
    group.add_argument(
        "--chat-template", metavar="FILE", help="Jinja file that replaces the model's chat template"
    )
    group.add_argument(
        "--generation-config", metavar="auto|vllm", help="auto: the model's own sampling defaults"
    )
    group.add_argument(
        "--max-body-bytes", type=_size, metavar="SIZE", help="largest request body (default 8MiB)"
    )
    group.add_argument(
        "--drain-timeout",
        type=float,
        dest="drain_timeout_s",
        metavar="SECONDS",
        help="after SIGTERM, what runs may take that long (default 30)",
    )
    group.add_argument(
        "--template-timeout",
        type=float,
        dest="template_timeout_s",
        metavar="SECONDS",
        help="longest rendering of one chat template (default 5)",
    )
    group.add_argument(
        "--max-concurrent-requests", type=int, metavar="N", help="more at once get 429 (default 4096)"
    )
    group.add_argument(
        "--log-level",
        choices=("debug", "info", "warning", "error"),
        help="of this server (default: HOTRACK_LOG_LEVEL, else info)",
    )


def _add_engine_flags(group: argparse._ArgumentGroup) -> None:
    toggle = argparse.BooleanOptionalAction
    group.add_argument("--dtype", help=", ".join(DTYPES))
    group.add_argument("--device", help=f"{', '.join(DEVICES)} or cuda:N (default auto)")
    group.add_argument(
        "--load-format", help=f"{', '.join(LOAD_FORMATS)}; dummy makes random weights for a config.json"
    )
    group.add_argument(
        "--tensor-parallel-size", "-tp", type=int, metavar="N", help="ranks that share the model"
    )
    group.add_argument(
        "--max-model-len",
        type=_size,
        metavar="N",
        help="prompt plus completion, in tokens; '32k' works",
    )
    group.add_argument("--max-num-seqs", type=int, metavar="N", help="sequences in one batch")
    group.add_argument("--max-num-batched-tokens", type=int, metavar="N", help="tokens in one step")
    group.add_argument(
        "--gpu-memory-utilization", type=float, metavar="SHARE", help="of what a GPU has free (default 0.9)"
    )
    group.add_argument(
        "--kv-cache-memory-bytes", type=_size, metavar="SIZE", help="for example 512MiB or 4GiB"
    )
    group.add_argument("--block-size", type=int, metavar="N", help="tokens in one KV block")
    group.add_argument(
        "--seed", type=int, metavar="N", help="accepted for vLLM; each request has its own seed"
    )
    group.add_argument("--num-threads", type=int, metavar="N", help="CPU threads of one rank")
    group.add_argument(
        "--enable-prefix-caching", action=toggle, help="reuse the KV of equal prompt beginnings"
    )
    group.add_argument(
        "--enforce-eager", action=toggle, help="launch every kernel; no CUDA graphs of decode steps"
    )
    group.add_argument(
        "--enable-sleep-mode", action=toggle, help="answer /sleep; keeps a host copy of the weights"
    )
    group.add_argument(
        "--host-copy",
        metavar="|".join(HOST_COPIES),
        help="shared: keep it in /dev/shm (GPU only), where the next start finds it (default private)",
    )


def _size(text: str) -> int:
    try:
        return parse_size(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None  # argparse keeps only this kind's message


def _dashes(arg: str) -> str:
    """``--max_model_len=5`` to ``--max-model-len=5``; vLLM takes both."""
    if not arg.startswith("--"):
        return arg
    name, equals, value = arg.partition("=")
    return name.replace("_", "-") + equals + value


def _unknown(parser: _Parser, arg: str) -> ConfigError:
    name = arg.partition("=")[0]
    if name in _NOT_NEEDED:
        return ConfigError(f"{name} is vLLM's and not needed here: {_NOT_NEEDED[name]}; leave it out")
    if not name.startswith("-"):
        return ConfigError(f"unexpected argument {arg!r}; only one MODEL can be served")
    flags = [option for action in parser._actions for option in action.option_strings]
    near = difflib.get_close_matches(name, flags, n=1)
    hint = f"; did you mean {near[0]}?" if near else "; --help lists all flags"
    return ConfigError(f"unknown flag {name}{hint}")
