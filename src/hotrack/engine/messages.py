"""Messages between a member's server process, its ranks, and the ranks among themselves (msgpack, no torch).

server -> rank 0   a list of ``AddRequest | AbortRequest | Control`` per ZeroMQ message
rank 0 -> server   ``StepOutputs`` | ``ControlReply`` | ``WakeLanded`` | ``RankReady`` | ``RankFailed``
rank 0 -> rank i   one ``StepFrame`` per step; ranks decide nothing by their own clock, socket or poll
"""

from typing import Any

import msgspec

from hotrack.core.request import EngineOutput, EngineRequest


class AddRequest(msgspec.Struct, tag="add", frozen=True):
    request: EngineRequest


class AbortRequest(msgspec.Struct, tag="abort", frozen=True):
    request_ids: tuple[str, ...]


class Control(msgspec.Struct, tag="control", frozen=True):
    """``op``: 'sleep' | 'wake' | 'reset_prefix_cache' | 'stats' | 'pause' | 'resume' | 'shutdown'. Answered
    by a ControlReply."""

    control_id: str
    op: str
    args: dict[str, Any] = {}


class ControlReply(msgspec.Struct, tag="control_reply", frozen=True):
    """``error``: ``{"code", "message"}`` when the control failed and nothing changed."""

    control_id: str
    result: dict[str, Any] = {}
    error: dict[str, Any] | None = None


class WakeLanded(msgspec.Struct, tag="landed", frozen=True):
    """A streamed wake is over. ``report``: of all of it; ``error``: ``{"code", "message"}`` when the weights
    were not what was saved: everything is asleep again, and the requests that ran have failed."""

    report: dict[str, Any] = {}
    error: dict[str, Any] | None = None


class StepOutputs(msgspec.Struct, tag="outputs", frozen=True):
    """``stats``: gauges as of this step (running, waiting, kv_usage, ...)."""

    outputs: tuple[EngineOutput, ...]
    stats: dict[str, float] = {}


class RankReady(msgspec.Struct, tag="ready", frozen=True):
    """Sent once, when rank 0 can take requests. ``info``: num_blocks, max_model_len, weight_bytes, load_s,
    ..."""

    rank: int
    pid: int
    info: dict[str, Any] = {}


class RankFailed(msgspec.Struct, tag="failed", frozen=True):
    """``kind``: the ``code`` of the error's class; ``code``: its own, which may be more precise."""

    rank: int
    message: str
    code: str = "engine_dead"
    kind: str = "engine_dead"


class LoadProgress(msgspec.Struct, tag="progress", frozen=True):
    """While loading: bytes placed so far, out of total."""

    stage: str
    done: int
    total: int


class StepFrame(msgspec.Struct, tag="frame", frozen=True):
    """Everything rank i needs to run step ``step`` exactly as rank 0 does. ``now``: rank 0's clock, in
    seconds."""

    step: int
    adds: tuple[EngineRequest, ...] = ()
    aborts: tuple[str, ...] = ()
    controls: tuple[Control, ...] = ()
    now: float = 0.0
    plan_hash: int | None = None


ToRank = AddRequest | AbortRequest | Control
FromRank = StepOutputs | ControlReply | WakeLanded | RankReady | RankFailed | LoadProgress
