"""KVCacheManager: prefix hits, the full-hit rule, all-or-nothing growth, conservation of blocks."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from hotrack.kvcache.manager import KVCacheManager
from hotrack.kvcache.prefix_cache import extend_hashes
from hotrack.kvcache.spec import Paged, group_layers

PAGED = Paged(num_heads=1, k_dim=2, v_dim=2, dtype_bytes=2)
TWO_KINDS = [PAGED, Paged(num_heads=2, k_dim=2, v_dim=2, dtype_bytes=2), PAGED]


def tokens(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


def manager(num_blocks: int = 8, specs: list | None = None, **options: object) -> KVCacheManager:
    groups = group_layers(specs or TWO_KINDS, block_size=4)
    return KVCacheManager(groups, num_blocks, num_slots=4, max_model_len=32, **options)


def fill(kv: KVCacheManager, slot: int, sequence: np.ndarray) -> list[bytes]:
    hashes: list[bytes] = []
    kv.admit(slot, kv.lookup(sequence, hashes))
    assert kv.grow(slot, len(sequence), 0)
    kv.name_blocks(slot, sequence, hashes)
    return hashes


def test_hash_chain_depends_on_everything_before() -> None:
    one: list[bytes] = []
    two: list[bytes] = []
    extend_hashes(one, tokens(1, 2, 3, 4, 5, 6, 7, 8), 4)
    extend_hashes(two, tokens(9, 2, 3, 4, 5, 6, 7, 8), 4)
    assert len(one) == 2
    assert one[1] != two[1]
    step: list[bytes] = []
    extend_hashes(step, tokens(1, 2, 3, 4), 4)
    extend_hashes(step, tokens(1, 2, 3, 4, 5, 6, 7, 8), 4)
    assert step == one
    salted: list[bytes] = []
    extend_hashes(salted, tokens(1, 2, 3, 4), 4, b"salt")
    assert salted[0] != one[0]


def test_shared_prefix_shares_blocks_and_full_hit_leaves_a_token() -> None:
    kv = manager()
    prompt = np.arange(8, dtype=np.int32)
    fill(kv, 0, prompt)
    full = kv.lookup(prompt, [])
    assert full.num_tokens == 4  # not 8: the last token's logits are needed
    longer = kv.lookup(np.arange(9, dtype=np.int32), [])
    assert longer.num_tokens == 8
    kv.admit(1, longer)
    assert all((table[0, :2] == table[1, :2]).all() for table in kv.tables)
    assert not kv.can_grow(2, 4 * kv.num_free_blocks + 4, 0, released=[0])  # what is shared stays
    kv.release(0)
    kv.release(1)
    assert kv.num_free_blocks == kv.capacity_blocks
    assert kv.lookup(np.arange(9, dtype=np.int32), []).num_tokens == 8  # still named while free
    kv.reset_prefix_cache()
    assert kv.lookup(np.arange(9, dtype=np.int32), []).num_tokens == 0


def test_growth_is_all_or_nothing() -> None:
    kv = manager(num_blocks=4)
    kv.admit(0, kv.lookup(tokens(1), []))
    assert kv.grow(0, 8, 0)
    assert np.count_nonzero(kv.tables[0][0]) == 2
    assert not kv.grow(0, 20, 8)
    assert np.count_nonzero(kv.tables[0][0]) == 2
    assert kv.num_free_blocks == 1


def test_caching_off_never_hits() -> None:
    kv = manager(enable_prefix_caching=False)
    fill(kv, 0, np.arange(8, dtype=np.int32))
    assert kv.lookup(np.arange(9, dtype=np.int32), []).num_tokens == 0


SEQUENCES = st.lists(st.integers(0, 1), min_size=1, max_size=16).map(lambda v: np.array(v, np.int32))
ACTIONS = st.lists(st.tuples(st.integers(0, 3), SEQUENCES), max_size=40)


@settings(max_examples=150, deadline=None)
@given(ACTIONS)
def test_blocks_are_conserved_and_hits_hold_the_right_tokens(actions: list[tuple[int, np.ndarray]]) -> None:
    kv = manager(num_blocks=10)
    running: dict[int, np.ndarray] = {}
    content: dict[int, tuple[int, ...]] = {}  # block of group 0 -> the tokens up to its end
    for slot, sequence in actions:
        if slot in running:
            kv.release(slot)
            del running[slot]
        hashes: list[bytes] = []
        hit = kv.lookup(sequence, hashes)
        for index, block in enumerate(hit.blocks[0], 1):
            assert content[block] == tuple(sequence[: 4 * index])
        fits = kv.can_admit(hit, len(sequence))
        kv.admit(slot, hit)
        assert kv.grow(slot, len(sequence), hit.num_tokens) == fits
        if not fits:
            kv.release(slot)
            continue
        kv.name_blocks(slot, sequence, hashes)
        running[slot] = sequence
        for index in range(len(sequence) // 4):
            content[int(kv.tables[0][slot, index])] = tuple(sequence[: 4 * index + 4])
        used = {int(b) for s in running for b in kv.tables[0][s] if b}
        assert kv.num_free_blocks == kv.capacity_blocks - len(used)
    for slot in running:
        kv.release(slot)
    assert kv.num_free_blocks == kv.capacity_blocks
