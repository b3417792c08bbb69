"""`hotrack chat`: talk to a model in the terminal."""

import sys
from typing import Annotated, Any

import typer

from hotrack.cli.http import Api, ServerError, text_pieces
from hotrack.cli.options import DEFAULT_URL, Json, Key, Url, print_json
from hotrack.config import env
from hotrack.core.errors import ConfigError


def chat(
    message: Annotated[str | None, typer.Argument(help="Ask this once; without it, a conversation.")] = None,
    url: Url = DEFAULT_URL,
    model: Annotated[str | None, typer.Option(help="Default: the first model the server lists.")] = None,
    api_key: Key = None,
    max_tokens: Annotated[int, typer.Option(min=1)] = 512,
    temperature: Annotated[float | None, typer.Option(min=0.0)] = None,
    system: Annotated[str | None, typer.Option(help="System message.")] = None,
    json_output: Json = False,
) -> None:
    """Answers appear as they are generated. /model NAME switches, /clear forgets, Ctrl-D ends."""
    api = Api(url, api_key or env.api_key())
    chosen = model or _first_model(api)
    conversation = _Conversation(api, chosen, system, {"max_tokens": max_tokens})
    if temperature is not None:
        conversation.options["temperature"] = temperature
    if message is not None:
        answer = conversation.ask(message, echo=not json_output)
        if json_output:
            print_json({"model": chosen, "answer": answer})
        return
    if json_output:
        raise ConfigError("--json needs a MESSAGE: hotrack chat --json 'your question'")
    if sys.stdin.isatty():
        print(f"{chosen} at {api.url}; /model NAME, /clear, Ctrl-D to leave", file=sys.stderr)
        import readline  # noqa: F401 - line editing and history for input()
    _converse(conversation, prompt=sys.stdin.isatty())


def _first_model(api: Api) -> str:
    models = api.get("/v1/models")["data"]
    if not models:
        raise ConfigError(f"{api.url} lists no models; name one with --model")
    return str(models[0]["id"])


class _Conversation:
    def __init__(self, api: Api, model: str, system: str | None, options: dict[str, Any]) -> None:
        self.model = model
        self.options = options
        self._api = api
        self._start = [{"role": "system", "content": system}] if system else []
        self._messages = list(self._start)

    def clear(self) -> None:
        self._messages = list(self._start)

    def ask(self, text: str, *, echo: bool) -> str:
        """The answer, printed as it arrives. A failed question leaves no trace in the conversation."""
        asked = [*self._messages, {"role": "user", "content": text}]
        body = {"model": self.model, "messages": asked, "stream": True, **self.options}
        pieces: list[str] = []
        try:
            for piece in text_pieces(self._api.stream("/v1/chat/completions", body)):
                pieces.append(piece)
                if echo:
                    print(piece, end="", flush=True)
        finally:
            if echo:
                print()
        answer = "".join(pieces)
        self._messages = [*asked, {"role": "assistant", "content": answer}]
        return answer


def _converse(conversation: _Conversation, *, prompt: bool) -> None:
    """``prompt`` False: questions come from a file or a pipe, and only answers are printed."""
    while True:
        try:
            text = input(f"{conversation.model}> " if prompt else "").strip()
        except (EOFError, KeyboardInterrupt):
            if prompt:
                print()
            return
        if text == "/clear":
            conversation.clear()
        elif text.startswith("/model "):
            conversation.model = text.removeprefix("/model ").strip()
        elif text:
            try:
                conversation.ask(text, echo=True)
            except ServerError as error:
                print(f"hotrack: {error.message}", file=sys.stderr)
            except KeyboardInterrupt:
                print("(stopped)", file=sys.stderr)
