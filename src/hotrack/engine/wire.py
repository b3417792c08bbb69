"""How engine processes find and understand each other: launch description, endpoints, codecs (no torch)."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

import msgspec

from hotrack.config.engine import EngineConfig
from hotrack.engine.messages import FromRank, StepFrame, ToRank


class RankLaunch(msgspec.Struct, frozen=True):
    """Argument of ``python -m hotrack.engine.rank``, as JSON.

    ``directory``: private (0700), holds the sockets and the rendezvous file until all ranks are up.
    ``salt``: hex, start of the prefix hash chain.
    """

    config: dict[str, Any]
    rank: int
    directory: str
    salt: str
    debug: bool = False

    def engine_config(self) -> EngineConfig:
        return EngineConfig(**self.config)

    def encode(self) -> str:
        return msgspec.json.encode(self).decode()


def launch(config: EngineConfig, rank: int, directory: Path, salt: bytes, *, debug: bool) -> RankLaunch:
    return RankLaunch(asdict(config), rank, str(directory), salt.hex(), debug)


def server_endpoint(directory: str | Path) -> str:
    """PAIR socket between the server process (binds) and rank 0."""
    return f"ipc://{directory}/server"


def frame_endpoint(directory: str | Path, rank: int) -> str:
    """PAIR socket between rank 0 (binds) and ``rank``."""
    return f"ipc://{directory}/frames{rank}"


to_rank_encoder = msgspec.msgpack.Encoder()
to_rank_decoder: msgspec.msgpack.Decoder[list[ToRank]] = msgspec.msgpack.Decoder(list[ToRank])
from_rank_encoder = msgspec.msgpack.Encoder()
from_rank_decoder: msgspec.msgpack.Decoder[FromRank] = msgspec.msgpack.Decoder(FromRank)
frame_encoder = msgspec.msgpack.Encoder()
frame_decoder: msgspec.msgpack.Decoder[StepFrame] = msgspec.msgpack.Decoder(StepFrame)
