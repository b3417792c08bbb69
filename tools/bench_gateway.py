"""What the gateway adds: latency, requests per second and streams per second on one core.

    python tools/bench_gateway.py [--json] [--seconds 5]

Three processes: a stub OpenAI upstream and the load generator share one core, the gateway has the other to
itself. Reported next to the same load sent straight to the stub. Needs the ``fakes`` folder of ``tests``.
"""

import argparse
import asyncio
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import cast

import httptools
import uvloop

ROOT = Path(__file__).resolve().parent.parent
PLAIN = json.dumps({"model": "m", "messages": [{"role": "user", "content": "hello " * 40}]}).encode()
STREAM = json.dumps(
    {"model": "m", "stream": True, "messages": [{"role": "user", "content": "hello " * 40}]}
).encode()


class Client(asyncio.Protocol):
    """One keep-alive connection sending the same request over and over."""

    def __init__(self, body: bytes) -> None:
        self.message = (
            b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
            b"accept: */*\r\nuser-agent: bench\r\nauthorization: Bearer x\r\ncontent-length: %d\r\n\r\n%s"
            % (len(body), body)
        )
        self.latencies: list[float] = []
        self.num_bytes = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)  # uvloop's does not derive from it
        self.parser = httptools.HttpResponseParser(self)

    def data_received(self, data: bytes) -> None:
        self.parser.feed_data(data)

    def on_body(self, body: bytes) -> None:
        self.num_bytes += len(body)

    def on_message_complete(self) -> None:
        assert self.parser.get_status_code() == 200, self.parser.get_status_code()
        if not self.done.done():
            self.done.set_result(None)

    async def one(self) -> None:
        self.done = asyncio.get_running_loop().create_future()
        start = time.perf_counter()
        self.transport.write(self.message)
        await self.done
        self.latencies.append(time.perf_counter() - start)


async def load(port: int, body: bytes, connections: int, seconds: float) -> dict[str, float]:
    loop = asyncio.get_running_loop()
    clients: list[Client] = []
    for _ in range(connections):
        _, client = await loop.create_connection(lambda: Client(body), "127.0.0.1", port)
        clients.append(client)
    for client in clients:  # warm up
        await client.one()
        client.latencies.clear()
    until = time.perf_counter() + seconds
    start = time.perf_counter()

    async def run(client: Client) -> None:
        while time.perf_counter() < until:
            await client.one()

    await asyncio.gather(*(run(client) for client in clients))
    elapsed = time.perf_counter() - start
    latencies = sorted(x for client in clients for x in client.latencies)
    for client in clients:
        client.transport.close()
    return {
        "per_s": len(latencies) / elapsed,
        "p50_ms": statistics.median(latencies) * 1e3,
        "p99_ms": latencies[int(len(latencies) * 0.99)] * 1e3,
    }


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def wait_port(port: int) -> None:
    for _ in range(200):
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.05)
    raise SystemExit(f"nothing listens on port {port}")


def measure(seconds: float) -> dict[str, dict[str, float]]:
    os.sched_setaffinity(0, {0})
    results: dict[str, dict[str, float]] = {}
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "tests")}
    with tempfile.TemporaryDirectory() as folder:
        uds, stub_port, gateway_port = f"{folder}/stub.sock", free_port(), free_port()
        commands = [
            [sys.executable, "-m", "fakes.stub_openai", "--uds", uds],
            [sys.executable, "-m", "fakes.stub_openai", "--port", str(stub_port)],
            ["taskset", "-c", "1", sys.executable, "-m", "fakes.gateway_process", str(gateway_port), uds],
        ]
        children = [subprocess.Popen(command, env=environment) for command in commands]
        try:
            wait_port(stub_port)
            wait_port(gateway_port)
            for name, port in (("direct", stub_port), ("gateway", gateway_port)):
                results[f"{name} plain 1"] = uvloop.run(load(port, PLAIN, 1, seconds))
                results[f"{name} plain 16"] = uvloop.run(load(port, PLAIN, 16, seconds))
                results[f"{name} stream 1"] = uvloop.run(load(port, STREAM, 1, seconds))
                results[f"{name} stream 16"] = uvloop.run(load(port, STREAM, 16, seconds))
        finally:
            for child in children:
                child.terminate()
            for child in children:
                child.wait()
    results["added"] = {
        "p50_ms": results["gateway plain 1"]["p50_ms"] - results["direct plain 1"]["p50_ms"],
        "requests_per_s": results["gateway plain 16"]["per_s"],
        "streams_per_s": results["gateway stream 16"]["per_s"],
    }
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=4.0)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    results = measure(options.seconds)
    if options.json:
        print(json.dumps(results, indent=1))
        return
    for name, row in results.items():
        print(f"{name:20}", "  ".join(f"{key} {value:,.3f}" for key, value in row.items()))


if __name__ == "__main__":
    main()
