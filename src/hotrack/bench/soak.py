"""Mixed load on a pool while its processes are killed: does every request end as promised?

Clients ask random members, half of them streaming, and compare with the answers that the same members gave
before anything happened. A request may end with its answer, or with an error that has a code; anything else
is a fault of the pool.
"""

import asyncio
import random
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import aiohttp
import msgspec

from hotrack.bench.client import BenchError

LOOK_S = 1.0
RETRY_S = 0.2
GROWTH_BYTES = 16 << 20  # of a sleeper: what the pool itself calls equal is 64 MiB
ENDINGS = ("wrong tokens", "cut silently", "no answer")


@dataclass(frozen=True, slots=True)
class SoakOptions:
    """``seconds`` of load by ``clients``; every ``kill_every_s`` one process dies (0: none). ``limit_s``:
    what 99 % of the waits for a first byte must keep."""

    models: Sequence[str]
    prompts: Sequence[str]
    seconds: float
    clients: int
    kill_every_s: float
    limit_s: float
    max_tokens: int = 24
    seed: int = 0


@dataclass(slots=True)
class SoakReport:
    """``endings``: 'ok', an error's code, or one of ``ENDINGS``. Times in seconds."""

    endings: Counter[str] = field(default_factory=Counter)
    evidence: list[str] = field(default_factory=list)
    waits: list[float] = field(default_factory=list)
    residues: dict[str, list[int]] = field(default_factory=lambda: defaultdict(list))
    swaps: int = 0
    kills: int = 0
    restarts: int = 0
    left_processes: int = 0

    def p99_s(self) -> float:
        return sorted(self.waits)[int(0.99 * (len(self.waits) - 1))] if self.waits else 0.0

    def growth_bytes(self) -> int:
        """Of the member whose residue grew most: median of the last quarter less that of the second; the
        first belongs to libraries that load late."""
        grown = [0]
        for values in self.residues.values():
            quarter = len(values) // 4
            if quarter:
                early, late = sorted(values[quarter : 2 * quarter]), sorted(values[-quarter:])
                grown.append(late[quarter // 2] - early[quarter // 2])
        return max(grown)

    def invariants(self, limit_s: float) -> dict[str, bool]:
        return {
            "no stream cut silently": not self.endings["cut silently"],
            "no wrong token": not self.endings["wrong tokens"],
            "every request answered": not self.endings["no answer"],
            "somebody was served": self.endings["ok"] > 0,
            f"99 % of first bytes within {limit_s:.0f} s": self.p99_s() <= limit_s,
            "residues flat": self.growth_bytes() <= GROWTH_BYTES,
            "no process left": not self.left_processes,
        }


class Soak:
    """``kill``: end a random process of the pool, False if there was none. ``down``: whether the gateway is
    being restarted, so that connections may fail."""

    def __init__(
        self, url: str, options: SoakOptions, *, kill: Callable[[], bool], down: Callable[[], bool]
    ) -> None:
        self.report = SoakReport()
        self._url = url
        self._options = options
        self._kill = kill
        self._down = down
        self._random = random.Random(options.seed)
        self._goldens: dict[tuple[str, str], str] = {}
        self._until = 0.0
        self._swaps_seen: set[tuple[int, float]] = set()

    async def run(self, progress: Callable[[float, int, int], None]) -> SoakReport:
        """``progress(share, requests, swaps)`` is called now and then.

        Raises:
            BenchError: a member gave no answer before anything was done to it.
        """
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=10, sock_read=120)
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(self._url, timeout=timeout, connector=connector) as session:
            for model in self._options.models:
                for prompt in self._options.prompts:
                    ending, text = await self._ask(session, model, prompt, stream=False)
                    if ending != "ok":
                        raise BenchError(f"{model} did not answer {prompt!r} at the start: {ending} {text}")
                    self._goldens[model, prompt] = text
            self.report.waits.clear()
            began = time.monotonic()
            self._until = began + self._options.seconds
            others = [asyncio.create_task(self._watch(session)), asyncio.create_task(self._harm())]
            clients = [asyncio.create_task(self._client(session)) for _ in range(self._options.clients)]
            while not all(client.done() for client in clients):
                share = min(1.0, (time.monotonic() - began) / self._options.seconds)
                progress(share, self.report.endings.total(), self.report.swaps)
                await asyncio.wait(clients, timeout=LOOK_S)
            for other in others:
                other.cancel()
            await asyncio.gather(*clients, *others, return_exceptions=True)
        return self.report

    async def _client(self, session: aiohttp.ClientSession) -> None:
        while time.monotonic() < self._until:
            model = self._random.choice(self._options.models)
            prompt = self._random.choice(self._options.prompts)
            was_down = self._down()
            ending, text = await self._ask(session, model, prompt, stream=self._random.random() < 0.5)
            if ending == "ok" and text != self._goldens[model, prompt]:
                ending, text = "wrong tokens", f"{text!r} instead of {self._goldens[model, prompt]!r}"
            if ending in ("no answer", "cut silently") and (was_down or self._down()):
                ending = "gateway restarting"
            self.report.endings[ending] += 1
            if ending in ENDINGS and len(self.report.evidence) < 20:
                self.report.evidence.append(f"{model}, {prompt!r}: {ending}: {text}")
            if ending != "ok":
                await asyncio.sleep(RETRY_S)

    async def _ask(
        self, session: aiohttp.ClientSession, model: str, prompt: str, *, stream: bool
    ) -> tuple[str, str]:
        """(how it ended, the answer or what is known of the end)."""
        body = {
            "model": model, "messages": [{"role": "user", "content": prompt}], "stream": stream,
            "temperature": 0.0, "max_tokens": self._options.max_tokens,
        }  # fmt: skip
        began = time.monotonic()
        try:
            async with session.post("/v1/chat/completions", json=body) as reply:
                if reply.status != 200 or not stream:
                    payload = msgspec.json.decode(await reply.read())
                    self.report.waits.append(time.monotonic() - began)
                    if "error" in payload:
                        return str(payload["error"]["code"]), str(payload["error"]["message"])
                    return "ok", str(payload["choices"][0]["message"]["content"])
                return await self._read_stream(reply, began)
        except (aiohttp.ClientError, TimeoutError, OSError, msgspec.DecodeError, KeyError) as error:
            return "no answer", f"{type(error).__name__}: {error}"

    async def _read_stream(self, reply: aiohttp.ClientResponse, began: float) -> tuple[str, str]:
        text, waited = "", False
        try:
            async for line in reply.content:
                if not line.startswith(b"data:"):
                    continue  # a comment: the pool is at work
                if not waited:
                    self.report.waits.append(time.monotonic() - began)
                    waited = True
                data = line[5:].strip()
                if data == b"[DONE]":
                    return "ok", text
                payload = msgspec.json.decode(data)
                if "error" in payload:
                    return str(payload["error"]["code"]), str(payload["error"]["message"])
                for choice in payload["choices"]:
                    text += choice["delta"].get("content") or ""
        except (aiohttp.ClientError, OSError) as error:
            return "cut silently", f"{text!r}, then {type(error).__name__}"
        return "cut silently", repr(text)

    async def _watch(self, session: aiohttp.ClientSession) -> None:
        while True:
            try:
                async with session.get("/api/pool/members") as reply:
                    members = (await reply.json())["members"]
                async with session.get("/api/pool/swaps") as reply:
                    swaps = (await reply.json())["swaps"]
            except (aiohttp.ClientError, TimeoutError, OSError):
                await asyncio.sleep(LOOK_S)
                continue
            self._swaps_seen |= {(swap["number"], swap["time"]) for swap in swaps}
            self.report.swaps = len(self._swaps_seen)
            for member in members:
                if member["state"] == "asleep" and member["memory_bytes"]:
                    self.report.residues[member["name"]].append(member["memory_bytes"])
            await asyncio.sleep(LOOK_S)

    async def _harm(self) -> None:
        while self._options.kill_every_s:
            await asyncio.sleep(self._options.kill_every_s * self._random.uniform(0.5, 1.5))
            if time.monotonic() > self._until - self._options.kill_every_s:
                return
            self.report.kills += not self._down() and self._kill()
