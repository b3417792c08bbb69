"""The proxy in front of an always-awake pool: ``python -m fakes.gateway_process PORT UPSTREAM_SOCKET``."""

import sys
from pathlib import Path

import uvicorn
import uvloop

from fakes.leases import FakeLeases
from hotrack.gateway.proxy import Proxy
from hotrack.gateway.request import Route
from hotrack.gateway.routes import Routes
from hotrack.gateway.serve import listen, uvicorn_config
from hotrack.members.endpoint import Endpoint


async def main(port: int, upstream: Path) -> None:
    proxy = Proxy(FakeLeases(Endpoint.unix(upstream)), Routes({"m": Route("m", "m")}, ["m"]))
    await uvicorn.Server(uvicorn_config(proxy)).serve([listen("127.0.0.1", port)])


if __name__ == "__main__":
    uvloop.run(main(int(sys.argv[1]), Path(sys.argv[2])))
