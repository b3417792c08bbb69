"""Layout arithmetic."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hotrack.core.tensorspec import DTYPE_BYTES, TensorSpec
from hotrack.memory.plan import PAGE_ALIGN_FROM, TENSOR_ALIGN, plan_region

PAGE = 4096
shapes = st.lists(st.integers(0, 300), max_size=3).map(tuple)


@given(st.lists(st.tuples(shapes, st.sampled_from(sorted(DTYPE_BYTES))), max_size=30), st.integers(1, 40))
def test_placements_are_ordered_aligned_disjoint_and_covered(
    tensors: list[tuple[tuple[int, ...], str]], pages: int
) -> None:
    specs = [TensorSpec(str(i), shape, dtype) for i, (shape, dtype) in enumerate(tensors)]
    plan = plan_region(specs, page_bytes=PAGE, chunk_bytes=pages * PAGE)
    assert [p.spec for p in plan.placements] == specs
    end = 0
    for placement in plan.placements:
        assert placement.offset >= end
        align = PAGE if placement.spec.nbytes >= PAGE_ALIGN_FROM else TENSOR_ALIGN
        assert placement.offset % align == 0
        assert placement.offset - end < align
        end = placement.end
    assert plan.nbytes % PAGE == 0
    assert 0 <= plan.nbytes - end < PAGE
    assert sum(nbytes for _, nbytes in plan.chunks) == plan.nbytes
    position = 0
    for start, nbytes in plan.chunks:
        assert start == position
        assert 0 < nbytes <= plan.chunk_bytes
        position += nbytes


def test_duplicate_names_are_a_bug() -> None:
    with pytest.raises(AssertionError, match="unique"):
        plan_region([TensorSpec("a", (1,), "uint8")] * 2, page_bytes=PAGE, chunk_bytes=PAGE)
