"""Decode steps as captured CUDA graphs: one launch instead of a thousand.

There is a graph per batch size in ``SIZES``, captured when a step first needs it; a smaller batch is padded.
All inputs are copied into buffers whose addresses the graph knows, and every size shares the buffers. A
padding row is a sequence of one token in the null block; the token it samples lands behind the token table's
last slot. A graph ends with the greedy token of every row, which it also writes to the token table; whoever
samples otherwise does so from the logits, and overwrites.

The buffers are ordinary memory, written anew before every replay; intermediate results and outputs live in
the graph pool, which a sleep unmaps and a wake maps at the same addresses with undefined contents.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import monotonic
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hotrack.engine.sampler import INVALID_TOKEN
from hotrack.kvcache.tensors import KVTensors
from hotrack.layers.batch import ForwardBatch, GroupTables
from hotrack.memory.graph_pool import GraphPool
from hotrack.obs.log import get_logger

SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 160, 192, 224, 256)
NULL_BLOCK = 0
TOKEN, POSITION, LENGTH, SAMPLED, SLOTS = range(5)  # rows of the small inputs; one row of slots per group
INTERMEDIATES = 256 << 20  # bytes of the largest step's, beside its logits

log = get_logger("hotrack.engine")

Int64Array = NDArray[np.int64]
Outputs = tuple[Tensor, Tensor]
Replay = Callable[[], None]
Capture = Callable[[Callable[[], Outputs]], tuple[Outputs, Replay]]


class GraphModel(Protocol):
    """What is captured."""

    def forward(self, batch: ForwardBatch, kv: KVTensors) -> Tensor: ...  # [T, D]

    def compute_logits(self, hidden: Tensor) -> Tensor: ...  # [R, D] -> float32 [R, vocab]


def graph_size(num_seqs: int) -> int | None:
    """The size that ``num_seqs`` sequences are padded to; None when there are too many."""
    return next((size for size in SIZES if size >= num_seqs), None)


def graph_bytes(max_num_seqs: int, vocab_size: int) -> int:
    """What the graphs of every size may come to hold: the logits of each, and one set of intermediates."""
    largest = graph_size(min(max_num_seqs, SIZES[-1])) or SIZES[-1]
    rows = sum(size for size in SIZES if size <= largest)
    return rows * vocab_size * 4 + 2 * largest * vocab_size * 4 + INTERMEDIATES


@dataclass(frozen=True, slots=True)
class DecodeInputs:
    """One padded step on the host. small int64 [SLOTS + groups, size], tables int32 [size, blocks] per
    group; ``num_seqs`` rows are real."""

    small: Int64Array
    tables: list[NDArray[np.int32]]
    num_seqs: int

    @property
    def size(self) -> int:
        return self.small.shape[1]


def pad_decodes(
    token_index: Int64Array,
    positions: Int64Array,
    sample_index: Int64Array,
    tables: Sequence[tuple[NDArray[np.int32], Int64Array]],
    nowhere: int,
) -> DecodeInputs | None:
    """[S] each, tables ([S, blocks], slot mapping [S]) per group -> inputs of the next size, None if there
    is none. ``nowhere``: where padding rows put their token."""
    num_seqs = len(token_index)
    size = graph_size(num_seqs)
    if size is None:
        return None
    small = np.zeros((SLOTS + len(tables), size), np.int64)
    small[LENGTH] = 1
    small[SAMPLED] = nowhere
    small[TOKEN, :num_seqs] = token_index
    small[POSITION, :num_seqs] = positions
    small[LENGTH, :num_seqs] = positions + 1
    small[SAMPLED, :num_seqs] = sample_index
    padded = []
    for group, (table, slots) in enumerate(tables):
        small[SLOTS + group, :num_seqs] = slots
        whole = np.full((size, table.shape[1]), NULL_BLOCK, np.int32)
        whole[:num_seqs] = table
        padded.append(whole)
    return DecodeInputs(small, padded, num_seqs)


class CudaCapture:
    """Captures on its own stream, after two runs that compile and load what the capture launches."""

    def __init__(self, device: torch.device, pool: GraphPool | None) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        # cuBLAS keeps its workspace per stream: made by the runs before, outside the pool, it stays valid.
        self._pool: Any = torch.cuda.graph_pool_handle() if pool is None else pool.mempool.id

    def __call__(self, function: Callable[[], Outputs]) -> tuple[Outputs, Replay]:
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            for _ in range(2):
                function()
        current.wait_stream(self._stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
            outputs = function()
        return outputs, graph.replay


class DecodeGraphs:
    """Everything here belongs to the runner's worker thread; others may ask whether it is ``enabled``.

    token_table  int32 [slots * max_model_len + 1]: its last place takes the tokens of padding rows
    table_widths  blocks of a full context, per cache group
    failure       why a capture failed; from then on ``prepare`` declines and steps are launched one by one
    """

    def __init__(
        self,
        model: GraphModel,
        kv: KVTensors,
        token_table: Tensor,
        *,
        max_num_seqs: int,
        max_model_len: int,
        table_widths: Sequence[int],
        capture: Capture,
    ) -> None:
        device = token_table.device
        self.failure: str | None = None
        self.capture_s: dict[int, float] = {}
        self._model = model
        self._kv = kv
        self._token_table = token_table
        self._max_model_len = max_model_len
        self._capture = capture
        rows = graph_size(min(max_num_seqs, SIZES[-1])) or SIZES[-1]
        self._rows = rows
        self._small = torch.zeros(SLOTS + len(table_widths), rows, dtype=torch.int64, device=device)
        self._tables = [torch.zeros(rows, width, dtype=torch.int32, device=device) for width in table_widths]
        self._starts = torch.arange(rows + 1, dtype=torch.int32, device=device)
        self._order = torch.arange(rows, device=device)
        self._captured: dict[int, tuple[Outputs, Replay]] = {}

    @property
    def enabled(self) -> bool:
        return self.failure is None

    @property
    def sizes(self) -> list[int]:
        """Captured so far."""
        return sorted(self._captured)

    def prepare(self, size: int) -> bool:
        """Whether there is a graph of this size now; captures it if need be."""
        if not self.enabled or size > self._rows:
            return False
        return size in self._captured or self._try_capture(size)

    def replay(self, small: Tensor, tables: Sequence[Tensor]) -> Outputs:
        """``DecodeInputs`` on the device, of a prepared size -> logits float32 [size, vocab] and greedy
        tokens int32 [size], -1 where none can be chosen; the next replay overwrites both."""
        size = small.shape[1]
        self._small[:, :size].copy_(small)
        for static, table in zip(self._tables, tables, strict=True):
            static[:size, : table.shape[1]].copy_(table)
        outputs, replay = self._captured[size]
        replay()
        return outputs

    def forget(self) -> None:
        """Drop all graphs for good, so that their memory can be given back."""
        self._captured.clear()
        self.failure = "given up"

    def _try_capture(self, size: int) -> bool:
        started = monotonic()
        self._clear()
        try:
            self._captured[size] = self._capture(lambda: self._forward(size))
        except Exception as error:  # noqa: BLE001 - whatever the driver, a kernel or the allocator objects to
            reason = (str(error).splitlines() or [""])[0]
            self.failure = f"batch {size}: {type(error).__name__}: {reason}"
            log.warning("decode steps run without CUDA graphs, capturing failed: %s", self.failure)
            return False
        self.capture_s[size] = monotonic() - started
        log.info("captured a CUDA graph for %d sequences in %.2f s", size, self.capture_s[size])
        return True

    def _clear(self) -> None:
        """Only padding rows: the runs before a capture must leave no trace."""
        self._small.zero_()
        self._small[LENGTH].fill_(1)
        self._small[SAMPLED].fill_(len(self._token_table) - 1)
        for table in self._tables:
            table.fill_(NULL_BLOCK)

    def _forward(self, size: int) -> Outputs:
        small = self._small[:, :size]
        batch = ForwardBatch(
            input_ids=self._token_table.index_select(0, small[TOKEN]).long(),
            positions=small[POSITION],
            query_start=self._starts[: size + 1],
            seq_lens=small[LENGTH].int(),
            logits_rows=self._order[:size],
            groups=tuple(
                GroupTables(table[:size], small[SLOTS + group]) for group, table in enumerate(self._tables)
            ),
            num_decodes=size,
            query_lens_list=[1] * size,
            seq_lens_list=[self._max_model_len] * size,  # bounds a launch; lengths are read on the device
        )
        logits = self._model.compute_logits(self._model.forward(batch, self._kv))
        highest, best = logits.max(dim=-1)
        tokens = best.masked_fill_(highest.isfinite().logical_not_(), INVALID_TOKEN).int()
        self._token_table.index_copy_(0, small[SAMPLED], tokens.clamp_min(0))
        return logits, tokens
