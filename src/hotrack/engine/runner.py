"""Runs planned steps on the device, in order, on one worker thread.

Host work (``submit``) happens on the caller's thread while the previous step computes. All token ids come
from one device table ``[num_slots, max_model_len]``: prompts are written at admission, sampled tokens by
the step that samples them, so a step never needs a token on the host before it can start.
"""

from collections.abc import Callable, Sequence
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
from hotrack.engine.device import device_worker
from hotrack.engine.graphs import SAMPLED, Capture, DecodeGraphs, DecodeInputs, pad_decodes
from hotrack.engine.sampler import LogprobsTensors, Sampler, compute_logprobs
from hotrack.engine.sampling_batch import SamplingState
from hotrack.engine.step import StepPlan, StepResult
from hotrack.engine.upload import Landed, Numbers, make_uploader, to_host
from hotrack.kvcache.manager import KVCacheManager
from hotrack.kvcache.tensors import KVTensors
from hotrack.layers.batch import ForwardBatch, GroupTables
from hotrack.models.causal_lm import Stages

PROMPT_LOGPROBS_CHUNK = 256  # rows of [chunk, vocab] logits in memory at a time

Int64Array = NDArray[np.int64]
T = TypeVar("T")
WaitFor = Callable[[Sequence[str]], None]


class Model(Protocol):
    """What the runner needs of a model."""

    @property
    def stages(self) -> Stages: ...

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
    seq_lens: NDArray[np.int32]
    tables: list[tuple[NDArray[np.int32], Int64Array]]  # per group: [S, blocks], slot mapping [T]
    num_decodes: int
    logits_rows: Int64Array  # [R]
    sample_slots: list[int]
    sample_index: Int64Array  # [R] where the sampled token goes in the flat token table
    num_logprobs: dict[int, int]  # sampled row -> how many its request wants
    prompt_rows: list[_PromptRows]
    wait_for: WaitFor | None
    decodes: DecodeInputs | None  # the same step for a captured graph, if one may run it


@dataclass(frozen=True, slots=True)
class _Uploaded:
    """``_Inputs`` on the device."""

    token_index: Tensor
    positions: Tensor
    query_start: Tensor
    seq_lens: Tensor
    logits_rows: Tensor
    sample_index: Tensor
    groups: tuple[GroupTables, ...]
    admitted: list[Tensor]
    targets: list[Tensor]


@dataclass(frozen=True, slots=True)
class _Launched:
    """What a step will have produced once it has ``landed``."""

    landed: Landed
    tokens: Tensor | None
    logprobs: LogprobsTensors | None
    num_logprobs: dict[int, int]
    prompt_logprobs: dict[int, list[LogprobsTensors]]

    def result(self) -> StepResult:
        self.landed.wait()
        prompt = {
            index: [entry for part in parts for entry in part.tolist()]
            for index, parts in self.prompt_logprobs.items()
        }
        tokens = [] if self.tokens is None else self.tokens.tolist()
        return StepResult(tokens, _wire_logprobs(self.logprobs, self.num_logprobs), prompt)


@dataclass(frozen=True, slots=True)
class PendingStep:
    """A submitted step."""

    _launch: Future[_Launched]

    def result(self) -> StepResult:
        """Waits for the step; raises what it raised."""
        return self._launch.result().result()


class ModelRunner:
    """``worker``: the one thread that runs the model, see :func:`device_worker`; closed with the runner.

    Only rank 0 of ``tp`` samples; its tokens are broadcast on the device and are the same on every rank.
    The worker never waits for a GPU: it launches the next step while this one runs. ``wait_for``: while set,
    submitted steps call it with the names of the weights they are about to read (a streamed wake).
    ``capture``: makes graphs of decode steps, see ``engine.graphs``; None: every step is launched kernel by
    kernel.
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
        capture: Capture | None = None,
    ) -> None:
        self.model = model
        self.kv = kv
        self.manager = manager
        self.device = device
        self.tp = tp or TensorParallel()
        self.max_model_len = max_model_len
        self.wait_for: WaitFor | None = None
        assert num_slots * max_model_len < 2**31, "places in the token table are uploaded as int32"
        self._uploader = make_uploader(device)
        # One place more than there are tokens: see engine.graphs.
        self._token_table = torch.zeros(num_slots * max_model_len + 1, dtype=torch.int32, device=device)
        self._sampler = Sampler()
        self._sampling = SamplingState(num_slots, vocab_size, device)
        self._worker = worker or device_worker(device=device)
        self.graphs: DecodeGraphs | None = None
        if capture is not None:
            self.graphs = DecodeGraphs(
                model,
                kv,
                self._token_table,
                max_num_seqs=num_slots,
                max_model_len=max_model_len,
                table_widths=[table.shape[1] for table in manager.tables],
                capture=capture,
            )

    def submit(self, plan: StepPlan) -> PendingStep:
        """Queue a step."""
        return PendingStep(self._worker.submit(self._execute, self._prepare(plan)))

    def call(self, function: Callable[[], T]) -> T:
        """Run ``function`` on the worker, after every submitted step, and wait for it."""
        return self._worker.submit(function).result()

    def forget_graphs(self) -> None:
        """On the worker: give captured graphs up; decode steps are launched kernel by kernel from now on."""
        if self.graphs is not None:
            self.graphs.forget()

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
        token_index = token_slots * self.max_model_len + positions
        sample_index = sample_slots * self.max_model_len + seq_lens[sampling]
        tables = self.manager.step_tables(slots, token_slots, positions, int(seq_lens.max()))
        decodes = None
        if self._may_replay(plan, len(sampling)):
            nowhere = len(self._token_table) - 1
            decodes = pad_decodes(token_index, positions, sample_index, tables, nowhere)
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
            token_index=token_index,
            positions=positions,
            query_start=query_start,
            counts=plan.counts,
            seq_lens=seq_lens.astype(np.int32),
            tables=tables,
            num_decodes=plan.num_decodes,
            logits_rows=query_start[1:][sampling].astype(np.int64) - 1,
            sample_slots=sample_slots.tolist(),
            sample_index=sample_index,
            num_logprobs={
                row: wanted
                for row, index in enumerate(sampling.tolist())
                if (wanted := plan.sequences[index].sampling.logprobs) is not None
            },
            prompt_rows=_prompt_rows(plan, query_start),
            wait_for=self.wait_for,
            decodes=decodes,
        )

    def _may_replay(self, plan: StepPlan, num_sampling: int) -> bool:
        """A graph knows one new token per sequence, each of which samples, and no weight that is still on its
        way."""
        return (
            self.graphs is not None
            and self.graphs.enabled
            and self.wait_for is None
            and plan.num_decodes == len(plan.slots) == num_sampling
            and not any(seq.wants_prompt_logprobs for seq in plan.sequences)
        )

    # ---- device side (worker thread)

    @torch.inference_mode()
    def _execute(self, inputs: _Inputs) -> _Launched:
        if inputs.decodes is not None and (launched := self._replay(inputs, inputs.decodes)) is not None:
            return launched
        device = self._upload(inputs)
        self._take_over(inputs, device.admitted)
        hidden = self.model.forward(self._batch(device, inputs), self.kv)
        if inputs.wait_for is not None:
            inputs.wait_for(self.model.stages.head)
        prompt_logprobs = {
            rows.index: self._prompt_logprobs(hidden, rows, targets)
            for rows, targets in zip(inputs.prompt_rows, device.targets, strict=True)
        }
        tokens: Tensor | None = None
        logprobs: LogprobsTensors | None = None
        if len(inputs.logits_rows):
            logits = self.model.compute_logits(hidden[device.logits_rows])
            sampled, logprobs = self._sample(logits, inputs)
            self._token_table[device.sample_index] = sampled.clamp_min(0)
            tokens = to_host(sampled)
        return _Launched(Landed(self.device), tokens, logprobs, inputs.num_logprobs, prompt_logprobs)

    def _replay(self, inputs: _Inputs, decodes: DecodeInputs) -> _Launched | None:
        """The step as one graph, None if there is none for it. Rows that are not simply greedy are sampled
        from the graph's logits."""
        assert self.graphs is not None, "see _may_replay"
        if not self.graphs.prepare(decodes.size):
            return None
        arrays: list[Numbers] = [decodes.small, *decodes.tables]
        arrays += [admission.tokens for admission in inputs.admissions]
        small, *rest = self._uploader.upload(arrays)
        self._take_over(inputs, rest[len(decodes.tables) :])
        logits, tokens = self.graphs.replay(small, rest[: len(decodes.tables)])
        count, logprobs = decodes.num_seqs, None
        if self._sampling.is_plain(inputs.sample_slots):
            sampled = tokens[:count]
            self._sampling.append(inputs.sample_slots, sampled)
        else:
            sampled, logprobs = self._sample(logits[:count], inputs)
            self._token_table[small[SAMPLED, :count]] = sampled.clamp_min(0)
        host = to_host(sampled)
        return _Launched(Landed(self.device), host, logprobs, inputs.num_logprobs, {})

    def _take_over(self, inputs: _Inputs, prompts: Sequence[Tensor]) -> None:
        """Slots that end, then those that begin."""
        for slot in inputs.freed_slots:
            self._sampling.remove(slot)
        for admission, prompt in zip(inputs.admissions, prompts, strict=True):
            self._admit(admission, prompt)

    def _upload(self, inputs: _Inputs) -> _Uploaded:
        """Everything at once."""
        arrays: list[Numbers] = [inputs.token_index, inputs.positions, inputs.query_start, inputs.seq_lens]
        arrays += [inputs.logits_rows, inputs.sample_index]
        for table, mapping in inputs.tables:
            arrays += [table, mapping]
        arrays += [admission.tokens for admission in inputs.admissions]
        arrays += [rows.targets for rows in inputs.prompt_rows]
        found = iter(self._uploader.upload(arrays))
        return _Uploaded(
            token_index=next(found),
            positions=next(found),
            query_start=next(found),
            seq_lens=next(found),
            logits_rows=next(found),
            sample_index=next(found),
            groups=tuple(GroupTables(next(found), next(found)) for _ in inputs.tables),
            admitted=[next(found) for _ in inputs.admissions],
            targets=[next(found) for _ in inputs.prompt_rows],
        )

    def _admit(self, admission: _Admission, tokens: Tensor) -> None:
        start = admission.slot * self.max_model_len
        self._token_table[start : start + len(tokens)] = tokens
        if self.tp.rank == 0:
            self._sampling.add(
                admission.slot,
                admission.sampling,
                prompt_token_ids=admission.tokens[: admission.prompt_len],
                output_token_ids=admission.tokens[admission.prompt_len :],
                eos_token_ids=admission.eos_token_ids,
            )

    def _batch(self, device: _Uploaded, inputs: _Inputs) -> ForwardBatch:
        return ForwardBatch(
            input_ids=self._token_table[device.token_index].long(),
            positions=device.positions,
            query_start=device.query_start,
            seq_lens=device.seq_lens,
            logits_rows=device.logits_rows,
            groups=device.groups,
            num_decodes=inputs.num_decodes,
            query_lens_list=inputs.counts,
            seq_lens_list=inputs.seq_lens.tolist(),
            wait_for=inputs.wait_for,
        )

    def _sample(self, logits: Tensor, inputs: _Inputs) -> tuple[Tensor, LogprobsTensors | None]:
        """int32 [R] tokens, equal on every rank; log-probabilities on rank 0 only."""
        if self.tp.rank:
            return self.tp.broadcast(torch.empty(len(logits), dtype=torch.int32, device=self.device)), None
        output = self._sampler(logits, self._sampling.select(inputs.sample_slots))
        tokens = self.tp.broadcast(output.tokens)
        self._sampling.append(inputs.sample_slots, tokens)
        return tokens, None if output.logprobs is None else output.logprobs.to_host()

    def _prompt_logprobs(self, hidden: Tensor, rows: _PromptRows, targets: Tensor) -> list[LogprobsTensors]:
        parts = []
        for start in range(0, len(targets), PROMPT_LOGPROBS_CHUNK):
            chosen = targets[start : start + PROMPT_LOGPROBS_CHUNK]
            first = rows.first + start
            logits = self.model.compute_logits(hidden[first : first + len(chosen)])
            if self.tp.rank == 0:
                parts.append(compute_logprobs(logits, chosen, rows.num_logprobs).to_host())
        return parts


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
