"""An engine of one rank in this process. Needs neither sockets nor an event loop."""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from hotrack.config.engine import EngineConfig
from hotrack.core.errors import error_from_code
from hotrack.core.request import EngineOutput, EngineRequest
from hotrack.engine.build import build_engine
from hotrack.engine.messages import Control, ControlReply, StepFrame

Outputs = dict[str, list[EngineOutput]]
Watch = Callable[[EngineOutput], bool]


class Backend(Protocol):
    """``run`` returns every request's outputs, in order, once all have ended. ``watch`` sees each output as
    it comes; True ends that request there."""

    info: dict[str, Any]

    def run(self, requests: Sequence[EngineRequest], watch: Watch) -> Outputs: ...

    def control(self, op: str, **args: Any) -> dict[str, Any]: ...

    def close(self) -> None: ...


class InProcessBackend:
    """One rank; steps run on the caller's thread and the core's worker."""

    def __init__(self, config: EngineConfig) -> None:
        built = build_engine(config)
        self.info = built.info
        self._built = built
        self._core = built.core
        self._steps = 0

    def run(self, requests: Sequence[EngineRequest], watch: Watch) -> Outputs:
        outputs: Outputs = {request.request_id: [] for request in requests}
        adds, stopped = tuple(requests), tuple[str, ...]()
        try:
            while adds or stopped or self._core.has_work:
                fresh = self._step(adds, stopped)
                adds, stopped = (), tuple(output.request_id for output in fresh if watch(output))
                for output in fresh:
                    outputs[output.request_id].append(output)
        except BaseException:
            self._step(aborts=tuple(outputs))
            raise
        return outputs

    def _step(self, adds: tuple[EngineRequest, ...] = (), aborts: tuple[str, ...] = ()) -> list[EngineOutput]:
        emissions = self._core.step(StepFrame(self._next_step(), adds, aborts))
        return [emission for emission in emissions if isinstance(emission, EngineOutput)]

    def control(self, op: str, **args: Any) -> dict[str, Any]:
        frame = StepFrame(self._next_step(), controls=(Control("c", op, args),))
        for emission in self._core.step(frame):
            if isinstance(emission, ControlReply):
                if emission.error is not None:
                    raise error_from_code(emission.error["code"], emission.error["message"])
                return emission.result
        raise AssertionError(f"control {op} was not answered: nothing runs between calls")

    def close(self) -> None:
        self._built.close()

    def _next_step(self) -> int:
        self._steps += 1
        return self._steps
