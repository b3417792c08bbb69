"""BlockPool against a naive model: no leak, no double free, counts consistent, least recently released
evicted first.
"""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from hotrack.kvcache.block_pool import NULL_BLOCK, BlockPool


class PoolMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.evicted: list[int] = []
        self.pool = BlockPool(9, on_evict=self.evicted.append)
        self.refs = dict.fromkeys(range(1, 9), 0)
        self.cached: set[int] = set()
        self.release_order: list[int] = []

    @rule(count=st.integers(1, 4))
    def allocate(self, count: int) -> None:
        free = [b for b in self.refs if self.refs[b] == 0]
        if count > len(free):
            with pytest.raises(AssertionError):
                self.pool.allocate(count)
            return
        plain = sum(b not in self.cached for b in free)
        expected = [b for b in self.release_order if self.refs[b] == 0 and b in self.cached]
        self.evicted.clear()
        for block in self.pool.allocate(count):
            assert self.refs[block] == 0
            self.refs[block] = 1
            self.cached.discard(block)
        assert self.evicted == expected[: max(0, count - plain)]

    @precondition(lambda self: any(self.refs.values()))
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        block = data.draw(st.sampled_from([b for b in self.refs if self.refs[b]]))
        self.pool.release([block])
        self.refs[block] -= 1
        if self.refs[block] == 0:
            if block in self.release_order:
                self.release_order.remove(block)
            self.release_order.append(block)

    @precondition(lambda self: any(self.refs.values()))
    @rule(data=st.data())
    def cache(self, data: st.DataObject) -> None:
        block = data.draw(st.sampled_from([b for b in self.refs if self.refs[b]]))
        self.pool.mark_cached(block)
        self.cached.add(block)

    @precondition(lambda self: any(self.refs.values()) or self.cached)
    @rule(data=st.data())
    def hit(self, data: st.DataObject) -> None:
        block = data.draw(st.sampled_from([b for b in self.refs if self.refs[b] or b in self.cached]))
        self.pool.acquire(block)
        self.refs[block] += 1

    @rule()
    def reset(self) -> None:
        self.pool.forget_cached()
        self.cached.clear()

    @invariant()
    def consistent(self) -> None:
        assert all(self.pool.ref_count(b) == n for b, n in self.refs.items())
        assert self.pool.num_free == sum(n == 0 for n in self.refs.values())


TestPoolMachine = PoolMachine.TestCase
TestPoolMachine.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


@given(st.integers(2, 20))
def test_every_block_but_the_null_block_is_handed_out_once(num_blocks: int) -> None:
    pool = BlockPool(num_blocks)
    blocks = pool.allocate(pool.capacity)
    assert sorted(blocks) == list(range(1, num_blocks))
    assert pool.num_free == 0
    pool.release(blocks)
    assert pool.num_free == pool.capacity


def test_misuse_is_caught() -> None:
    pool = BlockPool(4)
    (block,) = pool.allocate(1)
    pool.release([block])
    with pytest.raises(AssertionError, match="released twice"):
        pool.release([block])
    with pytest.raises(AssertionError, match="null block"):
        pool.release([NULL_BLOCK])
    with pytest.raises(AssertionError, match="holds nothing"):
        pool.acquire(block)
