import pytest
from hypothesis import given
from hypothesis import strategies as st

from hotrack.core.errors import ConfigError
from hotrack.plan.ledger import (
    GIB,
    DeviceBudget,
    Footprint,
    GpuLedger,
    Provenance,
    Term,
    Verdict,
    assumed,
    format_bytes,
    measured,
    operator,
)

TOTAL = 95 * GIB


def plan(utilization: float, residue: Term, *, sleepers: int = 1) -> Verdict:
    """The rotation of the field report: one member awake with 22 GiB outside its pool, the others asleep."""
    awake = Footprint("dsv4", pool=operator(round(utilization * TOTAL)), nonpool=measured(22 * GIB))
    others = [Footprint(f"peer{i}", pool=operator(40 * GIB), residue=residue) for i in range(sleepers)]
    return GpuLedger.of(DeviceBudget(TOTAL, device="gpu 0"), [awake, *others]).fits({"dsv4"})


@pytest.mark.parametrize(
    ("utilization", "residue", "sleepers", "spare_gib"),
    [
        (0.85, measured(9 * GIB), 1, -16.75),
        (0.70, assumed(4 * GIB), 1, 2.5),
        (0.70, measured(9 * GIB), 1, -2.5),
        (0.60, measured(9 * GIB), 1, 7.0),
        (0.60, measured(9 * GIB), 2, -2.0),
    ],
)
def test_a17_worked_examples(utilization: float, residue: Term, sleepers: int, spare_gib: float) -> None:
    verdict = plan(utilization, residue, sleepers=sleepers)
    assert verdict.spare_bytes / GIB == pytest.approx(spare_gib, abs=1e-6)
    assert verdict.fits == (spare_gib >= 0)
    ending = f"{abs(spare_gib):.2f} GiB {'spare' if spare_gib >= 0 else 'too much'}"
    assert verdict.arithmetic.endswith(ending)


def test_a17_an_assumed_residue_is_accepted_with_a_warning() -> None:
    (warning,) = plan(0.70, assumed(4 * GIB)).warnings
    assert warning.startswith("unmeasured residue peer0: 4.00 GiB is an assumption; write what")
    assert plan(0.60, measured(9 * GIB)).warnings == ()


def test_the_arithmetic_names_every_term_and_its_origin() -> None:
    assert plan(0.60, measured(9 * GIB)).arithmetic == (
        "pool dsv4 57.00 GiB (operator) + nonpool dsv4 22.00 GiB (measured) "
        "+ residue peer0 9.00 GiB (measured) = 88.00 GiB of 95.00 GiB on gpu 0: 7.00 GiB spare"
    )


def test_largest_pool_for_two_sleepers() -> None:
    members = [Footprint("dsv4", pool=operator(57 * GIB), nonpool=measured(22 * GIB))]
    members += [Footprint(f"peer{i}", pool=operator(40 * GIB), residue=measured(9 * GIB)) for i in range(2)]
    budget = DeviceBudget(TOTAL, margin=operator(3 * GIB))
    largest = GpuLedger.of(budget, members).max_pool_bytes("dsv4")
    assert largest / TOTAL == pytest.approx(0.547, abs=1e-3)


def test_a_budget_that_fits_neither_is_refused_with_numbers() -> None:
    members = [Footprint(name, pool=operator(60 * GIB), residue=operator(GIB)) for name in "ab"]
    ledger = GpuLedger.of(DeviceBudget(50 * GIB, foreign=measured(2 * GIB)), members)
    with pytest.raises(ConfigError) as error:
        ledger.check_each_alone()
    assert (
        "pool a 60.00 GiB (operator) + residue b 1.00 GiB (operator) + foreign 2.00 GiB"
        in error.value.message
    )
    assert "13.00 GiB too much; its pool may be at most 47.00 GiB" in error.value.message


def test_a_measurement_replaces_the_guess() -> None:
    members = [Footprint(name, pool=operator(40 * GIB), residue=assumed(0)) for name in "ab"]
    ledger = GpuLedger.of(DeviceBudget(50 * GIB), members)
    assert ledger.fits({"a"}).fits
    after = ledger.with_residue("b", measured(11 * GIB))
    assert not after.fits({"a"}).fits
    assert after.fits({"a"}, absent={"b"}).fits  # no process, no residue
    assert after.footprints["b"].residue.provenance is Provenance.MEASURED
    assert ledger.fits({"a"}).fits


@given(
    st.lists(st.tuples(st.integers(0, 100), st.integers(0, 100)), min_size=1, max_size=5), st.integers(1, 300)
)
def test_waking_one_more_member_never_needs_less_when_residue_is_less(
    sizes: list[tuple[int, int]], total: int
) -> None:
    members = [
        Footprint(str(i), pool=measured(max(p, r)), residue=measured(r)) for i, (p, r) in enumerate(sizes)
    ]
    ledger = GpuLedger.of(DeviceBudget(total), members)
    names = [m.name for m in members]
    needs = [ledger.fits(names[:k]).need_bytes for k in range(len(names) + 1)]
    assert needs == sorted(needs)
    assert all(ledger.fits(names[:k]).fits == (need <= total) for k, need in enumerate(needs))


def test_bytes_are_readable() -> None:
    assert [format_bytes(n) for n in (0, 1 << 20, 1_600_000, 300 << 20, 3 << 30)] == [
        "0 MiB",
        "1.0 MiB",
        "1.5 MiB",
        "300 MiB",
        "3.00 GiB",
    ]


def test_what_others_hold_can_change() -> None:
    ledger = GpuLedger.of(
        DeviceBudget(80 * GIB, margin=operator(GIB)), [Footprint("a", pool=measured(60 * GIB))]
    )
    assert ledger.fits({"a"}).spare_bytes == 19 * GIB
    crowded = ledger.with_foreign(measured(30 * GIB))
    assert crowded.fits({"a"}).spare_bytes == -11 * GIB
    assert "foreign 30.00 GiB (measured)" in crowded.fits({"a"}).arithmetic
    assert crowded.shares() == {"total": 80 * GIB, "foreign": 30 * GIB, "margin": GIB}
    assert ledger.shares()["foreign"] == 0
