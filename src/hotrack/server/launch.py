"""One member's life: bind, load, serve, drain, leave."""

import asyncio
import signal
import socket
import threading
from collections.abc import Callable, Coroutine, Iterator
from contextlib import AsyncExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from time import monotonic
from typing import Any, TypeVar

import uvicorn

from hotrack.checkpoint.tokenizer import TokenizerAssets, load_tokenizer
from hotrack.config.engine import EngineConfig
from hotrack.config.server import ServerConfig
from hotrack.core.errors import ConfigError, DrainTimeoutError, EngineDeadError
from hotrack.engine.client import EngineClient
from hotrack.hub.resolve import check_name, resolve
from hotrack.obs.log import get_logger, setup_logging
from hotrack.obs.member_metrics import MemberMetrics
from hotrack.openai.protocol import BoundedProtocol
from hotrack.server import listen
from hotrack.server.app import create_app
from hotrack.server.chat_template import MAX_TEMPLATE_CHARS, ChatTemplate
from hotrack.server.codec import Codec
from hotrack.server.member import Member
from hotrack.server.progress import LoadingBar
from hotrack.server.residency import Residency
from hotrack.server.sampling import model_defaults

log = get_logger(__name__)
R = TypeVar("R")

# After the engine's death: how long to let clients and probes read the reason before the process ends.
_LAST_WORDS_S = 1.0
_ANSWER_TIMEOUT_S = 5.0
# Longer than a gateway keeps an idle connection, so that it is never this side that closes one under a
# request.
_KEEP_ALIVE_S = 120


class _Uvicorn(uvicorn.Server):
    """Signals are handled here, not there: a drain comes before the shutdown. ``listening``: it has begun."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.listening = asyncio.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.listening.set()

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


async def run(engine_config: EngineConfig, server_config: ServerConfig) -> int:
    """Serve until SIGTERM, SIGINT or the engine's death; the process's exit code.

    Raises:
        HotrackError: the server could not start; the message is for the user.
    """
    started = monotonic()
    stop = asyncio.Event()
    hurry = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, _on_signal, stop, hurry)
    check_name(engine_config.model)
    sock = listen.bind(server_config)
    death: asyncio.Future[EngineDeadError] = asyncio.get_running_loop().create_future()
    async with AsyncExitStack() as stack:
        stack.callback(listen.close, sock, server_config)
        with LoadingBar() as bar:
            loading = _load(engine_config, server_config, bar, death, stack)
            member = await _unless(stop, loading)
        if member is None:
            return 0
        return await _serve(member, death, sock, (stop, hurry), started)


async def _load(
    engine_config: EngineConfig,
    config: ServerConfig,
    bar: LoadingBar,
    death: asyncio.Future[EngineDeadError],
    stack: AsyncExitStack,
) -> Member:
    """Everything between the command line and the first request; ``stack`` takes what must be closed."""
    own_template = _read_template(config.chat_template)  # before the weights: a wrong path shows at once
    resolved = await _in_daemon_thread(
        lambda: resolve(engine_config.model, progress=lambda done, total: bar.update("download", done, total))
    )
    names = config.served_model_names or (resolved.name,)
    setup_logging(names[0], config.log_level)
    local_config = replace(engine_config, model=str(resolved.path), served_model_name=names[0])
    assets_task = asyncio.create_task(asyncio.to_thread(load_tokenizer, resolved))
    client = EngineClient(local_config, on_death=death.set_result)
    try:
        info = (await client.start(bar.update)).info
    except BaseException:
        assets_task.cancel()
        raise
    stack.push_async_callback(client.close)
    assets = await assets_task
    template = ChatTemplate(
        own_template or assets.chat_template, _special_tokens(assets), timeout_s=config.template_timeout_s
    )
    stack.push_async_callback(template.close)
    await template.start()
    metrics = MemberMetrics(names[0])
    return Member(
        names=names,
        root=local_config.model,
        config=config,
        engine=client,
        codec=Codec(assets.tokenizer, int(info["max_model_len"]), int(info["vocab_size"])),
        template=template,
        residency=Residency(
            client,
            metrics,
            sleep_enabled=local_config.enable_sleep_mode,
            max_requests=config.max_concurrent_requests,
        ),
        metrics=metrics,
        eos_token_ids=assets.eos_token_ids,
        sampling_defaults=(
            model_defaults(assets.generation_defaults) if config.generation_config == "auto" else {}
        ),
    )


def _read_template(path: str | None) -> str | None:
    if path is None:
        return None
    try:
        with Path(path).open(encoding="utf-8") as file:
            return file.read(MAX_TEMPLATE_CHARS + 1)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--chat-template {path}: {error}") from None


def _special_tokens(assets: TokenizerAssets) -> dict[str, str]:
    return {"bos_token": assets.bos_token or "", "eos_token": assets.eos_token or ""}


async def _serve(
    member: Member,
    death: asyncio.Future[EngineDeadError],
    sock: socket.socket,
    signals: tuple[asyncio.Event, asyncio.Event],
    started: float,
) -> int:
    stop, hurry = signals
    options = uvicorn.Config(
        create_app(member),
        loop="uvloop",
        http=BoundedProtocol,
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        timeout_keep_alive=_KEEP_ALIVE_S,
        timeout_graceful_shutdown=int(_ANSWER_TIMEOUT_S),
    )
    server = _Uvicorn(options)
    serving = asyncio.create_task(server.serve(sockets=[sock]))
    await _until_listening(server, serving)
    log.info("%s ready at %s in %.1f s", member.names[0], listen.describe(sock), monotonic() - started)
    stopping = asyncio.create_task(stop.wait())
    first: set[asyncio.Future[Any]] = {serving, death, stopping}
    await asyncio.wait(first, return_when=asyncio.FIRST_COMPLETED)
    if not death.done() and stopping.done():
        await _unless(_as_event(death), _drain(member, hurry))
    if death.done():
        await _say_dead(member, death.result())
    stopping.cancel()
    server.should_exit = True
    await serving
    return 1 if death.done() else 0


async def _until_listening(server: _Uvicorn, serving: asyncio.Task[None]) -> None:
    """Raises ConfigError when another process began to listen on the same port while this one was loading."""
    listening = asyncio.create_task(server.listening.wait())
    await asyncio.wait({serving, listening}, return_when=asyncio.FIRST_COMPLETED)
    if not listening.done():
        listening.cancel()
        try:
            await serving
        except OSError as error:
            raise ConfigError(
                f"cannot listen: {error.strerror or error}; pass --port 0 for a free one"
            ) from None


async def _say_dead(member: Member, error: EngineDeadError) -> None:
    log.error("the engine died: %s; answering what is open, then leaving", error.message)
    member.residency.engine_died(error)
    await _within(_ANSWER_TIMEOUT_S, member.residency.wait_idle())
    await asyncio.sleep(_LAST_WORDS_S)


async def _drain(member: Member, hurry: asyncio.Event) -> None:
    residency, timeout_s = member.residency, member.config.drain_timeout_s
    log.info("stopping: no new requests; running ones have %g s (signal again to cut them short)", timeout_s)
    drained = await _unless(hurry, residency.drain(timeout_s))
    if not drained:
        residency.fail_all(
            DrainTimeoutError("the server is shutting down and could not wait for this request")
        )
        await _within(_ANSWER_TIMEOUT_S, residency.wait_idle())


def _as_event(future: asyncio.Future[Any]) -> asyncio.Event:
    event = asyncio.Event()
    future.add_done_callback(lambda _: event.set())
    return event


def _on_signal(stop: asyncio.Event, hurry: asyncio.Event) -> None:
    (hurry if stop.is_set() else stop).set()


async def _in_daemon_thread(work: Callable[[], R]) -> R:
    """Like ``asyncio.to_thread``, but a process told to stop does not wait for it (a long download)."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[R] = loop.create_future()

    def settle(set_outcome: Callable[[Any], None], outcome: object) -> None:
        if not done.cancelled():
            set_outcome(outcome)

    def run_work() -> None:
        try:
            result = work()
        except BaseException as error:  # noqa: BLE001 handed to whoever awaits
            outcome: tuple[Callable[[Any], None], object] = (done.set_exception, error)
        else:
            outcome = (done.set_result, result)
        with suppress(RuntimeError):  # the loop may be gone
            loop.call_soon_threadsafe(settle, *outcome)

    threading.Thread(target=run_work, name="resolve", daemon=True).start()
    return await done


async def _unless(event: asyncio.Event, work: Coroutine[Any, Any, R]) -> R | None:
    """``work``'s result, or None when ``event`` was set first and the work was cancelled."""
    task = asyncio.create_task(work)
    waiter = asyncio.create_task(event.wait())
    try:
        await asyncio.wait({task, waiter}, return_when=asyncio.FIRST_COMPLETED)
        return task.result() if task.done() else None
    finally:
        waiter.cancel()
        if not task.done():
            task.cancel()
            await asyncio.wait({task})


async def _within(timeout_s: float, work: Coroutine[Any, Any, None]) -> None:
    with suppress(TimeoutError):
        await asyncio.wait_for(work, timeout_s)
