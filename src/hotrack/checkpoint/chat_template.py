"""The sandbox of chat templates: they come with checkpoints and are hostile until proven otherwise."""

import datetime
import json
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment


class _Generation(Extension):
    """``{% generation %}`` marks what the assistant wrote (used in training); here it is only its body."""

    tags = {"generation"}  # noqa: RUF012 jinja2's protocol

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def template_environment() -> ImmutableSandboxedEnvironment:
    """Jinja2 with the conventions of Hugging Face chat templates. Its templates cannot reach Python; they can
    use up time and memory."""
    env = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _Generation]
    )
    env.filters["tojson"] = _tojson
    env.globals["raise_exception"] = _raise_exception
    env.globals["strftime_now"] = _strftime_now
    return env


def _tojson(value: Any, ensure_ascii: bool = False, indent: int | None = None, **options: Any) -> str:
    # Jinja's own filter escapes HTML characters, which would put \u003c into prompts.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(layout: str) -> str:
    return datetime.datetime.now().astimezone().strftime(layout)
