"""A real engine in this process, driven step by step, so that a transition can come in the middle."""

from collections.abc import Callable, Sequence
from pathlib import Path

from hotrack.config.engine import EngineConfig
from hotrack.core.request import EngineOutput, EngineRequest, pack_tokens, unpack_tokens
from hotrack.core.sampling import SamplingParams
from hotrack.engine.build import BuiltEngine, build_engine
from hotrack.engine.messages import Control, ControlReply, StepFrame, WakeLanded


def request(name: str, prompt: Sequence[int], count: int, **options: object) -> EngineRequest:
    """Greedy unless ``options`` say otherwise."""
    params = SamplingParams(max_tokens=count, ignore_eos=True, **{"temperature": 0.0, **options})
    return EngineRequest(name, pack_tokens(list(prompt)), params, count)


class SteppedEngine:
    """``outputs`` by request, ``landed``: how streamed wakes ended."""

    def __init__(self, path: Path, **options: object) -> None:
        defaults = {"max_model_len": 512, "max_num_seqs": 8, "kv_cache_memory_bytes": 16 << 20}
        self.built: BuiltEngine = build_engine(EngineConfig(model=str(path), **{**defaults, **options}))
        self.core = self.built.core
        self.memory = self.built.memory
        self.outputs: dict[str, list[EngineOutput]] = {}
        self.landed: list[WakeLanded] = []
        self._steps = 0

    def step(
        self,
        adds: Sequence[EngineRequest] = (),
        aborts: Sequence[str] = (),
        controls: Sequence[Control] = (),
    ) -> list[ControlReply]:
        frame = StepFrame(self._steps, tuple(adds), tuple(aborts), tuple(controls))
        self._steps += 1
        replies = []
        for emission in self.core.step(frame):
            if isinstance(emission, ControlReply):
                replies.append(emission)
            elif isinstance(emission, WakeLanded):
                self.landed.append(emission)
            else:
                self.outputs.setdefault(emission.request_id, []).append(emission)
        return replies

    def control(self, op: str, **args: object) -> ControlReply:
        replies = self.step(controls=[Control("c", op, args)])
        while not replies:
            replies = self.step()
        return replies[0]

    def do(self, op: str, **args: object) -> dict[str, object]:
        """A control that succeeds."""
        reply = self.control(op, **args)
        assert reply.error is None, reply.error
        return reply.result

    def start(self, requests: Sequence[EngineRequest], until: Callable[[], bool]) -> None:
        """Run them until a moment has come."""
        self.step(adds=requests)
        while not until():
            assert self.core.has_work
            self.step()

    def finish(self) -> dict[str, list[int]]:
        while self.core.has_work:
            self.step()
        return {name: self.tokens(name) for name in self.outputs}

    def run(self, requests: Sequence[EngineRequest]) -> dict[str, list[int]]:
        self.outputs.clear()
        self.step(adds=requests)
        return self.finish()

    def tokens(self, name: str) -> list[int]:
        return [token for o in self.outputs.get(name, ()) for token in unpack_tokens(o.tokens).tolist()]

    def close(self) -> None:
        self.built.close()
