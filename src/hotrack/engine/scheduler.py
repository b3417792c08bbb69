"""Which tokens of which sequences run in the next step. Pure: no clock, no I/O, no device; equal calls give
equal plans.

``plan`` may run one step ahead of the device: tokens still being sampled count as *pending*, and ``update``
brings their values later. Nothing that a step in flight uses is given back before that step's ``update``.
"""

import heapq
from bisect import insort
from dataclasses import dataclass

from hotrack.core.errors import ContextLengthError, RequestError
from hotrack.core.lifecycle import FinishReason, Phase
from hotrack.core.request import EngineOutput, EngineRequest
from hotrack.engine.sequence import Sequence
from hotrack.engine.step import StepPlan, StepResult
from hotrack.kvcache.manager import KVCacheManager, PrefixHit

RUNNING_PHASES = (Phase.PREFILL, Phase.DECODE)


@dataclass(frozen=True, slots=True)
class SchedulerLimits:
    """``num_slots``: at least ``max_num_seqs``; more lets a new sequence start while a finished one is
    still in flight.
    """

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    num_slots: int


@dataclass(slots=True)
class SchedulerCounters:
    """Totals since start."""

    steps: int = 0
    preemptions: int = 0
    prompt_tokens: int = 0
    cached_prompt_tokens: int = 0
    generated_tokens: int = 0


def _key(seq: Sequence) -> tuple[int, int]:
    return seq.key


class Scheduler:
    """One token budget per step is shared by decode (one token each) and prefill chunks.

    Running sequences are served in (priority, arrival) order, and a prefill chunk leaves one token of
    budget to every decoding sequence behind it. When blocks run out, the last sequence of that order is
    preempted: its tokens are kept, its blocks are dropped and recomputed later. Waiting sequences are
    admitted in the same order, and only when their whole text fits, so that admission does not cause
    preemption at once.
    """

    def __init__(self, kv: KVCacheManager, limits: SchedulerLimits) -> None:
        self.kv = kv
        self.limits = limits
        self.counters = SchedulerCounters()
        self.max_len = min(limits.max_model_len, kv.capacity_blocks * kv.block_tokens)
        self._waiting: list[tuple[tuple[int, int], Sequence]] = []
        self._running: list[Sequence] = []
        self._draining: dict[int, Sequence] = {}
        self._live: dict[str, Sequence] = {}
        self._free_slots = list(range(limits.num_slots - 1, -1, -1))
        self._freed_slots: list[int] = []
        self._arrivals = 0
        self.holding = False

    # ---- requests

    def add(self, request: EngineRequest) -> None:
        """Queue a request.

        Raises:
            RequestError: empty prompt, or the request id is in use.
            ContextLengthError: the prompt can never fit.
        """
        if request.request_id in self._live:
            raise RequestError(
                f"request id {request.request_id!r} is already in use", code="duplicate_request"
            )
        num_prompt = len(request.prompt) // 4
        if num_prompt == 0:
            raise RequestError("the prompt has no tokens; send at least one", param="prompt")
        if num_prompt >= self.max_len:
            raise ContextLengthError(
                f"the prompt has {num_prompt} tokens; this model takes at most {self.max_len} for prompt and "
                "output together. Shorten the prompt.",
                param="prompt",
            )
        seq = Sequence(request, self._arrivals, self.max_len)
        self._arrivals += 1
        self._live[seq.request_id] = seq
        heapq.heappush(self._waiting, (seq.key, seq))

    def abort(self, request_id: str, error: str | None = None) -> EngineOutput | None:
        """End a request at once; None when it is not known (any more)."""
        seq = self._live.get(request_id)
        if seq is None:
            return None
        self._finish(seq, FinishReason.ABORT if error is None else FinishReason.ERROR)
        return EngineOutput(request_id, b"", finish_reason=seq.finish_reason, error=error)

    def abort_all(self) -> list[EngineOutput]:
        outputs = [self.abort(request_id) for request_id in list(self._live)]
        return [output for output in outputs if output is not None]

    @property
    def has_unfinished(self) -> bool:
        return bool(self._live)

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        return len(self._live) - len(self._running)

    # ---- planning

    def plan(self) -> StepPlan | None:
        """The next step, or None when nothing can run before results arrive (or at all)."""
        decodes = _PlanPart()
        chunks = _PlanPart()
        budget, preempted = self._plan_running(decodes, chunks)
        admitted = [] if preempted or self.holding else self._plan_waiting(budget, decodes, chunks)
        if not decodes.sequences and not chunks.sequences:
            return None
        plan = StepPlan(
            step=self.counters.steps,
            sequences=decodes.sequences + chunks.sequences,
            slots=decodes.slots + chunks.slots,
            starts=decodes.starts + chunks.starts,
            counts=decodes.counts + chunks.counts,
            samples=decodes.samples + chunks.samples,
            num_decodes=len(decodes.sequences),
            admitted=admitted,
            freed_slots=self._freed_slots,
        )
        self._freed_slots = []
        self.counters.steps += 1
        return plan

    def _plan_running(self, decodes: "_PlanPart", chunks: "_PlanPart") -> tuple[int, bool]:
        """Give every running sequence its tokens; returns the budget left and whether a sequence was
        preempted.
        """
        budget = self.limits.max_num_batched_tokens
        decodes_behind = sum(seq.phase is Phase.DECODE for seq in self._running)
        before = self.counters.preemptions
        index = 0
        while index < len(self._running) and budget > 0:
            seq = self._running[index]
            if seq.phase is Phase.DECODE:
                decodes_behind -= 1
                count = 1 if seq.num_total < seq.max_total else 0
            else:
                # At least one token, or a budget below the number of decoding sequences would starve every
                # prefill.
                count = self._chunk(seq, max(budget - decodes_behind, 1))
            if count and self._make_room(seq, seq.num_computed + count):
                self._schedule(seq, count, decodes if count == 1 else chunks)
                budget -= count
            if seq.phase is not Phase.PREEMPTED:
                index += 1
        return budget, self.counters.preemptions > before

    def _chunk(self, seq: Sequence, budget: int) -> int:
        """How many of the sequence's tokens to compute next. Where layers keep states, chunks end at blocks'
        ends, and the last one begins at one: only there is a state that a later prompt can begin with."""
        end = min(seq.num_total, seq.num_computed + budget)
        if self.kv.keeps_states:
            block_tokens = self.kv.block_tokens
            last = (min(end, seq.num_total - 1)) // block_tokens * block_tokens
            end = last if last > seq.num_computed else end
        return end - seq.num_computed

    def _make_room(self, seq: Sequence, num_tokens: int) -> bool:
        """Make ``seq`` hold ``num_tokens``, preempting from the end of the order. False: not in this step
        (``seq`` waits
        for blocks in flight, or was itself the last and has been preempted)."""
        kv = self.kv
        while not kv.grow(seq.slot, num_tokens, seq.num_computed):
            if kv.can_grow(seq.slot, num_tokens, seq.num_computed, released=self._draining):
                return False
            victim = self._running[-1]
            self._preempt(victim)
            if victim is seq:
                return False
        return True

    def _plan_waiting(self, budget: int, decodes: "_PlanPart", chunks: "_PlanPart") -> list[Sequence]:
        admitted: list[Sequence] = []
        while budget > 0 and self._free_slots and len(self._running) < self.limits.max_num_seqs:
            seq = self._peek_waiting()
            if seq is None or seq.in_flight:
                break
            hit = self._lookup(seq)
            if not self.kv.can_admit(hit, seq.num_tokens):
                break
            heapq.heappop(self._waiting)
            self._admit(seq, hit)
            count = self._chunk(seq, budget)
            grown = self.kv.grow(seq.slot, seq.num_computed + count, seq.num_computed)
            assert grown, f"{seq.request_id}: admission promised blocks"
            self._schedule(seq, count, decodes if count == 1 else chunks)
            budget -= count
            admitted.append(seq)
        return admitted

    def _peek_waiting(self) -> Sequence | None:
        while self._waiting and self._waiting[0][1].phase is Phase.FINISHED:
            heapq.heappop(self._waiting)  # aborted while it waited
        return self._waiting[0][1] if self._waiting else None

    def _lookup(self, seq: Sequence) -> PrefixHit:
        if seq.wants_prompt_logprobs:  # needs the logits of every prompt position
            return self.kv.lookup(seq.tokens[:0], [])
        return self.kv.lookup(seq.tokens, seq.hashes)

    def _admit(self, seq: Sequence, hit: PrefixHit) -> None:
        if seq.phase is Phase.WAITING:
            seq.num_cached_tokens = hit.num_tokens
            self.counters.prompt_tokens += seq.prompt_len
            self.counters.cached_prompt_tokens += hit.num_tokens
        seq.slot = self._free_slots.pop()
        seq.phase = Phase.PREFILL
        seq.num_computed = hit.num_tokens
        seq.prompt_logprobs.clear()
        self.kv.admit(seq.slot, hit)
        insort(self._running, seq, key=_key)

    def _schedule(self, seq: Sequence, count: int, part: "_PlanPart") -> None:
        part.sequences.append(seq)
        part.slots.append(seq.slot)
        part.starts.append(seq.num_computed)
        part.counts.append(count)
        seq.num_computed += count
        seq.in_flight += 1
        samples = seq.num_computed == seq.num_total
        part.samples.append(samples)
        self._name_blocks(seq)
        if samples:
            seq.num_pending += 1
            if seq.phase is Phase.PREFILL:
                seq.phase = Phase.DECODE

    # ---- results

    def update(self, plan: StepPlan, result: StepResult) -> list[EngineOutput]:
        """Take the results of a finished step, oldest step first."""
        outputs: list[EngineOutput] = []
        row = 0
        for index, seq in enumerate(plan.sequences):
            seq.in_flight -= 1
            if seq.phase is not Phase.FINISHED:
                if index in result.prompt_logprobs:
                    seq.prompt_logprobs += result.prompt_logprobs[index]
                if plan.samples[index]:
                    outputs.append(self._take_token(seq, result.tokens[row], result, row))
            row += plan.samples[index]
            if seq.in_flight == 0 and seq.phase not in RUNNING_PHASES:
                self._release(seq)
        return outputs

    def _take_token(self, seq: Sequence, token: int, result: StepResult, row: int) -> EngineOutput:
        if token < 0:
            self._finish(seq, FinishReason.ERROR)
            message = "the model produced no finite logits for this request"
            return EngineOutput(seq.request_id, b"", finish_reason=FinishReason.ERROR, error=message)
        first = seq.num_outputs == 0
        seq.append(token)
        self.counters.generated_tokens += 1
        stop = seq.stop_reason(token)
        if stop is not None:
            self._finish(seq, stop[0])
        logprobs = result.logprobs.get(row)
        return EngineOutput(
            seq.request_id,
            token.to_bytes(4, "little"),
            logprobs=None if logprobs is None else (logprobs,),
            prompt_logprobs=tuple(seq.prompt_logprobs) if first and seq.prompt_logprobs else None,
            finish_reason=seq.finish_reason,
            stop_token_id=None if stop is None else stop[1],
            num_cached_tokens=seq.num_cached_tokens,
        )

    # ---- endings

    def _finish(self, seq: Sequence, reason: FinishReason) -> None:
        if seq.phase in RUNNING_PHASES:
            self._running.remove(seq)
            self._name_blocks(seq)
        seq.phase = Phase.FINISHED
        seq.finish_reason = reason
        del self._live[seq.request_id]
        self._release(seq)

    def _preempt(self, seq: Sequence) -> None:
        self._running.remove(seq)
        self._name_blocks(seq)
        seq.phase = Phase.PREEMPTED
        self.counters.preemptions += 1
        heapq.heappush(self._waiting, (seq.key, seq))
        self._release(seq)

    def _release(self, seq: Sequence) -> None:
        """Give back slot and blocks now, or when the last step in flight that uses them is done."""
        if seq.slot < 0:
            return
        if seq.in_flight:
            self._draining[seq.slot] = seq
            return
        self._draining.pop(seq.slot, None)
        self.kv.release(seq.slot)
        self._free_slots.append(seq.slot)
        self._freed_slots.append(seq.slot)
        seq.slot = -1

    def _name_blocks(self, seq: Sequence) -> None:
        """Let the prefix cache know the full blocks whose tokens are known (their K and V are on the way)."""
        known = min(seq.num_computed, seq.num_tokens)
        if self.kv.can_name(seq.slot, known):
            self.kv.name_blocks(seq.slot, seq.tokens[:known], seq.hashes)


@dataclass(slots=True)
class _PlanPart:
    """Parallel lists of a plan under construction."""

    sequences: list[Sequence]
    slots: list[int]
    starts: list[int]
    counts: list[int]
    samples: list[bool]

    def __init__(self) -> None:
        self.sequences, self.slots, self.starts, self.counts, self.samples = [], [], [], [], []
