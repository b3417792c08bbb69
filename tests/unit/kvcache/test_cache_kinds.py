"""Blocks, windows and states under one manager: whatever a step reads is what its tokens say it must be."""

import random
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hotrack.core.errors import CheckpointError
from hotrack.kvcache.manager import KVCacheManager
from hotrack.kvcache.spec import (
    Alias,
    CacheGroup,
    OpenGroup,
    Paged,
    State,
    StateTensor,
    Window,
    group_layers,
    open_group,
)
from hotrack.kvcache.split import split_blocks
from hotrack.kvcache.tensors import KVTensors

torch = pytest.importorskip("torch")

P = 4  # tokens per block
PAGED = Paged(1, 2, 2, 2)
WINDOW = Window(window=6, num_heads=1, k_dim=2, v_dim=4, dtype_bytes=2, slack=3)
STATE = State((StateTensor((3, 5), "bfloat16"), StateTensor((2, 4, 4), "float32")))
HALF = Paged(1, 2, 2, 2, ratio=2)
RING = open_group(2, 6, "float32", slack=3)
OVERLAPPING = open_group(2, 6, "float32", overlap=True, slack=3)
KINDS = {
    "paged": [PAGED],
    "window": [PAGED, WINDOW],
    "state": [STATE, PAGED],
    "compressed": [HALF, RING, WINDOW],
    "overlap": [HALF, RING, OVERLAPPING],
    "all": [OVERLAPPING, STATE, PAGED, HALF, RING, WINDOW],
}
Work = list[tuple[int, int, int, int]]  # slot, start, end, drafts


@dataclass
class Running:
    """``tokens``: accepted and planned ones; ``computed``: how many the cache holds."""

    tokens: list[int]
    computed: int
    hashes: list[bytes] = field(default_factory=list)


class Device:
    """Remembers of every place, and of every state, the tokens that led to it."""

    def __init__(self, specs: list, num_blocks: int, seed: int, *, caching: bool = True) -> None:
        self.groups = group_layers(specs, P)
        self.kv = KVCacheManager(
            self.groups, num_blocks, num_slots=4, max_model_len=48, max_step_tokens=8,
            enable_prefix_caching=caching,
        )  # fmt: skip
        self.places: dict[tuple[int, int], tuple[int, ...]] = {}
        self.rows: dict[tuple[int, int], tuple[int, ...]] = {}
        self.running: dict[int, Running] = {}
        self.random = random.Random(seed)
        self.hits = 0

    def token(self) -> int:
        return self.random.random() < 0.1

    def admit(self, slot: int) -> None:
        prompt = [self.token() for _ in range(self.random.randrange(1, 24))]
        hashes: list[bytes] = []
        hit = self.kv.lookup(np.array(prompt, np.int32), hashes)
        if not self.kv.can_admit(hit, len(prompt)):
            return
        self.kv.admit(slot, hit)
        self.running[slot] = Running(prompt, hit.num_tokens, hashes)
        self.hits += hit.num_tokens > 0

    def plan(self, slots: list[int]) -> Work:
        """(slot, start, end, drafts) of one step."""
        work = []
        for slot in slots:
            seq = self.running[slot]
            left = len(seq.tokens) - seq.computed
            drafts = 0
            if left <= 1:
                drafts = self.random.choice((0, 0, 2, 3))
                seq.tokens += [self.token() for _ in range(1 - left + drafts)]
            start, end = seq.computed, min(len(seq.tokens), seq.computed + 8)
            if end > 44 or not self.kv.grow(slot, end, start, num_drafts=drafts):
                self.kv.release(slot)
                del self.running[slot]
                continue
            seq.computed = end
            self.name(slot, end - drafts)
            work.append((slot, start, end, drafts))
        return work

    def name(self, slot: int, known: int) -> None:
        seq = self.running[slot]
        self.kv.name_blocks(slot, np.array(seq.tokens[:known], np.int32), seq.hashes)

    def run(self, work: Work) -> None:
        for index, group in enumerate(self.groups):
            if isinstance(group.spec, State):
                self.run_states(index, group.spec, work)
            else:
                self.run_blocks(index, group, work)

    def run_states(self, index: int, spec: State, work: Work) -> None:
        table = self.kv.tables[index]
        for slot, _, _, _ in work:
            others = {int(table[other, 1]) for other, _, _, _ in work if other != slot}
            assert int(table[slot, 0]) not in others, "read and written by two sequences of a step"
            assert int(table[slot, 1]) not in others
        for slot, start, end, _ in work:
            read, write = table[slot].tolist()
            assert write != 0
            tokens = tuple(self.running[slot].tokens)
            if isinstance(spec, OpenGroup):
                assert read or start == 0 or (start % P == 0 and not spec.overlap)
                self.run_ring(spec, index, (read, write), tokens, (start, end))
                continue
            assert (read == 0) == (start == 0)
            if read:
                assert self.rows[index, read] == tokens[:start]
            self.rows[index, write] = tokens[:end]

    def run_ring(
        self,
        spec: OpenGroup,
        index: int,
        rows: tuple[int, int],
        tokens: tuple[int, ...],
        span: tuple[int, int],
    ) -> None:
        """``rows[index, row]``: at each place of the ring the tokens up to the one that wrote it."""
        capacity, start = spec.tensors[0].shape[0], span[0]
        ring = list(self.rows.get((index, rows[0]), ())) if rows[0] else []
        ring += [()] * (capacity - len(ring))
        group = start // spec.ratio * spec.ratio
        first = max(0, group - (spec.ratio if spec.overlap else 0))
        for position in range(first, start):
            assert ring[position % capacity] == tokens[: position + 1]
        for position in range(*span):
            ring[position % capacity] = tokens[: position + 1]
        self.rows[index, rows[1]] = tuple(ring)

    def run_blocks(self, index: int, group: CacheGroup, work: Work) -> None:
        if isinstance(group.spec, Paged) and group.spec.ratio > 1:
            self.run_entries(index, group.spec.ratio, work)
            return
        table = self.kv.tables[index]

        def place(slot: int, position: int) -> tuple[int, int]:
            block = int(table[slot, position // P])
            assert block != 0, f"{slot=} {position=} is not there"
            return index, block * P + position % P

        for slot, start, end, _ in work:  # all writes of a step before its reads
            for position in range(start, end):
                self.places[place(slot, position)] = tuple(self.running[slot].tokens[: position + 1])
        for slot, start, end, _ in work:
            tokens = tuple(self.running[slot].tokens)
            for position in range(start, end):
                first = position - group.spec.window + 1 if isinstance(group.spec, Window) else 0
                for key in range(max(0, first), position + 1):
                    assert self.places[place(slot, key)] == tokens[: key + 1]

    def run_entries(self, index: int, ratio: int, work: Work) -> None:
        """An entry is made by the last of its tokens; a token sees those that are whole."""
        for reads in (False, True):
            for slot, start, end, _ in work:
                tokens, positions = tuple(self.running[slot].tokens), np.arange(start, end)
                slots = np.full(len(positions), slot)
                table, places = self.kv.step_tables(np.array([slot]), slots, positions, end)[index]
                for position, place in zip(positions.tolist(), places.tolist(), strict=True):
                    if not reads and place >= 0:
                        assert (position + 1) % ratio == 0
                        self.places[index, place] = tokens[: position + 1]
                    for entry in range((position + 1) // ratio if reads else 0):
                        block, offset = divmod(entry, P // ratio)
                        found = self.places[index, int(table[0, block]) * (P // ratio) + offset]
                        assert found == tokens[: (entry + 1) * ratio]

    def accept(self, work: Work) -> None:
        for slot, start, end, drafts in work:
            seq = self.running[slot]
            if drafts:
                accepted = end - self.random.randrange(drafts + 1)
                seq.computed = self.kv.rewind(slot, accepted)
                assert start <= seq.computed <= accepted
                # What was not accepted is replaced by something else.
                seq.tokens = [*seq.tokens[:accepted], *(1 - t for t in seq.tokens[accepted:end][:1])]
                self.name(slot, min(seq.computed, accepted))


@pytest.mark.parametrize("kinds", KINDS)
@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 1 << 30), num_blocks=st.integers(8, 40), caching=st.booleans())
def test_a_step_reads_what_it_must(kinds: str, seed: int, num_blocks: int, caching: bool) -> None:
    device = Device(KINDS[kinds], num_blocks, seed, caching=caching)
    for _ in range(40):
        for slot in range(4):
            if slot not in device.running and device.random.random() < 0.5:
                device.admit(slot)
            elif slot in device.running and device.random.random() < 0.05:
                device.kv.release(slot)
                del device.running[slot]
        work = device.plan([slot for slot in device.running if device.random.random() < 0.8])
        device.run(work)
        device.accept(work)
        if device.random.random() < 0.02:
            device.kv.reset_prefix_cache()
    for slot in device.running:
        device.kv.release(slot)
    assert device.kv.usage == 0
    assert all(len(blocks) == 0 for blocks in device.kv.live_blocks())


@pytest.mark.parametrize("kinds", KINDS)
def test_prefixes_are_hit(kinds: str) -> None:
    """The property above would hold of a cache that never hits."""
    device = Device(KINDS[kinds], 40, seed=5)
    for _ in range(200):
        for slot in range(4):
            if slot not in device.running:
                device.admit(slot)
        work = device.plan(list(device.running))
        device.run(work)
        device.accept(work)
    assert device.hits > 3


def step(
    kv: KVCacheManager, slot: int, start: int, end: int, tokens: np.ndarray, hashes: list[bytes]
) -> None:
    assert kv.grow(slot, end, start)
    kv.name_blocks(slot, tokens[:end], hashes)


def test_a_state_is_hit_only_where_a_step_ended() -> None:
    kv = KVCacheManager(group_layers([STATE, PAGED], P), 20, num_slots=2, max_model_len=48)
    tokens, hashes = np.arange(23, dtype=np.int32), []
    kv.admit(0, kv.lookup(tokens, hashes))
    for start, end in ((0, 8), (8, 20), (20, 22)):
        step(kv, 0, start, end, tokens, hashes)
    assert kv.lookup(tokens, []).num_tokens == 20
    assert kv.lookup(tokens[:20], []).num_tokens == 8  # 16 has blocks, but no state
    assert kv.lookup(tokens[:8], []).num_tokens == 0
    row = kv.lookup(tokens, []).blocks[0]
    kv.admit(1, kv.lookup(tokens, []))
    kv.grow(1, 22, 20)
    assert kv.tables[0][1, 0] == row[0]  # reads the snapshot
    assert kv.tables[0][1, 1] != row[0]  # and leaves it as it is


def test_a_window_is_hit_where_its_last_blocks_are() -> None:
    specs = [PAGED, Window(6, 1, 2, 2, 2)]
    kv = KVCacheManager(group_layers(specs, P), [20, 6], num_slots=2, max_model_len=48, max_step_tokens=8)
    tokens, hashes = np.arange(32, dtype=np.int32), []
    kv.admit(0, kv.lookup(tokens, hashes))
    for start in range(0, 32, 8):
        step(kv, 0, start, start + 8, tokens, hashes)
    assert len(kv.live_blocks()[1]) <= 4
    hit = kv.lookup(np.arange(33, dtype=np.int32), [])
    assert hit.num_tokens == 32
    assert hit.blocks[1][:6] == (0,) * 6  # 5 tokens before it: two blocks
    assert 0 not in hit.blocks[1][6:]
    # Of 13 tokens, blocks 1 and 2 were overwritten; a start after block 0 needs only that.
    assert kv.lookup(tokens[:13], []).num_tokens == 4


def test_rewinding_more_than_the_drafts_is_a_mistake() -> None:
    kv = KVCacheManager(group_layers([STATE], P), 8, num_slots=1, max_model_len=48)
    kv.admit(0, kv.lookup(np.arange(3, dtype=np.int32), []))
    kv.grow(0, 6, 0)
    with pytest.raises(AssertionError):
        kv.rewind(0, 5)
    kv.grow(0, 9, 6, num_drafts=2)
    assert kv.rewind(0, 8) == 6  # from the state before the step


def test_rows_of_states_and_aliases() -> None:
    specs = [PAGED, STATE, Alias(0), STATE, WINDOW]
    groups = group_layers(specs, P)
    assert [group.layers for group in groups] == [(0, 2), (1, 3), (4,)]
    assert groups[0].row_bytes == 64  # the alias has no bytes of its own
    assert groups[1].row_bytes == 2 * (64 + 128)
    storage = [torch.zeros(5, group.row_bytes, dtype=torch.uint8) for group in groups]
    kv = KVTensors(groups, storage, torch.bfloat16)
    assert kv.k(2).data_ptr() == kv.k(0).data_ptr()
    assert kv.v(4).shape == (5, 1, 4, 4)
    inputs, matrices = kv.states[3]
    assert (inputs.shape, inputs.dtype) == ((5, 3, 5), torch.bfloat16)
    assert (matrices.shape, matrices.dtype) == ((5, 2, 4, 4), torch.float32)
    inputs[2], matrices[2] = 1.0, 2.0
    assert torch.equal(storage[1].any(1), torch.tensor([False, False, True, False, False]))
    assert not kv.states[1][0].any()
    assert not kv.states[1][1].any()
    with pytest.raises(CheckpointError, match="keeps none of its own"):
        group_layers([PAGED, Alias(3)], P)
    with pytest.raises(CheckpointError, match="multiple of 8"):
        group_layers([Paged(1, 2, 2, 2, ratio=8)], P)


@pytest.mark.parametrize("kinds", KINDS)
@given(budget=st.integers(0, 200_000), seqs=st.integers(1, 300), context=st.integers(1, 5000))
@settings(max_examples=100, deadline=None)
def test_bytes_are_split_within_the_budget(kinds: str, budget: int, seqs: int, context: int) -> None:
    groups = group_layers(KINDS[kinds], P)
    counts = split_blocks(groups, budget, max_num_seqs=seqs, max_model_len=context, max_step_tokens=64)
    alone = split_blocks(groups, 0, max_num_seqs=seqs, max_model_len=context, max_step_tokens=64)
    assert all(count >= least for count, least in zip(counts, alone, strict=True))
    nbytes = sum(count * group.row_bytes for count, group in zip(counts, groups, strict=True))
    least = sum(count * group.row_bytes for count, group in zip(alone, groups, strict=True))
    assert nbytes <= max(budget, least)
