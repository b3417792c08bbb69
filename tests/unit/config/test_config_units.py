import pytest
from hypothesis import given
from hypothesis import strategies as st

from hotrack.config.units import format_size, parse_duration, parse_size


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [
        ("900MiB", 900 << 20),
        ("1.5GiB", 3 << 29),
        ("2GB", 2 * 10**9),
        ("4096", 4096),
        (4096, 4096),
        ("7k", 7000),
        ("1 TiB", 1 << 40),
    ],
)
def test_sizes(text: str | int, num_bytes: int) -> None:
    assert parse_size(text) == num_bytes


@pytest.mark.parametrize("text", ["", "MiB", "-1", "1.2.3", "12 parsecs", "1e9", "nan", "0x10"])
def test_not_sizes(text: str) -> None:
    with pytest.raises(ValueError, match="is not a size"):
        parse_size(text)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("10s", 10), ("2m", 120), ("1h30m", 5400), ("500ms", 0.5), (3, 3), ("2.5", 2.5), ("0s", 0)],
)
def test_durations(text: str | float, seconds: float) -> None:
    assert parse_duration(text) == pytest.approx(seconds)


@pytest.mark.parametrize("text", ["", "s", "-1s", "10 s", "nan", "inf", "1h30", "5 parsecs"])
def test_not_durations(text: str) -> None:
    with pytest.raises(ValueError, match="is not a duration"):
        parse_duration(text)


@given(st.integers(0, 1 << 50))
def test_a_shown_size_reads_back_to_within_its_rounding(num_bytes: int) -> None:
    shown = format_size(num_bytes)
    unit = {"B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}[shown.split()[1]]
    assert abs(parse_size(shown) - num_bytes) <= 0.05 * unit + 1
