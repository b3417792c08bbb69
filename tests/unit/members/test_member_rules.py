import pytest

from hotrack.core.errors import ConfigError
from hotrack.members.canary import CanaryAnswer, mismatch
from hotrack.members.client import _reason
from hotrack.members.reconcile import Found, Observation, classify
from hotrack.members.spec import Deadlines, MemberSpec, check_members

PARIS = CanaryAnswer(" Paris", (" Paris",), -0.5)


@pytest.mark.parametrize(
    ("answer", "evidence"),
    [
        (PARIS, ""),
        (CanaryAnswer(" Paris", (" Paris",), -0.54), ""),
        (CanaryAnswer(" Paris", (" Paris",), -0.6), "logprob went from -0.5000 to -0.6000"),
        (CanaryAnswer(" Paris", (" Paris",), float("nan")), "logprob"),
        (CanaryAnswer(" Paris", (" Pa", "ris"), -0.5), "expected"),
        (CanaryAnswer("!!!!", ("!",) * 4, -0.5), "expected ' Paris', got '!!!!'"),
    ],
)
def test_canary(answer: CanaryAnswer, evidence: str) -> None:
    found = mismatch([PARIS], [answer], logprob_tolerance=0.05)
    assert evidence in found
    assert bool(found) == bool(evidence)


@pytest.mark.parametrize(
    ("raw", "reason"),
    [
        (b'{"error": {"message": "out of memory", "code": "x"}}', "out of memory"),
        (b'{"detail": "Not Found"}', "Not Found"),
        (b'{"error": "no such path"}', "no such path"),
        (b"plain words\nmore", "plain words"),
        (b'{"object": "list"}', "18 bytes without a message"),
        (b'{"broken', "8 bytes without a message"),
        (b"<html>no</html>", "15 bytes without a message"),
        (b"", "0 bytes without a message"),
        (b'{"message": "' + b"a" * 1000 + b'"}', "a" * 300),
    ],
)
def test_an_error_answer_is_quoted_in_words(raw: bytes, reason: str) -> None:
    assert _reason(raw) == reason


@pytest.mark.parametrize(
    ("seen", "found"),
    [
        (Observation(False), Found.GONE),
        (Observation(True, False, 90), Found.AWAKE),
        (Observation(True, True, 9), Found.ASLEEP),
        (Observation(True, True, 11), Found.HALF),
        (Observation(True, True, None), Found.ASLEEP),
        (Observation(True, None, 9), Found.HALF),
    ],
)
def test_found(seen: Observation, found: Found) -> None:
    assert classify(seen, 10) is found


def test_member_options_that_contradict_each_other() -> None:
    with pytest.raises(ConfigError, match="either a command or a url"):
        MemberSpec(name="a")
    with pytest.raises(ConfigError, match="either a command or a url"):
        MemberSpec(name="a", command=("x",), url="http://x")
    with pytest.raises(ConfigError, match="never give memory back"):
        MemberSpec(name="a", url="http://x", sleep_level=None)
    with pytest.raises(ConfigError, match="sleep level"):
        MemberSpec(name="a", url="http://x", sleep_level=3)
    with pytest.raises(ConfigError, match="drain_s must be greater than 0"):
        Deadlines(drain_s=0)


def test_two_members_with_one_name() -> None:
    a = MemberSpec(name="a", command=("x",), aliases=("chat",))
    b = MemberSpec(name="b", command=("x",), aliases=("chat",))
    with pytest.raises(ConfigError, match="'chat' is used by two members"):
        check_members((a, b))
    with pytest.raises(ConfigError, match="at least one member"):
        check_members(())
    assert check_members((a,)) == {"a": "a", "chat": "a"}
