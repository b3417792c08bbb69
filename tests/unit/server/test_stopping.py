"""Stop strings: nothing of a match leaks, nothing else is lost or kept longer than needed."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hotrack.core.errors import RequestError
from hotrack.server.stopping import MAX_STOP_CHARS, StopMatcher

small = st.text("ab\n", min_size=1, max_size=4)


def feed(stops: list[str], pieces: list[str], *, include: bool = False) -> tuple[list[str], str | None]:
    matcher = StopMatcher(stops, include=include)
    shown = [matcher.push(piece) for piece in pieces]
    if matcher.matched is None:
        shown.append(matcher.finish())
    return shown, matcher.matched


@given(stops=st.lists(small, max_size=3), text=st.text("ab\n", max_size=30), include=st.booleans())
def test_one_character_at_a_time_equals_cutting_the_whole_text(
    stops: list[str], text: str, include: bool
) -> None:
    shown, matched = feed(stops, list(text), include=include)
    # The first stop string to be complete ends the text.
    ends = [(text.find(s) + len(s), text.find(s), s) for s in stops if s in text]
    if not ends:
        assert (matched, "".join(shown)) == (None, text)
        return
    end = min(end for end, _, _ in ends)
    at, stop = min((at, s) for e, at, s in ends if e == end)
    assert "".join(shown) == (text[:end] if include else text[:at])
    assert matched is not None
    assert text[:end].endswith(matched)
    assert len(matched) == len(stop)


@given(
    stops=st.lists(small, min_size=1, max_size=3), pieces=st.lists(st.text("ab\n", max_size=4), max_size=10)
)
def test_holds_back_only_what_could_become_a_stop(stops: list[str], pieces: list[str]) -> None:
    matcher = StopMatcher(stops)
    seen, shown = "", ""
    for piece in pieces:
        seen += piece
        shown += matcher.push(piece)
        if matcher.matched is not None:
            return
        held = seen[len(shown) :]
        assert seen == shown + held
        assert not held or any(stop.startswith(held) for stop in stops)


def test_part_of_a_stop_is_released_when_it_comes_to_nothing() -> None:
    matcher = StopMatcher(["###"])
    assert [matcher.push("a#"), matcher.push("#"), matcher.push("b")] == ["a", "", "##b"]


def test_min_tokens_disarms() -> None:
    matcher = StopMatcher(["x"])
    assert matcher.push("axb", armed=False) == "axb"
    assert matcher.push("cxd") == "c"
    assert matcher.matched == "x"


def test_too_much_to_match_is_refused() -> None:
    with pytest.raises(RequestError, match="stop strings"):
        StopMatcher(["x" * (MAX_STOP_CHARS + 1)])
