"""A device without a model: it keeps real KV cells per block, so a wrong block table gives wrong tokens."""

from collections import deque
from collections.abc import Sequence

from hotrack.core.request import EngineOutput, EngineRequest, pack_tokens, unpack_tokens
from hotrack.core.sampling import SamplingParams
from hotrack.engine.scheduler import Scheduler
from hotrack.engine.step import StepPlan, StepResult
from hotrack.kvcache.manager import KVCacheManager

VOCAB = 17


def next_token(history: Sequence[int], seed: int = 0) -> int:
    """The token that follows ``history``: depends on every token and its position."""
    state = 1469598103 + seed
    for position, token in enumerate(history):
        state = (state ^ (token + 31 * position)) * 16777619 % (1 << 31)
    return (state >> 7) % VOCAB


def generate(request: EngineRequest, max_len: int) -> list[int]:
    """What a request must produce whatever it shares the device with."""
    prompt = list(unpack_tokens(request.prompt))
    history = list(prompt)
    params = request.sampling
    while True:
        token = next_token(history, params.seed or 0)
        history.append(token)
        num_outputs = len(history) - len(prompt)
        ends = () if params.ignore_eos else request.eos_token_ids
        if num_outputs >= params.min_tokens and (token in ends or token in params.stop_token_ids):
            break
        if num_outputs >= request.max_tokens or len(history) >= max_len:
            break
    return history[len(prompt) :]


def make_request(request_id: str, prompt: Sequence[int], max_tokens: int, **options: object) -> EngineRequest:
    engine_options = {k: options.pop(k) for k in ("priority", "eos_token_ids") if k in options}
    sampling = SamplingParams(max_tokens=max_tokens, temperature=0.0, **options)
    return EngineRequest(request_id, pack_tokens(prompt), sampling, max_tokens, **engine_options)


class FakeDevice:
    def __init__(self, kv: KVCacheManager) -> None:
        self.kv = kv
        self.cells: dict[int, int] = {}
        self.tokens: dict[int, list[int]] = {}

    def run(self, plan: StepPlan) -> StepResult:
        """Writes of all sequences first, then reads: as every layer of a real model does."""
        for seq in plan.admitted:
            self.tokens[seq.slot] = seq.tokens.tolist()
        rows = list(zip(plan.sequences, plan.slots, plan.starts, plan.counts, plan.samples, strict=True))
        for _, slot, start, count, _ in rows:
            for position in range(start, start + count):
                self.cells[self._cell(slot, position)] = self.tokens[slot][position]
        sampled = []
        for seq, slot, start, count, samples in rows:
            if samples:
                history = [self.cells[self._cell(slot, position)] for position in range(start + count)]
                sampled.append(next_token(history, seq.sampling.seed or 0))
                self.tokens[slot].append(sampled[-1])
        return StepResult(sampled)

    def _cell(self, slot: int, position: int) -> int:
        bs = self.kv.block_tokens
        block = int(self.kv.tables[0][slot, position // bs])
        assert block != 0, f"position {position} of slot {slot} has no block"
        return block * bs + position % bs


class Simulation:
    """Scheduler and FakeDevice with ``depth`` steps in flight while the next one is planned."""

    def __init__(self, scheduler: Scheduler, depth: int) -> None:
        self.scheduler = scheduler
        self.device = FakeDevice(scheduler.kv)
        self.depth = depth
        self.in_flight: deque[tuple[StepPlan, StepResult]] = deque()
        self.plans: list[StepPlan] = []

    def step(self) -> list[EngineOutput]:
        outputs: list[EngineOutput] = []
        while len(self.in_flight) > self.depth:
            outputs += self.scheduler.update(*self.in_flight.popleft())
        plan = self.scheduler.plan()
        if plan is not None:
            self.plans.append(plan)
            self.in_flight.append((plan, self.device.run(plan)))
        elif self.in_flight:
            outputs += self.scheduler.update(*self.in_flight.popleft())
        return outputs

    def drain(self) -> list[EngineOutput]:
        outputs: list[EngineOutput] = []
        while self.in_flight:
            outputs += self.scheduler.update(*self.in_flight.popleft())
        return outputs
