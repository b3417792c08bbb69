"""The engine of one rank: scheduler, runner and memory, driven by frames.

    step(frame k):  results of step k - 1 - depth  ->  controls, adds, aborts of frame k  ->  plan k  ->
    submit k

Equal frames give equal plans on every rank; nothing here looks at a clock or a socket.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import asdict, replace
from time import monotonic
from typing import Any

import numpy as np

from hotrack.core.errors import (
    DrainingError,
    EngineDeadError,
    HotrackError,
    ModelAsleepError,
    RequestError,
    SleepError,
)
from hotrack.core.lifecycle import FinishReason, SleepLevel, SleepMode
from hotrack.core.request import EngineOutput, EngineRequest
from hotrack.engine.live_kv import live_rows
from hotrack.engine.messages import Control, ControlReply, StepFrame, WakeLanded
from hotrack.engine.runner import ModelRunner, PendingStep
from hotrack.engine.sampling_batch import check_logit_bias
from hotrack.engine.scheduler import Scheduler
from hotrack.engine.step import StepPlan, StepResult
from hotrack.engine.transitions import Transitions

Emission = EngineOutput | ControlReply | WakeLanded
SCHEDULING = "scheduling"  # the tag that resumes without touching memory (vLLM's word)


class EngineCore:
    """``pipeline_depth``: steps that may be in flight while the next is planned. ``hash_every``: a plan's
    digest is kept in ``last_digest`` every so many steps (ranks compare them); 0 never.
    ``device_streams``: the memory can wake while steps run, see ``Transitions.start_wake``; a wake that is
    asked to be ``streamed`` is an ordinary one otherwise.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        runner: ModelRunner,
        transitions: Transitions,
        *,
        vocab_size: int,
        pipeline_depth: int = 1,
        hash_every: int = 0,
        device_streams: bool = False,
    ) -> None:
        self.scheduler = scheduler
        self.runner = runner
        self.transitions = transitions
        self.vocab_size = vocab_size
        self.last_digest: int | None = None
        self.device_streams = device_streams
        self._depth = pipeline_depth
        self._hash_every = hash_every
        self._in_flight: deque[tuple[StepPlan, PendingStep]] = deque()
        self._paused = False
        self._draining: list[tuple[Control, float]] = []  # and since when
        self._wait_s = 0.0
        self._controls: dict[str, Callable[[dict[str, Any], list[Emission]], dict[str, Any]]] = {
            "sleep": self._sleep,
            "wake": self._wake,
            "pause": lambda args, emit: self._sleep({**args, "level": SleepLevel.PAUSE}, emit),
            "resume": lambda _, emit: self._wake({"tags": [SCHEDULING]}, emit),
            "reset_prefix_cache": self._reset_prefix_cache,
            "stats": lambda _, __: dict(self.stats()),
            "shutdown": self._shutdown,
        }

    @property
    def has_work(self) -> bool:
        """Whether ``step`` with an empty frame would do anything."""
        return bool(self._in_flight) or (self.scheduler.has_unfinished and not self._paused)

    def step(self, frame: StepFrame) -> list[Emission]:
        """One turn of the loop; returns what it produced, in order.

        Raises:
            EngineDeadError: the step on the device failed; the engine must not be used again.
        """
        emissions: list[Emission] = []
        self.last_digest = None
        for control in frame.controls:
            emissions += self._finish_in_flight()
            emissions += self._control(control)
        for request in frame.adds:
            emissions += self._add(request)
        for request_id in frame.aborts:
            if output := self.scheduler.abort(request_id):
                emissions.append(output)
        while len(self._in_flight) > self._depth:
            emissions += self._update()
        plan = None if self._paused else self.scheduler.plan()
        if plan is not None:
            self._submit(plan)
        elif self._in_flight:
            emissions += self._update()
        else:
            assert not self.has_work, f"nothing can run: {self.stats()}"
        return emissions + self._end_of_drain()

    def stats(self) -> dict[str, float]:
        """Gauges and totals."""
        return {
            "running": float(self.scheduler.num_running),
            "waiting": float(self.scheduler.num_waiting),
            "kv_usage": self.scheduler.kv.usage,
            "device_wait_s": self._wait_s,
            **{name: float(value) for name, value in asdict(self.scheduler.counters).items()},
        }

    def close(self) -> None:
        """Wait for the worker and end it."""
        self.runner.close()

    # ---- steps

    def _submit(self, plan: StepPlan) -> None:
        if self._hash_every and plan.step % self._hash_every == 0:
            self.last_digest = plan.digest(self.scheduler.kv.tables[0])
        self._in_flight.append((plan, self.runner.submit(plan)))

    def _update(self) -> list[Emission]:
        if self.transitions.is_landing:
            return self._land()
        plan, pending = self._in_flight.popleft()
        return [*self.scheduler.update(plan, self._result(plan, pending))]

    def _result(self, plan: StepPlan, pending: PendingStep) -> StepResult:
        start = monotonic()
        try:
            return pending.result()
        except Exception as exc:
            raise EngineDeadError(f"step {plan.step} failed on the device: {exc!r}") from exc
        finally:
            self._wait_s += monotonic() - start

    def _land(self) -> list[Emission]:
        """End a streamed wake. Everything that was computed with weights not yet verified is held back until
        they are, and thrown away if they turn out wrong."""
        self.runner.wait_for = None
        steps = [(plan, self._result(plan, pending)) for plan, pending in self._in_flight]
        self._in_flight.clear()
        emissions: list[Emission] = []
        try:
            emissions.append(WakeLanded(self.runner.call(self.transitions.finish_wake)))
        except HotrackError as exc:
            emissions += [
                replace(output, finish_reason=FinishReason.ERROR, error=exc.message, error_code=exc.code)
                for output in self.scheduler.abort_all()
            ]
            emissions.append(WakeLanded(error=_error(exc)))
            self._paused = True
        for plan, result in steps:
            emissions += self.scheduler.update(plan, result)
        if self._paused:
            self.scheduler.kv.reset_prefix_cache()
        return emissions

    def _finish_in_flight(self) -> list[Emission]:
        emissions: list[Emission] = []
        while self._in_flight:
            emissions += self._update()
        return emissions

    # ---- requests

    def _add(self, request: EngineRequest) -> list[EngineOutput]:
        try:
            self._check(request)
            self.scheduler.add(request)
        except HotrackError as exc:
            return [
                EngineOutput(
                    request.request_id,
                    b"",
                    finish_reason=FinishReason.ERROR,
                    error=exc.message,
                    error_code=exc.code,
                )
            ]
        return []

    def _check(self, request: EngineRequest) -> None:
        if self.transitions.is_sleeping:
            raise ModelAsleepError("the model is asleep; wake it with POST /wake_up", retry_after_s=1.0)
        if self._draining:
            raise DrainingError(
                "the model is finishing its requests before it goes to sleep; try again later",
                retry_after_s=1.0,
            )
        prompt = np.frombuffer(request.prompt, np.int32)
        if len(prompt) and not 0 <= prompt.min() <= prompt.max() < self.vocab_size:
            raise RequestError(
                f"the prompt has token ids from {prompt.min()} to {prompt.max()}; this model has 0 to "
                f"{self.vocab_size - 1}",
                param="prompt",
            )
        check_logit_bias(request.sampling, self.vocab_size)

    # ---- controls

    def _control(self, control: Control) -> list[Emission]:
        if control.op not in self._controls:
            error = RequestError(f"unknown control {control.op!r}")
            return [ControlReply(control.control_id, error=_error(error))]
        if self._must_drain(control):
            self._draining.append((control, monotonic()))
            return []
        emissions = self._land() if self.transitions.is_landing else []
        try:
            result = self._controls[control.op](control.args, emissions)
        except HotrackError as exc:
            return [*emissions, ControlReply(control.control_id, error=_error(exc))]
        return [*emissions, ControlReply(control.control_id, result=result)]

    def _must_drain(self, control: Control) -> bool:
        waits = control.op in ("sleep", "pause") and control.args.get("mode") == SleepMode.WAIT
        return waits and not self._paused and self.scheduler.has_unfinished

    def _end_of_drain(self) -> list[Emission]:
        if not self._draining or (self.scheduler.has_unfinished and not self._paused):
            return []
        emissions = self._finish_in_flight()
        controls, self._draining = self._draining, []
        for control, since in controls:
            waited_ms = (monotonic() - since) * 1e3
            for emission in self._control(control):
                if isinstance(emission, ControlReply) and "wait_ms" in emission.result:
                    emission.result["wait_ms"] = waited_ms
                emissions.append(emission)
        return emissions

    def _sleep(self, args: dict[str, Any], emissions: list[Emission]) -> dict[str, Any]:
        level = SleepLevel(args.get("level", SleepLevel.KEEP_WEIGHTS))
        nbytes = args.get("nbytes")
        if nbytes is not None and (level is not SleepLevel.KEEP_WEIGHTS or nbytes < 1):
            raise RequestError(
                f"a partial sleep has level 1 and at least a byte, got {level=:d} {nbytes=}", param="nbytes"
            )
        if SleepMode(args.get("mode", SleepMode.ABORT)) is SleepMode.ABORT:
            emissions += self.scheduler.abort_all()
        if level is SleepLevel.PAUSE:
            self._paused = True
            return {"is_sleeping": self.transitions.is_sleeping, "level": level, "seconds": 0.0}
        # Whoever is still running keeps its KV, and goes on after the wake as if nothing had happened.
        kv = self.scheduler.kv
        kv.reset_prefix_cache()
        live = live_rows(kv.live_blocks(), self.runner.kv.storage)
        result = self.runner.call(lambda: self.transitions.sleep(level, nbytes, live))
        self._paused = True
        return result

    def _wake(self, args: dict[str, Any], emissions: list[Emission]) -> dict[str, Any]:
        for control, _ in self._draining:
            error = SleepError("a wake arrived before the requests had finished")
            emissions.append(ControlReply(control.control_id, error=_error(error)))
        self._draining = []
        tags = args.get("tags")
        result = {"is_sleeping": self.transitions.is_sleeping}
        if args.get("streamed") and tags is None and self.device_streams:
            result = self.runner.call(self.transitions.start_wake)
            self.runner.wait_for = self.transitions.wait_for if self.transitions.is_landing else None
        elif tags is None or (tags := [tag for tag in tags if tag != SCHEDULING]):
            result = self.runner.call(lambda: self.transitions.wake(tags))
        self._paused = self.transitions.is_sleeping
        return result

    def _reset_prefix_cache(self, _: dict[str, Any], __: list[Emission]) -> dict[str, Any]:
        self.scheduler.kv.reset_prefix_cache()
        return {}

    def _shutdown(self, _: dict[str, Any], emissions: list[Emission]) -> dict[str, Any]:
        emissions += self.scheduler.abort_all()
        return {}


def _error(error: HotrackError) -> dict[str, Any]:
    return {"code": error.code, "message": error.message}
