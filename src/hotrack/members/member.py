"""What the pool drives: one member, as a protocol and as the real thing (process + HTTP client + memory
probe).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from hotrack.core.errors import MemberFailedError
from hotrack.core.lifecycle import SleepMode
from hotrack.members.canary import CanaryAnswer
from hotrack.members.client import MemberClient
from hotrack.members.endpoint import Endpoint
from hotrack.members.gpu import Gpus
from hotrack.members.probe import GpuProbe, MemoryProbe, ProcessTreeProbe
from hotrack.members.process import MemberProcess
from hotrack.members.spec import MIB, MemberSpec
from hotrack.obs.log import get_logger

log = get_logger(__name__)
ExitCallback = Callable[[int], None]


class Member(Protocol):
    """Every coroutine either did what it says or raised ``HotrackError``; none waits longer than its
    deadline in
    ``spec.deadlines``. A 2xx answer is only a claim: the pool checks ``is_sleeping`` and ``memory_bytes``
    after it.
    """

    spec: MemberSpec

    @property
    def endpoint(self) -> Endpoint: ...

    @property
    def pid(self) -> int | None: ...

    @property
    def alive(self) -> bool:
        """False when its process is known to be gone. An external engine counts as alive."""
        ...

    def watch(self, on_exit: ExitCallback) -> None:
        """Call back once per process exit that ``stop`` did not ask for."""
        ...

    async def launch(self) -> None:
        """Start the process (external: nothing). Does not wait for it to be healthy."""
        ...

    async def stop(self) -> None:
        """End the whole process group and reap it. Raises when it cannot, e.g. for an external engine."""
        ...

    async def healthy(self) -> bool: ...

    async def is_sleeping(self) -> bool: ...

    async def sleep(self, mode: SleepMode, nbytes: int | None = None) -> int | None:
        """Sleep at ``spec.sleep_level``. Sleeping twice is fine. ``nbytes`` (``spec.partial_sleep``): give
        back only about so many more bytes. Returns what it says that it gave back of its GPU, if it does."""
        ...

    async def wake_up(self, *, streamed: bool = False) -> None:
        """Wake fully; level 2 reloads the weights. Prefix caches that outlived their KV are reset.
        ``streamed`` (``spec.streamed_wake``): weights may still be on their way."""
        ...

    async def ask(self, prompt: str, max_tokens: int) -> CanaryAnswer: ...

    async def memory_bytes(self) -> int | None:
        """Device bytes the member's process tree holds now; None when nobody can measure it."""
        ...

    def logs(self) -> list[str]: ...

    async def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class MemberFactory:
    """Makes real members. ``log_dir``: one log file per member there (None: only the ring buffer)."""

    log_dir: Path | None = None
    gpus: Gpus = field(default_factory=Gpus)

    def __call__(self, spec: MemberSpec) -> Member:
        """Raises ConfigError: there is no such GPU as ``spec.device``."""
        return EngineMember(spec, log_dir=self.log_dir, probe=self._probe(spec))

    def _probe(self, spec: MemberSpec) -> MemoryProbe | None:
        if spec.device is None:
            return ProcessTreeProbe()
        gpu = self.gpus.find(spec.device, spec.env)
        return None if gpu is None else GpuProbe(spec.name, gpu)


class EngineMember:
    """A member with vLLM's HTTP dialect, launched by us or only known by its URL.

    Its memory is measured by ``probe``; its own word (``device_after_bytes`` in its reports) is compared with
    that, and stands in for it where nobody else can tell: without a probe, or for an engine of somebody else.
    """

    def __init__(self, spec: MemberSpec, *, log_dir: Path | None, probe: MemoryProbe | None) -> None:
        self.spec = spec
        self._probe = probe
        self._word: int | None = None  # what it said to hold on its device, last
        self._word_is_new = False
        self._doubted = False
        self._process = MemberProcess(spec, log_dir=log_dir) if spec.command else None
        self._client: MemberClient | None = None
        self._endpoint = Endpoint(spec.url.rstrip("/")) if spec.url else Endpoint("")

    @property
    def endpoint(self) -> Endpoint:
        return self._endpoint

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process else None

    @property
    def alive(self) -> bool:
        return self._process is None or self._process.pid is not None

    def watch(self, on_exit: ExitCallback) -> None:
        if self._process:
            self._process.on_exit = on_exit

    async def launch(self) -> None:
        if self._process:
            await self.close()
            self._forget()
            self._moving()
            self._endpoint = await self._process.start()

    async def stop(self) -> None:
        if self._process is None:
            raise MemberFailedError(
                f"{self.spec.name} runs outside hotrack at {self.spec.url}; stop it where it was started"
            )
        await self.close()
        self._moving()
        await self._process.stop()
        self._forget()

    async def healthy(self) -> bool:
        return await self._api().healthy()

    async def is_sleeping(self) -> bool:
        return await self._api().is_sleeping()

    async def sleep(self, mode: SleepMode, nbytes: int | None = None) -> int | None:
        self._moving()
        report = await self._api().sleep(self.spec.sleep_level or 1, mode, nbytes)
        self._hear(report)
        freed = report.get("freed_bytes")
        return freed if self.spec.device is not None and isinstance(freed, int) else None

    async def wake_up(self, *, streamed: bool = False) -> None:
        api = self._api()
        self._moving()
        if self.spec.sleep_level == 2:
            await api.wake_up(("weights",))
            await api.reload_weights()
            self._hear(await api.wake_up(("kv_cache",)))
        else:
            self._hear(await api.wake_up(streamed=streamed))
        if not self.spec.resets_itself:
            await api.reset_prefix_cache()

    async def ask(self, prompt: str, max_tokens: int) -> CanaryAnswer:
        return await self._api().ask(prompt, max_tokens)

    async def memory_bytes(self) -> int | None:
        pid = self.pid
        if pid is None and self._process is not None:
            return None
        measured = None if pid is None or self._probe is None else await self._probe.memory_bytes(pid)
        if measured is None:
            return self._word
        self._compare(measured)
        return measured

    def logs(self) -> list[str]:
        return self._process.logs() if self._process else []

    async def close(self) -> None:
        """Close the HTTP client; the process is left alone."""
        if self._client is not None:
            client, self._client = self._client, None
            await client.close()

    def _moving(self) -> None:
        if self._probe is not None:
            self._probe.moving()

    def _forget(self) -> None:
        self._word = None
        if self._probe is not None:
            self._probe.gone()

    def _hear(self, report: Mapping[str, Any]) -> None:
        word = report.get("device_after_bytes")
        self._word = word if isinstance(word, int) else None
        self._word_is_new = self._word is not None

    def _compare(self, measured: int) -> None:
        """Once after each transition; said once."""
        if not self._word_is_new or self._word is None:
            return
        self._word_is_new = False
        if abs(measured - self._word) > self.spec.tolerance_bytes and not self._doubted:
            self._doubted = True
            log.warning(
                "%s says that it holds %d MiB on its device, the driver says %d MiB; the driver counts",
                self.spec.name,
                self._word // MIB,
                measured // MIB,
            )

    def _api(self) -> MemberClient:
        if self._client is None:
            self._client = MemberClient(self._endpoint, self.spec)
        return self._client
