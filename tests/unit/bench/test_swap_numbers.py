"""Arithmetic of the swap benchmark."""

import pytest

from hotrack.bench.swap_numbers import JUDGED_CYCLES, Leak, Row, Series, Slope, changes, leaks


def test_series_keeps_the_first_cycle_apart():
    series = Series.of([6000.0, *([10.0] * 17), 30.0, 20.0])
    assert (series.first, series.median, series.worst, series.count) == (6000.0, 10.0, 6000.0, 20)
    assert series.p95 == 30.0  # the 19th of 20
    assert Series.of([3.0, 1.0]).p95 == 3.0


def test_slope_is_least_squares_per_step():
    assert Slope.of([5.0, 9.0]) == Slope(0.0, 0.0)
    assert Slope.of([7.0, 7.0, 7.0]) == Slope(0.0, 0.0)
    straight = Slope.of([1.0, 3.0, 5.0, 7.0])
    assert straight.value == pytest.approx(2.0)
    assert straight.error == pytest.approx(0.0)
    # By hand: mean 1, sum of x*y about the means 3, of x*x 2; residuals 0.5, -1, 0.5.
    bent = Slope.of([0.0, 0.0, 3.0])
    assert bent.value == pytest.approx(1.5)
    assert bent.error == pytest.approx((1.5 / 1 / 2) ** 0.5)


def test_changes_counts_differences_from_the_first():
    assert changes([4, 4, 4]) == 0
    assert changes([4, 5, 4, 6]) == 2


def test_what_must_be_exact_may_not_even_come_back():
    assert Leak.of("handles", [4, 4, 4]).passed
    assert not Leak.of("handles", [4, 5, 4]).passed


def test_growth_is_judged_by_slope_after_settling():
    settling = [0.0] * 6 + [50_000.0] * 54
    assert Leak.growing("RSS", settling, 1024.0).passed
    assert not Leak.growing("RSS", [4096.0 * cycle for cycle in range(60)], 1024.0).passed
    noise = [300_000.0 * (cycle % 7) + 2048.0 * cycle for cycle in range(60)]
    assert Leak.growing("RSS", noise, 1024.0).passed  # nobody could see that in 60 cycles
    every_fourth = Leak.growing("RSS", [4096.0 * cycle for cycle in range(0, 240, 4)], 5000.0, stride=4)
    assert every_fourth.per_cycle.value == pytest.approx(4096)
    assert every_fourth.passed
    few = Leak.growing("RSS", [4096.0 * cycle for cycle in range(JUDGED_CYCLES - 1)], 1024.0)
    assert few.passed
    assert few.limit is None


def test_leaks_reads_every_counter_and_sees_a_kind_that_appears_later():
    states = [
        {"rss_bytes": 10, "device_bytes": None, "host_bytes": 7, "handles": {"mappings": 3}},
        {"rss_bytes": 10, "device_bytes": None, "host_bytes": 7, "handles": {"mappings": 3, "events": 1}},
    ]
    found = {leak.what: leak.passed for leak in leaks(states, "asleep")}
    assert found == {
        "RSS asleep": True,
        "host copy asleep": True,
        "events asleep": False,
        "mappings asleep": True,
    }


def test_a_bar_holds_for_the_first_cycle_too():
    series = Series.of([6000.0, 10.0, 10.0])
    assert Row.of("x", "sleep", series, bar=20.0).passed is False
    assert Row.of("x", "sleep", Series.of([19.0, 10.0, 10.0]), bar=20.0).passed is True
    row = Row.of("x", "wake", Series.of([11.0]), floor=10.0)
    assert row.passed is None
    assert row.ratio == pytest.approx(1.1)
    assert Row(subject="x", what="residue", value=2.0, unit="GiB", bar=1.9).passed is False
