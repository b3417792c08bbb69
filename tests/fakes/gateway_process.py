"""The whole gateway (application, pool, run loop) in front of one member whose engine is only simulated, so
that nothing but the path of a request costs time: ``python -m fakes.gateway_process PORT UPSTREAM_SOCKET``.
"""

import sys
from pathlib import Path

import uvloop

from fakes.fake_member import FakeMember, World
from hotrack.config.pool_file import load_pool_text
from hotrack.gateway.app import create_app
from hotrack.gateway.auth import Keys
from hotrack.gateway.build import member_specs, pool_policy
from hotrack.gateway.serve import Server, listen, uvicorn_config
from hotrack.members.endpoint import Endpoint
from hotrack.members.spec import MemberSpec
from hotrack.pool.pool import Pool


class PlacedMember(FakeMember):
    """A fake member whose requests go to a real socket."""

    def __init__(self, spec: MemberSpec, upstream: Path) -> None:
        super().__init__(spec, World(), start_s=0.0, wake_s=0.0)
        self._upstream = upstream

    @property
    def endpoint(self) -> Endpoint:
        return Endpoint.unix(self._upstream)


async def main(port: int, upstream: Path) -> None:
    config = load_pool_text("models: {m: {cmd: 'x ${PORT}', sleep_level: 1}}")
    pool = Pool(member_specs(config), pool_policy(config), connect=lambda spec: PlacedMember(spec, upstream))
    app = create_app(pool, config, Keys(api=("x",)))
    await pool.start(preload="m")
    await Server(uvicorn_config(app)).serve([listen("127.0.0.1", port)])
    await pool.close()


if __name__ == "__main__":
    uvloop.run(main(int(sys.argv[1]), Path(sys.argv[2])))
