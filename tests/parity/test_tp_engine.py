"""Two rank processes over gloo: the tokens of one rank, lock-step under stress, and no survivor when one
dies.
"""

import asyncio
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from fakes.tiny_checkpoints import write_tiny
from hotrack.config.engine import EngineConfig
from hotrack.core.errors import ConfigError, EngineDeadError, HotrackError, ModelAsleepError
from hotrack.core.lifecycle import FinishReason
from hotrack.core.request import EngineOutput, EngineRequest, pack_tokens, unpack_tokens
from hotrack.core.sampling import SamplingParams
from hotrack.engine.client import EngineClient
from hotrack.engine.in_process import InProcessBackend

pytestmark = pytest.mark.e2e


def config(model: Path, **options: object) -> EngineConfig:
    defaults = {"tensor_parallel_size": 2, "num_threads": 1, "max_model_len": 96, "max_num_seqs": 8}
    return EngineConfig(model=str(model), **{**defaults, **options})


def request(name: str, prompt: list[int], tokens: int, seed: int | None = None) -> EngineRequest:
    params = SamplingParams(max_tokens=tokens, temperature=0.0 if seed is None else 0.8, seed=seed)
    return EngineRequest(name, pack_tokens(prompt), params, tokens)


def workload(seed: int, count: int) -> list[EngineRequest]:
    rng = random.Random(seed)
    return [
        request(
            f"w{i}",
            [rng.randrange(3, 500) for _ in range(rng.randrange(1, 40))],
            rng.randrange(1, 24),
            None if i % 2 else i,
        )
        for i in range(count)
    ]


async def collect(client: EngineClient, one: EngineRequest) -> list[int]:
    return [token async for output in client.add(one) for token in unpack_tokens(output.tokens)]


def no_leftovers(pids: tuple[int, ...], timeout_s: float = 10.0) -> bool:
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if not any(psutil.pid_exists(pid) for pid in pids):
            return True
        time.sleep(0.05)
    return False


@pytest.fixture
def scratch(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where engines put their private directories: short, because socket paths are limited to 107 bytes."""
    with tempfile.TemporaryDirectory(prefix="ht") as directory:
        monkeypatch.setattr(tempfile, "tempdir", directory)
        monkeypatch.setenv("TMPDIR", directory)
        yield Path(directory)


@pytest.mark.parametrize("family", ["llama", "qwen3", "qwen3_moe", "qwen3_next"])
def test_two_ranks_give_the_tokens_of_one(tmp_path: Path, family: str) -> None:
    model = write_tiny(tmp_path / family, family, seed=3)
    requests = workload(seed=5, count=12)
    single = InProcessBackend(config(model, tensor_parallel_size=1))
    outputs = single.run(requests, lambda _: False)
    single.close()
    expected = [[t for o in outputs[r.request_id] for t in unpack_tokens(o.tokens)] for r in requests]

    async def scenario() -> list[list[int]]:
        async with EngineClient(config(model, max_num_batched_tokens=32), debug=True) as client:
            return await asyncio.gather(*(collect(client, r) for r in requests))

    assert asyncio.run(scenario()) == expected


class Stress:
    """Random requests, aborts after random waits, and ranks frozen for moments, until enough steps were
    run.
    """

    def __init__(self, client: EngineClient, pids: tuple[int, ...], seed: int) -> None:
        self.client = client
        self.pids = pids
        self.rng = random.Random(seed)
        self.ended: dict[str, int] = {}
        self.aborted = 0
        self.delays = 0

    async def run(self, steps: int) -> dict[str, float]:
        workers = [asyncio.create_task(self._user(i)) for i in range(14)]
        delays = asyncio.create_task(self._delay())
        try:
            while (stats := await self.client.control("stats"))["steps"] < steps:
                assert not any(worker.done() for worker in workers), "a user gave up"
                if self.rng.random() < 0.2:
                    await self.client.control("reset_prefix_cache")
                if self.rng.random() < 0.1:
                    await self.client.control("sleep", level=1, mode="keep")
                    await self.client.control("wake")
                await asyncio.sleep(0.1)
        finally:
            delays.cancel()
            for worker in workers:
                worker.cancel()
            failures = await asyncio.gather(*workers, return_exceptions=True)
        assert all(isinstance(f, asyncio.CancelledError) for f in failures), failures
        return stats

    async def _user(self, user: int) -> None:
        serial = 0
        while True:
            serial += 1
            name = f"u{user}.{serial}"
            prompt = [self.rng.randrange(3, 6) for _ in range(self.rng.randrange(1, 60))]
            stream = self.client.add(request(name, prompt, self.rng.randrange(1, 36), seed=serial))
            patience = self.rng.choice([None, None, 0.0, self.rng.random() * 0.3])
            try:
                async with asyncio.timeout(patience):
                    await self._read(name, stream)
            except TimeoutError:
                self.aborted += 1
            except ModelAsleepError:
                await asyncio.sleep(0.01)
            finally:
                await stream.aclose()

    async def _read(self, name: str, stream: object) -> None:
        async for output in stream:
            assert isinstance(output, EngineOutput)
            assert name not in self.ended
            if output.finish_reason is not None:
                assert output.finish_reason in (FinishReason.LENGTH, FinishReason.STOP), output
                self.ended[name] = 1
                return
            if self.rng.random() < 0.02:
                return  # the client went away

    async def _delay(self) -> None:
        while True:
            await asyncio.sleep(self.rng.random())
            pid = self.rng.choice(self.pids)
            os.kill(pid, signal.SIGSTOP)
            await asyncio.sleep(self.rng.random() * 0.1)
            os.kill(pid, signal.SIGCONT)
            self.delays += 1


@pytest.mark.timeout(600)
@pytest.mark.parametrize("steps", [2_000, pytest.param(10_000, marks=pytest.mark.slow)])
def test_ranks_stay_in_lock_step_under_stress(tmp_path: Path, steps: int) -> None:
    model = write_tiny(tmp_path / "tiny", "llama", seed=1, hidden_size=64, num_hidden_layers=1, head_dim=16)
    one_block = 2 * 1 * 16 * 16 * 4  # K and V, one local head, 16 tokens, 16 dims, float32
    options = {"kv_cache_memory_bytes": 20 * one_block, "max_num_batched_tokens": 48}

    async def scenario() -> None:
        client = EngineClient(config(model, **options), debug=True)
        info = await client.start()
        try:
            assert info.info["num_blocks"] == 20
            before = await collect(client, request("before", [5, 6, 7], 8))
            stress = Stress(client, info.pids, seed=steps)
            stats = await stress.run(steps)
            await asyncio.sleep(0)
            after = await collect(client, request("after", [5, 6, 7], 8))
            assert after == before
            final = await client.control("stats")
            print(
                f"{stats['steps']:.0f} steps, {stats['preemptions']:.0f} preemptions, {len(stress.ended)} "
                f"finished, {stress.aborted} timed out, {stress.delays} delays"
            )
            assert stats["preemptions"] > 10
            assert stress.aborted > 10
            assert len(stress.ended) > 50
            assert stress.delays > 0
            assert (final["running"], final["waiting"], final["kv_usage"]) == (0, 0, 0)
        finally:
            for pid in info.pids:
                if psutil.pid_exists(pid):
                    os.kill(pid, signal.SIGCONT)
            await client.close()

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("victim", "sig"), [(0, signal.SIGKILL), (1, signal.SIGKILL), (0, signal.SIGSTOP), (1, signal.SIGSTOP)]
)
def test_a_dead_or_hung_rank_fails_every_request_and_leaves_nothing(
    tmp_path: Path, scratch: Path, victim: int, sig: signal.Signals
) -> None:
    model = write_tiny(tmp_path / "tiny", "llama")

    async def scenario() -> tuple[int, ...]:
        deaths: list[EngineDeadError] = []
        client = EngineClient(config(model, rank_timeout_s=4.0, max_model_len=2048), on_death=deaths.append)
        info = await client.start()
        tasks = [asyncio.create_task(collect(client, request(f"r{i}", [i + 3] * 5, 2000))) for i in range(3)]
        await asyncio.sleep(0.3)
        os.kill(info.pids[victim], sig)
        async with asyncio.timeout(12):
            results = await asyncio.gather(*tasks, return_exceptions=True)
        assert [type(r) for r in results] == [EngineDeadError] * 3, results
        assert len(deaths) == 1
        with pytest.raises(EngineDeadError):
            await collect(client, request("late", [3], 1))
        with pytest.raises(EngineDeadError):
            await client.control("stats")
        await client.close()
        return info.pids

    assert no_leftovers(asyncio.run(scenario()))
    assert list(scratch.iterdir()) == []


SERVER = """
import asyncio, sys
from hotrack.config.engine import EngineConfig
from hotrack.engine.client import EngineClient

async def main():
    client = EngineClient(EngineConfig(model=sys.argv[1], tensor_parallel_size=2, num_threads=1))
    info = await client.start()
    print(*info.pids, flush=True)
    await asyncio.Event().wait()

asyncio.run(main())
"""


def test_ranks_end_with_a_killed_server_and_leave_nothing(tmp_path: Path, scratch: Path) -> None:
    model = write_tiny(tmp_path / "tiny", "llama")
    server = subprocess.Popen([sys.executable, "-c", SERVER, str(model)], stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        pids = tuple(map(int, server.stdout.readline().split()))
        assert len(pids) == 2
    finally:
        server.kill()
        server.wait()
        server.stdout.close()
    assert no_leftovers(pids)
    assert list(scratch.iterdir()) == []


def test_a_cancelled_start_leaves_nothing_to_close(tmp_path: Path, scratch: Path) -> None:
    async def cancel() -> None:
        client = EngineClient(config(write_tiny(tmp_path / "tiny", "llama")))
        starting = asyncio.create_task(client.start())
        await asyncio.sleep(0.3)
        starting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await starting
        await client.close()

    asyncio.run(cancel())
    assert list(scratch.iterdir()) == []


def test_what_keeps_a_rank_from_starting_arrives_typed(tmp_path: Path, scratch: Path) -> None:
    odd = write_tiny(tmp_path / "odd", "llama", num_attention_heads=3, num_key_value_heads=3)

    async def start(options: EngineConfig) -> HotrackError:
        client = EngineClient(options)
        with pytest.raises(HotrackError) as caught:
            await client.start()
        return caught.value

    missing = asyncio.run(start(config(tmp_path / "missing", tensor_parallel_size=1)))
    assert missing.code == "model_not_found"
    assert "no file or folder" in missing.message
    indivisible = asyncio.run(start(config(odd)))
    assert isinstance(indivisible, ConfigError)
    assert list(scratch.iterdir()) == []
