"""What the kernels of recurrent layers know about a step: whose state is where, which token comes when."""

from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor

CHUNK = 64  # tokens of a sequence that are handled as one matrix


class StatePlan:
    """Addresses of one step, the same in every layer that keeps a state per sequence.

    read, write   int64 [S]  rows of the state tensors: where each sequence's state is, where it goes
    fresh         bool [S]   sequences at their first token: they begin with zeros, whatever is stored
    query_start   int32 [S+1], ``query_lens`` the same as lengths on the host
    num_decodes   leading sequences with exactly one token

    Everything else is computed on the device from these: nothing here waits for it.
    """

    def __init__(
        self,
        read: Tensor,
        write: Tensor,
        fresh: Tensor,
        query_start: Tensor,
        query_lens: list[int],
        num_decodes: int,
    ) -> None:
        self.read = read
        self.write = write
        self.fresh = fresh
        self.query_start = query_start
        self.query_lens = query_lens
        self.num_decodes = num_decodes
        self._taps: dict[int, Taps] = {}

    def taps(self, past: int) -> "Taps":
        """Where a causal convolution that sees ``past`` earlier tokens finds them."""
        if past not in self._taps:
            self._taps[past] = Taps(self, past)
        return self._taps[past]

    @cached_property
    def chunks(self) -> "Chunks | None":
        """The tokens of all sequences but the decodes; None when there are none."""
        return Chunks(self) if len(self.query_lens) > self.num_decodes else None

    def load(self, states: Tensor, first: int = 0, last: int | None = None) -> Tensor:
        """states [N, ...] -> a copy of the states of sequences first..last-1, zeros where they are fresh"""
        found = states.index_select(0, self.read[first:last])
        fresh = self.fresh[first:last].view(-1, *(1 for _ in states.shape[1:]))
        return found.masked_fill_(fresh, 0)

    def store(self, states: Tensor, new: Tensor, first: int = 0, last: int | None = None) -> None:
        """The inverse of :meth:`load`."""
        states.index_copy_(0, self.write[first:last], new)


class Taps:
    """Rows of ``[the last past inputs of every sequence | the step's inputs]``, [S * past + T, C].

    inputs   int64 [past, T]  the input ``past, past - 1, .. 1`` tokens before each token
    last     int64 [S * past]  the last ``past`` inputs of each sequence after this step
    """

    def __init__(self, plan: StatePlan, past: int) -> None:
        device = plan.query_start.device
        sequences, tokens = len(plan.query_lens), sum(plan.query_lens)
        start = plan.query_start.long()
        lens = start.diff()
        index = torch.arange(sequences, device=device)
        owner = index if plan.num_decodes == sequences else index.repeat_interleave(lens, output_size=tokens)
        back = torch.arange(past, 0, -1, device=device)

        def row(sequence: Tensor, position: Tensor) -> Tensor:
            """``position``: of an input, counted from the sequence's first new one"""
            earlier = sequence * past + past + position
            return torch.where(position < 0, earlier, sequences * past + start[sequence] + position)

        position = torch.arange(tokens, device=device) - start[owner]
        self.inputs = row(owner[None], position[None] - back[:, None])
        self.last = row(index[:, None], lens[:, None] - back).flatten()


class Chunks:
    """The tokens after the decodes, cut into chunks of ``size``, the last one of a sequence padded.

    Order: the first chunk of every sequence, then every second one, and so on; sequences with more chunks
    first. So the ``active[c]`` chunks of turn c are neighbours, and belong to the first ``active[c]`` of
    ``order``.

    tokens    int64 [N * size]  row of the step that each place holds (any row where ``padding``)
    padding   bool [N * size]
    places    int64 [T']        place of each token, in the step's order
    order     int64 [S']        sequences, counted from the first that is no decode
    """

    def __init__(self, plan: StatePlan) -> None:
        device = plan.query_start.device
        lens_list = plan.query_lens[plan.num_decodes :]
        self.size = size = min(CHUNK, 1 << (max(lens_list) - 1).bit_length())
        counts = [-(-n // size) for n in lens_list]
        self.active = [sum(n > turn for n in counts) for turn in range(max(counts))]
        self.first_token = plan.num_decodes  # a decode is one token

        start = plan.query_start[plan.num_decodes :].long()
        lens = start.diff()
        num_chunks = (lens + size - 1) // size
        self.order = num_chunks.argsort(descending=True, stable=True)
        turns = torch.arange(len(self.active), device=device)
        active = (num_chunks[None] > turns[:, None]).sum(1)
        first = F.pad(active.cumsum(0), (1, 0))  # chunks before each turn
        turn = turns.repeat_interleave(active, output_size=sum(self.active))
        sequence = self.order[torch.arange(len(turn), device=device) - first[turn]]
        position = turn[:, None] * size + torch.arange(size, device=device)
        self.padding = (position >= lens[sequence][:, None]).flatten()
        token = start[sequence][:, None] + position
        self.tokens = token.flatten().masked_fill_(self.padding, self.first_token)

        rank = torch.empty_like(self.order)
        rank[self.order] = torch.arange(len(lens), device=device)
        owner = torch.arange(len(lens), device=device).repeat_interleave(lens, output_size=sum(lens_list))
        offset = torch.arange(sum(lens_list), device=device) + self.first_token - start[owner]
        self.places = (first[offset // size] + rank[owner]) * size + offset % size
