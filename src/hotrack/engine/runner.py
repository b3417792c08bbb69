"""Runs planned steps on the device, in order, on one worker thread.

Host work (``submit``) happens on the caller's thread while the previous step computes. All token ids come
from one device table ``[num_slots, max_model_len]``: prompts are written at admission, sampled tokens by
the step that samples them, so a step never needs a token on the host before it can start.
"""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hotrack.core.request import TokenLogprobs
from hotrack.core.sampling import SamplingParams
from hotrack.distributed.tensor_parallel import TensorParallel
from hotrack.engine.sampler import LogprobsTensors, Sampler, compute_logprobs
from hotrack.engine.sampling_batch import SamplingState
from hotrack.engine.step import StepPlan, StepResult
from hotrack.kvcache.manager import KVCacheManager
from hotrack.kvcache.tensors import KVTensors
from hotrack.layers.batch import ForwardBatch, GroupTables

PROMPT_LOGPROBS_CHUNK = 256  # rows of [chunk, vocab] logits in memory at a time

Int64Array = NDArray[np.int64]
T = TypeVar("T")


class Model(Protocol):
    """What the runner needs of a model."""

    def forward(self, batch: ForwardBatch, kv: KVTensors) -> Tensor: ...  # [T, D]

    def compute_logits(self, hidden: Tensor) -> Tensor: ...  # [R, D] -> float32 [R, vocab]


@dataclass(frozen=True, slots=True)
class _Admission:
    slot: int
    tokens: NDArray[np.int32]
    prompt_len: int
    sampling: SamplingParams
    eos_token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _PromptRows:
    """Hidden rows [first, first + len(targets)) predict ``targets`` (the prompt tokens that follow)."""

    index: int
    first: int
    targets: NDArray[np.int32]
    num_logprobs: int


@dataclass(frozen=True, slots=True)
class _Inputs:
    """Host side of one step; nothing in it changes after submission."""

    admissions: list[_Admission]
    freed_slots: list[int]
    token_index: Int64Array  # [T] into the flat token table
    positions: Int64Array  # [T]
    query_start: NDArray[np.int32]  # [S+1]
    counts: list[int]
    seq_lens: list[int]
    tables: list[tuple[NDArray[np.int32], Int64Array]]  # per group: [S, blocks], slot mapping [T]
    num_decodes: int
    logits_rows: Int64Array  # [R]
    sample_slots: list[int]
    sample_index: Int64Array  # [R] where the sampled token goes in the flat token table
    num_logprobs: dict[int, int]  # sampled row -> how many its request wants
    prompt_rows: list[_PromptRows]


def device_worker(num_threads: int | None = None) -> ThreadPoolExecutor:
    """The thread for all that computes, loading and packing included; ``num_threads`` intra-op threads.

    Only one: OpenMP keeps a team per calling thread, and once the teams together have more threads than
    there are cores it stops spinning at barriers, which doubles the time of a decode step.
    """
    return ThreadPoolExecutor(1, "hotrack-device", initializer=_set_threads, initargs=(num_threads,))


def _set_threads(num_threads: int | None) -> None:
    if num_threads is not None:
        torch.set_num_threads(num_threads)


class ModelRunner:
    """``worker``: the one thread that runs the model, see :func:`device_worker`; closed with the runner.

    Only rank 0 of ``tp`` samples; its tokens are broadcast on the device and are the same on every rank.
    """

    def __init__(
        self,
        model: Model,
        kv: KVTensors,
        manager: KVCacheManager,
        *,
        vocab_size: int,
        num_slots: int,
        max_model_len: int,
        device: torch.device,
        tp: TensorParallel | None = None,
        worker: ThreadPoolExecutor | None = None,
    ) -> None:
        self.model = model
        self.kv = kv
        self.manager = manager
        self.device = device
        self.tp = tp or TensorParallel()
        self.max_model_len = max_model_len
        self._token_table = torch.zeros(num_slots * max_model_len, dtype=torch.int32, device=device)
        self._sampler = Sampler()
        self._sampling = SamplingState(num_slots, vocab_size, device)
        self._worker = worker or device_worker()

    def submit(self, plan: StepPlan) -> Future[StepResult]:
        """Queue a step; the future's exception is the step's."""
        return self._worker.submit(self._execute, self._prepare(plan))

    def call(self, function: Callable[[], T]) -> T:
        """Run ``function`` on the worker, after every submitted step, and wait for it."""
        return self._worker.submit(function).result()

    def close(self) -> None:
        self._worker.shutdown()

    # ---- host side

    def _prepare(self, plan: StepPlan) -> _Inputs:
        slots = np.array(plan.slots, np.int64)
        starts = np.array(plan.starts, np.int64)
        counts = np.array(plan.counts, np.int64)
        query_start = np.zeros(len(slots) + 1, np.int32)
        np.cumsum(counts, out=query_start[1:])
        seq_lens = starts + counts
        if plan.num_decodes == len(slots):
            token_slots, positions = slots, starts
        else:
            token_slots = np.repeat(slots, counts)
            positions = np.arange(query_start[-1]) + np.repeat(starts - query_start[:-1], counts)
        sampling = np.flatnonzero(plan.samples)
        sample_slots = slots[sampling]
        return _Inputs(
            admissions=[
                _Admission(
                    seq.slot,
                    seq.tokens.copy(),
                    seq.prompt_len,
                    seq.sampling,
                    tuple(seq.eos_token_ids),
                )
                for seq in plan.admitted
            ],
            freed_slots=plan.freed_slots,
            token_index=token_slots * self.max_model_len + positions,
            positions=positions,
            query_start=query_start,
            counts=plan.counts,
            seq_lens=seq_lens.tolist(),
            tables=self._tables(slots, token_slots, positions, int(seq_lens.max())),
            num_decodes=plan.num_decodes,
            logits_rows=query_start[1:][sampling].astype(np.int64) - 1,
            sample_slots=sample_slots.tolist(),
            sample_index=sample_slots * self.max_model_len + seq_lens[sampling],
            num_logprobs={
                row: wanted
                for row, index in enumerate(sampling.tolist())
                if (wanted := plan.sequences[index].sampling.logprobs) is not None
            },
            prompt_rows=_prompt_rows(plan, query_start),
        )

    def _tables(
        self, slots: Int64Array, token_slots: Int64Array, positions: Int64Array, longest: int
    ) -> list[tuple[NDArray[np.int32], Int64Array]]:
        block_tokens = self.manager.block_tokens
        width = self.manager.blocks_for(longest)
        block, offset = np.divmod(positions, block_tokens)
        return [
            (table[slots, :width], table[token_slots, block].astype(np.int64) * block_tokens + offset)
            for table in self.manager.tables
        ]

    # ---- device side (worker thread)

    @torch.inference_mode()
    def _execute(self, inputs: _Inputs) -> StepResult:
        for slot in inputs.freed_slots:
            self._sampling.remove(slot)
        for admission in inputs.admissions:
            self._admit(admission)
        input_ids = self._token_table[self._to_device(inputs.token_index)].long()
        hidden = self.model.forward(self._batch(input_ids, inputs), self.kv)
        prompt_logprobs = {rows.index: self._prompt_logprobs(hidden, rows) for rows in inputs.prompt_rows}
        if not len(inputs.logits_rows):
            return StepResult([], {}, prompt_logprobs)
        logits_rows = self._to_device(inputs.logits_rows)
        logits = self.model.compute_logits(hidden[logits_rows])
        tokens, logprobs = self._sample(logits, inputs)
        self._token_table[self._to_device(inputs.sample_index)] = tokens.clamp_min(0)
        return StepResult(tokens.tolist(), _wire_logprobs(logprobs, inputs.num_logprobs), prompt_logprobs)

    def _admit(self, admission: _Admission) -> None:
        start = admission.slot * self.max_model_len
        tokens = self._to_device(admission.tokens)
        self._token_table[start : start + len(tokens)] = tokens
        if self.tp.rank == 0:
            self._sampling.add(
                admission.slot,
                admission.sampling,
                prompt_token_ids=admission.tokens[: admission.prompt_len],
                output_token_ids=admission.tokens[admission.prompt_len :],
                eos_token_ids=admission.eos_token_ids,
            )

    def _batch(self, input_ids: Tensor, inputs: _Inputs) -> ForwardBatch:
        return ForwardBatch(
            input_ids=input_ids,
            positions=self._to_device(inputs.positions),
            query_start=self._to_device(inputs.query_start),
            seq_lens=torch.tensor(inputs.seq_lens, dtype=torch.int32, device=self.device),
            logits_rows=self._to_device(inputs.logits_rows),
            groups=tuple(
                GroupTables(self._to_device(tables), self._to_device(mapping))
                for tables, mapping in inputs.tables
            ),
            num_decodes=inputs.num_decodes,
            query_lens_list=inputs.counts,
            seq_lens_list=inputs.seq_lens,
        )

    def _sample(self, logits: Tensor, inputs: _Inputs) -> tuple[Tensor, LogprobsTensors | None]:
        """int32 [R] tokens, equal on every rank; log-probabilities on rank 0 only."""
        if self.tp.rank:
            return self.tp.broadcast(torch.empty(len(logits), dtype=torch.int32, device=self.device)), None
        output = self._sampler(logits, self._sampling.select(inputs.sample_slots))
        tokens = self.tp.broadcast(output.tokens)
        self._sampling.append(inputs.sample_slots, tokens)
        return tokens, output.logprobs

    def _prompt_logprobs(self, hidden: Tensor, rows: _PromptRows) -> list[TokenLogprobs]:
        entries: list[TokenLogprobs] = []
        targets = self._to_device(rows.targets)
        for start in range(0, len(targets), PROMPT_LOGPROBS_CHUNK):
            chosen = targets[start : start + PROMPT_LOGPROBS_CHUNK]
            first = rows.first + start
            logits = self.model.compute_logits(hidden[first : first + len(chosen)])
            if self.tp.rank == 0:
                entries += compute_logprobs(logits, chosen, rows.num_logprobs).tolist()
        return entries

    def _to_device(self, array: NDArray[np.generic]) -> Tensor:
        return torch.from_numpy(array).to(self.device, non_blocking=True)


def _prompt_rows(plan: StepPlan, query_start: NDArray[np.int32]) -> list[_PromptRows]:
    found = []
    for index, seq in enumerate(plan.sequences):
        wanted = seq.sampling.prompt_logprobs
        if wanted is None or not seq.wants_prompt_logprobs:
            continue
        start = plan.starts[index]
        targets = seq.tokens[start + 1 : start + 1 + plan.counts[index]].copy()
        if len(targets):
            found.append(_PromptRows(index, int(query_start[index]), targets, wanted))
    return found


def _wire_logprobs(logprobs: LogprobsTensors | None, wanted: dict[int, int]) -> dict[int, TokenLogprobs]:
    """Sampled row -> its log-probabilities, each cut to what its request wants."""
    if logprobs is None:
        return {}
    found = {}
    for (row, count), entry in zip(wanted.items(), logprobs.tolist(), strict=True):
        found[row] = TokenLogprobs(
            entry.token_ids[: 4 * (count + 1)], entry.logprobs[: count + 1], entry.rank
        )
    return found
